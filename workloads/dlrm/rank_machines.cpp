#include "dlrm/rank_machines.h"

#include <map>
#include <utility>

#include <nlohmann/json.hpp>

#include "report/rank_log.h"
#include "tessera/core/check.h"
#include "tessera/planner/plan_error.h"

namespace tessera::workloads::dlrm {
namespace {

constexpr double planner::Speeds::* kBandwidths[] = {
    &planner::Speeds::memory, &planner::Speeds::host, &planner::Speeds::network,
    &planner::Speeds::step};

std::vector<double> numbers_of(const planner::Speeds& speeds) {
  std::vector<double> numbers;
  for (const auto one : kBandwidths) numbers.push_back(speeds.*one);
  for (const planner::SecondsName& name : planner::kSpeedSeconds) {
    numbers.push_back(speeds.*(name.seconds));
  }
  return numbers;
}

planner::Speeds speeds_from(const std::vector<double>& numbers) {
  planner::Speeds speeds;
  auto next = numbers.begin();
  for (const auto one : kBandwidths) speeds.*one = *next++;
  for (const planner::SecondsName& name : planner::kSpeedSeconds) {
    speeds.*(name.seconds) = *next++;
  }
  return speeds;
}

// Machines of one kind have the same; where nothing was measured all are alike.
std::string kind_of(const KnownSpeeds& known) {
  if (!known.is_measured) return "";
  return known.profile.machine + "\n" + std::to_string(known.profile.num_ranks) + "\n" +
         known.profile.engine;
}

}  // namespace

RankMachines rank_machines(const std::string& verb, const std::string& profile,
                           const sharding::Topology& topology, const TableMemory& memory,
                           const comm::Group& world) {
  RankMachines machines;
  nlohmann::json mine{{"memory", memory_of_rank(memory)}};
  if (world.rank() == 0 || profile.empty()) {
    try {
      planner::Here here;
      here.num_ranks = topology.local_size;
      // Between hosts there are other engines than the one that was measured inside one.
      if (world.size() > 1 && world.size() == topology.local_size) here.engine = world.engine();
      machines.known = known_speeds(profile, here, memory.is_gpu);
      const KnownSpeeds& known = machines.known;
      mine["speeds"] = numbers_of(known.speeds);
      mine["kind"] = kind_of(known);
      mine["measured"] = known.is_measured;
      mine["told"] = known.note + "\n" + known.caution;
    } catch (const planner::PlanError& error) {
      mine["error"] = error.what();
    }
  }
  const auto handler = nlohmann::json::error_handler_t::replace;
  const std::vector<std::string> texts =
      report::gather_texts(mine.dump(-1, ' ', false, handler), world);
  std::map<std::string, planner::Speeds> kinds;
  std::map<std::string, int> told;  // by how many ranks
  std::vector<std::string> order;
  nlohmann::json last;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    nlohmann::json one = nlohmann::json::parse(texts[rank]);
    const auto bytes = one["memory"].get<double>();
    TESSERA_CHECK_VALUE(!one.contains("error"), verb, ": ",
                        profile.empty() && rank > 0 ? "rank " + std::to_string(rank) + ": " : "",
                        one.value("error", std::string()));
    if (one.contains("speeds")) last = std::move(one);
    const planner::Speeds& speeds =
        kinds
            .emplace(last["kind"].get<std::string>(),
                     speeds_from(last["speeds"].get<std::vector<double>>()))
            .first->second;
    machines.ranks.push_back({bytes, speeds});
    machines.known.is_measured = machines.known.is_measured && last["measured"].get<bool>();
    const auto text = last["told"].get<std::string>();
    if (told[text]++ == 0) order.push_back(text);
  }
  machines.known.note.clear();
  machines.known.caution.clear();
  for (const std::string& text : order) {
    std::string line = text.substr(0, text.find('\n'));
    if (order.size() > 1) {
      line += " (" + std::to_string(told[text]) + " of " + std::to_string(world.size()) + " ranks)";
    }
    machines.known.note += (machines.known.note.empty() ? "" : "\n") + line;
    machines.known.caution += text.substr(text.find('\n') + 1);
  }
  return machines;
}

}  // namespace tessera::workloads::dlrm
