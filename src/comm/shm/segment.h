// src/comm/shm/segment.h — the file in shared memory behind a group, and its removal.
//
// The file's name is unguessable and tells who made it, so that a segment whose maker died before
// it could be unlinked is found and removed by the next group on the machine.

#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace tessera::comm::shm {

/// A file mapped by this process. Unmapped, and unlinked if it still is linked by its maker, when
/// the last owner lets go. Not collective; any thread.
class Segment {
 public:
  /// Makes a new file of `total_bytes` in `directory`, with its first `reserved_bytes` present.
  /// Throws Failure(kUnavailable) with the numbers if that cannot be had.
  static std::shared_ptr<Segment> create(const std::string& directory, std::size_t reserved_bytes,
                                         std::size_t total_bytes);
  /// Maps a file that another rank has made.
  static std::shared_ptr<Segment> open(const std::string& path, std::size_t total_bytes);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const std::string& path() const noexcept { return path_; }
  std::byte* base() const noexcept { return base_; }

  /// Removes the name; the memory stays until the last rank unmaps it.
  void unlink() noexcept;

  /// Makes the bytes present; false if the file system is full.
  bool commit(std::size_t offset, std::size_t bytes) noexcept;

  /// Fills this process's page table for the bytes, so that first use does not fault. Best effort.
  void populate(std::size_t offset, std::size_t bytes) noexcept;

 private:
  Segment(std::string path, int file, std::size_t bytes, bool is_maker);
  void map();

  std::string path_;
  int file_ = -1;
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  bool is_linked_ = false;
};

/// Where segments are made: TESSERA_SHM_DIR, or /dev/shm.
std::string default_directory();

/// Bytes that can still be written below `directory`; 0 if it cannot be asked.
std::size_t free_bytes(const std::string& directory) noexcept;

/// Removes segments of this user whose maker is dead. Returns how many.
int remove_stale_segments(const std::string& directory) noexcept;

}  // namespace tessera::comm::shm
