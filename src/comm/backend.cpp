#include "comm/backend.h"

#include <pthread.h>

#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>

#include "comm/engines.h"
#include "comm/obituary.h"
#include "comm/rank_list.h"
#include "tessera/comm/failure.h"
#include "tessera/core/check.h"

namespace tessera::comm {
namespace {

// Every engine alive in this process, so that a failure can be told to all groups it takes part in.
struct Registry {
  std::mutex mutex;
  std::set<EngineBackend*> backends;
  std::optional<Error> last_error;
};
// Never destroyed: groups may outlive static destructors. A forked child begins with an empty one,
// for its parent's groups are not its own, and its parent's lock may be held for good.
Registry& registry() {
  static std::atomic<Registry*> instance{new Registry};
  [[maybe_unused]] static const int installed =
      ::pthread_atfork(nullptr, nullptr, [] { instance = new Registry; });
  return *instance.load();
}

}  // namespace

ErrorKind error_kind(FailureKind kind) noexcept {
  switch (kind) {
    case FailureKind::kMismatch:
      return ErrorKind::kMismatch;
    case FailureKind::kPeerLost:
      return ErrorKind::kPeerLost;
    case FailureKind::kPeerFailed:
      return ErrorKind::kPeerFailed;
    case FailureKind::kTimeout:
      return ErrorKind::kTimeout;
    case FailureKind::kUnavailable:
      return ErrorKind::kUnavailable;
    case FailureKind::kAborted:
      break;
  }
  return ErrorKind::kAborted;
}

FailureKind failure_kind(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::kMismatch:
      return FailureKind::kMismatch;
    case ErrorKind::kPeerLost:
      return FailureKind::kPeerLost;
    case ErrorKind::kPeerFailed:
      return FailureKind::kPeerFailed;
    case ErrorKind::kTimeout:
    case ErrorKind::kRendezvous:
      return FailureKind::kTimeout;
    case ErrorKind::kUnavailable:
      return FailureKind::kUnavailable;
    case ErrorKind::kAborted:
      break;
  }
  return FailureKind::kAborted;
}

void for_each_backend(const std::function<void(EngineBackend&)>& visit) {
  std::lock_guard lock(registry().mutex);
  for (EngineBackend* backend : registry().backends) visit(*backend);
}

std::optional<Error> last_error() {
  std::lock_guard lock(registry().mutex);
  return registry().last_error;
}

EngineBackend::EngineBackend(std::shared_ptr<Transport> transport,
                             std::shared_ptr<GroupMonitor> monitor,
                             std::chrono::milliseconds timeout)
    : c10d::Backend(transport->rank(), transport->size()),
      transport_(std::move(transport)),
      monitor_(std::move(monitor)),
      options_(c10::make_intrusive<Options>(std::string(transport_->name()), timeout)),
      collectives_(make_executor(true)) {
  std::lock_guard lock(registry().mutex);
  registry().backends.insert(this);
}

const char* EngineBackend::event_name(std::string_view op) const noexcept {
  struct Names {
    std::string_view op;
    const char* shm;
    const char* gloo;
  };
  // Spelled out: profilers keep the pointers.
  static constexpr Names kNames[] = {
      {"all_reduce", "shm:all_reduce", "gloo:all_reduce"},
      {"sparse_all_reduce", "shm:sparse_all_reduce", "gloo:sparse_all_reduce"},
      {"all_gather", "shm:all_gather", "gloo:all_gather"},
      {"all_to_all", "shm:all_to_all", "gloo:all_to_all"},
      {"reduce_scatter", "shm:reduce_scatter", "gloo:reduce_scatter"},
      {"broadcast", "shm:broadcast", "gloo:broadcast"},
      {"reduce", "shm:reduce", "gloo:reduce"},
      {"gather", "shm:gather", "gloo:gather"},
      {"scatter", "shm:scatter", "gloo:scatter"},
      {"barrier", "shm:barrier", "gloo:barrier"},
      {"send", "shm:send", "gloo:send"},
      {"recv", "shm:recv", "gloo:recv"},
      {"recvAnySource", "shm:recvAnySource", "gloo:recvAnySource"},
  };
  for (const Names& names : kNames) {
    if (names.op == op) return is_relay() ? names.gloo : names.shm;
  }
  return "tessera";
}

std::shared_ptr<Executor> EngineBackend::make_executor(bool is_ordered) {
  return std::make_shared<Executor>(
      Executor::Options{.is_relay = is_relay(),
                        .is_ordered = is_ordered,
                        .on_given_up = [this](ErrorKind kind, const std::string& text) {
                          fail(failure_kind(kind), {rank_}, text);
                        }});
}

EngineBackend::~EngineBackend() {
  if (is_inherited()) {
    // Threads, locks and peers are the parent's: nothing of it is closed, woken or told from here.
    new auto(std::make_tuple(std::move(collectives_), std::move(lanes_), std::move(transport_),
                             std::move(monitor_), std::move(lent_memory_)));
    return;
  }
  {
    std::lock_guard lock(registry().mutex);
    registry().backends.erase(this);
  }
  shutdown();
}

void EngineBackend::check_own(const char* title) const {
  if (!is_inherited()) return;
  const std::string name(title);
  TESSERA_CHECK_VALUE(false, "comm.", name.substr(name.find(':') + 1), ": group '",
                      monitor_->group_name(), "' belongs to process ", maker_, ", rank ",
                      monitor_->members()[rank_].world_rank, " of it; this is process ", own_pid(),
                      ", forked from it, which is no rank. Use the group in process ", maker_,
                      ", and give a child what it needs before the fork, or through a queue.");
}

void EngineBackend::shutdown() {
  if (is_inherited()) return;
  monitor_->cancel();
  collectives_->stop("the group was closed");
  std::lock_guard lock(lanes_mutex_);
  for (auto& [key, lane] : lanes_) lane->stop("the group was closed");
}

void EngineBackend::abort() {
  fail(FailureKind::kAborted, {rank_},
       "comm: group '" + monitor_->group_name() + "' was aborted by rank " +
           std::to_string(monitor_->members()[rank_].world_rank) + ". Make a new one.");
}

void EngineBackend::fail(FailureKind kind, const std::vector<int>& ranks,
                         const std::string& reason) noexcept {
  if (is_inherited()) return;
  has_failed_.store(true);
  transport_->abort(kind, ranks, reason);
}

c10d::ErrorType EngineBackend::getError() {
  return has_failed_.load() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void EngineBackend::raise(const Failure& failure) {
  has_failed_.store(true);
  std::map<int, Member> members;
  for (const Member& member : monitor_->members()) {
    members.emplace(static_cast<int>(members.size()), member);
  }
  const Failure first = in_first_words(failure, members);
  std::string text = first.what();
  if (failure.kind() == FailureKind::kMismatch && monitor_->group_name() != "world") {
    // The transport compares calls by group rank; readers think in world ranks.
    std::vector<int> world_ranks;
    for (const Member& member : monitor_->members()) world_ranks.push_back(member.world_rank);
    text += " These are ranks of group '" + monitor_->group_name() + "', world " +
            list_ranks(world_ranks) + ".";
  }
  Error error(error_kind(failure.kind()), first.ranks(), std::move(text));
  {
    std::lock_guard lock(registry().mutex);
    registry().last_error = error;
  }
  throw error;
}

std::chrono::milliseconds EngineBackend::limit_of(
    std::chrono::milliseconds timeout) const noexcept {
  return timeout.count() > 0 ? timeout : options_->timeout;
}

Call EngineBackend::stamped(Call call, std::uint64_t sequence,
                            std::chrono::milliseconds timeout) const {
  call.sequence = sequence;
  call.limit = limit_of(timeout);
  call.deadline = Clock::now() + call.limit;
  return call;
}

c10::intrusive_ptr<c10d::Work> EngineBackend::submit(Submission submission,
                                                     std::vector<Step> steps) {
  check_own(submission.title);
  const std::uint64_t first = sequence_.fetch_add(1);
  std::optional<std::vector<at::Tensor>> inputs;
  if (at::hasCallbacks()) {
    inputs = submission.inputs.empty() ? submission.outputs : std::move(submission.inputs);
  }
  auto run = [this, title = submission.title, timeout = submission.timeout,
              steps = std::move(steps)](EngineWork& work) mutable {
    const core::LiveOperation live(monitor_->live_collectives(), title, work.position());
    try {
      std::uint64_t sequence = work.position();
      for (Step& step : steps) {
        Call call = stamped({}, sequence++, timeout);
        step(*transport_, call);
      }
    } catch (const Failure& failure) {
      raise(failure);
    }
  };
  auto work = c10::make_intrusive<EngineWork>(
      collectives_, rank_, submission.type, event_name(submission.title), first,
      std::move(submission.outputs), std::move(run), [this] { return transport_->is_met(); },
      inputs);
  work->set_num_steps(static_cast<std::uint64_t>(submission.num_sequence));
  work->set_limit(limit_of(submission.timeout));
  if (submission.plan) {
    work->set_announcement(
        [this, plan = *submission.plan, timeout = submission.timeout, &self = *work] {
          transport_->announce(stamped(plan, self.position(), timeout));
        });
  }
  if (submission.is_async) {
    collectives_->run_later(work);
  } else {
    collectives_->run_now(work);
  }
  return work;
}

bool EngineBackend::supportsTensorAlloc(c10::DeviceIndex) { return !is_relay(); }

at::Tensor EngineBackend::allocateTensor(long size, at::TensorOptions options) {
  TESSERA_CHECK_VALUE(size >= 0, "comm.allocate: a tensor cannot have ", size, " elements.");
  // Gradient buckets address complex numbers as pairs of reals.
  if (at::isComplexType(c10::typeMetaToScalarType(options.dtype()))) {
    options = options.dtype(c10::toRealValueType(c10::typeMetaToScalarType(options.dtype())));
    size *= 2;
  }
  // Buckets of a model on a GPU that ranks share lie there; they are staged like any other tensor.
  if (options.device().type() != at::kCPU) return at::empty({size}, options);
  const std::size_t bytes = static_cast<std::size_t>(size) * options.dtype().itemsize();
  auto memory = bytes > 0 && !is_inherited() ? transport_->allocate(bytes) : nullptr;
  // Without room in the segment the tensor still works; it is staged like any other.
  if (!memory) return at::empty({size}, options.device(at::kCPU));
  void* data = memory.get();
  // A hook may resize a bucket, which then leaves the segment and is staged.
  return at::for_blob(data, {size})
      .deleter([memory = std::move(memory)](void*) mutable { memory.reset(); })
      .options(options.device(at::kCPU))
      .resizeable_storage()
      .allocator(c10::GetCPUAllocator())
      .make_tensor();
}

EngineBackend* engine_of(const Group& group) {
  if (!has_engine_for(*group.process_group(), c10::DeviceType::CPU)) return nullptr;
  return dynamic_cast<EngineBackend*>(
      group.process_group()->getBackend(c10::DeviceType::CPU).get());
}

}  // namespace tessera::comm
