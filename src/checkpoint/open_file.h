// checkpoint/open_file.h — opening what may come from a stranger: plain files of one folder only.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint/disk.h"
#include "tessera/checkpoint/manifest.h"

namespace tessera::checkpoint {

/// What a Disk has opened, closed at the end.
class Descriptor {
 public:
  Descriptor() noexcept = default;
  Descriptor(Disk& disk, int fd) noexcept : disk_(&disk), fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : disk_(other.disk_), fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(disk_, other.disk_);
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const noexcept { return fd_; }

 private:
  Disk* disk_ = nullptr;
  int fd_ = -1;
};

/// A folder, open for reading. What is opened in it is of this folder, also when another one takes
/// its name meanwhile.
class OpenFolder {
 public:
  /// Opens `path`, which may be a link only if `follows`. Throws Error(kMissing, kCorrupt, kRead).
  explicit OpenFolder(const std::string& path, bool follows = false, Disk& disk = Disk::real());
  /// Opens the folder `name` in `parent`, never following a link.
  OpenFolder(const OpenFolder& parent, const std::string& name);

  const std::string& path() const noexcept { return path_; }
  int fd() const noexcept { return fd_.get(); }
  Disk& disk() const noexcept { return *disk_; }
  /// What is in it, in the order of names.
  std::vector<std::string> names() const;
  /// Whether `name` in `parent` is no longer this folder.
  bool is_replaced(const OpenFolder& parent, const std::string& name) const;

 private:
  OpenFolder(int parent, const std::string& name, std::string path, int flags, Disk& disk);

  Disk* disk_;
  std::string path_;
  Descriptor fd_;
};

/// A regular file, open for reading.
class OpenFile {
 public:
  /// Opens `name` in `folder`. Refuses names with a slash, links, anything but a regular file, and
  /// files of other users that have a second name elsewhere. Throws Error(kMissing, kCorrupt,
  /// kRead).
  OpenFile(const OpenFolder& folder, const std::string& name);

  const std::string& path() const noexcept { return path_; }
  std::uint64_t num_bytes() const noexcept { return num_bytes_; }

  /// Reads exactly these bytes. Throws Error(kCorrupt) if the file ends before, Error(kRead) if it
  /// cannot be read.
  void read(std::uint64_t begin, void* data, std::size_t num_bytes) const;
  /// Tells the kernel that these bytes are wanted soon.
  void expect(std::uint64_t begin, std::uint64_t num_bytes) const;

 private:
  Disk* disk_;
  std::string path_;
  Descriptor fd_;
  std::uint64_t num_bytes_ = 0;
};

/// Reads a whole file of at most `max_bytes`.
std::string read_small_file(const OpenFolder& folder, const std::string& name,
                            std::uint64_t max_bytes);

/// Reads and checks the manifest of a folder; not the files it lists.
Manifest read_manifest(const OpenFolder& folder);
Manifest read_manifest(const std::string& folder, Disk& disk = Disk::real());

/// The commit that the manifest of a folder claims, without reading more than its beginning; 0 if
/// it has none, -1 if there is no manifest. Throws Error(kRead).
std::int64_t read_commit(const OpenFolder& parent, const std::string& folder);

/// Reads and checks the header of a safetensors file.
FileHeader read_header(const OpenFile& file);

}  // namespace tessera::checkpoint
