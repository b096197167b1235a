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
constexpr const char* kRollKey = "roll";  // the collective that somebody asks about
constexpr auto kPollInterval = std::chrono::milliseconds(50);
// Who waits says so at every poll; a rank that has not for so long does not move.
constexpr auto kSilence = 10 * kPollInterval;
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
  std::optional<std::uint64_t> waits_in;       // where this rank waits; taken by the thread
  bool asks = false;                           // and wants to know who else does
  std::optional<std::uint64_t> roll_sequence;  // what `roll` is about
  std::vector<int> roll;                       // ranks that are late there
  // Of the thread alone: how often this rank has said that it waits, and what it last heard.
  std::uint64_t num_beats = 0;
  struct Word {
    std::string text;
    Clock::time_point since{};
  };
  std::vector<Word> heard;
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
  // Note [Roll call]
  // A wait that gets long makes its rank ask who else is there, by a key that holds the number of
  // the collective. Who waits in it answers at its next poll, however short it has waited, and
  // goes on answering, with a count, until it is done. So one who came a moment ago is not taken
  // for one who never came, and one who stopped in the middle can be told from one who waits.
  bool is_asked_about(std::uint64_t sequence) {
    return store->add(kRollKey, 0) == static_cast<std::int64_t>(sequence);
  }
  void answer(std::uint64_t sequence) {
    store->set(arrival_key(rank), std::to_string(sequence) + " " + std::to_string(++num_beats));
  }
  std::vector<int> call_roll(std::uint64_t sequence) {
    store->set(kRollKey, std::to_string(sequence));
    answer(sequence);
    heard.resize(static_cast<std::size_t>(size));
    std::vector<int> absent;
    std::vector<int> silent;
    for (int other = 0; other < size; ++other) {
      if (other == rank) continue;
      const std::string key = arrival_key(other);
      std::string text = store->check({key}) ? store->get_to_str(key) : "";
      Word& word = heard[static_cast<std::size_t>(other)];
      if (text != word.text) word = {std::move(text), Clock::now()};
      // Whoever waits in a later one has done its part here.
      const std::uint64_t place = word.text.empty() ? 0 : std::stoull(word.text);
      if (word.text.empty() || place < sequence) {
        absent.push_back(other);
      } else if (place == sequence && Clock::now() - word.since > kSilence) {
        silent.push_back(other);
      }
    }
    return absent.empty() ? silent : absent;
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
    const auto waits_in = std::exchange(state->waits_in, std::nullopt);
    const bool asks = state->asks;
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
        // See Note [Roll call].
        if (!found && waits_in && asks) {
          roll = state->call_roll(*waits_in);
        } else if (!found && waits_in && state->is_asked_about(*waits_in)) {
          state->answer(*waits_in);
        }
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
      state->roll_sequence = waits_in;
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

std::optional<std::vector<int>> FailureChannel::call_roll(std::uint64_t sequence,
                                                          bool asks) noexcept {
  std::lock_guard lock(state_->mutex);
  state_->waits_in = sequence;
  state_->asks = asks;
  if (!asks || state_->roll_sequence != sequence) return std::nullopt;
  return state_->roll;
}

}  // namespace tessera::comm
