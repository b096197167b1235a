#include "comm/shm/segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include "comm/transport.h"

namespace tessera::comm::shm {

namespace {

constexpr const char* kPrefix = "tessera-";

/// Tells one process from all others of this machine since it started, across reuse of numbers.
struct Maker {
  std::uint64_t pid_namespace = 0;
  std::uint64_t pid = 0;
  std::uint64_t start_time = 0;  // clock ticks since the machine started
};

/// Start time of a process, or 0 if there is none.
std::uint64_t start_time_of(std::uint64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  // The second field is the program's name in parentheses and may hold anything; the start time is
  // the 22nd field, the 20th after it.
  std::size_t position = text.rfind(')');
  if (position == std::string::npos) return 0;
  for (int field = 2; field < 22; ++field) {
    position = text.find(' ', position + 1);
    if (position == std::string::npos) return 0;
  }
  // A process that has ended but has not been waited for is dead for our purpose.
  const char state = text[text.rfind(')') + 2];
  if (state == 'Z' || state == 'X') return 0;
  return std::strtoull(text.c_str() + position + 1, nullptr, 10);
}

std::uint64_t pid_namespace() {
  struct stat status{};
  return ::stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

std::string run_id_prefix() {
  const char* run_id = std::getenv("TESSERA_RUN_ID");
  if (run_id == nullptr || *run_id == '\0') return "";
  std::string text(run_id);
  for (char& c : text) {
    const bool is_plain = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') ||
                          (c >= 'a' && c <= 'z') || c == '.' || c == '_' || c == '-';
    if (!is_plain) c = '_';
  }
  return text.substr(0, 96) + "-";
}

std::string new_name() {
  std::uint64_t secret[2] = {};
  if (getrandom(secret, sizeof(secret), 0) != static_cast<ssize_t>(sizeof(secret))) {
    throw Failure(FailureKind::kUnavailable, {}, "comm.shm: the system gives no random numbers.");
  }
  const auto pid = static_cast<std::uint64_t>(getpid());
  char tail[128];
  std::snprintf(tail, sizeof(tail), "%" PRIx64 ".%" PRIu64 ".%" PRIu64 "-%016" PRIx64 "%016" PRIx64,
                pid_namespace(), pid, start_time_of(pid), secret[0], secret[1]);
  return kPrefix + run_id_prefix() + tail;
}

/// Reads the maker out of a name made by new_name.
bool parse_maker(const std::string& name, Maker& maker) {
  if (name.rfind(kPrefix, 0) != 0) return false;
  const std::size_t last = name.rfind('-');
  if (last == std::string::npos || last == 0 || name.size() - last != 33) return false;
  const std::size_t before = name.rfind('-', last - 1);
  if (before == std::string::npos) return false;
  const std::string middle = name.substr(before + 1, last - before - 1);
  int consumed = 0;
  const int fields = std::sscanf(middle.c_str(), "%" SCNx64 ".%" SCNu64 ".%" SCNu64 "%n",
                                 &maker.pid_namespace, &maker.pid, &maker.start_time, &consumed);
  return fields == 3 && consumed == static_cast<int>(middle.size());
}

std::string in_mib(std::size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

[[noreturn]] void unavailable(const std::string& what, int error, const std::string& remedy) {
  throw Failure(FailureKind::kUnavailable, {},
                "comm.shm: " + what + ": " + std::strerror(error) + ". " + remedy);
}

/// posix_fallocate, repeated if a signal interrupts it; 0 or an error number.
int reserve(int file, std::size_t offset, std::size_t bytes) {
  int error = 0;
  do {
    error = posix_fallocate(file, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (error == EINTR);
  return error;
}

}  // namespace

std::string default_directory() {
  const char* directory = std::getenv("TESSERA_SHM_DIR");
  return directory != nullptr && *directory != '\0' ? directory : "/dev/shm";
}

std::size_t free_bytes(const std::string& directory) noexcept {
  struct statvfs status{};
  if (::statvfs(directory.c_str(), &status) != 0) return 0;
  return static_cast<std::size_t>(status.f_bavail) * status.f_frsize;
}

Segment::Segment(std::string path, int file, std::size_t bytes, bool is_maker)
    : path_(std::move(path)), file_(file), bytes_(bytes), is_linked_(is_maker) {}

std::shared_ptr<Segment> Segment::create(const std::string& directory, std::size_t reserved_bytes,
                                         std::size_t total_bytes) {
  const std::string path = directory + "/" + new_name();
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) {
    unavailable("cannot make a segment in " + directory, errno,
                "Set TESSERA_SHM_DIR to a directory in memory that can be written.");
  }
  std::shared_ptr<Segment> segment(new Segment(path, file, total_bytes, true));
  const std::size_t available = free_bytes(directory);
  const int error = reserve(file, 0, reserved_bytes);
  if (error != 0) {
    unavailable("cannot reserve " + in_mib(reserved_bytes) + " in " + directory + " (" +
                    in_mib(available) + " free)",
                error, "Enlarge it, in a container with --shm-size, or set TESSERA_SHM_DIR.");
  }
  if (::ftruncate(file, static_cast<off_t>(total_bytes)) != 0) {
    unavailable("cannot extend a segment in " + directory + " to " + in_mib(total_bytes), errno,
                "Choose a smaller heap.");
  }
  segment->map();
  return segment;
}

std::shared_ptr<Segment> Segment::open(const std::string& path, std::size_t total_bytes) {
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (file < 0) {
    unavailable("cannot open the segment " + path + " made by rank 0", errno,
                "The ranks of a group must run on one host and share this directory.");
  }
  std::shared_ptr<Segment> segment(new Segment(path, file, total_bytes, false));
  struct stat status{};
  if (::fstat(file, &status) != 0 || static_cast<std::size_t>(status.st_size) != total_bytes) {
    unavailable("the segment " + path + " is not " + in_mib(total_bytes) + " long", EINVAL,
                "Run the same version on every rank.");
  }
  segment->map();
  return segment;
}

void Segment::map() {
  void* base =
      ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
  if (base == MAP_FAILED) {
    unavailable("cannot map " + in_mib(bytes_), errno,
                "Choose a smaller heap, or raise the limit on address space.");
  }
  base_ = static_cast<std::byte*>(base);
  // Advice only: helps where the system gives huge pages to shared memory on request, and keeps
  // tensors out of core dumps.
  ::madvise(base, bytes_, MADV_HUGEPAGE);
  ::madvise(base, bytes_, MADV_DONTDUMP);
}

Segment::~Segment() {
  unlink();
  if (base_ != nullptr) ::munmap(base_, bytes_);
  if (file_ >= 0) ::close(file_);
}

void Segment::unlink() noexcept {
  if (!is_linked_) return;
  ::unlink(path_.c_str());
  is_linked_ = false;
}

bool Segment::commit(std::size_t offset, std::size_t bytes) noexcept {
  return reserve(file_, offset, bytes) == 0;
}

void Segment::populate(std::size_t offset, std::size_t bytes) noexcept {
#if defined(MADV_POPULATE_WRITE)
  ::madvise(base_ + offset, bytes, MADV_POPULATE_WRITE);
#else
  constexpr int kPopulateWrite = 23;  // Linux 5.14; older systems refuse it, which is harmless
  ::madvise(base_ + offset, bytes, kPopulateWrite);
#endif
}

int remove_stale_segments(const std::string& directory) noexcept {
  DIR* entries = ::opendir(directory.c_str());
  if (entries == nullptr) return 0;
  const std::uint64_t own_namespace = pid_namespace();
  int removed = 0;
  while (const dirent* entry = ::readdir(entries)) {
    Maker maker;
    if (!parse_maker(entry->d_name, maker)) continue;
    // Another namespace counts its processes differently: we cannot tell whether the maker lives.
    if (maker.pid_namespace != own_namespace) continue;
    if (start_time_of(maker.pid) == maker.start_time) continue;
    struct stat status{};
    const int folder = ::dirfd(entries);
    if (::fstatat(folder, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (!S_ISREG(status.st_mode) || status.st_uid != ::geteuid()) continue;
    if (::unlinkat(folder, entry->d_name, 0) == 0) ++removed;
  }
  ::closedir(entries);
  return removed;
}

}  // namespace tessera::comm::shm
