#include "tessera/core/check.h"
#include "tessera/sharding/plan.h"

namespace tessera::sharding {
namespace {

constexpr const char* kMissing =
    ": the library was built without nlohmann-json, and has no JSON plans.";

}  // namespace

std::string to_json(const ShardingPlan&) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "sharding.to_json", kMissing);
}

ShardingPlan plan_from_json(std::string_view) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "sharding.plan_from_json", kMissing);
}

}  // namespace tessera::sharding
