// tessera/planner/replan.h — a better plan that moves little.

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/export.h"
#include "tessera/planner/planner.h"

namespace tessera::planner {

/// Rows and columns that go to `part.rank` from another one.
struct Move {
  std::string table;
  Shard part;
  int from = 0;

  bool operator==(const Move&) const = default;
};

/// What must travel for `after` to hold what `before` held: of tables in both, rows and columns of
/// both. In order of tables and shards.
TESSERA_API std::vector<Move> moves_between(const Plan& before, const Plan& after);

struct Replan {
  PlanResult result;  // its gap is to the best of all plans, however much those would move
  std::vector<Move> moves;
  double moved_bytes = 0;       // of weights
  double total_bytes = 0;       // of the weights of `previous` that are still there
  double previous_seconds = 0;  // of a step, if nothing moved that need not
  double moving_seconds = 0;    // that rows and their state keep the links of the busiest rank
  std::vector<std::string> appeared;
  std::vector<std::string> vanished;
  std::vector<std::string> changed;  // have other rows, or another width
};

/// A plan for `problem` that starts from `previous` and moves at most `max_moved` of its bytes, and
/// beside that what must go: from ranks that are gone or too full, and rows that a table cut by
/// rows has elsewhere because it grew. Tables that appeared or changed their width are laid anew.
///
/// With `steps_left` it stops where steps and moves together take least: what moves must be paid
/// back by so many steps. 0: moves are free.
///
/// Not collective. Throws PlanError as plan() does, and kBadEvidence for a `previous` whose shards
/// do not make tables.
TESSERA_API Replan replan(const Problem& problem, const Plan& previous, double max_moved,
                          double steps_left = 0);

/// The plan of a file: of `plan_json`, or a whole result. Throws PlanError(kBadProblem) with the
/// place.
TESSERA_API Plan plan_from_json(std::string_view text);

}  // namespace tessera::planner
