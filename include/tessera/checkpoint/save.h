// tessera/checkpoint/save.h — writes the state of all ranks as one checkpoint.
//
// All ranks see the same folder: one host, or a file system that the hosts share.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "tessera/checkpoint/disk.h"
#include "tessera/checkpoint/state.h"
#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::checkpoint {

struct SaveOptions {
  /// Checkpoints that stay: those committed last, this one included, whatever their steps. 0: all.
  int keep = 0;
  /// Replaces the checkpoint of the same step also if another job saved it. Otherwise that is an
  /// error; a job that has loaded from the root goes on with what was there then, and replaces it.
  bool replaces = false;
  /// Kept in the manifest, such as the hash of a sharding plan.
  std::string plan;
  /// Saves a delta: pieces that say which rows were touched write only these, on top of the
  /// checkpoint of this step, which must be there.
  std::optional<std::int64_t> base;
  /// Gets lines about progress and bandwidth, on rank 0. Default: standard error.
  std::function<void(const std::string&)> log;
  /// Where to write; the machine's own if null.
  Disk* disk = nullptr;
};

struct SaveReport {
  std::int64_t step = 0;
  std::string folder;
  std::uint64_t rank_bytes = 0;   // tensors written by this rank
  std::uint64_t total_bytes = 0;  // by all ranks
  double seconds = 0;
};

/// Saves `state` as step `step` under `root`, and returns when it is safely on the disk.
///
/// Collective over `group`; without one, this process alone. Throws Error on every rank, naming the
/// rank, the file and the cause, if any rank fails; no checkpoint appears then, earlier ones stay,
/// and the group remains usable. Throws comm::Error if a rank is lost.
TESSERA_API SaveReport save(const std::string& root, std::int64_t step, const State& state,
                            const std::optional<comm::Group>& group = std::nullopt,
                            const SaveOptions& options = {});

/// Saves beside training: the caller waits only for a copy of its own tensors.
class TESSERA_API AsyncSaver {
 public:
  /// Collective over `group`: the writers talk over a group of their own.
  explicit AsyncSaver(std::string root, const std::optional<comm::Group>& group = std::nullopt,
                      SaveOptions options = {});
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;
  /// Waits for the save in progress. An error that nobody has asked for is printed.
  ~AsyncSaver();

  /// Copies `state` into memory that is kept for the next time, and returns; the rest happens
  /// beside the caller. Waits for the save before, if it is still running, and throws what it
  /// threw. Every rank calls it, with the same steps in the same order.
  void save(std::int64_t step, const State& state,
            const std::optional<std::int64_t>& base = std::nullopt);

  /// Throws what the last save threw, if it has failed by now. Does not wait; call it every step.
  void check();
  /// Waits for the save in progress and throws what it threw. Returns nothing if none was started.
  std::optional<SaveReport> wait();
  bool is_saving() const;

 private:
  struct Worker;
  std::unique_ptr<Worker> worker_;
};

}  // namespace tessera::checkpoint
