#include "comm/failure_channel.h"

#include <condition_variable>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>

#include "comm/failure_post.h"
#include "comm/network.h"

namespace tessera::comm {
namespace {

constexpr const char* kKey = "failure";
constexpr const char* kInquiryKey = "inquiry";
constexpr auto kPollInterval = std::chrono::milliseconds(50);
// Long enough for a busy store, short enough not to delay the report of what this rank saw itself.
constexpr auto kStoreLimit = std::chrono::milliseconds(1000);

std::string arrival_key(int rank) { return "arrived/" + std::to_string(rank); }

std::string post_key(int rank) { return "post/" + std::to_string(rank); }

std::string encode(const Failure& failure) {
  std::ostringstream text;
  text << static_cast<int>(failure.kind()) << ' ' << failure.ranks().size();
  for (const int rank : failure.ranks()) text << ' ' << rank;
  text << '\n' << failure.what();
  return text.str();
}

std::vector<std::uint8_t> as_bytes(const std::string& text) { return {text.begin(), text.end()}; }

Failure decode(const std::string& text) {
  const auto line = text.find('\n');
  std::istringstream head(text.substr(0, line));
  int kind = static_cast<int>(FailureKind::kAborted);
  std::size_t num_ranks = 0;
  head >> kind >> num_ranks;
  std::vector<int> ranks;
  for (int rank = 0; ranks.size() < num_ranks && head >> rank;) ranks.push_back(rank);
  return {static_cast<FailureKind>(kind), std::move(ranks), text.substr(line + 1)};
}

}  // namespace

struct FailureChannel::State {
  explicit State(const std::string& address) : post(address, job_secret()) {}

  int rank = 0;
  int size = 0;
  FailurePost post;
  std::vector<std::string> posts;  // where the other ranks listen
  mutable std::mutex mutex;
  std::condition_variable asked;          // there is something for the thread to do
  std::condition_variable answered;       // the thread has done something, or has ended
  c10::intrusive_ptr<c10d::Store> store;  // null once it failed us; used by the thread alone
  std::optional<Failure> failure;
  std::optional<Failure> to_publish;
  bool has_poll = false;
  bool to_inquire = false;
  bool has_inquiry = false;
  std::optional<std::uint64_t> arrived;        // where this rank waits; taken by the thread
  std::optional<std::uint64_t> roll_sequence;  // what `roll` is about
  std::vector<int> roll;                       // ranks that have not arrived there
  Clock::time_point next_poll{};
  std::optional<Clock::time_point> busy_since;  // since when the thread is inside the store
  bool is_closed = false;
  bool has_ended = false;

  // When to stop hoping for an answer. A store that has kept the thread waiting gets no more time.
  Clock::time_point patience() const { return busy_since.value_or(Clock::now()) + kStoreLimit; }

  bool has_work() const { return is_closed || to_publish || has_poll; }

  // The calls to the store; the mutex is not held.
  Failure exchange(const Failure& mine) {
    const auto settled = store->compareSet(kKey, {}, as_bytes(encode(mine)));
    return decode({settled.begin(), settled.end()});
  }
  std::optional<Failure> look() {
    if (!store->check({kKey})) return std::nullopt;
    return decode(store->get_to_str(kKey));
  }
  std::vector<int> call_roll(std::uint64_t sequence) {
    store->set(arrival_key(rank), std::to_string(sequence));
    std::vector<int> missing;
    for (int other = 0; other < size; ++other) {
      if (other == rank) continue;
      const std::string key = arrival_key(other);
      // Whoever waits in a later one has done its part here.
      const bool is_here = store->check({key}) && std::stoull(store->get_to_str(key)) >= sequence;
      if (!is_here) missing.push_back(other);
    }
    return missing;
  }
};

FailureChannel::FailureChannel(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                               const std::string& address)
    : state_(std::make_shared<State>(address)) {
  state_->rank = rank;
  state_->size = size;
  try {
    // A connection of its own: the shared one may be inside a long wait of another thread.
    state_->store = store->clone();
    state_->store->setTimeout(kStoreLimit);
    state_->store->set(post_key(rank), as_bytes(state_->post.address()));
  } catch (const std::exception&) {
    state_->store = nullptr;
  }
  thread_ = std::thread([state = state_] { serve(state); });
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
    state->asked.wait(lock, [&] { return state->has_work(); });
    if (state->is_closed) break;
    const auto mine = state->to_publish;
    const auto arrived = std::exchange(state->arrived, std::nullopt);
    const bool to_inquire = std::exchange(state->to_inquire, false);
    bool has_inquiry = false;
    std::optional<Failure> found = mine;
    std::optional<std::vector<int>> roll;
    state->busy_since = Clock::now();
    lock.unlock();
    try {
      if (state->store) {
        found = mine ? state->exchange(*mine) : state->look();
        if (!found) has_inquiry = state->store->check({kInquiryKey});
        if (!found && arrived) roll = state->call_roll(*arrived);
        if (!found && to_inquire) state->store->set(kInquiryKey, std::to_string(state->rank));
      }
    } catch (const std::exception&) {
      state->store = nullptr;
    }
    lock.lock();
    state->busy_since.reset();
    state->has_inquiry |= has_inquiry;
    if (!state->failure) state->failure = found;
    if (roll) {
      state->roll_sequence = arrived;
      state->roll = std::move(*roll);
    }
    if (mine) state->to_publish.reset();
    state->has_poll = false;
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
  if (!state_->failure) {
    if (!state_->to_publish) state_->to_publish = failure;
    state_->asked.notify_all();
    state_->answered.wait_until(lock, state_->patience(),
                                [&] { return state_->failure.has_value(); });
    if (!state_->failure) state_->failure = failure;
    // Settled, or nobody can settle it any more: for those who cannot reach the store.
    state_->post.send(encode(*state_->failure), state_->posts);
  }
  return *state_->failure;
}

std::optional<Failure> FailureChannel::poll() noexcept {
  std::lock_guard lock(state_->mutex);
  if (!state_->failure) {
    if (const auto letter = state_->post.receive()) state_->failure = decode(*letter);
  }
  if (!state_->failure && !state_->has_poll && Clock::now() >= state_->next_poll) {
    state_->next_poll = Clock::now() + kPollInterval;
    state_->has_poll = true;
    state_->asked.notify_all();
  }
  return state_->failure;
}

std::optional<Failure> FailureChannel::known() const {
  std::lock_guard lock(state_->mutex);
  return state_->failure;
}

void FailureChannel::inquire() noexcept {
  std::lock_guard lock(state_->mutex);
  state_->to_inquire = true;
  state_->has_poll = true;
  state_->asked.notify_all();
}

bool FailureChannel::has_inquiry() const {
  std::lock_guard lock(state_->mutex);
  return state_->has_inquiry;
}

std::optional<std::vector<int>> FailureChannel::absent(std::uint64_t sequence) noexcept {
  std::lock_guard lock(state_->mutex);
  state_->arrived = sequence;
  if (state_->roll_sequence != sequence) return std::nullopt;
  return state_->roll;
}

}  // namespace tessera::comm
