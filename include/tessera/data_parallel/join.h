// tessera/data_parallel/join.h — ranks with different numbers of batches.
//
// A rank that has run out of batches would leave the others waiting in their collectives. Inside
// `join` it shadows them instead, contributing nothing, until all have run out:
//
//   join({&model.replica()}, [&] { for (auto& batch : mine) step(batch); });

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::data_parallel {

struct JoinOptions {
  /// Divide gradients by the number of ranks of the group; false divides by those still active.
  bool divide_by_initial_world_size = true;
  bool enable = true;
  /// Raise on all ranks as soon as one has run out, instead of shadowing.
  bool throw_on_early_termination = false;
};

/// What a rank that has run out does for one object that communicates in each iteration.
class TESSERA_API JoinHook {
 public:
  virtual ~JoinHook() = default;
  /// Repeats the collectives of one iteration of an active rank. Collective over the rest.
  virtual void main_hook() {}
  /// Once, when all ranks have run out. `is_last_joiner`: this rank never shadowed. Collective.
  virtual void post_hook(bool is_last_joiner) { static_cast<void>(is_last_joiner); }
};

class JoinContext;

/// An object with collectives in each iteration that a rank which has run out can shadow.
class TESSERA_API Joinable {
 public:
  virtual ~Joinable() = default;
  virtual std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) = 0;
  virtual comm::Group join_group() const = 0;

 protected:
  /// Call at the start of each iteration, before any collective of it. Inside `join`, the first of
  /// its objects tells the others that this rank is active, and learns how many are. Returns that
  /// number, or the size of the group outside `join`.
  int notify_join_context();
  /// The options of the `join` this object is in, or null.
  const JoinOptions* join_options() const noexcept;

 private:
  friend class JoinContext;
  JoinContext* context_ = nullptr;
};

/// Runs `body` on ranks whose numbers of iterations may differ. All ranks of the objects' group
/// call it; all objects have the same group. If `body` throws, so does this, without joining.
///
/// Throws ValueError for no objects or different groups, RuntimeError (c10::Error) with
/// `throw_on_early_termination`.
TESSERA_API void join(const std::vector<Joinable*>& objects, const std::function<void()>& body,
                      const JoinOptions& options = {});

}  // namespace tessera::data_parallel
