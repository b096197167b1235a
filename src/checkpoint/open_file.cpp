#include "checkpoint/open_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>

#include "tessera/checkpoint/error.h"

namespace tessera::checkpoint {
namespace {

[[noreturn]] void fail(ErrorKind kind, const std::string& path, const std::string& what) {
  throw Error(kind, path + ": " + what + ".");
}

// Often gone at the next try: a busy disk, a limit that another thread has hit as well.
bool may_pass(int number) {
  switch (number) {
    case EAGAIN:
    case EBUSY:
    case EINTR:
    case EIO:
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
    case ESTALE:
    case ETIMEDOUT:
      return true;
    default:
      return false;
  }
}

constexpr std::array kPausesMs = {1, 10, 100};

// Makes a call until it succeeds, fails for good, or has failed too often.
template <typename Call>
auto patiently(Disk& disk, const Call& call) {
  auto result = call();
  for (const int pause : kPausesMs) {
    if (result >= 0 || !may_pass(errno)) break;
    disk.pause(pause);
    result = call();
  }
  return result;
}

[[noreturn]] void fail_to_read(const std::string& path, int number) {
  std::string what = std::string("cannot be read: ") + std::strerror(number);
  if (number == EMFILE) what += ". Raise the limit of open files (ulimit -n)";
  if (may_pass(number)) what += ". Nothing is known to be wrong with it: try again";
  fail(ErrorKind::kRead, path, what);
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) disk_->close(fd_);
}

OpenFolder::OpenFolder(const std::string& path, bool follows, Disk& disk)
    : OpenFolder(AT_FDCWD, path, path, follows ? 0 : O_NOFOLLOW, disk) {}

OpenFolder::OpenFolder(const OpenFolder& parent, const std::string& name)
    : OpenFolder(parent.fd(), name, parent.path() + "/" + name, O_NOFOLLOW, parent.disk()) {}

OpenFolder::OpenFolder(int parent, const std::string& name, std::string path, int flags, Disk& disk)
    : disk_(&disk),
      path_(std::move(path)),
      fd_(disk, patiently(disk, [&] {
            return disk.open(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags);
          })) {
  if (fd() >= 0) return;
  const int number = errno;
  if (number == ELOOP || number == ENOTDIR) {
    fail(ErrorKind::kCorrupt, path_, "is a link or not a folder");
  }
  if (number == ENOENT) fail(ErrorKind::kMissing, path_, std::strerror(number));
  fail_to_read(path_, number);
}

std::vector<std::string> OpenFolder::names() const {
  std::vector<std::string> names;
  const int failed = patiently(*disk_, [&] {
    names.clear();
    return disk_->list(fd(), names);
  });
  if (failed != 0) fail_to_read(path_, errno);
  std::sort(names.begin(), names.end());
  return names;
}

bool OpenFolder::is_replaced(const OpenFolder& parent, const std::string& name) const {
  // This one is open, so its number cannot have gone to another.
  struct stat mine{};
  struct stat now{};
  return disk_->look(fd(), mine) != 0 || disk_->look_at(parent.fd(), name, now) != 0 ||
         mine.st_ino != now.st_ino || mine.st_dev != now.st_dev;
}

OpenFile::OpenFile(const OpenFolder& folder, const std::string& name)
    : disk_(&folder.disk()), path_(folder.path() + "/" + name) {
  check_file_name(name, folder.path());
  // The name has no slash and is not followed, so nothing outside the folder can be reached.
  // Without O_NONBLOCK, opening a pipe would wait for a writer.
  fd_ = Descriptor(*disk_, patiently(*disk_, [&] {
    return disk_->open(folder.fd(), name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  }));
  if (fd_.get() < 0) {
    const int number = errno;
    if (number == ENOENT) fail(ErrorKind::kMissing, path_, "is missing");
    if (number == ELOOP) fail(ErrorKind::kCorrupt, path_, "is a link");
    if (number == ENXIO) fail(ErrorKind::kCorrupt, path_, "is not a regular file");
    fail_to_read(path_, number);
  }
  struct stat facts{};
  if (disk_->look(fd_.get(), facts) != 0) fail_to_read(path_, errno);
  if (!S_ISREG(facts.st_mode)) fail(ErrorKind::kCorrupt, path_, "is not a regular file");
  if (facts.st_nlink > 1 && facts.st_uid != ::geteuid()) {
    fail(ErrorKind::kCorrupt, path_, "belongs to another user and has a second name");
  }
  num_bytes_ = static_cast<std::uint64_t>(facts.st_size);
}

void OpenFile::read(std::uint64_t begin, void* data, std::size_t num_bytes) const {
  char* next = static_cast<char*>(data);
  while (num_bytes > 0) {
    const ssize_t got =
        patiently(*disk_, [&] { return disk_->read(fd_.get(), next, num_bytes, begin); });
    if (got < 0) fail_to_read(path_, errno);
    if (got == 0) fail(ErrorKind::kCorrupt, path_, "ends too early");
    next += got;
    begin += static_cast<std::uint64_t>(got);
    num_bytes -= static_cast<std::size_t>(got);
  }
}

void OpenFile::expect(std::uint64_t begin, std::uint64_t num_bytes) const {
  ::posix_fadvise(fd_.get(), static_cast<off_t>(begin), static_cast<off_t>(num_bytes),
                  POSIX_FADV_WILLNEED);
}

std::string read_small_file(const OpenFolder& folder, const std::string& name,
                            std::uint64_t max_bytes) {
  const OpenFile file(folder, name);
  if (file.num_bytes() > max_bytes) {
    fail(ErrorKind::kCorrupt, file.path(),
         "has " + std::to_string(file.num_bytes()) + " bytes, more than the " +
             std::to_string(max_bytes) + " that are read");
  }
  std::string text(file.num_bytes(), '\0');
  file.read(0, text.data(), text.size());
  return text;
}

Manifest read_manifest(const OpenFolder& folder) {
  return decode_manifest(read_small_file(folder, kManifestName, kMaxManifestBytes),
                         folder.path() + "/" + kManifestName);
}

Manifest read_manifest(const std::string& folder, Disk& disk) {
  return read_manifest(OpenFolder(folder, /*follows=*/false, disk));
}

std::int64_t read_commit(const OpenFolder& parent, const std::string& folder) {
  for (;;) {
    std::optional<OpenFolder> opened;
    try {
      opened.emplace(parent, folder);
      const OpenFile file(*opened, kManifestName);
      std::string beginning(std::min<std::uint64_t>(file.num_bytes(), 64), '\0');
      file.read(0, beginning.data(), beginning.size());
      return commit_in(beginning);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::kRead) throw;  // or a good one would seem to be of no age
      // A save may have put another in its place and be removing this one.
      if (!opened || !opened->is_replaced(parent, folder)) return -1;
    }
  }
}

FileHeader read_header(const OpenFile& file) {
  unsigned char length_bytes[8];
  if (file.num_bytes() < sizeof(length_bytes))
    fail(ErrorKind::kCorrupt, file.path(), "is too short");
  file.read(0, length_bytes, sizeof(length_bytes));
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | length_bytes[i];
  if (length > kMaxHeaderBytes || length > file.num_bytes() - sizeof(length_bytes)) {
    fail(ErrorKind::kCorrupt, file.path(),
         "claims a header of " + std::to_string(length) + " bytes, the file has " +
             std::to_string(file.num_bytes()));
  }
  std::string text(length, '\0');
  file.read(sizeof(length_bytes), text.data(), text.size());
  return decode_header(text, file.num_bytes(), file.path());
}

}  // namespace tessera::checkpoint
