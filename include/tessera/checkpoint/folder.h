// tessera/checkpoint/folder.h — how a checkpoint comes to be, whole or not at all. No LibTorch.
//
// A root holds one folder per saved step and the file LATEST:
//
//   root/step-000000000120/            shards, MANIFEST.json
//   root/step-000000000130.tmp-9f.../  being written, or left over from a process that died
//   root/LATEST                        the folder committed last, a hint for people and scripts
//
// A folder gets its final name in one step, after everything in it has reached the disk.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/disk.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/core/export.h"

namespace tessera::checkpoint {

/// "step-000000000123".
TESSERA_API std::string folder_name(std::int64_t step);
/// The step of a folder's name, -1 if it is not the name of a finished checkpoint.
TESSERA_API std::int64_t step_of(std::string_view name) noexcept;
/// Steps of the finished folders in `root`, highest first; none if there is no such root.
/// Throws Error(kRead) if that cannot be known.
TESSERA_API std::vector<std::int64_t> list_steps(const std::string& root,
                                                 Disk& disk = Disk::real());
/// The same, last committed first: after a load of step 300, a save of 310 is newer than 500.
TESSERA_API std::vector<std::int64_t> list_commits(const std::string& root,
                                                   Disk& disk = Disk::real());
/// The highest number of a commit in `root`, 0 if there is none. Not checked.
TESSERA_API std::int64_t last_commit(const std::string& root, Disk& disk = Disk::real());
/// The folder that LATEST names, empty if there is none or it makes no sense.
TESSERA_API std::string latest_folder(const std::string& root, Disk& disk = Disk::real());

class RootLock;

/// One save in progress. One process makes it (rank 0); others only write files into `path()`.
///
/// Holds a lock on the root, so that two jobs cannot save into one at the same time; what dead
/// processes left behind is removed. Unless committed, everything is removed again. A process that
/// is forked meanwhile has neither the lock nor a say.
class TESSERA_API PendingFolder {
 public:
  /// Makes root and temporary folder. Throws Error(kWrite) naming what cannot be made. Throws
  /// Error(kInvalid) naming both jobs if another one saved that step and this process has not read
  /// from the root since, unless it `replaces` it.
  PendingFolder(std::string root, std::int64_t step, Disk& disk = Disk::real(),
                bool replaces = false);
  PendingFolder(const PendingFolder&) = delete;
  PendingFolder& operator=(const PendingFolder&) = delete;
  ~PendingFolder();

  /// Where the files go.
  const std::string& path() const noexcept { return path_; }

  /// Writes the index (if every tensor is whole in one file) and the manifest and syncs them.
  /// Checks that the tensors are covered first: throws Error(kInvalid) naming one that is not.
  /// Numbers the commit, unless `manifest` has a number already.
  void write_manifest(Manifest& manifest);

  /// Gives the folder its name, syncs the root, moves LATEST, and removes checkpoints beyond the
  /// `keep` committed last (0: all are kept; what a kept delta stands on is kept too). This one is
  /// never removed. A folder of the same step is replaced in one step.
  void commit(int keep = 0);

 private:
  void check_owner() const;

  std::string root_;
  std::string name_;
  std::string path_;
  Disk& disk_;
  std::unique_ptr<RootLock> lock_;
  bool is_committed_ = false;
};

/// Removes a folder and the files in it, never following links.
TESSERA_API void remove_folder(const std::string& path, Disk& disk);

}  // namespace tessera::checkpoint
