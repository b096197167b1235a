#include "tessera/data_parallel/join.h"

#include <ATen/ops/tensor.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"

namespace tessera::data_parallel {
namespace {

constexpr int kWarnAfter = 1000;

// One message per iteration: how many are active, and whether one that has run out wants all to
// stop.
struct Roll {
  std::int64_t num_active = 0;
  std::int64_t num_stopping = 0;
};

Roll call_roll(const comm::Group& group, bool is_active, bool is_stopping) {
  const std::vector<std::int64_t> words{is_active ? 1 : 0, is_stopping ? 1 : 0};
  at::Tensor roll = at::tensor(words, at::kLong);
  comm::all_reduce_(roll, group);
  return {roll[0].item<std::int64_t>(), roll[1].item<std::int64_t>()};
}

}  // namespace

class JoinContext {
 public:
  JoinContext(const std::vector<Joinable*>& objects, const JoinOptions& options)
      : objects_(objects), options_(options), group_(objects.front()->join_group()) {
    for (Joinable* object : objects_) {
      TESSERA_CHECK_VALUE(object->join_group() == group_,
                          "join: the objects have different groups, '", group_.name(), "' and '",
                          object->join_group().name(), "'. All need the same one.");
      TESSERA_CHECK_VALUE(object->context_ == nullptr,
                          "join: an object is in another join already.");
    }
    for (Joinable* object : objects_) object->context_ = this;
  }
  ~JoinContext() {
    for (Joinable* object : objects_) object->context_ = nullptr;
  }

  const JoinOptions& options() const noexcept { return options_; }

  int notify(const Joinable* object) {
    if (object == objects_.front()) {
      const Roll roll = call_roll(group_, true, false);
      TORCH_CHECK(!options_.throw_on_early_termination || roll.num_stopping == 0,
                  "Detected at least one rank that exhausted inputs. Throwing across all ranks.");
      num_active_ = static_cast<int>(roll.num_active);
    }
    return num_active_;
  }

  void shadow() {
    std::vector<std::unique_ptr<JoinHook>> hooks;
    for (Joinable* object : objects_) hooks.push_back(object->join_hook(options_));
    bool is_last_joiner = true;
    for (int iteration = 0;; ++iteration) {
      const Roll roll = call_roll(group_, false, options_.throw_on_early_termination);
      if (roll.num_active == 0) break;
      TORCH_CHECK(!options_.throw_on_early_termination, "Rank ", group_.rank(),
                  " exhausted all inputs.");
      if (iteration == kWarnAfter) {
        TORCH_WARN("join: rank ", group_.rank(), " has shadowed ", kWarnAfter,
                   " iterations of the others. Distribute the samples more evenly.");
      }
      is_last_joiner = false;
      for (const auto& hook : hooks) hook->main_hook();
    }
    for (const auto& hook : hooks) hook->post_hook(is_last_joiner);
  }

 private:
  std::vector<Joinable*> objects_;
  JoinOptions options_;
  comm::Group group_;
  int num_active_ = 0;
};

int Joinable::notify_join_context() {
  return context_ == nullptr ? join_group().size() : context_->notify(this);
}

const JoinOptions* Joinable::join_options() const noexcept {
  return context_ == nullptr ? nullptr : &context_->options();
}

void join(const std::vector<Joinable*>& objects, const std::function<void()>& body,
          const JoinOptions& options) {
  TESSERA_CHECK_VALUE(!objects.empty(), "join: name at least one object.");
  for (const Joinable* object : objects) {
    TESSERA_CHECK_VALUE(object != nullptr, "join: an object is null.");
  }
  if (!options.enable) {
    body();
    return;
  }
  JoinContext context(objects, options);
  body();
  context.shadow();
}

}  // namespace tessera::data_parallel
