#include "tessera/collision/mch.h"

#include <algorithm>
#include <numeric>
#include <span>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "collision/line_store.h"
#include "kernels/id_lines.h"
#include "tessera/core/check.h"

namespace tessera::collision {
namespace {

std::span<std::int64_t> numbers(const at::Tensor& tensor) {
  return {tensor.data_ptr<std::int64_t>(), static_cast<std::size_t>(tensor.numel())};
}

void check_slots(const MchSlots& slots, std::int64_t num_ids) {
  const auto check = [&](const at::Tensor& tensor) {
    TESSERA_CHECK_VALUE(tensor.scalar_type() == at::kLong && tensor.is_cpu() &&
                            tensor.is_contiguous() && tensor.numel() == slots.ids.numel(),
                        "collision.mch: the tensors of a table must be int64, on the CPU, "
                        "contiguous and of one length.");
  };
  check(slots.ids);
  check(slots.rows);
  for (const at::Tensor& tensor : slots.metadata) check(tensor);
  TESSERA_CHECK_VALUE(0 <= num_ids && num_ids <= slots.ids.numel(), "collision.mch: ", num_ids,
                      " ids in ", slots.ids.numel(), " slots.");
}

template <typename Score>
std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> select(
    std::span<const Score> scores, std::int64_t num_slots) {
  const auto is_better = [&](std::int64_t a, std::int64_t b) {
    const Score left = scores[static_cast<std::size_t>(a)];
    const Score right = scores[static_cast<std::size_t>(b)];
    return left != right ? left > right : a < b;
  };
  std::vector<std::int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::nth_element(order.begin(), order.begin() + num_slots, order.end(), is_better);
  std::vector<std::int64_t> leaving;
  std::vector<std::int64_t> coming;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const bool stays = static_cast<std::int64_t>(i) < num_slots;
    if (order[i] < num_slots && !stays) leaving.push_back(order[i]);
    if (order[i] >= num_slots && stays) coming.push_back(order[i]);
  }
  std::sort(leaving.begin(), leaving.end(), is_better);
  std::sort(coming.begin(), coming.end(), is_better);
  for (std::int64_t& place : coming) place -= num_slots;
  return {std::move(leaving), std::move(coming)};
}

at::Tensor to_tensor(const std::vector<std::int64_t>& values) {
  at::Tensor tensor = at::empty({static_cast<std::int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), numbers(tensor).begin());
  return tensor;
}

void reorder(const at::Tensor& tensor, const std::vector<std::int64_t>& order) {
  const auto values = numbers(tensor);
  std::vector<std::int64_t> before(values.begin(), values.end());
  for (std::size_t i = 0; i < order.size(); ++i) {
    values[i] = before[static_cast<std::size_t>(order[i])];
  }
}

}  // namespace

std::pair<at::Tensor, at::Tensor> mch_match(const at::Tensor& sorted_ids, std::int64_t num_ids,
                                            const at::Tensor& values) {
  const at::Tensor known = sorted_ids.narrow(0, 0, num_ids).contiguous();
  if (num_ids == 0) {
    return {at::zeros_like(values, at::kBool), at::empty({0}, values.options())};
  }
  const at::Tensor places = at::searchsorted(known, values).clamp_max(num_ids - 1);
  const at::Tensor is_known = known.index_select(0, places).eq(values);
  return {is_known, places.masked_select(is_known)};
}

std::pair<at::Tensor, at::Tensor> mch_select(const at::Tensor& scores, std::int64_t num_slots) {
  TESSERA_CHECK_VALUE(scores.dim() == 1 && 0 <= num_slots && num_slots <= scores.numel(),
                      "collision.mch: ", scores.numel(), " scores for ", num_slots, " slots.");
  const auto choose = [&]<typename Score>(at::ScalarType type) {
    const at::Tensor own = scores.to(at::kCPU, type).contiguous();
    return select<Score>({own.const_data_ptr<Score>(), static_cast<std::size_t>(own.numel())},
                         num_slots);
  };
  const auto [leaving, coming] = at::isFloatingType(scores.scalar_type())
                                     ? choose.operator()<double>(at::kDouble)
                                     : choose.operator()<std::int64_t>(at::kLong);
  return {to_tensor(leaving).to(scores.device()), to_tensor(coming).to(scores.device())};
}

struct MchIndex::State {
  LineStore lines{0};
  std::int64_t first_row = 0;  // rows are kept less this, in 32 bits

  void insert(std::int64_t id, std::int64_t row) {
    TESSERA_CHECK_VALUE(row >= first_row && row - first_row < std::int64_t{0xffffffff},
                        "collision.mch: row ", row, " of id ", id, " is too far from row ",
                        first_row, ".");
    TESSERA_CHECK_VALUE(
        lines.insert(id, static_cast<std::uint32_t>(row - first_row)) == Placed::kYes,
        "collision.mch: no room for id ", id,
        ": there is no memory, or too many ids have a hash like it.");
  }
};

MchIndex::MchIndex() : state_(std::make_unique<State>()) {}
MchIndex::MchIndex(MchIndex&&) noexcept = default;
MchIndex& MchIndex::operator=(MchIndex&&) noexcept = default;
MchIndex::~MchIndex() = default;

void MchIndex::rebuild(const MchSlots& slots, std::int64_t num_ids) {
  check_slots(slots, num_ids);
  State& state = *state_;
  state.lines.clear();
  const auto ids = numbers(slots.ids);
  const auto rows = numbers(slots.rows);
  state.first_row = rows.empty() ? 0 : *std::min_element(rows.begin(), rows.end());
  for (std::size_t slot = 0; slot < static_cast<std::size_t>(num_ids); ++slot) {
    const std::int64_t other = state.lines.find(ids[slot]);
    TESSERA_CHECK_VALUE(other < 0, "collision.mch: rows ", other + state.first_row, " and ",
                        rows[slot], " both have id ", ids[slot], ".");
    state.insert(ids[slot], rows[slot]);
  }
}

std::int64_t MchIndex::replace(MchSlots& slots, std::int64_t num_ids, const at::Tensor& places,
                               const at::Tensor& new_ids) {
  check_slots(slots, num_ids);
  TESSERA_CHECK_VALUE(places.numel() == new_ids.numel(), "collision.mch: ", new_ids.numel(),
                      " new ids for ", places.numel(), " slots.");
  State& state = *state_;
  const at::Tensor own_places = places.to(at::kCPU, at::kLong).contiguous();
  const at::Tensor own_ids = new_ids.to(at::kCPU, at::kLong).contiguous();
  const auto targets = numbers(own_places);
  const auto incoming = numbers(own_ids);
  const auto ids = numbers(slots.ids);
  const auto rows = numbers(slots.rows);
  std::vector<bool> is_replaced(ids.size());
  std::vector<std::int64_t> fresh(targets.begin(), targets.end());
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const auto slot = static_cast<std::size_t>(targets[i]);
    TESSERA_CHECK_VALUE(slot < ids.size() && !is_replaced[slot], "collision.mch: slot ", targets[i],
                        " is outside the table or given twice.");
    is_replaced[slot] = true;
    if (targets[i] < num_ids) state.lines.erase(ids[slot]);
  }
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const auto slot = static_cast<std::size_t>(targets[i]);
    ids[slot] = incoming[i];
    state.insert(incoming[i], rows[slot]);
  }
  // Ids that stay are in order already: merge them with the new ones; free slots come behind.
  std::sort(fresh.begin(), fresh.end(), [&](std::int64_t a, std::int64_t b) {
    return ids[static_cast<std::size_t>(a)] < ids[static_cast<std::size_t>(b)];
  });
  std::vector<std::int64_t> order;
  order.reserve(ids.size());
  std::size_t next = 0;
  for (std::int64_t slot = 0; slot < num_ids; ++slot) {
    if (is_replaced[static_cast<std::size_t>(slot)]) continue;
    while (next < fresh.size() &&
           ids[static_cast<std::size_t>(fresh[next])] < ids[static_cast<std::size_t>(slot)]) {
      order.push_back(fresh[next++]);
    }
    order.push_back(slot);
  }
  order.insert(order.end(), fresh.begin() + static_cast<std::ptrdiff_t>(next), fresh.end());
  const auto num_now = static_cast<std::int64_t>(order.size());
  for (std::int64_t slot = num_ids; slot < slots.ids.numel(); ++slot) {
    if (!is_replaced[static_cast<std::size_t>(slot)]) order.push_back(slot);
  }
  reorder(slots.ids, order);
  reorder(slots.rows, order);
  for (const at::Tensor& tensor : slots.metadata) reorder(tensor, order);
  return num_now;
}

at::Tensor MchIndex::remap(const at::Tensor& values, std::int64_t unknown_row) const {
  constexpr std::int64_t kGrain = 16384;
  const State& state = *state_;
  const at::Tensor ids = values.to(at::kCPU, at::kLong).contiguous();
  at::Tensor rows = at::empty_like(ids);
  const auto* from = ids.const_data_ptr<std::int64_t>();
  auto* to = rows.data_ptr<std::int64_t>();
  const kernels::IdLines view = state.lines.view();
  at::parallel_for(0, ids.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    kernels::id_line_kernels().find_rows(view, from + begin, end - begin, to + begin);
    for (std::int64_t i = begin; i < end; ++i) {
      to[i] = to[i] < 0 ? unknown_row : to[i] + state.first_row;
    }
  });
  return rows.to(values.device());
}

}  // namespace tessera::collision
