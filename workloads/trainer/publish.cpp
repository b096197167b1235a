#include "trainer/publish.h"

#include <cstdio>
#include <exception>

#include "tessera/checkpoint/error.h"

namespace tessera::trainer {
namespace {

// A reader opens every link of a chain.
constexpr std::int64_t kMostDeltas = 100;
// Publications that stay, with what they stand on: a server may be a little behind.
constexpr int kKept = 8;

checkpoint::SaveOptions options_of() {
  checkpoint::SaveOptions options;
  options.keep = kKept;
  options.replaces = true;  // a training that begins anew publishes its steps again
  options.log = [](const std::string&) {};
  return options;
}

}  // namespace

Publisher::Publisher(AnyWorkload& workload, const comm::Group& world)
    : workload_(workload), world_(world), saver_(workload.settings().publish, world, options_of()) {
  workload.add_published(state_);
  for (const Mark& mark : workload.marks()) state_.values[mark.name] = mark.value;
}

bool Publisher::is_due() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - last_).count() >=
         workload_.settings().publish_every;
}

void Publisher::tell(const std::exception& error) {
  // Which rows the next one must hold is not known any more.
  base_.reset();
  if (world_.rank() != 0) return;
  std::fprintf(stderr, "warning: train: nothing was published: %s\n", error.what());
}

void Publisher::publish(std::int64_t step, bool waits) {
  last_ = std::chrono::steady_clock::now();
  try {
    saver_.wait();
  } catch (const checkpoint::Error& error) {
    tell(error);
  }
  if (base_ == step) return;
  state_.values["step"] = step;
  if (num_deltas_ >= kMostDeltas) base_.reset();
  try {
    saver_.save(step, state_, base_);
    num_deltas_ = base_ ? num_deltas_ + 1 : 0;
    base_ = step;
    workload_.forget_published();
    if (waits) saver_.wait();
  } catch (const checkpoint::Error& error) {
    tell(error);
  }
}

}  // namespace tessera::trainer
