#include "tessera/checkpoint/disk.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "tessera/checkpoint/error.h"

namespace tessera::checkpoint {
namespace {

// Large enough to keep a disk busy, small enough that a failure is noticed soon.
constexpr std::size_t kMaxWrite = std::size_t{8} << 20;
// The kernel is asked to start writing after so many bytes, so that the sync at the end waits for
// the last of them only.
constexpr std::uint64_t kFlushBytes = std::uint64_t{16} << 20;

struct CloseListing {
  void operator()(DIR* listing) const {
    const int number = errno;
    ::closedir(listing);
    errno = number;
  }
};

}  // namespace

const char* name_of(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::kMissing:
      return "missing";
    case ErrorKind::kCorrupt:
      return "corrupt";
    case ErrorKind::kWrite:
      return "write";
    case ErrorKind::kRead:
      return "read";
    case ErrorKind::kInvalid:
      break;
  }
  return "invalid";
}

Error::Error(ErrorKind kind, const std::string& message)
    : std::runtime_error(message), kind_(kind) {}
Error::~Error() = default;

void throw_write_error(const std::string& doing, const std::string& path) {
  const int number = errno;
  std::string text = "checkpoint: cannot ";
  text.append(doing).append(" ").append(path).append(": ");
  text.append(std::strerror(number)).append(".");
  if (number == ENOSPC || number == EDQUOT) {
    text.append(" Free some space, or keep fewer checkpoints; earlier ones are untouched.");
  } else {
    text.append(" Earlier checkpoints are untouched.");
  }
  throw Error(ErrorKind::kWrite, text);
}

Disk::~Disk() = default;

int Disk::open(int parent, const std::string& name, int flags) {
  return ::openat(parent, name.c_str(), flags);
}

ssize_t Disk::read(int fd, void* data, std::size_t num_bytes, std::uint64_t begin) {
  return ::pread(fd, data, num_bytes, static_cast<off_t>(begin));
}

int Disk::look(int fd, struct stat& facts) { return ::fstat(fd, &facts); }

int Disk::look_at(int parent, const std::string& name, struct stat& facts) {
  return ::fstatat(parent, name.c_str(), &facts, AT_SYMLINK_NOFOLLOW);
}

int Disk::list(int fd, std::vector<std::string>& names) {
  // A descriptor of its own: closedir closes it, and the place in the list belongs to it.
  const int own = open(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (own < 0) return -1;
  DIR* const listing = ::fdopendir(own);
  if (listing == nullptr) {
    const int number = errno;
    ::close(own);
    errno = number;
    return -1;
  }
  const std::unique_ptr<DIR, CloseListing> closes(listing);
  for (;;) {
    errno = 0;
    const dirent* entry = ::readdir(listing);
    if (entry == nullptr) return errno == 0 ? 0 : -1;
    std::string name = static_cast<const char*>(entry->d_name);
    if (name != "." && name != "..") names.push_back(std::move(name));
  }
}

int Disk::open_lock(const std::string& path) {
  return ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
}

std::uint64_t Disk::random() {
  std::uint64_t number = 0;
  if (::getrandom(&number, sizeof(number), 0) != sizeof(number)) {
    number = static_cast<std::uint64_t>(::getpid());
  }
  return number;
}

void Disk::pause(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

int Disk::make_folder(const std::string& path) { return ::mkdir(path.c_str(), 0777); }

int Disk::create(const std::string& path) {
  return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
}

ssize_t Disk::write(int fd, const void* data, std::size_t num_bytes) {
  return ::write(fd, data, num_bytes);
}

int Disk::sync(int fd) { return ::fsync(fd); }

int Disk::close(int fd) { return ::close(fd); }

int Disk::sync_folder(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return -1;
  const int result = ::fsync(fd);
  const int number = errno;
  ::close(fd);
  errno = number;
  return result;
}

int Disk::rename(const std::string& from, const std::string& to) {
  return ::rename(from.c_str(), to.c_str());
}

int Disk::exchange(const std::string& first, const std::string& second) {
  return ::renameat2(AT_FDCWD, first.c_str(), AT_FDCWD, second.c_str(), RENAME_EXCHANGE);
}

int Disk::remove(const std::string& path) { return ::unlink(path.c_str()); }

int Disk::remove_folder(const std::string& path) { return ::rmdir(path.c_str()); }

Disk& Disk::real() {
  static Disk disk;
  return disk;
}

FileWriter::FileWriter(Disk& disk, std::string path) : disk_(disk), path_(std::move(path)) {
  fd_ = disk_.create(path_);
  if (fd_ < 0) throw_write_error("create", path_);
}

FileWriter::~FileWriter() {
  if (fd_ >= 0) disk_.close(fd_);
}

void FileWriter::write(const void* data, std::size_t num_bytes) {
  const char* next = static_cast<const char*>(data);
  while (num_bytes > 0) {
    const ssize_t written = disk_.write(fd_, next, std::min(num_bytes, kMaxWrite));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw_write_error("write", path_);
    if (written == 0) {  // never by a healthy file system; without this, a loop for ever
      errno = EIO;
      throw_write_error("write", path_);
    }
    next += written;
    num_bytes -= static_cast<std::size_t>(written);
    num_bytes_ += static_cast<std::uint64_t>(written);
    if (num_bytes_ - flushed_bytes_ >= kFlushBytes) {
      // A hint; what cannot be written is reported by the sync.
      ::sync_file_range(fd_, static_cast<off64_t>(flushed_bytes_),
                        static_cast<off64_t>(num_bytes_ - flushed_bytes_), SYNC_FILE_RANGE_WRITE);
      flushed_bytes_ = num_bytes_;
    }
  }
}

void FileWriter::finish() {
  if (disk_.sync(fd_) != 0) throw_write_error("sync", path_);
  const int fd = fd_;
  fd_ = -1;
  if (disk_.close(fd) != 0) throw_write_error("close", path_);
}

}  // namespace tessera::checkpoint
