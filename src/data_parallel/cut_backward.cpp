// Backwards that an exception has ended before all their buckets were reduced.

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include <ATen/ops/tensor.h>

#include "comm/engines.h"
#include "data_parallel/replica_state.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"

namespace tessera::data_parallel {
namespace {

constexpr const char* kAdvice =
    ". Their gradients do not belong together any more: end the job, or go on in another group.";

std::string place_text(std::int64_t num_begun, std::int64_t num_buckets) {
  return "after " + std::to_string(num_begun) + " of " + std::to_string(num_buckets) + " buckets";
}

/// How many buckets each rank had begun, told through the store: an engine that does not compare
/// calls would add these numbers to the gradients of a rank that goes on.
std::vector<std::int64_t> told_through_store(std::int64_t mine, const comm::Group& group,
                                             const std::string& place) {
  const auto store = group.store();
  const auto key_of = [](int rank) { return "tessera/cut_backward/" + std::to_string(rank); };
  const std::string number = "/" + std::to_string(store->add(key_of(group.rank()), 1));
  const std::string text = std::to_string(mine);
  store->set(key_of(group.rank()) + number, std::vector<std::uint8_t>(text.begin(), text.end()));
  std::vector<std::int64_t> all;
  for (int rank = 0; rank < group.size(); ++rank) {
    try {
      const std::vector<std::uint8_t> word = store->get(key_of(rank) + number);
      all.push_back(std::stoll(std::string(word.begin(), word.end())));
    } catch (const c10::Error& error) {
      throw comm::Error(comm::ErrorKind::kTimeout, {rank},
                        "DistributedDataParallel: an exception ended the backward on rank " +
                            std::to_string(group.world_rank(group.rank())) + " " + place +
                            ", and rank " + std::to_string(group.world_rank(rank)) +
                            " did not say the same" + kAdvice + " " +
                            error.what_without_backtrace());
    }
  }
  return all;
}

/// The same through the group itself. Ranks that go on meet it with another call, which is an error
/// on all of them at once.
std::vector<std::int64_t> told_through_group(std::int64_t mine, const comm::Group& group,
                                             const std::string& place) {
  try {
    const std::vector<std::int64_t> words{mine};
    const at::Tensor all = comm::all_gather(at::tensor(words, at::kLong), group);
    const auto* first = all.const_data_ptr<std::int64_t>();
    return {first, first + all.numel()};
  } catch (const comm::Error& error) {
    if (error.kind() != comm::ErrorKind::kMismatch) throw;
    throw comm::Error(error.kind(), error.ranks(),
                      "DistributedDataParallel: an exception ended the backward on rank " +
                          std::to_string(group.world_rank(group.rank())) + " " + place +
                          ", but not at the same place on all ranks" + kAdvice + " " +
                          error.what_without_backtrace());
  }
}

}  // namespace

void Replica::State::drop_cut_backward() {
  if (group.size() > 1) {
    const auto num_buckets = static_cast<std::int64_t>(reducer->buckets().size());
    const auto mine = static_cast<std::int64_t>(reducer->num_begun());
    const std::string place = place_text(mine, num_buckets);
    // Engines of ours compare what the ranks call.
    const auto all = kept.front().tensor.is_cpu() && comm::engine_of(group) != nullptr
                         ? told_through_group(mine, group, place)
                         : told_through_store(mine, group, place);
    if (std::any_of(all.begin(), all.end(), [&](auto num_begun) { return num_begun != mine; })) {
      std::string text = "DistributedDataParallel: an exception ended the backward";
      std::vector<int> ranks(all.size());
      std::iota(ranks.begin(), ranks.end(), 0);
      for (const int rank : ranks) {
        text.append(rank > 0 ? ", " : " ")
            .append(place_text(all[rank], num_buckets))
            .append(" on rank ")
            .append(std::to_string(group.world_rank(rank)));
      }
      throw comm::Error(comm::ErrorKind::kMismatch, ranks, text.append(kAdvice));
    }
  }
  reset();
}

}  // namespace tessera::data_parallel
