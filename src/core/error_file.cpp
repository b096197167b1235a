#include "tessera/core/error_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>

namespace tessera::core {
namespace {

// Returns the length of the UTF-8 sequence `text` begins with, 0 if it is not one.
size_t utf8_length(std::string_view text) noexcept {
  const auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
  uint32_t point = lead & (0xffU >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if ((byte & 0xc0) != 0x80) return 0;
    point = point << 6 | (byte & 0x3fU);
  }
  constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = point >= 0xd800 && point < 0xe000;
  return point >= kSmallest[length] && point <= 0x10ffff && !is_surrogate ? length : 0;
}

// The digits of a number that is not negative, least first.
struct Digits {
  explicit Digits(int64_t value) noexcept {
    do {
      digits[count++] = static_cast<char>('0' + value % 10);
      value /= 10;
    } while (value > 0);
  }
  char digits[20] = {};
  int count = 0;
};

// Collects bytes in a fixed buffer and writes it whenever it is full.
class JsonFile {
 public:
  explicit JsonFile(int fd) noexcept : fd_(fd) {}

  void raw(std::string_view text) noexcept {
    for (const char c : text) put(c);
  }

  void string(std::string_view text) noexcept {
    put('"');
    while (!text.empty()) {
      const size_t length = utf8_length(text);
      if (length == 0) {
        put('?');  // a JSON reader would refuse the whole file
      } else if (length == 1) {
        escaped(text[0]);
      } else {
        raw(text.substr(0, length));
      }
      text.remove_prefix(length == 0 ? 1 : length);
    }
    put('"');
  }

  void number(int64_t value) noexcept {
    Digits number(value);
    while (number.count > 0) put(number.digits[--number.count]);
  }

  bool finish() noexcept {
    flush();
    return is_good_;
  }

 private:
  void put(char c) noexcept {
    buffer_[size_++] = c;
    if (size_ == sizeof(buffer_)) flush();
  }

  void escaped(char c) noexcept {
    constexpr char kHex[] = "0123456789abcdef";
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      put('\\');
      put(c);
    } else if (c == '\n') {
      raw("\\n");
    } else if (byte < 0x20 || byte == 0x7f) {
      raw("\\u00");
      put(kHex[byte >> 4]);
      put(kHex[byte & 15]);
    } else {
      put(c);
    }
  }

  void flush() noexcept {
    for (size_t begin = 0; begin < size_ && is_good_;) {
      const ssize_t written = write(fd_, buffer_ + begin, size_ - begin);
      if (written > 0) {
        begin += static_cast<size_t>(written);
      } else if (errno != EINTR) {
        is_good_ = false;
      }
    }
    size_ = 0;
  }

  int fd_;
  size_t size_ = 0;
  bool is_good_ = true;
  char buffer_[1024];
};

// `path`.<pid>.<count>: threads of one process may fail together.
bool temporary_name(const char* path, char* name, size_t capacity) noexcept {
  static std::atomic<int> counter{0};
  const size_t length = std::strlen(path);
  if (length + 32 > capacity) return false;
  std::memcpy(name, path, length);
  char* end = name + length;
  for (const int64_t value : {static_cast<int64_t>(getpid()), static_cast<int64_t>(counter++)}) {
    Digits number(value);
    *end++ = '.';
    while (number.count > 0) *end++ = number.digits[--number.count];
  }
  *end = '\0';
  return true;
}

}  // namespace

bool write_error_file(const char* path, const ErrorReport& report) noexcept {
  char temporary[4096];
  if (!temporary_name(path, temporary, sizeof(temporary))) return false;
  const int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return false;
  int64_t now = report.timestamp_ns;
  if (now <= 0) {
    timespec moment{};
    clock_gettime(CLOCK_REALTIME, &moment);
    now = static_cast<int64_t>(moment.tv_sec) * 1'000'000'000 + moment.tv_nsec;
  }
  JsonFile file(fd);
  file.raw(R"({"message": {"message": )");
  file.string(report.message);
  file.raw(R"(, "extraInfo": {"py_callstack": )");
  file.string(report.callstack);
  file.raw(R"(, "timestamp": ")");
  file.number(now / 1'000'000'000);
  file.raw(R"(", "timestamp_ns": ")");
  file.number(now);
  file.raw(report.is_secondary ? R"(", "secondary": "true"}}})" : R"("}}})");
  file.raw("\n");
  const bool is_whole = file.finish();
  close(fd);
  // link() fails if the name exists, so an earlier report is never replaced.
  const bool is_first = is_whole && link(temporary, path) == 0;
  unlink(temporary);
  return is_first;
}

bool write_error_file(const ErrorReport& report) noexcept {
  const char* path = std::getenv("TORCHELASTIC_ERROR_FILE");
  return path != nullptr && *path != '\0' && write_error_file(path, report);
}

}  // namespace tessera::core
