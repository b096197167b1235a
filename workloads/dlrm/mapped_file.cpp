#include "dlrm/mapped_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "dlrm/click_log.h"
#include "tessera/core/error_file.h"
#include "tessera/launch/exit_code.h"

namespace tessera::workloads::dlrm {
namespace {

// Note [Files that are cut short]
// Reading a mapped page behind the end of its file raises SIGBUS: whoever maps a file cannot be
// told by an exception. So the process says which file it was, how long it has been and is now,
// also in the file that the launcher reports from, and ends with the exit code of bad data. It
// cannot go on: the reader has no way to answer for bytes that are gone. Signals for other
// addresses go where they went before.

// What the handler may look at: no locks, no allocation.
struct Mapping {
  std::atomic<const char*> begin{nullptr};
  std::size_t num_bytes = 0;
  int fd = -1;
  const char* path = nullptr;
};

std::array<Mapping, 1024> mappings;  // files beyond that end the process as they always did
std::mutex mappings_mutex;
struct sigaction previous_action{};

// Collects a text in a buffer of its own; what does not fit is left out.
class Text {
 public:
  void add(std::string_view piece) noexcept {
    const std::size_t count = std::min(piece.size(), sizeof(buffer_) - size_);
    std::memcpy(buffer_ + size_, piece.data(), count);
    size_ += count;
  }
  void add(std::uint64_t number) noexcept {
    char digits[20];
    std::size_t begin = sizeof(digits);
    do {
      digits[--begin] = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number > 0);
    add({digits + begin, sizeof(digits) - begin});
  }
  std::string_view view() const noexcept { return {buffer_, size_}; }

 private:
  char buffer_[4600];
  std::size_t size_ = 0;
};

[[noreturn]] void end_over(const Mapping& mapping) noexcept {
  Text text;
  text.add(mapping.path);
  text.add(": was cut short while it was read: it had ");
  text.add(mapping.num_bytes);
  struct stat facts{};
  const bool is_known = ::fstat(mapping.fd, &facts) == 0;
  const auto now = static_cast<std::uint64_t>(facts.st_size);
  if (is_known && now < mapping.num_bytes) {
    text.add(" bytes, and now has ");
    text.add(now);
    text.add(". Write a new file and rename it over the old one instead.");
  } else {
    text.add(" bytes, and some of them cannot be read any more. Look at the disk it is on.");
  }
  core::write_error_file({.message = text.view()});
  Text line;
  line.add("error: ");
  line.add(text.view());
  line.add("\n");
  (void)!::write(STDERR_FILENO, line.view().data(), line.view().size());
  ::_exit(launch::kExitData);
}

void on_bus_error(int number, siginfo_t* info, void* context) {
  const auto* const address = static_cast<const char*>(info->si_addr);
  for (const Mapping& mapping : mappings) {
    const char* const begin = mapping.begin.load(std::memory_order_acquire);
    if (begin != nullptr && address >= begin && address < begin + mapping.num_bytes) {
      end_over(mapping);
    }
  }
  if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
    previous_action.sa_sigaction(number, info, context);
  } else if (previous_action.sa_handler == SIG_DFL || previous_action.sa_handler == SIG_IGN) {
    ::signal(number, SIG_DFL);  // the instruction is run again, and ends the process
  } else {
    previous_action.sa_handler(number);
  }
}

void watch_for_bus_errors() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action{};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigaction(SIGBUS, &action, &previous_action);
  });
}

// Places are found by number, so that they can be given back. -1: none was free.
int note_mapping(const char* begin, std::size_t num_bytes, int fd, const std::string& path) {
  watch_for_bus_errors();
  const std::lock_guard lock(mappings_mutex);
  for (std::size_t i = 0; i < mappings.size(); ++i) {
    Mapping& mapping = mappings[i];
    if (mapping.begin.load(std::memory_order_relaxed) != nullptr) continue;
    mapping.num_bytes = num_bytes;
    mapping.fd = fd;
    mapping.path = ::strdup(path.c_str());
    mapping.begin.store(begin, std::memory_order_release);
    return static_cast<int>(i);
  }
  return -1;
}

void forget_mapping(int place) {
  const std::lock_guard lock(mappings_mutex);
  Mapping& mapping = mappings[static_cast<std::size_t>(place)];
  mapping.begin.store(nullptr, std::memory_order_release);
  std::free(const_cast<char*>(mapping.path));
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  // Without O_NONBLOCK, opening a pipe would wait for a writer.
  fd_ = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd_ < 0) throw DataError(path + ": cannot be opened: " + std::strerror(errno) + ".");
  struct stat facts{};
  std::string problem;
  if (::fstat(fd_, &facts) != 0) {
    problem = std::string("cannot be read: ") + std::strerror(errno) + ".";
  } else if (!S_ISREG(facts.st_mode)) {
    problem = "is not a regular file.";
  } else if (facts.st_size > 0) {
    num_bytes_ = static_cast<std::size_t>(facts.st_size);
    void* data = ::mmap(nullptr, num_bytes_, PROT_READ, MAP_SHARED, fd_, 0);
    if (data == MAP_FAILED) {
      problem = std::string("cannot be mapped: ") + std::strerror(errno) + ".";
      num_bytes_ = 0;
    } else {
      data_ = static_cast<const char*>(data);
      place_ = note_mapping(data_, num_bytes_, fd_, path);
    }
  }
  if (problem.empty()) return;
  ::close(fd_);
  throw DataError(path + ": " + problem);
}

void MappedFile::fetch(std::size_t begin, std::size_t count) const noexcept {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t end = std::min(begin + count, num_bytes_);
  begin = begin / page * page;
  // A wish: whoever reads the bytes gets them either way.
  if (begin < end) ::madvise(const_cast<char*>(data_) + begin, end - begin, MADV_WILLNEED);
}

MappedFile::~MappedFile() {
  if (place_ >= 0) forget_mapping(place_);
  if (data_ != nullptr) ::munmap(const_cast<char*>(data_), num_bytes_);
  ::close(fd_);
}

}  // namespace tessera::workloads::dlrm
