// Hooks that look at gradients on their way: finite, deterministic, clipped; and the replicas'
// fingerprint.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "data_parallel/hook_base.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"
#include "tessera/data_parallel/deterministic.h"
#include "tessera/data_parallel/fingerprint.h"
#include "tessera/data_parallel/finite_check.h"
#include "tessera/data_parallel/gradient_clipping.h"

namespace tessera::data_parallel {
namespace {

/// False if an element is NaN or infinite. A sum cannot hide one; it can itself overflow, which
/// costs a second look.
bool is_finite(const at::Tensor& values) {
  if (values.numel() == 0) return true;
  const at::Tensor real = values.is_complex() ? at::view_as_real(values) : values;
  if (std::isfinite(real.sum(at::kFloat).item<double>())) return true;
  return at::isfinite(real).all().item<bool>();
}

class FiniteCheckHook final : public Wrapping<FiniteCheck> {
 public:
  FiniteCheckHook(std::shared_ptr<CommHook> inner, NonFinitePolicy policy)
      : Wrapping(std::move(inner), "finite_check"), policy_(policy) {
    TESSERA_CHECK_VALUE(
        policy == NonFinitePolicy::kZeroRank || !this->inner().consumes_gradients(),
        "ddp.finite_check: '", this->inner().name(),
        "' steps the parameters before the step's end, when it is too late to raise or to skip. "
        "Use the policy that zeroes the rank.");
  }

  FuturePtr reduce(Bucket& bucket) override {
    if (bucket.index() == 0 && names_.empty()) mine_ = 0;
    group_ = bucket.group();
    device_ = bucket.buffer().device();
    names_.push_back(bucket.names());
    const at::Tensor buffer = bucket.buffer();
    const at::Tensor values = bucket.is_sparse() ? buffer._values() : buffer;
    if (!is_finite(values)) {
      const auto slices = bucket.slices_of(buffer);
      for (std::size_t i = 0; i < slices.size() && mine_ == 0; ++i) {
        const at::Tensor slice = slices[i].is_sparse() ? slices[i]._values() : slices[i];
        if (is_finite(slice)) continue;
        // Bucket, place in it, kind; zero means that all is well.
        mine_ = (static_cast<std::int64_t>(names_.size() - 1) << 32) |
                (static_cast<std::int64_t>(i) << 1) | (at::isnan(slice).any().item<bool>() ? 1 : 0);
        mine_ += 1;
      }
      values.zero_();
    }
    return inner().reduce(bucket);
  }

  void end_step() override {
    inner().end_step();
    if (!group_) return;
    found_.clear();
    const auto names = std::exchange(names_, {});
    const std::int64_t mine = std::exchange(mine_, 0);
    const at::Tensor all =
        comm::all_gather(at::full({1}, mine, at::TensorOptions(device_).dtype(at::kLong)), *group_)
            .cpu();
    for (int rank = 0; rank < group_->size(); ++rank) {
      std::int64_t code = all[rank].item<std::int64_t>();
      if (code == 0) continue;
      code -= 1;
      found_.push_back({rank,
                        names.at(static_cast<std::size_t>(code >> 32))
                            .at(static_cast<std::size_t>((code & 0xffffffff) >> 1)),
                        (code & 1) != 0});
    }
    ++step_;
    if (policy_ == NonFinitePolicy::kRaise && !found_.empty()) {
      std::string text;
      for (const NonFinite& one : found_) {
        text.append(text.empty() ? "" : "; ")
            .append("rank ")
            .append(std::to_string(group_->world_rank(one.rank)))
            .append(" has ")
            .append(one.is_nan ? "NaN" : "infinity")
            .append(" in the gradient of '")
            .append(one.parameter)
            .append("'");
      }
      TORCH_CHECK(false, "ddp.finite_check: step ", step_, ": ", text,
                  ". It has not reached the other ranks; this step's gradients are void.");
    }
  }

  void reset() override {
    names_.clear();
    mine_ = 0;
    inner().reset();
  }

  const std::vector<NonFinite>& found() const override { return found_; }
  bool skip_step() const override {
    return policy_ == NonFinitePolicy::kSkipStep && !found_.empty();
  }

 private:
  NonFinitePolicy policy_;
  std::optional<comm::Group> group_;
  c10::Device device_{at::kCPU};                 // of the gradients: the group may know no other
  std::vector<std::vector<std::string>> names_;  // of this step's buckets so far
  std::int64_t mine_ = 0;
  std::int64_t step_ = 0;
  std::vector<NonFinite> found_;
};

class DeterministicHook final : public Sending<> {
 public:
  FuturePtr reduce(Bucket& bucket) override {
    at::Tensor buffer = bucket.buffer();
    const double divisor = bucket.divisor();
    if (bucket.is_sparse()) return sender().average_plainly(bucket);
    if (bucket.group().size() == 1 || adds_in_rank_order(bucket.group())) {
      return then(sender().start_sum(buffer, bucket.group())->getFuture(), buffer,
                  [divisor](at::Tensor sum) { return sum.div_(divisor); });
    }
    at::Tensor rows;
    const WorkPtr work = sender().start_gather(buffer, rows, bucket.group());
    return then(work->getFuture(), buffer, [buffer, rows, divisor](const at::Tensor&) mutable {
      use_here(rows);
      at::add_out(buffer, rows[0], rows[1]);
      for (std::int64_t rank = 2; rank < rows.size(0); ++rank) buffer.add_(rows[rank]);
      return buffer.div_(divisor);
    });
  }
  std::string name() const override { return "deterministic"; }
};

class ClippingHook final : public Wrapping<GradientClipping> {
 public:
  ClippingHook(std::shared_ptr<CommHook> inner, const ClippingOptions& options)
      : Wrapping(std::move(inner), "clipping"), options_(options) {
    TESSERA_CHECK_VALUE(options.max_norm > 0, "ddp.clipping: a largest norm of ", options.max_norm,
                        ". It must be positive.");
    TESSERA_CHECK_VALUE(options.norm_type > 0, "ddp.clipping: norm type ", options.norm_type,
                        ". It must be positive.");
    TESSERA_CHECK_VALUE(!this->inner().consumes_gradients(), "ddp.clipping: '",
                        this->inner().name(),
                        "' steps the parameters before the norm of all gradients is known.");
  }

  FuturePtr reduce(Bucket& bucket) override {
    TESSERA_CHECK_TYPE(!bucket.is_sparse(), "ddp.clipping: the gradient of '",
                       bucket.names().front(), "' is sparse. Clip it after backward.");
    auto part = std::make_shared<Part>();
    part->future = pending(bucket.buffer());
    part->reduced = then(inner().reduce(bucket), bucket.buffer(),
                         [part, bucket, type = options_.norm_type](at::Tensor averaged) {
                           std::vector<at::Tensor> slices = bucket.slices_of(averaged);
                           std::erase_if(slices, [](const at::Tensor& slice) {
                             return slice.numel() == 0;  // has no infinity norm
                           });
                           if (!slices.empty()) part->norms = at::_foreach_norm(slices, type);
                           return averaged;
                         });
    parts_.push_back(part);
    return part->future;
  }

  void end_step() override {
    inner().end_step();
    clip();
  }
  // The norm needs all buckets: whoever flushes after each of them cannot clip.
  void flush() override { inner().flush(); }

  void reset() override {
    const auto error = std::make_exception_ptr(
        std::runtime_error("ddp.clipping: this step was given up; see the first error."));
    for (const auto& part : parts_) {
      if (!part->future->completed()) part->future->setError(error);
    }
    parts_.clear();
    inner().reset();
  }

  double total_norm() const override { return total_norm_; }

 private:
  struct Part {
    FuturePtr reduced;
    FuturePtr future;
    std::vector<at::Tensor> norms;
  };

  void clip() {
    std::vector<at::Tensor> norms;
    for (const auto& part : parts_) {
      part->reduced->waitAndThrow();
      for (const at::Tensor& norm : part->norms) norms.push_back(norm.to(at::kFloat));
    }
    if (norms.empty()) norms.push_back(at::zeros({}));
    const at::Tensor total = at::linalg_vector_norm(at::stack(norms), options_.norm_type);
    total_norm_ = total.item<double>();
    if (options_.error_if_nonfinite && !std::isfinite(total_norm_)) {
      const double found = total_norm_;
      reset();
      TORCH_CHECK(false, "ddp.clipping: the norm of the gradients is ", found,
                  ". They cannot be clipped.");
    }
    const at::Tensor scale = (options_.max_norm / (total + 1e-6)).clamp_max(1.0);
    const bool is_needed = scale.item<double>() != 1.0;
    for (const auto& part : parts_) {
      at::Tensor result = tensor_in(part->reduced->value());
      if (is_needed) result.mul_(scale);
      part->future->markCompleted(c10::IValue(result));
    }
    parts_.clear();
  }

  ClippingOptions options_;
  std::vector<std::shared_ptr<Part>> parts_;
  double total_norm_ = 0;
};

constexpr std::uint64_t kMixer = 0x9e3779b97f4a7c15ULL;  // 2^64 / golden ratio

std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) {
  hash = (hash ^ word) * kMixer;
  return hash ^ (hash >> 29);
}

std::string hex(std::uint64_t number) {
  char text[20];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(number));
  return text;
}

}  // namespace

std::shared_ptr<FiniteCheck> finite_check_hook(std::shared_ptr<CommHook> inner,
                                               NonFinitePolicy policy) {
  return std::make_shared<FiniteCheckHook>(std::move(inner), policy);
}

std::shared_ptr<CommHook> deterministic_hook() { return std::make_shared<DeterministicHook>(); }

std::shared_ptr<GradientClipping> clipping_hook(std::shared_ptr<CommHook> inner,
                                                const ClippingOptions& options) {
  return std::make_shared<ClippingHook>(std::move(inner), options);
}

std::uint64_t fingerprint(const at::Tensor& tensor) {
  const at::Tensor plain = tensor.detach().cpu().contiguous();
  std::uint64_t lanes[4] = {1, 2, 3, 4};  // four chains, so that the multiplications overlap
  const auto* bytes = static_cast<const unsigned char*>(plain.const_data_ptr());
  const std::size_t length = plain.nbytes();
  std::size_t at = 0;
  for (; at + 32 <= length; at += 32) {
    std::uint64_t words[4];
    std::memcpy(words, bytes + at, 32);
    for (int lane = 0; lane < 4; ++lane) lanes[lane] = mixed(lanes[lane], words[lane]);
  }
  for (int lane = 0; at < length; at += 8, ++lane) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + at, std::min<std::size_t>(8, length - at));
    lanes[lane] = mixed(lanes[lane], word);
  }
  std::uint64_t hash = static_cast<std::uint64_t>(plain.scalar_type());
  for (const std::uint64_t lane : lanes) hash = mixed(hash, lane);
  for (const std::int64_t size : plain.sizes())
    hash = mixed(hash, static_cast<std::uint64_t>(size));
  return hash;
}

ReplicaFingerprint::ReplicaFingerprint(comm::Group group, std::int64_t every)
    : group_(std::move(group)), every_(every) {
  TESSERA_CHECK_VALUE(every_ >= 1, "ddp.fingerprint: every ", every_,
                      " steps. It must be at least 1.");
}

bool ReplicaFingerprint::check(const std::vector<std::string>& names,
                               const std::vector<at::Tensor>& parameters) {
  TESSERA_CHECK_VALUE(names.size() == parameters.size(), "ddp.fingerprint: ", names.size(),
                      " names for ", parameters.size(), " parameters.");
  if (++step_ % every_ != 0) return false;
  // On the parameters' device: the group may know no other.
  const c10::Device device = parameters.empty() ? at::kCPU : parameters[0].device();
  at::Tensor hashes = at::empty({static_cast<std::int64_t>(parameters.size())}, at::kLong);
  std::uint64_t total = parameters.size();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::uint64_t hash = fingerprint(parameters[i]);
    total = mixed(total, hash);
    hashes.data_ptr<std::int64_t>()[i] = static_cast<std::int64_t>(hash);
  }
  const at::Tensor totals =
      comm::all_gather(at::full({1}, static_cast<std::int64_t>(total), at::kLong).to(device),
                       group_)
          .cpu();
  if ((totals == totals[0]).all().item<bool>()) return true;
  const at::Tensor all = comm::all_gather(hashes.unsqueeze(0).to(device), group_).cpu();
  for (std::int64_t i = 0; i < all.size(1); ++i) {
    std::map<std::int64_t, std::string> ranks_of;
    for (int rank = 0; rank < group_.size(); ++rank) {
      std::string& ranks = ranks_of[all[rank][i].item<std::int64_t>()];
      ranks.append(ranks.empty() ? "" : ", ").append(std::to_string(group_.world_rank(rank)));
    }
    if (ranks_of.size() < 2) continue;
    // By first rank, so that the text is the same everywhere and reads in rank order.
    std::map<std::string, std::int64_t> sides;
    for (const auto& [hash, ranks] : ranks_of) sides[ranks] = hash;
    std::string text;
    for (const auto& [ranks, hash] : sides) {
      text.append(text.empty() ? "" : ", ")
          .append("ranks ")
          .append(ranks)
          .append(" hold ")
          .append(hex(static_cast<std::uint64_t>(hash)));
    }
    TORCH_CHECK(false, "ddp.fingerprint: the replicas differ in step ", step_, ": '",
                names[static_cast<std::size_t>(i)], "' (", text,
                "). Restore them from one rank or a checkpoint.");
  }
  TESSERA_INTERNAL_ASSERT(false, "the fingerprints differ, but no parameter does");
}

}  // namespace tessera::data_parallel
