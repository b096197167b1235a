// src/comm/shm/segment.h — the memory behind a group.
//
// A segment has no name in any file system, so nobody can open it who was not handed it: it goes
// from process to process as a descriptor (handover.h).
//
// Note [What a forked child sees]
// A child inherits the mapping of its parent, and a word that it wrote there would count as its
// parent's: it would take that rank's place in the group. So a fork turns the mapping into a
// private one, at the same address. Tensors in it can be read as before; what the child writes, it
// alone sees.

#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace tessera::comm::shm {

/// Memory mapped by this process, and unmapped when the last owner lets go. Not collective; any
/// thread.
class Segment {
 public:
  /// Makes a new segment of `total_bytes` with its first `reserved_bytes` present: anonymous and
  /// sealed against another length, or a nameless file in `directory` if that is not empty. Throws
  /// Failure(kUnavailable) with the numbers if that cannot be had.
  static std::shared_ptr<Segment> create(const std::string& directory, std::size_t reserved_bytes,
                                         std::size_t total_bytes);
  /// Maps the segment behind `file`, which another rank has made, and owns the descriptor from then
  /// on. Throws Failure(kAborted), before anything is mapped, unless it is a file of this user that
  /// nobody else may open, without a name or sealed, and `total_bytes` long.
  static std::shared_ptr<Segment> adopt(int file, std::size_t total_bytes);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* base() const noexcept { return base_; }
  std::size_t bytes() const noexcept { return bytes_; }
  /// To be handed to another rank; stays with the segment.
  int file() const noexcept { return file_; }

  /// Makes the bytes present; false if there is no memory left for them.
  bool commit(std::size_t offset, std::size_t bytes) noexcept;

  /// Fills this process's page table for the bytes, so that first use does not fault. Best effort.
  void populate(std::size_t offset, std::size_t bytes) noexcept;

 private:
  Segment(int file, std::size_t bytes) : file_(file), bytes_(bytes) {}
  void map();
  friend class SegmentsOfProcess;

  int file_ = -1;
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  bool is_inherited_ = false;  // by a fork: a private copy
};

/// Where segments are made: TESSERA_SHM_DIR, or "" for anonymous memory.
std::string default_directory();

/// Bytes that a segment in `directory`, or in anonymous memory, can still have; 0 if that cannot be
/// asked.
std::size_t free_bytes(const std::string& directory) noexcept;

}  // namespace tessera::comm::shm
