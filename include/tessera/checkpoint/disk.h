// tessera/checkpoint/disk.h — the system calls that change or read a checkpoint, in one place. No
// LibTorch.
//
// Everything a save or a load does to the file system goes through a Disk, so that tests can let
// the n-th call fail, write half, or be the process's last, or put a disk of their own in its
// place.

#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/export.h"

namespace tessera::checkpoint {

/// The file system. Each call returns what its system call returns, and sets errno.
class TESSERA_API Disk {
 public:
  Disk() = default;
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;
  virtual ~Disk();

  /// Opens a file or folder that is there, in the folder `parent` (AT_FDCWD: anywhere).
  virtual int open(int parent, const std::string& name, int flags);
  virtual ssize_t read(int fd, void* data, std::size_t num_bytes, std::uint64_t begin);
  /// Looks at an open file or folder; at what has a name in the folder `parent`, links themselves.
  virtual int look(int fd, struct stat& facts);
  virtual int look_at(int parent, const std::string& name, struct stat& facts);
  /// Adds the names in an open folder to `names`, without "." and "..", in any order.
  virtual int list(int fd, std::vector<std::string>& names);
  /// Before a call that failed is made again.
  virtual void pause(int milliseconds);

  virtual int make_folder(const std::string& path);
  /// Creates a file that does not exist yet, for writing.
  virtual int create(const std::string& path);
  virtual ssize_t write(int fd, const void* data, std::size_t num_bytes);
  virtual int sync(int fd);
  virtual int close(int fd);
  virtual int sync_folder(const std::string& path);
  virtual int rename(const std::string& from, const std::string& to);
  /// Lets two folders trade places, in one step.
  virtual int exchange(const std::string& first, const std::string& second);
  virtual int remove(const std::string& path);
  virtual int remove_folder(const std::string& path);
  /// Opens a file to be locked by flock, which nobody else may open; makes it if need be.
  virtual int open_lock(const std::string& path);
  /// A number that nobody else has, for names of what is not finished.
  virtual std::uint64_t random();

  /// The disk of this machine.
  static Disk& real();
};

/// Writes one new file through a Disk and sums what it writes. Throws Error(kWrite) naming the file
/// and the cause; the file is then incomplete and must not be kept.
class TESSERA_API FileWriter {
 public:
  FileWriter(Disk& disk, std::string path);
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;
  ~FileWriter();

  void write(const void* data, std::size_t num_bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Brings the file to the disk and closes it.
  void finish();

  std::uint64_t num_bytes() const noexcept { return num_bytes_; }

 private:
  Disk& disk_;
  std::string path_;
  int fd_ = -1;
  std::uint64_t num_bytes_ = 0;
  std::uint64_t flushed_bytes_ = 0;
};

/// Throws Error(kWrite) "checkpoint: <doing> <path>: <cause>. ..." from errno.
[[noreturn]] TESSERA_API void throw_write_error(const std::string& doing, const std::string& path);

}  // namespace tessera::checkpoint
