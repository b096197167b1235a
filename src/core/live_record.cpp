#include "core/live_record.h"

#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <string>

namespace tessera::core {
namespace {

// Null without one, and in forked children: the record is their parent's.
std::atomic<LiveRecord*> own_record{nullptr};

// In ticks since the start of the machine, as /proc says; 0 if there is no such process.
std::uint64_t start_time_of(std::int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::size_t begin = name_end + 2;
  for (int field = 3; field < 22 && begin != 0; ++field) begin = text.find(' ', begin) + 1;
  return begin == 0 ? 0 : std::strtoull(text.c_str() + begin, nullptr, 10);
}

// A program that a rank starts inherits the variable: the file is that of the first that lives.
bool is_taken(const char* path) {
  const int fd = ::open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return false;
  alignas(LiveRecord) char bytes[sizeof(std::uint64_t) + sizeof(std::int64_t) * 2];
  const bool is_whole = ::pread(fd, bytes, sizeof(bytes), 0) == sizeof(bytes);
  ::close(fd);
  if (!is_whole) return false;
  std::int64_t pid = 0;
  std::uint64_t start_time = 0;
  std::memcpy(&pid, bytes + offsetof(LiveRecord, pid), sizeof(pid));
  std::memcpy(&start_time, bytes + offsetof(LiveRecord, start_time), sizeof(start_time));
  return pid > 0 && start_time_of(pid) == start_time;
}

LiveRecord* map_record(const char* path) {
  if (is_taken(path)) return nullptr;
  ::unlink(path);
  const int fd = ::open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) return nullptr;
  // Room on the disk now, rather than a signal when it is written to.
  void* memory = MAP_FAILED;
  if (::posix_fallocate(fd, 0, sizeof(LiveRecord)) == 0) {
    memory = ::mmap(nullptr, sizeof(LiveRecord), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  ::close(fd);
  return memory == MAP_FAILED ? nullptr : static_cast<LiveRecord*>(memory);
}

// Note [Stacks of a living rank]
// The reader sends a signal to one thread, once it has seen in /proc that it is caught. The handler
// writes the frames of that thread by calls that are allowed there, without memory of the heap. A
// system call that waits is started again, or returns early with EINTR, as by any signal.
char stack_path[512];

void on_stack_signal(int) {
  const int saved = errno;
  char path[sizeof(stack_path) + 24];
  std::size_t length = std::strlen(stack_path);
  std::memcpy(path, stack_path, length);
  auto thread = static_cast<unsigned long>(::syscall(SYS_gettid));
  char digits[20];
  std::size_t count = 0;
  do {
    digits[count++] = static_cast<char>('0' + thread % 10);
    thread /= 10;
  } while (thread > 0);
  while (count > 0) path[length++] = digits[--count];
  path[length] = '\0';
  const int fd = ::open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd >= 0) {
    std::array<void*, 128> frames{};
    const int num_frames = ::backtrace(frames.data(), static_cast<int>(frames.size()));
    ::backtrace_symbols_fd(frames.data(), num_frames, fd);
    (void)!::write(fd, kStackEnd.data(), kStackEnd.size());
    ::close(fd);
  }
  errno = saved;
}

void answer_for_stacks(const char* path) {
  const std::string prefix = std::string(path) + kStackSuffix;
  if (prefix.size() + 1 > sizeof(stack_path)) return;
  std::memcpy(stack_path, prefix.c_str(), prefix.size() + 1);
  struct sigaction now{};
  // Somebody else's use of the number comes first.
  if (::sigaction(stack_signal(), nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return;
  void* frame = nullptr;
  ::backtrace(&frame, 1);  // the first call loads a library, which a handler must not
  struct sigaction action{};
  action.sa_handler = on_stack_signal;
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  ::sigaction(stack_signal(), &action, nullptr);
}

void open_record() {
  const char* path = std::getenv(kLiveVariable);
  if (path == nullptr || *path == '\0') return;
  LiveRecord* const record = map_record(path);
  if (record == nullptr) return;
  record->pid = ::getpid();
  record->start_time = start_time_of(record->pid);
  record->step.store(-1, std::memory_order_relaxed);
  record->magic.store(LiveRecord::kMagic, std::memory_order_release);
  own_record.store(record);
  ::pthread_atfork(nullptr, nullptr, [] { own_record.store(nullptr); });
  answer_for_stacks(path);
}

LiveRecord* record() noexcept {
  static std::once_flag once;
  try {
    std::call_once(once, open_record);
  } catch (...) {
    // Out of memory, say: then nobody can look.
  }
  return own_record.load(std::memory_order_relaxed);
}

}  // namespace

LiveSlot* take_live_slot(std::string_view group) noexcept {
  LiveRecord* const own = record();
  if (own == nullptr) return nullptr;
  for (LiveSlot& slot : own->slots) {
    std::uint32_t expected = 0;
    if (!slot.is_taken.compare_exchange_strong(expected, 1)) continue;
    for (LiveLane* lane : {&slot.collectives, &slot.messages}) {
      lane->begin_ns.store(0, std::memory_order_relaxed);
      lane->end_ns.store(0, std::memory_order_relaxed);
    }
    slot.group.set(group);
    return &slot;
  }
  return nullptr;
}

void give_back_live_slot(LiveSlot* slot) noexcept {
  // A forked child destroys its copy of the group, not its parent's place.
  if (slot != nullptr && own_record.load(std::memory_order_relaxed) != nullptr) {
    slot->is_taken.store(0);
  }
}

void note_live_step(std::int64_t step) noexcept {
  LiveRecord* const own = record();
  if (own == nullptr) return;
  own->step_ns.store(live_clock_ns(), std::memory_order_relaxed);
  own->step.store(step, std::memory_order_relaxed);
}

LiveOperation::LiveOperation(LiveLane* lane, std::string_view operation,
                             std::uint64_t sequence) noexcept
    : lane_(lane) {
  if (lane_ == nullptr) return;
  begin_ns_ = live_clock_ns();
  lane_->begin_ns.store(0, std::memory_order_relaxed);
  lane_->operation.set(operation);
  lane_->sequence.store(sequence, std::memory_order_relaxed);
  lane_->num_missing.store(0, std::memory_order_relaxed);
  lane_->begin_ns.store(begin_ns_, std::memory_order_release);
}

LiveOperation::~LiveOperation() {
  if (lane_ == nullptr) return;
  lane_->end_ns.store(live_clock_ns(), std::memory_order_relaxed);
  // Of several messages at a time the last one is shown.
  lane_->begin_ns.compare_exchange_strong(begin_ns_, 0, std::memory_order_release,
                                          std::memory_order_relaxed);
}

void note_live_wait(LiveLane& lane, std::span<const int> missing,
                    std::string_view details) noexcept {
  constexpr std::size_t kMost = std::extent_v<decltype(lane.missing)>;
  for (std::size_t i = 0; i < std::min(missing.size(), kMost); ++i) {
    lane.missing[i].store(missing[i], std::memory_order_relaxed);
  }
  lane.details.set(details);
  lane.num_missing.store(static_cast<std::int32_t>(missing.size()), std::memory_order_release);
}

}  // namespace tessera::core
