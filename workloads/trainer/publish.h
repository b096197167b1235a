// trainer/publish.h — hands what is being trained to servers, a few times a second.
//
// A publication is a checkpoint without what only training needs: whole at first and now and then,
// between these the rows that have changed and the dense layers (docs/serving.md, updates). It is
// written beside training; one that cannot be written is told, and training goes on.

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "tessera/checkpoint/save.h"
#include "tessera/comm/group.h"
#include "trainer/workload.h"

namespace tessera::trainer {

class Publisher {
 public:
  /// Collective over `world`.
  Publisher(AnyWorkload& workload, const comm::Group& world);

  /// Whether it is time, by this rank's clock, and whether this rank is still writing the last one.
  bool is_due() const;
  bool is_writing() const { return saver_.is_saving(); }
  /// Takes a copy of what is trained and writes it beside training; with `waits`, until it is
  /// there. Every rank calls it, for the same step.
  void publish(std::int64_t step, bool waits);

 private:
  void tell(const std::exception& error);

  AnyWorkload& workload_;
  comm::Group world_;
  checkpoint::State state_;
  checkpoint::AsyncSaver saver_;
  std::chrono::steady_clock::time_point last_;
  std::optional<std::int64_t> base_;  // the step of the last one
  std::int64_t num_deltas_ = 0;       // since the last whole one
};

}  // namespace tessera::trainer
