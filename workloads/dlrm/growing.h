// dlrm/growing.h — the tables of `--ids unlimited`, and how they grow.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dlrm/click_log.h"
#include "dlrm/settings.h"
#include "dlrm/text_check.h"
#include "tessera/collision/growing_tables.h"
#include "trainer/workload.h"

namespace tessera::workloads::dlrm {

/// One growing table per feature of a log, named as it, with what the settings say of ids. Beside
/// tables that a schema lets grow, one of a fixed number of rows never has more ids than rows.
std::vector<collision::GrowingTable> growing_tables(const Settings& settings,
                                                    const ClickSchema& schema);
/// Where they lie: over all ranks, or whole, one rank after the other.
std::map<std::string, sharding::Placement> growing_placements(const Settings& settings,
                                                              const ClickSchema& schema,
                                                              int num_ranks);

/// What is told of growing tables. Counted over all ranks now and then.
class GrowthWatch {
 public:
  /// `texts`: on rank 0, if texts are checked.
  explicit GrowthWatch(std::shared_ptr<const collision::GrowingTables> tables,
                       std::shared_ptr<TextCheck> texts = nullptr)
      : tables_(std::move(tables)), texts_(std::move(texts)) {}

  /// After every step. Collective.
  void follow();
  /// Counts now. Collective.
  void count();

  std::int64_t num_ids() const;
  /// "ids 4.1M (+12k)": how many there are, and how many more than at the count before.
  std::string text() const;
  /// The line of a run's metrics, without its step.
  std::string record() const;
  trainer::Figures figures() const;

 private:
  std::shared_ptr<const collision::GrowingTables> tables_;
  std::shared_ptr<TextCheck> texts_;
  std::vector<collision::Growth> now_;
  std::int64_t before_ = 0;
  std::int64_t num_followed_ = 0;
};

}  // namespace tessera::workloads::dlrm
