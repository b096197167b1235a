#include "tessera/data_parallel/powersgd.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_qr.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include "comm/agreement.h"
#include "data_parallel/hook_base.h"
#include "tessera/core/check.h"

namespace tessera::data_parallel {
namespace {

/// Makes the columns of each matrix of the batch orthonormal, in place.
void orthogonalize(at::Tensor matrices, double epsilon) {
  const std::int64_t columns = matrices.size(2);
  const bool is_half =
      matrices.scalar_type() == at::kHalf || matrices.scalar_type() == at::kBFloat16;
  if (columns > 2 && !is_half) {
    matrices.copy_(std::get<0>(at::linalg_qr(matrices)));
    return;
  }
  for (std::int64_t i = 0; i < columns; ++i) {
    at::Tensor column = matrices.narrow(2, i, 1);
    at::Tensor norm = at::linalg_vector_norm(column, 2, at::IntArrayRef{1}, /*keepdim=*/true);
    // A layer without gradient gives columns of zeros; dividing them would make NaN.
    norm = epsilon == 0 ? norm.masked_fill(norm == 0, 1) : norm + epsilon;
    column.div_(norm);
    if (i + 1 < columns) {
      at::Tensor rest = matrices.narrow(2, i + 1, columns - i - 1);
      rest.sub_((column * rest).sum(at::IntArrayRef{1}, /*keepdim=*/true) * column);
    }
  }
}

/// Matrices of one shape: their factors lie together, and are made orthogonal together. The
/// matrices themselves are multiplied where they are; copying them side by side costs more than it
/// saves.
struct Batch {
  std::vector<std::string> keys;
  std::vector<at::Tensor> targets;   // where the result goes, in the gradient's own layout
  std::vector<at::Tensor> matrices;  // [n, m], views of the targets where the layout allows it
  at::Tensor p;                      // [count, n, r], a piece of the bucket's Ps
  at::Tensor q;                      // [count, m, r]
};

/// One bucket on its way.
struct Compression {
  std::vector<Batch> batches;
  at::Tensor ps;
  at::Tensor qs;
  at::Tensor plain;                // what is not worth compressing, one after the other
  std::vector<at::Tensor> plains;  // where it goes
  at::Tensor before;               // the gradients with what was lost before
  WorkPtr plain_work;
  WorkPtr factor_work;
};

class PowerSgdHook final : public Sending<PowerSgd> {
 public:
  explicit PowerSgdHook(const PowerSgdOptions& options) : options_(options) {
    TESSERA_CHECK_VALUE(options.matrix_approximation_rank >= 1, "ddp.power_sgd: a rank of ",
                        options.matrix_approximation_rank, ". It must be at least 1.");
    TESSERA_CHECK_VALUE(options.start_step >= 0, "ddp.power_sgd: compression cannot start at step ",
                        options.start_step, ".");
    TESSERA_CHECK_VALUE(options.min_compression_rate >= 0, "ddp.power_sgd: a compression rate of ",
                        options.min_compression_rate, ". It cannot be negative.");
  }

  FuturePtr reduce(Bucket& bucket) override {
    at::Tensor buffer = bucket.buffer();
    if (step_ < options_.start_step || bucket.is_sparse() || buffer.is_complex() ||
        buffer.numel() == 0) {
      return sender().average_plainly(bucket);
    }
    auto job = std::make_shared<Compression>();
    if (options_.use_error_feedback) {
      add_losses(bucket);
      job->before = buffer.clone();
    }
    if (options_.batched) {
      cut_square(bucket, *job);
    } else {
      cut_by_parameter(bucket, *job);
    }
    // See Note [Follow-up collectives].
    std::vector<Pipeline::Step> steps;
    steps.emplace_back([this, job, group = bucket.group()] { send_p(*job, group); });
    if (job->ps.numel() > 0) {
      steps.emplace_back([this, job, group = bucket.group()] { send_q(*job, group); });
    }
    steps.emplace_back([this, job, bucket] { finish(*job, bucket); });
    return pipeline_.add(std::move(steps), buffer);
  }

  void end_step() override {
    pipeline_.flush();
    ++step_;
  }
  void flush() override { pipeline_.flush(); }
  void reset() override { pipeline_.reset(); }

  std::string name() const override {
    return std::string(options_.batched ? "batched_power_sgd_" : "power_sgd_")
        .append(std::to_string(options_.matrix_approximation_rank));
  }

  const PowerSgdOptions& options() const override { return options_; }
  std::int64_t step() const override { return step_; }
  CompressionStats stats() const override { return stats_; }

  HookState state() const override {
    HookState state;
    for (const auto& [name, loss] : losses_) {
      state.tensors["error/" + name] = loss;
      state.local.insert("error/" + name);
    }
    for (const auto& [name, q] : qs_) state.tensors["q/" + name] = q;
    state.numbers["step"] = step_;
    return state;
  }

  void load_state(const HookState& state) override {
    losses_.clear();
    qs_.clear();
    for (const auto& [key, tensor] : state.tensors) {
      if (key.rfind("error/", 0) == 0) {
        losses_[key.substr(6)] = tensor.clone();
      } else {
        TESSERA_CHECK_VALUE(key.rfind("q/", 0) == 0, "ddp.power_sgd: '", key,
                            "' is not a key of its state. Keys are 'error/<parameter>' and "
                            "'q/<parameter>'.");
        qs_[key.substr(2)] = tensor.clone();
      }
    }
    const auto step = state.numbers.find("step");
    step_ = step == state.numbers.end() ? 0 : step->second;
  }

 private:
  void add_losses(const Bucket& bucket) {
    const auto slices = bucket.slices_of(bucket.buffer());
    for (std::size_t i = 0; i < slices.size(); ++i) {
      const auto loss = losses_.find(bucket.names()[i]);
      if (loss != losses_.end() && loss->second.numel() == slices[i].numel()) {
        slices[i].add_(loss->second.to(slices[i].options()));
      }
    }
  }

  void cut_by_parameter(const Bucket& bucket, Compression& job) {
    const auto views = bucket.gradients();
    std::vector<at::Tensor> plain;
    std::map<std::pair<std::int64_t, std::int64_t>, std::size_t> batch_of_shape;
    std::int64_t p_length = 0;
    std::int64_t q_length = 0;
    for (std::size_t i = 0; i < views.size(); ++i) {
      const at::Tensor& view = views[i];
      stats_.before += view.numel();
      const std::int64_t n = view.dim() > 0 ? view.size(0) : 1;
      const std::int64_t m = n > 0 ? view.numel() / n : 0;
      const std::int64_t r = std::min({n, m, options_.matrix_approximation_rank});
      const auto compressed = static_cast<double>((n + m) * r);
      if (view.dim() < 2 || view.numel() == 0 ||
          compressed * options_.min_compression_rate >= static_cast<double>(n * m)) {
        plain.push_back(view.reshape(-1));
        job.plains.push_back(view);
        stats_.after += view.numel();
        continue;
      }
      stats_.after += (n + m) * r;
      p_length += n * r;
      q_length += m * r;
      const auto [place, is_new] = batch_of_shape.emplace(std::pair(n, m), job.batches.size());
      if (is_new) job.batches.emplace_back();
      Batch& batch = job.batches[place->second];
      batch.keys.push_back(bucket.names()[i]);
      batch.targets.push_back(view);
      batch.matrices.push_back(view.reshape({n, m}));
    }
    job.plain = plain.empty() ? at::empty({0}, bucket.buffer().options()) : at::cat(plain);
    job.ps = at::empty({p_length}, bucket.buffer().options());
    job.qs = at::empty({q_length}, bucket.buffer().options());
    std::int64_t p_offset = 0;
    std::int64_t q_offset = 0;
    for (Batch& batch : job.batches) place_factors(batch, job, p_offset, q_offset);
  }

  void cut_square(const Bucket& bucket, Compression& job) {
    const std::int64_t length = bucket.buffer().numel();
    auto side = static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(length))));
    while (side * side < length) ++side;
    const std::int64_t r = std::min(side, options_.matrix_approximation_rank);
    stats_.before += length;
    stats_.after += 2 * side * r;
    at::Tensor square = at::zeros({side * side}, bucket.buffer().options());
    square.narrow(0, 0, length).copy_(bucket.buffer());
    job.plain = at::empty({0}, bucket.buffer().options());
    job.ps = at::empty({side * r}, bucket.buffer().options());
    job.qs = at::empty({side * r}, bucket.buffer().options());
    Batch batch;
    batch.keys = {std::to_string(bucket.names().size())
                      .append(" parameters from ")
                      .append(bucket.names().front())};
    batch.targets = {bucket.buffer()};
    batch.matrices = {square.view({side, side})};
    std::int64_t p_offset = 0;
    std::int64_t q_offset = 0;
    place_factors(batch, job, p_offset, q_offset);
    job.batches.push_back(std::move(batch));
  }

  /// Gives a batch its pieces of the bucket's factors and fills Q.
  void place_factors(Batch& batch, const Compression& job, std::int64_t& p_offset,
                     std::int64_t& q_offset) {
    const auto count = static_cast<std::int64_t>(batch.matrices.size());
    const std::int64_t n = batch.matrices[0].size(0);
    const std::int64_t m = batch.matrices[0].size(1);
    const std::int64_t r = std::min({n, m, options_.matrix_approximation_rank});
    batch.p = job.ps.narrow(0, p_offset, count * n * r).view({count, n, r});
    batch.q = job.qs.narrow(0, q_offset, count * m * r).view({count, m, r});
    p_offset += count * n * r;
    q_offset += count * m * r;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::string& key = batch.keys[static_cast<std::size_t>(i)];
      const auto last = qs_.find(key);
      at::Tensor q = batch.q[i];
      if (options_.warm_start && last != qs_.end() && last->second.sizes() == q.sizes()) {
        q.copy_(last->second);
      } else {
        std::uint64_t seed = options_.random_seed ^ comm::detail::hash_of(key);
        if (!options_.warm_start) seed += static_cast<std::uint64_t>(step_);
        q.copy_(at::randn({m, r}, at::detail::createCPUGenerator(seed), at::kFloat));
      }
    }
    orthogonalize(batch.q, options_.orthogonalization_epsilon);
  }

  void send_p(Compression& job, const comm::Group& group) {
    for (Batch& batch : job.batches) {
      for (std::size_t i = 0; i < batch.matrices.size(); ++i) {
        at::Tensor p = batch.p[static_cast<std::int64_t>(i)];
        at::mm_out(p, batch.matrices[i], batch.q[static_cast<std::int64_t>(i)]);
      }
    }
    if (job.plain.numel() > 0) job.plain_work = sender().start_sum(job.plain, group);
    if (job.ps.numel() > 0) job.factor_work = sender().start_sum(job.ps, group);
  }

  void send_q(Compression& job, const comm::Group& group) {
    job.factor_work->wait();
    for (Batch& batch : job.batches) {
      orthogonalize(batch.p, options_.orthogonalization_epsilon);
      for (std::size_t i = 0; i < batch.matrices.size(); ++i) {
        at::Tensor q = batch.q[static_cast<std::int64_t>(i)];
        at::mm_out(q, batch.matrices[i].t(), batch.p[static_cast<std::int64_t>(i)]);
      }
    }
    job.factor_work = sender().start_sum(job.qs, group);
  }

  void finish(Compression& job, const Bucket& bucket) {
    if (job.plain_work) {
      job.plain_work->wait();
      job.plain.div_(bucket.divisor());
      std::int64_t offset = 0;
      for (at::Tensor& target : job.plains) {
        target.copy_(job.plain.narrow(0, offset, target.numel()).view(target.sizes()));
        offset += target.numel();
      }
    }
    if (job.factor_work) {
      job.factor_work->wait();
      job.qs.div_(bucket.divisor());
    }
    for (Batch& batch : job.batches) {
      for (std::size_t i = 0; i < batch.targets.size(); ++i) {
        const auto place = static_cast<std::int64_t>(i);
        at::Tensor& matrix = batch.matrices[i];
        at::mm_out(matrix, batch.p[place], batch.q[place].t());
        at::Tensor& target = batch.targets[i];
        if (!matrix.is_alias_of(target)) {
          target.copy_(matrix.view(-1).narrow(0, 0, target.numel()).view(target.sizes()));
        }
        if (options_.warm_start) qs_[batch.keys[i]] = batch.q[place];
      }
    }
    if (options_.use_error_feedback) {
      // Together the ranks put in what they now keep plus divisor times the result. Under join the
      // divisor is less than their number, so each takes off its share, not the whole result.
      job.before.sub_(bucket.buffer(), bucket.divisor() / bucket.group().size());
      const auto slices = bucket.slices_of(job.before);
      for (std::size_t i = 0; i < slices.size(); ++i) losses_[bucket.names()[i]] = slices[i];
    }
  }

  PowerSgdOptions options_;
  Pipeline pipeline_;
  std::int64_t step_ = 0;
  CompressionStats stats_;
  std::map<std::string, at::Tensor> losses_;  // flat, in the gradient's memory order
  std::map<std::string, at::Tensor> qs_;      // [m, r]
};

}  // namespace

std::shared_ptr<PowerSgd> power_sgd_hook(const PowerSgdOptions& options) {
  return std::make_shared<PowerSgdHook>(options);
}

}  // namespace tessera::data_parallel
