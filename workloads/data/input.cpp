#include "data/input.h"

#include <fcntl.h>
#include <glob.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#ifdef TESSERA_HAS_ZLIB
#include <zlib.h>
#endif
#ifdef TESSERA_HAS_ZSTD
#include <zstd.h>
#endif

namespace tessera::workloads::data {
namespace {

constexpr std::size_t kFrontBytes = 4096;
constexpr std::size_t kPackedBytes = std::size_t{256} << 10;

std::string system_text() { return std::string(std::strerror(errno)) + "."; }

std::size_t read_some(int fd, const std::string& name, char* to, std::size_t room) {
  for (;;) {
    const ssize_t done = ::read(fd, to, room);
    if (done >= 0) return static_cast<std::size_t>(done);
    if (errno != EINTR) throw DataError(name + ": cannot be read: " + system_text());
  }
}

}  // namespace

std::vector<std::string> expand(const std::vector<std::string>& names) {
  std::vector<std::string> files;
  for (const std::string& name : names) {
    if (name.find_first_of("*?[") == std::string::npos || ::access(name.c_str(), F_OK) == 0) {
      files.push_back(name);
      continue;
    }
    glob_t found{};
    const int code = ::glob(name.c_str(), 0, nullptr, &found);
    for (std::size_t i = 0; code == 0 && i < found.gl_pathc; ++i) {
      files.emplace_back(found.gl_pathv[i]);
    }
    ::globfree(&found);
    if (code != 0) throw DataError(name + ": no file has such a name.");
  }
  return files;
}

std::vector<std::string> files_of(const std::string& names) {
  if (::access(names.c_str(), F_OK) == 0) return {names};  // a comma may belong to a name
  std::vector<std::string> all;
  for (std::size_t begin = 0; begin <= names.size();) {
    const std::size_t end = std::min(names.find(',', begin), names.size());
    if (end > begin) all.push_back(names.substr(begin, end - begin));
    begin = end + 1;
  }
  return expand(all);
}

void check_apart(const std::vector<std::string>& inputs, const std::string& out) {
  struct stat to{};
  if (::stat(out.c_str(), &to) != 0) return;
  for (const std::string& input : inputs) {
    struct stat from{};
    const int code = input == "-" ? ::fstat(STDIN_FILENO, &from) : ::stat(input.c_str(), &from);
    if (code == 0 && from.st_dev == to.st_dev && from.st_ino == to.st_ino) {
      throw DataError(out + ": is read and cannot be written too. Name another file to write.");
    }
  }
}

/// Turns packed bytes into plain ones.
struct Input::Unpacker {
  virtual ~Unpacker() = default;
  /// 0 at the end only.
  virtual std::size_t read(Input& input, char* to, std::size_t room) = 0;

 protected:
  std::vector<char> packed_ = std::vector<char>(kPackedBytes);
};

#ifdef TESSERA_HAS_ZLIB
struct Input::Gzip : Input::Unpacker {
  Gzip() {
    // 15 bits of window, and gzip's frame.
    if (inflateInit2(&stream_, 15 + 16) != Z_OK) throw std::bad_alloc();
  }
  ~Gzip() override { inflateEnd(&stream_); }

  std::size_t read(Input& input, char* to, std::size_t room) override {
    room = std::min<std::size_t>(room, 1U << 30);
    stream_.next_out = reinterpret_cast<Bytef*>(to);
    stream_.avail_out = static_cast<uInt>(room);
    while (stream_.avail_out == room) {
      if (stream_.avail_in == 0) {
        const std::size_t more = input.read_packed(packed_.data(), packed_.size());
        if (more == 0) {
          if (is_inside_)
            throw DataError(input.name_ + ": is cut short: the gzip data has no end.");
          return 0;
        }
        stream_.next_in = reinterpret_cast<Bytef*>(packed_.data());
        stream_.avail_in = static_cast<uInt>(more);
      }
      is_inside_ = true;
      const int code = inflate(&stream_, Z_NO_FLUSH);
      if (code == Z_STREAM_END) {
        is_inside_ = false;  // another part may follow
        inflateReset(&stream_);
      } else if (code != Z_OK && code != Z_BUF_ERROR) {
        throw DataError(input.name_ + ": is damaged: " +
                        (stream_.msg != nullptr ? stream_.msg : "no gzip data") + ".");
      }
    }
    return room - stream_.avail_out;
  }

 private:
  z_stream stream_{};
  bool is_inside_ = false;
};
#endif

#ifdef TESSERA_HAS_ZSTD
struct Input::Zstd : Input::Unpacker {
  Zstd() : stream_(ZSTD_createDStream()) {
    if (stream_ == nullptr) throw std::bad_alloc();
  }
  ~Zstd() override { ZSTD_freeDStream(stream_); }

  std::size_t read(Input& input, char* to, std::size_t room) override {
    ZSTD_outBuffer out{to, room, 0};
    while (out.pos == 0) {
      if (in_.pos == in_.size) {
        in_ = {packed_.data(), input.read_packed(packed_.data(), packed_.size()), 0};
        if (in_.size == 0) {
          if (is_inside_)
            throw DataError(input.name_ + ": is cut short: the zstd data has no end.");
          return 0;
        }
      }
      const std::size_t left = ZSTD_decompressStream(stream_, &out, &in_);
      if (ZSTD_isError(left) != 0) {
        throw DataError(input.name_ + ": is damaged: " + ZSTD_getErrorName(left) + ".");
      }
      is_inside_ = left != 0;
    }
    return out.pos;
  }

 private:
  ZSTD_DStream* stream_;
  ZSTD_inBuffer in_{nullptr, 0, 0};
  bool is_inside_ = false;
};
#endif

Input::Input(const std::string& path, std::function<bool()> goes_on)
    : goes_on_(std::move(goes_on)), name_(path == "-" ? "standard input" : path) {
  fd_ = path == "-" ? ::dup(STDIN_FILENO) : ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) throw DataError(name_ + ": cannot be opened: " + system_text());
  try {
    struct stat facts{};
    if (::fstat(fd_, &facts) == 0 && S_ISDIR(facts.st_mode)) {
      throw DataError(name_ + ": is a folder, not a file.");
    }
    is_file_ = S_ISREG(facts.st_mode);
    front_.resize(kFrontBytes);
    std::size_t size = 0;
    while (size < front_.size()) {  // a pipe may give less at a time
      const std::size_t more = read_or_wait(front_.data() + size, front_.size() - size);
      if (more == 0) break;
      size += more;
      // Of a text that still grows, its first line is enough to know what it is.
      if (goes_on_ && std::memchr(front_.data(), '\n', size) != nullptr) break;
    }
    front_.resize(size);
    num_bytes_ = static_cast<std::int64_t>(size);
    const Content content = content_of(front_);
#ifdef TESSERA_HAS_ZLIB
    if (content.kind == FileKind::kGzip) unpacker_ = std::make_unique<Gzip>();
#endif
#ifdef TESSERA_HAS_ZSTD
    if (content.kind == FileKind::kZstd) unpacker_ = std::make_unique<Zstd>();
#endif
    if (unpacker_ == nullptr) check_text(name_, front_);
    if (unpacker_ != nullptr) {
      text_.resize(kFrontBytes);
      text_.resize(unpacker_->read(*this, text_.data(), text_.size()));
      check_text(name_ + " (unpacked)", text_);
    }
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

Input::~Input() { ::close(fd_); }

std::size_t Input::read_or_wait(char* to, std::size_t room) {
  constexpr int kPauseMs = 100;
  for (;;) {
    if (goes_on_) {
      // A file is always ready, a pipe when there is something, or when it was closed.
      pollfd ready{fd_, POLLIN, 0};
      if (::poll(&ready, 1, kPauseMs) == 0) {
        if (goes_on_()) continue;
        return 0;
      }
    }
    const std::size_t done = read_some(fd_, name_, to, room);
    if (done > 0 || !goes_on_ || !is_file_ || !goes_on_()) return done;
    std::this_thread::sleep_for(std::chrono::milliseconds(kPauseMs));
  }
}

std::size_t Input::read_packed(char* to, std::size_t room) {
  const std::size_t ready = std::min(room, front_.size() - front_taken_);
  if (ready > 0) {
    std::memcpy(to, front_.data() + front_taken_, ready);
    front_taken_ += ready;
    return ready;
  }
  const std::size_t done = read_or_wait(to, room);
  num_bytes_ += static_cast<std::int64_t>(done);
  return done;
}

std::size_t Input::read(char* to, std::size_t room) {
  if (unpacker_ == nullptr) return read_packed(to, room);
  const std::size_t ready = std::min(room, text_.size() - text_taken_);
  if (ready > 0) {
    std::memcpy(to, text_.data() + text_taken_, ready);
    text_taken_ += ready;
    return ready;
  }
  return unpacker_->read(*this, to, room);
}

std::function<std::size_t(char* to, std::size_t room)> unpacking(const std::string& path) {
  if (path != "-") {
    const FileKind kind = content_of(front_of(path)).kind;
    if (kind != FileKind::kGzip && kind != FileKind::kZstd) return nullptr;
  }
  const auto input = std::make_shared<Input>(path);
  return [input](char* to, std::size_t room) { return input->read(to, room); };
}

}  // namespace tessera::workloads::data
