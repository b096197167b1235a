#include "data/whole_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "trainer/data_error.h"

namespace tessera::workloads::data {
namespace {

// A pipe or a device: it has no draft, and must not be replaced by a file. So are the names that
// the system gives to open files, such as /dev/stdout, whatever is behind them.
bool is_stream(const std::string& path) {
  struct stat facts{};
  if (::lstat(path.c_str(), &facts) != 0) return false;
  const bool is_link = S_ISLNK(facts.st_mode);
  if (is_link && (path.starts_with("/dev/") || path.starts_with("/proc/"))) return true;
  if (is_link && ::stat(path.c_str(), &facts) != 0) return false;
  return !S_ISREG(facts.st_mode) && !S_ISDIR(facts.st_mode);
}

}  // namespace

WholeFile::WholeFile(std::string path)
    : path_(std::move(path)), partial_(path_ + ".partial-" + std::to_string(::getpid())) {
  open();
}

WholeFile::~WholeFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  if (is_named_) ::unlink(partial_.c_str());
}

void WholeFile::fail(const std::string& what) const {
  const std::string why = std::strerror(errno);
  throw trainer::DataError(path_ + ": " + what + ": " + why + ".");
}

// A file without a name goes away with its process, however that ends. Where the file system has no
// such files, or no name could be given to one later, it has a name from the start.
void WholeFile::open() {
  is_stream_ = is_stream(path_);
  if (is_stream_) {
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd_ < 0) fail("cannot be opened");
    return;
  }
  const std::size_t slash = path_.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  if (::access("/proc/self/fd", X_OK) == 0) {
    fd_ = ::open(folder.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
    if (fd_ >= 0) return;
  }
  fd_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("cannot be made");
  is_named_ = true;
}

bool WholeFile::give_name() const {
  if (is_named_) return true;
  ::unlink(partial_.c_str());  // of a process of this number that was lost
  const std::string file = "/proc/self/fd/" + std::to_string(fd_);
  return ::linkat(AT_FDCWD, file.c_str(), AT_FDCWD, partial_.c_str(), AT_SYMLINK_FOLLOW) == 0;
}

void WholeFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t done = ::write(fd_, bytes.data(), bytes.size());
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail("cannot be written");
    bytes.remove_prefix(static_cast<std::size_t>(done));
  }
}

void WholeFile::rewind() {
  if (::lseek(fd_, 0, SEEK_SET) != 0) fail("cannot be written from its beginning");
}

void WholeFile::finish() {
  if (is_stream_) {
    if (::close(std::exchange(fd_, -1)) != 0) fail("cannot be written");
    return;
  }
  if (::fsync(fd_) == 0 && give_name() && ::close(std::exchange(fd_, -1)) == 0 &&
      std::rename(partial_.c_str(), path_.c_str()) == 0) {
    return;
  }
  const int number = errno;
  ::unlink(partial_.c_str());
  errno = number;
  fail("cannot be finished");
}

void write_whole(const std::string& path, std::string_view text) {
  WholeFile file(path);
  file.write(text);
  file.finish();
}

}  // namespace tessera::workloads::data
