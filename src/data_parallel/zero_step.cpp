#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include "comm/agreement.h"
#include "data_parallel/hook_base.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"
#include "tessera/data_parallel/optimizer_in_backward.h"

namespace tessera::data_parallel {
namespace {

/// Which rank steps which parameter. A new one goes to the rank that has least so far, so all ranks
/// agree as long as they ask in the same order.
class Owners {
 public:
  int of(const std::string& name, std::int64_t numel, int num_ranks) {
    const auto [place, is_new] = rank_of_.try_emplace(name, 0);
    if (!is_new) return place->second;
    loads_.resize(static_cast<std::size_t>(num_ranks), 0);
    const auto least = std::min_element(loads_.begin(), loads_.end());
    *least += numel;
    return place->second = static_cast<int>(least - loads_.begin());
  }
  int of(const std::string& name) const { return rank_of_.at(name); }
  void clear() {
    rank_of_.clear();
    loads_.clear();
  }

 private:
  std::map<std::string, int> rank_of_;
  std::vector<std::int64_t> loads_;
};

/// A line per tensor: type, number of dimensions, sizes, key.
std::string described(const HookState& state) {
  std::ostringstream text;
  for (const auto& [key, tensor] : state.tensors) {
    text << static_cast<int>(tensor.scalar_type()) << ' ' << tensor.dim();
    for (const std::int64_t size : tensor.sizes()) text << ' ' << size;
    text << ' ' << key << '\n';
  }
  return text.str();
}

/// The optimizer of a rank that steps, and remembers, its own parameters only.
class SharedOut final : public BackwardOptimizer {
 public:
  explicit SharedOut(std::shared_ptr<BackwardOptimizer> optimizer)
      : optimizer_(std::move(optimizer)) {}

  /// Says who owns the bucket's parameters. On the thread that runs backward, in bucket order.
  std::vector<int> owners_of(const Bucket& bucket) {
    const std::lock_guard lock(mutex_);
    if (!group_) {
      group_ = bucket.group();
      device_ = bucket.buffer().device();
      take_own(waiting_);
      waiting_ = {};
    }
    std::vector<int> owners;
    for (std::size_t i = 0; i < bucket.names().size(); ++i) {
      owners.push_back(
          owners_.of(bucket.names()[i], bucket.parameters()[i].numel(), group_->size()));
    }
    return owners;
  }

  void step(const Bucket& bucket, const at::Tensor& averaged,
            const std::optional<std::set<std::string>>& /*only*/) override {
    std::set<std::string> own;
    {
      const std::lock_guard lock(mutex_);
      for (const std::string& name : bucket.names()) {
        if (owners_.of(name) == group_->rank()) own.insert(name);
      }
    }
    if (!own.empty()) optimizer_->step(bucket, averaged, own);
  }

  std::string name() const override { return optimizer_->name(); }
  void set_learning_rate(double lr) override { optimizer_->set_learning_rate(lr); }
  double learning_rate() const override { return optimizer_->learning_rate(); }

  /// Collective once a step was taken: every rank gets what all ranks remember.
  HookState state() const override {
    if (!group_) return waiting_;
    const HookState own = optimizer_->state();
    const std::vector<std::string> texts = comm::detail::exchange_texts(described(own), *group_);
    HookState all;
    for (int rank = 0; rank < group_->size(); ++rank) {
      std::istringstream lines(texts[static_cast<std::size_t>(rank)]);
      int type = 0;
      while (lines >> type) {
        std::size_t num_dimensions = 0;
        lines >> num_dimensions;
        std::vector<std::int64_t> sizes(num_dimensions);
        for (std::int64_t& size : sizes) lines >> size;
        std::string key;
        lines.get();  // the space before it
        std::getline(lines, key);
        at::Tensor tensor =
            rank == group_->rank()
                ? own.tensors.at(key).contiguous().clone()
                : at::empty(sizes, at::TensorOptions(device_).dtype(at::ScalarType(type)));
        comm::broadcast_(tensor, rank, *group_);
        all.tensors[key] = tensor;
      }
    }
    return all;
  }

  void load_state(const HookState& state) override {
    const std::lock_guard lock(mutex_);
    owners_.clear();
    if (group_) {
      take_own(state);
    } else {
      waiting_ = state;
    }
  }

 private:
  /// Shares out the parameters of a state of all ranks and keeps what belongs to this one.
  void take_own(const HookState& state) {
    const auto parameter_of = [](const std::string& key) { return key.substr(0, key.rfind('/')); };
    std::map<std::string, std::int64_t> sizes;
    for (const auto& [key, tensor] : state.tensors) {
      std::int64_t& size = sizes[parameter_of(key)];
      size = std::max(size, tensor.numel());
    }
    for (const auto& [name, numel] : sizes) owners_.of(name, numel, group_->size());
    HookState own;
    for (const auto& [key, tensor] : state.tensors) {
      if (owners_.of(parameter_of(key)) == group_->rank()) own.tensors[key] = tensor;
    }
    if (!state.tensors.empty()) optimizer_->load_state(own);
  }

  std::shared_ptr<BackwardOptimizer> optimizer_;
  std::optional<comm::Group> group_;  // known from the first bucket on
  at::Device device_ = at::kCPU;
  HookState waiting_;  // loaded before that
  mutable std::mutex mutex_;
  Owners owners_;
};

class ZeroStep final : public Wrapping<> {
 public:
  ZeroStep(std::shared_ptr<CommHook> stepping, std::shared_ptr<SharedOut> optimizer)
      : Wrapping(std::move(stepping), "zero_step"), optimizer_(std::move(optimizer)) {}

  FuturePtr reduce(Bucket& bucket) override {
    std::vector<int> owners = optimizer_->owners_of(bucket);
    FuturePtr stepped = inner().reduce(bucket);
    waiting_.push_back({bucket, std::move(owners), stepped});
    return stepped;
  }

  void end_step() override {
    Wrapping::end_step();
    deliver();
  }
  void flush() override {
    Wrapping::flush();
    deliver();
  }

  void reset() override {
    waiting_.clear();
    Wrapping::reset();
  }

  std::int64_t bytes_sent() const override { return Wrapping::bytes_sent() + bytes_; }

 private:
  struct Stepped {
    Bucket bucket;
    std::vector<int> owners;
    FuturePtr future;
  };
  /// Parameters of one owner and bucket, on their way to the others.
  struct Sent {
    std::vector<at::Tensor> parameters;
    bool is_own;
    comm::Awaitable<at::Tensor> arrival;
  };

  /// Brings the parameters stepped so far to all ranks.
  void deliver() {
    const c10::AutoGradMode no_grad(false);
    const std::vector<Stepped> all = std::exchange(waiting_, {});
    for (const Stepped& one : all) one.future->waitAndThrow();
    if (all.empty() || all.front().bucket.group().size() == 1) return;
    std::vector<Sent> sent;
    for (const Stepped& one : all) {
      for (int rank = 0; rank < one.bucket.group().size(); ++rank) send(one, rank, sent);
    }
    for (Sent& piece : sent) {
      const at::Tensor flat = piece.arrival.wait();
      std::int64_t start = 0;
      for (const at::Tensor& parameter : piece.parameters) {
        if (!piece.is_own) {
          parameter.copy_(flat.narrow(0, start, parameter.numel()).view(parameter.sizes()));
        }
        start += parameter.numel();
      }
    }
  }

  void send(const Stepped& stepped, int rank, std::vector<Sent>& sent) {
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> rows;
    for (std::size_t i = 0; i < stepped.owners.size(); ++i) {
      const at::Tensor parameter = stepped.bucket.parameters()[i].detach();
      if (stepped.owners[i] != rank || parameter.numel() == 0) continue;
      parameters.push_back(parameter);
      rows.push_back(parameter.reshape(-1));
    }
    if (parameters.empty()) return;
    at::Tensor flat = at::cat(rows);
    bytes_ += static_cast<std::int64_t>(flat.nbytes());
    const comm::Group& group = stepped.bucket.group();
    auto arrival = comm::broadcast_async_(flat, rank, group);
    sent.push_back({std::move(parameters), rank == group.rank(), std::move(arrival)});
  }

  std::shared_ptr<SharedOut> optimizer_;
  std::vector<Stepped> waiting_;
  std::int64_t bytes_ = 0;
};

}  // namespace

std::shared_ptr<CommHook> hook_then_zero_step(std::shared_ptr<CommHook> inner,
                                              std::shared_ptr<BackwardOptimizer> optimizer) {
  TESSERA_CHECK_VALUE(optimizer != nullptr, "ddp.hook_then_zero_step: no optimizer.");
  auto shared = std::make_shared<SharedOut>(std::move(optimizer));
  return std::make_shared<ZeroStep>(hook_then_optimizer(std::move(inner), shared), shared);
}

}  // namespace tessera::data_parallel
