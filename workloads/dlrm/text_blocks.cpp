#include "dlrm/text_blocks.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "dlrm/click_log.h"

namespace tessera::workloads::dlrm {
namespace {

constexpr std::size_t kMostLineBytes = std::size_t{16} << 20;
// Beyond a block: where its last line usually ends.
constexpr std::size_t kMargin = 4096;
// How soon a waiting reader looks whether it was stopped.
constexpr int kLookMilliseconds = 50;

std::string system_text() { return std::string(std::strerror(errno)) + "."; }

}  // namespace

TextBlocks::TextBlocks(std::string path, std::size_t block_bytes)
    : path_(std::move(path)), block_bytes_(block_bytes) {
  // Without O_NONBLOCK, opening a pipe would wait for a writer.
  fd_ = ::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd_ < 0) throw DataError(path_ + ": cannot be opened: " + system_text());
  struct stat facts{};
  std::string problem;
  if (::fstat(fd_, &facts) != 0) {
    problem = "cannot be read: " + system_text();
  } else if (!S_ISREG(facts.st_mode) && !S_ISFIFO(facts.st_mode)) {
    problem = "is neither a regular file nor a pipe.";
  }
  if (problem.empty()) return;
  ::close(fd_);
  throw DataError(path_ + ": " + problem);
}

TextBlocks::TextBlocks(std::string path, std::size_t block_bytes, ReadText read)
    : is_input_(path == "-"),
      path_(is_input_ ? "standard input" : std::move(path)),
      block_bytes_(block_bytes),
      read_(std::move(read)) {}

TextBlocks::~TextBlocks() {
  if (fd_ >= 0) ::close(fd_);
}

void TextBlocks::wait_for_input() const {
  pollfd input{STDIN_FILENO, POLLIN, 0};
  while (!is_stopped_) {
    const int num_ready = ::poll(&input, 1, kLookMilliseconds);
    if (num_ready > 0 || (num_ready < 0 && errno != EINTR)) return;
  }
}

std::size_t TextBlocks::read(char* to, std::size_t room) {
  if (read_) {
    if (is_input_) wait_for_input();
    const std::size_t done = is_stopped_ ? 0 : read_(to, room);
    num_bytes_ += static_cast<std::int64_t>(done);
    return done;
  }
  while (!is_stopped_) {
    const ssize_t done = ::read(fd_, to, room);
    if (done >= 0) {
      num_bytes_ += done;
      return static_cast<std::size_t>(done);
    }
    if (errno == EAGAIN) {
      pollfd pipe{fd_, POLLIN, 0};
      ::poll(&pipe, 1, kLookMilliseconds);
    } else if (errno != EINTR) {
      throw DataError(path_ + ": cannot be read: " + system_text());
    }
  }
  return 0;
}

std::optional<std::string_view> TextBlocks::next(std::vector<char>& memory) {
  std::size_t size = rest_.size();
  memory.resize(std::max({memory.size(), block_bytes_ + kMargin, size}));
  std::copy(rest_.begin(), rest_.end(), memory.begin());
  rest_.clear();
  for (std::size_t searched = block_bytes_;;) {
    if (size > searched) {
      const auto* found =
          static_cast<const char*>(std::memchr(memory.data() + searched, '\n', size - searched));
      if (found != nullptr) {
        const auto end = static_cast<std::size_t>(found - memory.data()) + 1;
        rest_.assign(memory.data() + end, size - end);
        return std::string_view(memory.data(), end);
      }
      searched = size;
      if (size > block_bytes_ + kMostLineBytes) {
        throw DataError(path_ + ": a line near byte " + std::to_string(num_bytes_) +
                        " has more than 16 MiB. This is no text of clicks.");
      }
    }
    if (size == memory.size()) memory.resize(2 * size);
    const std::size_t added = read(memory.data() + size, memory.size() - size);
    size += added;
    if (added > 0) continue;
    if (size == 0) return std::nullopt;
    return std::string_view(memory.data(), size);
  }
}

}  // namespace tessera::workloads::dlrm
