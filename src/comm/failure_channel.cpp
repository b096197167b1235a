#include "comm/failure_channel.h"

#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>

#include "comm/failure_agreement.h"
#include "comm/failure_post.h"
#include "comm/network.h"
#include "comm/start_thread.h"
#include "comm/store_keys.h"

namespace tessera::comm {
namespace {

// Long enough for a busy store, short enough not to delay the report of what this rank saw itself.
constexpr auto kStoreLimit = std::chrono::milliseconds(1000);

// The one who wrote a letter has waited for the store already.
constexpr auto kHearingLimit = std::chrono::milliseconds(200);

std::string post_key(int rank) { return "post/" + std::to_string(rank); }

std::vector<std::uint8_t> as_bytes(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

struct FailureChannel::State {
  State(int own_rank, int group_size, const std::string& address)
      : rank(own_rank), size(group_size), post(address, job_secret()), agreement(rank, size) {}

  const int rank;
  const int size;
  FailurePost post;
  std::vector<std::string> posts;  // where the other ranks listen
  mutable std::mutex mutex;
  std::condition_variable asked;          // there is something for the thread to do
  std::condition_variable answered;       // the thread has done something, or has ended
  c10::intrusive_ptr<c10d::Store> store;  // null once it failed us; used by the thread alone
  FailureAgreement agreement;
  std::optional<Clock::time_point> busy_since;  // since when the thread is inside the store
  std::optional<Clock::time_point> heard_at;    // when a letter came that the store is to settle
  bool is_closed = false;
  bool has_ended = false;

  // When to stop hoping for an answer. A store that has kept the thread waiting gets no more time.
  Clock::time_point patience() const { return busy_since.value_or(Clock::now()) + kStoreLimit; }
};

FailureChannel::FailureChannel(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                               const std::string& address)
    : state_(std::make_shared<State>(rank, size, address)) {
  try {
    // A connection of its own: the shared one may be inside a long wait of another thread.
    state_->store = store->clone();
    state_->store->setTimeout(kStoreLimit);
    state_->store->set(post_key(rank), as_bytes(state_->post.address()));
  } catch (const std::exception&) {
    state_->store = nullptr;
  }
  thread_ = start_thread("comm.init", [state = state_] { serve(state); });
}

FailureChannel::~FailureChannel() {
  bool has_ended = false;
  {
    std::unique_lock lock(state_->mutex);
    state_->is_closed = true;
    state_->asked.notify_all();
    has_ended =
        state_->answered.wait_until(lock, state_->patience(), [&] { return state_->has_ended; });
  }
  // A thread that is stuck in the store keeps what it needs alive, and nothing else.
  if (has_ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void FailureChannel::meet(c10d::Store& store) noexcept {
  try {
    std::vector<std::string> posts;
    for (int rank = 0; rank < state_->size; ++rank) {
      if (rank != state_->rank) posts.push_back(store.get_to_str(post_key(rank)));
    }
    std::lock_guard lock(state_->mutex);
    state_->posts = std::move(posts);
  } catch (const std::exception&) {
    // The store is gone already; what this rank learns it keeps to itself.
  }
}

void FailureChannel::serve(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  while (true) {
    state->asked.wait(lock, [&] { return state->is_closed || state->agreement.has_errand(); });
    if (state->is_closed) break;
    const auto errand = state->agreement.take();
    std::optional<FailureAgreement::Tidings> tidings;
    state->busy_since = Clock::now();
    lock.unlock();
    try {
      if (state->store) {
        StoreKeys keys(*state->store);
        tidings = state->agreement.run(errand, keys, [] { return Clock::now(); });
      }
    } catch (const std::exception&) {
      state->store = nullptr;
    }
    lock.lock();
    state->busy_since.reset();
    state->agreement.settle(errand, std::move(tidings));
    state->answered.notify_all();
  }
  lock.unlock();
  state->store = nullptr;
  lock.lock();
  state->has_ended = true;
  state->answered.notify_all();
}

Failure FailureChannel::publish(const Failure& failure) noexcept {
  std::unique_lock lock(state_->mutex);
  FailureAgreement& agreement = state_->agreement;
  if (!agreement.known()) {
    agreement.publish(failure);
    state_->asked.notify_all();
    state_->answered.wait_until(lock, state_->patience(),
                                [&] { return agreement.known().has_value(); });
    agreement.give_up();
    // Settled, or nobody can settle it any more: for those who cannot reach the store.
    state_->post.send(agreement.letter(), state_->posts);
  }
  return *agreement.known();
}

std::optional<Failure> FailureChannel::poll() noexcept {
  std::lock_guard lock(state_->mutex);
  FailureAgreement& agreement = state_->agreement;
  if (!agreement.known()) {
    const auto letter = state_->post.receive();
    if (letter && agreement.hear(*letter)) state_->heard_at = Clock::now();
    if (state_->heard_at && Clock::now() > *state_->heard_at + kHearingLimit) agreement.give_up();
  }
  agreement.poll(Clock::now());
  if (agreement.has_errand()) state_->asked.notify_all();
  return agreement.known();
}

std::optional<Failure> FailureChannel::known() const {
  std::lock_guard lock(state_->mutex);
  return state_->agreement.known();
}

void FailureChannel::inquire() noexcept {
  std::lock_guard lock(state_->mutex);
  state_->agreement.inquire();
  state_->asked.notify_all();
}

bool FailureChannel::has_inquiry() const {
  std::lock_guard lock(state_->mutex);
  return state_->agreement.has_inquiry();
}

std::optional<std::vector<int>> FailureChannel::call_roll(std::uint64_t sequence,
                                                          bool asks) noexcept {
  std::lock_guard lock(state_->mutex);
  return state_->agreement.call_roll(sequence, asks);
}

}  // namespace tessera::comm
