#include "comm/shm/segment.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <vector>

#include "comm/transport.h"

namespace tessera::comm::shm {

/// All segments of this process, so that a fork can turn the child's into copies.
class SegmentsOfProcess {
 public:
  static void add(Segment* segment) {
    static std::once_flag once;
    std::call_once(once, [] { ::pthread_atfork(&before_fork, &after_fork, &in_child); });
    const std::lock_guard lock(self().mutex_);
    self().segments_.push_back(segment);
  }

  static void remove(const Segment* segment) noexcept {
    const std::lock_guard lock(self().mutex_);
    std::erase(self().segments_, segment);
  }

 private:
  static SegmentsOfProcess& self() {
    static auto* instance = new SegmentsOfProcess;  // tensors may outlive static destructors
    return *instance;
  }

  static void before_fork() { self().mutex_.lock(); }
  static void after_fork() { self().mutex_.unlock(); }

  // See Note [What a forked child sees]. Only what is safe in a child of many threads.
  static void in_child() {
    for (Segment* segment : self().segments_) {
      segment->is_inherited_ = true;
      void* base = ::mmap(segment->base_, segment->bytes_, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, segment->file_, 0);
      if (base == MAP_FAILED) {
        // Without the copy, better a fault in the child than a word in its parent's name.
        ::mprotect(segment->base_, segment->bytes_, PROT_READ);
      } else {
        ::madvise(base, segment->bytes_, MADV_DONTDUMP);
      }
    }
    self().mutex_.unlock();
  }

  std::mutex mutex_;
  std::vector<Segment*> segments_;
};

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::string in_mib(std::size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

[[noreturn]] void unavailable(const std::string& what, int error, const std::string& remedy) {
  throw Failure(FailureKind::kUnavailable, {},
                "comm.shm: " + what + ": " + std::strerror(error) + ". " + remedy);
}

[[noreturn]] void not_believable(const std::string& why) {
  throw Failure(FailureKind::kAborted, {},
                "comm.shm: what was handed over as the group's segment is not believable: " + why +
                    ". Nothing of it was used.");
}

/// posix_fallocate, repeated if a signal interrupts it; 0 or an error number.
int reserve(int file, std::size_t offset, std::size_t bytes) {
  int error = 0;
  do {
    error = posix_fallocate(file, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (error == EINTR);
  return error;
}

int make_anonymous_file() {
  constexpr unsigned kNoExec = 8;  // MFD_NOEXEC_SEAL, from Linux 6.3
  const auto make = [](unsigned flags) {
    return static_cast<int>(
        ::syscall(SYS_memfd_create, "tessera", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  };
  int file = make(kNoExec);
  if (file < 0 && errno == EINVAL) file = make(0);
  if (file >= 0) ::fchmod(file, 0600);
  return file;
}

int make_nameless_file(const std::string& directory) {
  const int file = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return file;
  // A file system without nameless files: one with a name that is gone at once.
  std::uint64_t secret[2] = {};
  if (::getrandom(secret, sizeof(secret), 0) != static_cast<ssize_t>(sizeof(secret))) return -1;
  char name[64];
  std::snprintf(name, sizeof(name), "/tessera-%016" PRIx64 "%016" PRIx64, secret[0], secret[1]);
  const std::string path = directory + name;
  const int named = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (named >= 0) ::unlink(path.c_str());
  return named;
}

std::size_t number_in(const std::string& path) {
  std::ifstream file(path);
  std::size_t number = 0;
  return file >> number ? number : 0;  // "max" is no number
}

/// What the control group `folder` leaves; SIZE_MAX if it sets no limit.
std::size_t room_in_control_group(const std::string& folder) {
  std::size_t limit = number_in(folder + "/memory.max");
  std::size_t used = number_in(folder + "/memory.current");
  if (limit == 0) {
    limit = number_in(folder + "/memory.limit_in_bytes");
    used = number_in(folder + "/memory.usage_in_bytes");
  }
  if (limit == 0) return SIZE_MAX;
  return limit > used ? limit - used : 0;
}

/// Half of the memory that is left to this process, which is what /dev/shm gives.
std::size_t free_memory() {
  std::size_t available = 0;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    if (line.rfind("MemAvailable:", 0) == 0) {
      available = std::strtoull(line.c_str() + std::strlen("MemAvailable:"), nullptr, 10) * 1024;
      break;
    }
  }
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::size_t names = line.find(':');
    const std::size_t path = names == std::string::npos ? names : line.find(':', names + 1);
    if (path == std::string::npos) continue;
    const std::string controllers = line.substr(names + 1, path - names - 1);
    if (!controllers.empty() && controllers.find("memory") == std::string::npos) continue;
    const std::string root = controllers.empty() ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    // Inside a container the group's own folder is the root of what can be seen.
    for (const std::string& folder : {root + line.substr(path + 1), root}) {
      available = std::min(available, room_in_control_group(folder));
    }
  }
  return available / 2;
}

}  // namespace

std::string default_directory() {
  const char* directory = std::getenv("TESSERA_SHM_DIR");
  return directory != nullptr ? directory : "";
}

std::size_t free_bytes(const std::string& directory) noexcept {
  try {
    if (directory.empty()) return free_memory();
  } catch (const std::exception&) {
    return 0;
  }
  struct statvfs status{};
  if (::statvfs(directory.c_str(), &status) != 0) return 0;
  return static_cast<std::size_t>(status.f_bavail) * status.f_frsize;
}

std::shared_ptr<Segment> Segment::create(const std::string& directory, std::size_t reserved_bytes,
                                         std::size_t total_bytes) {
  const bool is_anonymous = directory.empty();
  const std::string where = is_anonymous ? "memory" : directory;
  const int file = is_anonymous ? make_anonymous_file() : make_nameless_file(directory);
  // Some sandboxes refuse anonymous files.
  if (file < 0 && is_anonymous) return create("/dev/shm", reserved_bytes, total_bytes);
  if (file < 0) {
    unavailable("cannot make a segment in " + where, errno,
                "Set TESSERA_SHM_DIR to a directory in memory that can be written.");
  }
  std::shared_ptr<Segment> segment(new Segment(file, total_bytes));
  const std::size_t available = free_bytes(directory);
  if (::ftruncate(file, static_cast<off_t>(total_bytes)) != 0) {
    unavailable("cannot extend a segment in " + where + " to " + in_mib(total_bytes), errno,
                "Choose a smaller heap.");
  }
  // A file system says that it is full; memory would have to end a process to say so.
  const int error =
      is_anonymous && available < reserved_bytes ? ENOMEM : reserve(file, 0, reserved_bytes);
  if (error != 0) {
    unavailable("cannot reserve " + in_mib(reserved_bytes) + " in " + where + " (" +
                    in_mib(available) + " free)",
                error,
                is_anonymous ? "End other programs, or give the container more memory."
                             : "Enlarge it, in a container with --shm-size, or set "
                               "TESSERA_SHM_DIR.");
  }
  if (is_anonymous && ::fcntl(file, F_ADD_SEALS, kSeals) != 0) {
    unavailable("cannot seal a segment", errno, "Set TESSERA_SHM_DIR=/dev/shm.");
  }
  segment->map();
  return segment;
}

std::shared_ptr<Segment> Segment::adopt(int file, std::size_t total_bytes) {
  std::shared_ptr<Segment> segment(new Segment(file, total_bytes));
  struct stat status{};
  if (::fstat(file, &status) != 0) not_believable(std::strerror(errno));
  if (!S_ISREG(status.st_mode)) not_believable("it is no file");
  if (status.st_uid != ::geteuid()) {
    not_believable("it belongs to user " + std::to_string(status.st_uid) + ", not to user " +
                   std::to_string(::geteuid()));
  }
  if ((status.st_mode & 0077) != 0) not_believable("other users may open it");
  const int seals = ::fcntl(file, F_GET_SEALS);
  const bool is_sealed = seals >= 0 && (seals & kSeals) == kSeals;
  const bool is_sealable = seals >= 0 && (seals & F_SEAL_SEAL) == 0;
  if (!is_sealed && (is_sealable || status.st_nlink != 0)) {
    not_believable(is_sealable ? "its length is not sealed" : "it has a name");
  }
  if (status.st_size < 0 || static_cast<std::size_t>(status.st_size) != total_bytes) {
    not_believable("it is " + std::to_string(status.st_size) + " bytes long, not " +
                   std::to_string(total_bytes));
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
  SegmentsOfProcess::add(this);
}

Segment::~Segment() {
  if (base_ != nullptr) {
    SegmentsOfProcess::remove(this);
    ::munmap(base_, bytes_);
  }
  if (file_ >= 0) ::close(file_);
}

bool Segment::commit(std::size_t offset, std::size_t bytes) noexcept {
  return !is_inherited_ && reserve(file_, offset, bytes) == 0;
}

void Segment::populate(std::size_t offset, std::size_t bytes) noexcept {
#if defined(MADV_POPULATE_WRITE)
  ::madvise(base_ + offset, bytes, MADV_POPULATE_WRITE);
#else
  constexpr int kPopulateWrite = 23;  // Linux 5.14; older systems refuse it, which is harmless
  ::madvise(base_ + offset, bytes, kPopulateWrite);
#endif
}

}  // namespace tessera::comm::shm
