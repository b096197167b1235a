#include "regions/agreement.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <sstream>
#include <string_view>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "comm/agreement.h"
#include "comm/engines.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"
#include "tessera/core/check.h"

namespace tessera::regions {

Sizes even_sizes(std::int64_t extent, int num_parts) {
  TESSERA_CHECK_VALUE(extent >= 0 && num_parts > 0, "regions.even_sizes: ", extent,
                      " items cannot be cut into ", num_parts, " parts.");
  Sizes sizes(num_parts, extent / num_parts);
  for (int part = 0; part < extent % num_parts; ++part) ++sizes[part];
  return sizes;
}

namespace detail {
namespace {

using comm::Group;

// One rank's call, as far as the ranks must agree on it, in words that travel.
enum Word : std::size_t {
  kOperator,
  kIsValid,
  kNeedsGrad,
  kType,
  kNumDims,
  kDim,
  kExtent,
  kRest,        // the other extents
  kGivenSizes,  // digest; 0 if none were given
  kNumWords,
};
using Record = std::vector<std::int64_t>;

bool is_checking() {
  static const bool is_on = [] {
    const char* value = std::getenv("TESSERA_CHECK_REGIONS");
    return value == nullptr || std::string_view(value) != "0";
  }();
  return is_on;
}

bool can_compare(const at::Tensor& x, const Group& group) {
  return is_checking() && group.size() > 1 && (!x.defined() || x.is_cpu()) &&
         comm::has_engine_for(*group.process_group(), c10::DeviceType::CPU);
}

// Equal lists give equal digests, and never 0.
std::int64_t digest_of(at::IntArrayRef words) {
  const std::string_view bytes(reinterpret_cast<const char*>(words.data()),
                               words.size() * sizeof(std::int64_t));
  return static_cast<std::int64_t>(comm::detail::hash_of(bytes) | 1);
}

std::int64_t sum_of(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
}

std::string list_of(at::IntArrayRef numbers) {
  std::ostringstream text;
  for (std::size_t i = 0; i < numbers.size(); ++i) text << (i > 0 ? ", " : "") << numbers[i];
  return text.str();
}

// What one rank asks for, before it is known to make sense.
struct Request {
  Operator op;
  at::Tensor x;
  bool has_dim = false;
  std::int64_t dim = 0;
  const std::optional<Sizes>* sizes = nullptr;

  bool cuts_whole() const { return op == Operator::kScatter || op == Operator::kReduceScatter; }
  bool has_sizes() const { return sizes != nullptr && sizes->has_value(); }

  std::string describe() const {
    std::ostringstream text;
    text << name_of(op) << '(';
    if (x.defined()) {
      text << x.scalar_type() << " [" << list_of(x.sizes()) << ']';
    } else {
      text << "no tensor";
    }
    if (has_dim) text << ", dim " << dim;
    if (has_sizes()) text << ", sizes " << list_of(**sizes);
    text << ')';
    return text.str();
  }

  // What is wrong with it on this rank alone; empty if nothing.
  std::string fault(const Group& group) {
    std::ostringstream text;
    text << "regions." << name_of(op) << ": ";
    if (!x.defined()) {
      text << "the tensor is undefined.";
      return text.str();
    }
    if (!has_dim) return "";
    if (x.dim() == 0) {
      text << "a tensor without dimensions cannot be cut. Give it one, as with unsqueeze(0).";
      return text.str();
    }
    if (dim < -x.dim() || dim >= x.dim()) {
      text << "there is no dimension " << dim << " in a tensor of " << x.dim() << " (" << -x.dim()
           << " to " << x.dim() - 1 << ").";
      return text.str();
    }
    if (dim < 0) dim += x.dim();
    if (!has_sizes()) return "";
    const Sizes& given = **sizes;
    if (given.size() != static_cast<std::size_t>(group.size())) {
      text << given.size() << " sizes were given for a group of " << group.size() << '.';
      return text.str();
    }
    for (std::size_t r = 0; r < given.size(); ++r) {
      if (given[r] < 0) {
        text << "rank " << r << " cannot have a slice of " << given[r] << '.';
        return text.str();
      }
    }
    if (cuts_whole() && sum_of(given) != x.size(dim)) {
      text << "the sizes (" << list_of(given) << ") add up to " << sum_of(given) << ", dimension "
           << dim << " has " << x.size(dim) << '.';
      return text.str();
    }
    return "";
  }

  Record record(bool is_valid) const {
    Record words(kNumWords, 0);
    words[kOperator] = static_cast<std::int64_t>(op);
    words[kIsValid] = is_valid ? 1 : 0;
    if (!is_valid) return words;
    words[kNeedsGrad] = at::GradMode::is_enabled() && x.requires_grad() ? 1 : 0;
    words[kType] = static_cast<std::int64_t>(x.scalar_type());
    words[kNumDims] = x.dim();
    auto rest = x.sizes().vec();
    if (has_dim) {
      words[kDim] = dim;
      words[kExtent] = rest[dim];
      rest.erase(rest.begin() + dim);
    }
    words[kRest] = digest_of(rest);
    if (has_sizes()) words[kGivenSizes] = digest_of(**sizes);
    return words;
  }
};

// All ranks come here together: each saw the same records.
[[noreturn]] void raise_difference(const Request& request, const std::string& fault,
                                   const std::vector<Record>& records,
                                   const std::vector<int>& different, const Group& group) {
  const int other = different[0];
  if (records[other][kIsValid] == 0) comm::detail::raise_faults(fault, different, group);
  const auto texts = comm::detail::exchange_texts(request.describe(), group);
  std::ostringstream text;
  text << "regions." << name_of(static_cast<Operator>(records[0][kOperator])) << ": rank 0 calls "
       << texts[0] << ", rank " << other << " calls " << texts[other] << " in group '"
       << group.name()
       << "'. All ranks make the same calls, in the same order, with the same arguments.";
  throw comm::Error(comm::ErrorKind::kMismatch, different, text.str());
}

std::vector<int> ranks_that_differ(const std::vector<Record>& records, bool cuts_whole) {
  std::vector<int> wrong;
  for (std::size_t r = 0; r < records.size(); ++r) {
    if (records[r][kIsValid] == 0) wrong.push_back(static_cast<int>(r));
  }
  if (!wrong.empty()) return wrong;
  const Record& first = records[0];
  for (std::size_t r = 1; r < records.size(); ++r) {
    const Record& other = records[r];
    bool is_same = !cuts_whole || other[kExtent] == first[kExtent];
    for (const Word word : {kOperator, kType, kNumDims, kDim, kRest, kGivenSizes}) {
      is_same = is_same && other[word] == first[word];
    }
    if (!is_same) wrong.push_back(static_cast<int>(r));
  }
  return wrong;
}

// A rank whose slice is not what the sizes say; every rank finds the same one.
void check_extents(const Request& request, const std::vector<Record>& records, const Group& group) {
  if (!request.has_sizes() || request.cuts_whole()) return;
  const Sizes& sizes = **request.sizes;
  for (int r = 0; r < group.size(); ++r) {
    const std::int64_t extent = records.empty()
                                    ? (r == group.rank() ? request.x.size(request.dim) : sizes[r])
                                    : records[r][kExtent];
    TESSERA_CHECK_VALUE(extent == sizes[r], "regions.", name_of(request.op), ": rank ", r,
                        " holds ", extent, " along dimension ", request.dim, ", the sizes say ",
                        sizes[r], " (sizes ", list_of(sizes),
                        "). Give every rank the sizes of one partition.");
  }
}

Sizes sizes_for(const Request& request, const std::vector<Record>& records, const Group& group) {
  if (!request.has_dim) return {};
  if (request.has_sizes()) return **request.sizes;
  if (request.cuts_whole()) return even_sizes(request.x.size(request.dim), group.size());
  Sizes sizes;
  for (const Record& record : records) sizes.push_back(record[kExtent]);
  if (!sizes.empty()) return sizes;
  if (group.size() == 1) return {request.x.size(request.dim)};
  const at::Tensor mine = at::full({1}, request.x.size(request.dim),
                                   request.x.options().dtype(at::kLong).requires_grad(false));
  const at::Tensor all = comm::all_gather(mine, group).cpu();
  const std::int64_t* extent = all.const_data_ptr<std::int64_t>();
  return {extent, extent + group.size()};
}

// A constant that takes part in the backward pass because another rank's input is not constant.
at::Tensor with_grad(const at::Tensor& x) {
  return x.requires_grad() ? x : x.detach().requires_grad_(true);
}

bool any_needs_grad(const std::vector<Record>& records) {
  for (const Record& record : records) {
    if (record[kNeedsGrad] != 0) return true;
  }
  return false;
}

Agreed agree_on(Request request, const Group& group) {
  const std::string fault = request.fault(group);
  std::vector<Record> records;
  if (can_compare(request.x, group)) {
    records = comm::detail::exchange_words(request.record(fault.empty()), group);
    const auto different = ranks_that_differ(records, request.cuts_whole());
    if (!different.empty()) raise_difference(request, fault, records, different, group);
  }
  TESSERA_CHECK_VALUE(fault.empty(), fault);
  check_extents(request, records, group);
  Agreed agreed;
  agreed.input = any_needs_grad(records) ? with_grad(request.x) : request.x;
  agreed.cut = c10::make_intrusive<Cut>(group, request.has_dim ? request.dim : 0,
                                        sizes_for(request, records, group));
  return agreed;
}

}  // namespace

const char* name_of(Operator op) noexcept {
  switch (op) {
    case Operator::kCopy:
      return "copy";
    case Operator::kReduce:
      return "reduce";
    case Operator::kAllReduce:
      return "all_reduce";
    case Operator::kGather:
      return "gather";
    case Operator::kScatter:
      return "scatter";
    case Operator::kGatherShared:
      return "gather_shared";
    case Operator::kReduceScatter:
      return "reduce_scatter";
  }
  return "";
}

Agreed agree(Operator op, const at::Tensor& x, const Group& group) {
  return agree_on({.op = op, .x = x}, group);
}

Agreed agree(Operator op, const at::Tensor& x, const Group& group, std::int64_t dim,
             const std::optional<Sizes>& sizes) {
  return agree_on({.op = op, .x = x, .has_dim = true, .dim = dim, .sizes = &sizes}, group);
}

at::Tensor rejoin(Operator op, const at::Tensor& x, const Cut& cut) {
  if (!at::GradMode::is_enabled() || !can_compare(x, cut.group)) return x;
  Request request{.op = op, .x = x};
  const auto records = comm::detail::exchange_words(request.record(true), cut.group);
  std::vector<int> different;
  for (int r = 1; r < cut.group.size(); ++r) {
    if (records[r][kOperator] != records[0][kOperator]) different.push_back(r);
  }
  if (!different.empty()) raise_difference(request, "", records, different, cut.group);
  return any_needs_grad(records) ? with_grad(x) : x;
}

}  // namespace detail
}  // namespace tessera::regions
