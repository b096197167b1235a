#include "trainer/event_file.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "tessera/core/crc32c.h"

namespace tessera::trainer {
namespace {

// The fields of TensorFlow's messages Event, SessionLog, Summary and Summary.Value.
constexpr int kWallTime = 1;
constexpr int kStep = 2;
constexpr int kFileVersion = 3;
constexpr int kSummary = 5;
constexpr int kSessionLog = 7;
constexpr int kStatus = 1;
constexpr std::uint64_t kStart = 1;
constexpr int kValue = 1;
constexpr int kTag = 1;
constexpr int kSimpleValue = 2;

/// A message in protobuf's encoding.
struct Message {
  std::string bytes;

  void number(int field, std::uint64_t value) {
    varint(static_cast<std::uint64_t>(field) << 3U);
    varint(value);
  }
  void text(int field, std::string_view value) {
    varint(static_cast<std::uint64_t>(field) << 3U | 2U);
    varint(value.size());
    bytes += value;
  }
  template <class T>
  void fixed(int field, T value) {
    varint(static_cast<std::uint64_t>(field) << 3U | (sizeof(T) == 8 ? 1U : 5U));
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }

 private:
  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7U) bytes += static_cast<char>(value | 0x80U);
    bytes += static_cast<char>(value);
  }
};

Message event_at(std::int64_t step) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  Message event;
  event.fixed(kWallTime, std::chrono::duration<double>(now).count());
  if (step != 0) event.number(kStep, static_cast<std::uint64_t>(step));
  return event;
}

// Sums are stored turned and shifted, so that a sum over sums means something.
std::uint32_t masked_sum(std::string_view bytes) {
  const std::uint32_t sum = core::crc32c(bytes.data(), bytes.size());
  return (sum >> 15U | sum << 17U) + 0xa282ead8U;
}

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}

std::string new_path(const std::string& folder) {
  static std::atomic<int> count{0};
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  // TensorBoard reads the files of a folder in the order of their names.
  char name[512];
  std::snprintf(
      name, sizeof(name), "/events.out.tfevents.%010lld.%s.%ld.%d",
      static_cast<long long>(std::chrono::duration_cast<std::chrono::seconds>(now).count()), host,
      static_cast<long>(getpid()), count++);
  return folder + name;
}

}  // namespace

EventFile::EventFile(const std::string& folder, std::int64_t first_step)
    : path_(new_path(folder)), file_(std::fopen(path_.c_str(), "wbx"), std::fclose) {
  if (!file_) throw std::runtime_error(path_ + ": cannot be made: " + std::strerror(errno) + ".");
  Message head = event_at(0);
  head.text(kFileVersion, "brain.Event:2");
  write(head.bytes);
  if (first_step > 0) {
    Message start;
    start.number(kStatus, kStart);
    Message event = event_at(first_step + 1);
    event.text(kSessionLog, start.bytes);
    write(event.bytes);
  }
  flush();
}

void EventFile::add(std::string_view tag, std::int64_t step, double value) {
  if (!std::isfinite(value)) return;
  Message point;
  point.text(kTag, tag);
  point.fixed(kSimpleValue, static_cast<float>(value));
  Message summary;
  summary.text(kValue, point.bytes);
  Message event = event_at(step);
  event.text(kSummary, summary.bytes);
  write(event.bytes);
}

// A record: its length and the sum of that, its bytes and the sum of these.
void EventFile::write(std::string_view event) {
  const std::uint64_t length = event.size();
  std::string record(bytes_of(length));
  record += bytes_of(masked_sum(bytes_of(length)));
  record += event;
  record += bytes_of(masked_sum(event));
  // A disk that is full must not end a training: curves are not its result.
  std::fwrite(record.data(), 1, record.size(), file_.get());
}

void EventFile::flush() { std::fflush(file_.get()); }

}  // namespace tessera::trainer
