// tessera/planner/plan_error.h — why there is no plan.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "tessera/core/export.h"

namespace tessera::planner {

enum class PlanErrorKind : std::uint8_t {
  kBadProblem,   // numbers, names or JSON that cannot be meant
  kTooLarge,     // memory: one table, or all together
  kRules,        // rules that together allow nothing
  kBadEvidence,  // a plan or certificate that does not hold
  kLate,         // no plan was found in the time that was given
};

/// Three lines: what, why, and what was computed to help.
class TESSERA_API PlanError : public std::runtime_error {
 public:
  PlanError(PlanErrorKind kind, std::string what, std::string why = {}, std::string advice = {})
      : std::runtime_error(text_of(what, why, advice)),
        kind_(kind),
        what_(std::move(what)),
        why_(std::move(why)),
        advice_(std::move(advice)) {}

  PlanErrorKind kind() const noexcept { return kind_; }
  const std::string& problem() const noexcept { return what_; }
  const std::string& why() const noexcept { return why_; }
  const std::string& advice() const noexcept { return advice_; }

 private:
  static std::string text_of(const std::string& what, const std::string& why,
                             const std::string& advice) {
    return what + (why.empty() ? "" : "\n" + why) + (advice.empty() ? "" : "\ntry: " + advice);
  }

  PlanErrorKind kind_;
  std::string what_;
  std::string why_;
  std::string advice_;
};

}  // namespace tessera::planner
