#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "comm/agreement.h"
#include "comm/engines.h"
#include "core/autograd.h"
#include "graph_parallel/halo_rows.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"
#include "tessera/core/check.h"
#include "tessera/graph_parallel/halo.h"

namespace tessera::graph_parallel {
namespace detail {

namespace {

// What a rank says of its rows: whether they fit the plan, their type, and the shape of one.
constexpr std::size_t kMaxDims = 8;
constexpr std::size_t kShape = 3;
using Words = std::vector<std::int64_t>;

Words words_of(const at::Tensor& rows, bool fits) {
  Words words{fits ? 0 : 1, -1, 0};
  words.resize(kShape + kMaxDims, -1);
  if (!fits) return words;
  words[1] = static_cast<std::int64_t>(rows.scalar_type());
  words[2] = rows.dim() - 1;
  for (std::size_t i = 0; i < std::min<std::size_t>(words[2], kMaxDims); ++i) {
    words[kShape + i] = rows.size(static_cast<std::int64_t>(i) + 1);
  }
  return words;
}

std::string describe(const Words& words) {
  std::ostringstream text;
  text << "rows of " << static_cast<at::ScalarType>(words[1]) << " [";
  for (std::size_t i = 0; i < std::min<std::size_t>(words[2], kMaxDims); ++i) {
    text << (i > 0 ? ", " : "") << words[kShape + i];
  }
  text << ']';
  return text.str();
}

// Our engines compare what the ranks bring to a collective; others trust them. Not on a GPU, where
// the host would have to wait for it.
bool must_compare(const HaloPlan& plan, const at::Tensor& rows) {
  if (!plan.options().check || plan.group().size() == 1) return false;
  if (rows.defined() && !rows.is_cpu()) return false;
  return comm::has_engine_for(*plan.group().process_group(), c10::DeviceType::CPU) &&
         comm::engine_of(plan.group()) == nullptr;
}

void compare_rows(const char* operation, const at::Tensor& rows, const std::string& fault,
                  const HaloPlan& plan) {
  const comm::Group& group = plan.group();
  const auto all = comm::detail::exchange_words(words_of(rows, fault.empty()), group);
  std::vector<int> wrong;
  std::vector<int> different;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (all[rank][0] != 0) wrong.push_back(rank);
    if (all[rank] != all[0]) different.push_back(rank);
  }
  if (!wrong.empty()) comm::detail::raise_faults(fault, wrong, group);
  if (different.empty()) return;
  throw comm::Error(comm::ErrorKind::kMismatch, different,
                    "graph." + std::string(operation) + ": rank 0 brings " + describe(all[0]) +
                        ", rank " + std::to_string(different[0]) + ' ' +
                        describe(all[different[0]]) +
                        ". Give every rank rows of one type and shape.");
}

at::Tensor in_payload(const at::Tensor& rows, const HaloPlan& plan) {
  return plan.options().payload ? rows.to(*plan.options().payload) : rows;
}

}  // namespace

at::Tensor pack(const at::Tensor& owned, const HaloPlan& plan) {
  return in_payload(owned.detach().index_select(0, plan.send_index(owned.device())), plan);
}

at::Tensor pack_back(const at::Tensor& halo, const HaloPlan& plan) {
  return in_payload(halo.detach(), plan).contiguous();
}

comm::Awaitable<at::Tensor> start_exchange(const at::Tensor& packed, const HaloPlan& plan) {
  return comm::all_to_all_v_async(packed, plan.send_rows(), plan.group(), plan.recv_rows());
}

comm::Awaitable<at::Tensor> start_accumulate(const at::Tensor& packed, const HaloPlan& plan) {
  return comm::all_to_all_v_async(packed, plan.recv_rows(), plan.group(), plan.send_rows());
}

at::Tensor unpack_back(const at::Tensor& arrived, const HaloPlan& plan, at::ScalarType dtype) {
  auto shape = arrived.sizes().vec();
  shape[0] = plan.num_owned();
  at::Tensor owned = at::zeros(shape, arrived.options().dtype(dtype));
  const at::Tensor index = plan.send_index(arrived.device());
  const at::Tensor rows = arrived.to(dtype);
  if (!plan.options().deterministic || arrived.is_cpu()) {
    return owned.index_add_(0, index, rows);
  }
  // index_put_ with accumulate sorts its indices; index_add_ uses atomics on other devices.
  return owned.index_put_({index}, rows, /*accumulate=*/true);
}

at::Tensor joining(const char* operation, const at::Tensor& rows, std::int64_t expected,
                   const HaloPlan& plan) {
  const std::int64_t num_rows = rows.defined() && rows.dim() >= 1 ? rows.size(0) : 0;
  std::string fault;
  if (!rows.defined() || rows.dim() < 1 || num_rows != expected) {
    fault = c10::str("graph.", operation, ": rank ", plan.group().rank(), " brings ", num_rows,
                     " rows, the plan has ", expected, ".");
  }
  if (must_compare(plan, rows)) compare_rows(operation, rows, fault, plan);
  TESSERA_CHECK_VALUE(fault.empty(), fault);
  const bool is_needed = at::GradMode::is_enabled() && !rows.requires_grad() &&
                         (rows.is_floating_point() || rows.is_complex());
  return is_needed ? rows.detach().requires_grad_(true) : rows;
}

}  // namespace detail

namespace {

using detail::SavedPlan;
using PlanPtr = c10::intrusive_ptr<SavedPlan>;

struct Exchange : Function<Exchange> {
  static Variable forward(AutogradContext* context, const Variable& owned, const PlanPtr& saved);
  static variable_list backward(AutogradContext* context, const variable_list& grads);
};

struct Accumulate : Function<Accumulate> {
  static Variable forward(AutogradContext* context, const Variable& halo, const PlanPtr& saved);
  static variable_list backward(AutogradContext* context, const variable_list& grads);
};

Variable Exchange::forward(AutogradContext* context, const Variable& owned, const PlanPtr& saved) {
  carry(context, saved);
  const HaloPlan& plan = saved->plan;
  return comm::all_to_all_v(detail::pack(owned, plan), plan.send_rows(), plan.group(),
                            plan.recv_rows())
      .to(owned.scalar_type());
}

variable_list Exchange::backward(AutogradContext* context, const variable_list& grads) {
  return {Accumulate::apply(grads[0], carried<SavedPlan>(context)), Variable()};
}

Variable Accumulate::forward(AutogradContext* context, const Variable& halo, const PlanPtr& saved) {
  carry(context, saved);
  const HaloPlan& plan = saved->plan;
  const at::Tensor arrived = comm::all_to_all_v(detail::pack_back(halo, plan), plan.recv_rows(),
                                                plan.group(), plan.send_rows());
  return detail::unpack_back(arrived, plan, halo.scalar_type());
}

variable_list Accumulate::backward(AutogradContext* context, const variable_list& grads) {
  return {Exchange::apply(grads[0], carried<SavedPlan>(context)), Variable()};
}

}  // namespace

at::Tensor halo_exchange(const at::Tensor& owned, const HaloPlan& plan) {
  return Exchange::apply(detail::joining("halo_exchange", owned, plan.num_owned(), plan),
                         c10::make_intrusive<SavedPlan>(plan));
}

at::Tensor halo_accumulate(const at::Tensor& halo, const HaloPlan& plan) {
  return Accumulate::apply(detail::joining("halo_accumulate", halo, plan.num_halo(), plan),
                           c10::make_intrusive<SavedPlan>(plan));
}

at::Tensor halo_extend(const at::Tensor& owned, const HaloPlan& plan) {
  const at::Tensor halo = halo_exchange(owned, plan);
  if (owned.dim() > 1) return at::cat({owned, halo});
  // Joining one-dimensional tensors drops empty ones from the graph.
  return at::cat({owned.unsqueeze(1), halo.unsqueeze(1)}).squeeze(1);
}

}  // namespace tessera::graph_parallel
