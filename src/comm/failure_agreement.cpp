#include "comm/failure_agreement.h"

#include <sstream>
#include <utility>

namespace tessera::comm {
namespace {

constexpr const char* kKey = "failure";
constexpr const char* kInquiryKey = "inquiry";
constexpr const char* kRollKey = "roll";  // the collective that somebody asks about
constexpr auto kPollInterval = std::chrono::milliseconds(50);
// Who waits says so at every poll; a rank that has not for so long does not move.
constexpr auto kSilence = 10 * kPollInterval;
// Who waits hears of a question at its next poll; before that nobody is late.
constexpr auto kAnswerTime = 3 * kPollInterval;

// The first letter of a letter.
constexpr char kSettled = '+';
constexpr char kSeen = '?';

std::string arrival_key(int rank) { return "arrived/" + std::to_string(rank); }

}  // namespace

std::string encode(const Failure& failure) {
  std::ostringstream text;
  text << static_cast<int>(failure.kind()) << ' ' << failure.ranks().size();
  for (const int rank : failure.ranks()) text << ' ' << rank;
  text << '\n' << failure.what();
  return text.str();
}

Failure decode_failure(const std::string& text) {
  const auto line = text.find('\n');
  std::istringstream head(text.substr(0, line));
  int kind = static_cast<int>(FailureKind::kAborted);
  std::size_t num_ranks = 0;
  head >> kind >> num_ranks;
  std::vector<int> ranks;
  for (int rank = 0; ranks.size() < num_ranks && head >> rank;) ranks.push_back(rank);
  return {static_cast<FailureKind>(kind), std::move(ranks), text.substr(line + 1)};
}

void FailureAgreement::publish(const Failure& failure) {
  if (!failure_ && !to_publish_) to_publish_ = failure;
}

void FailureAgreement::poll(Clock::time_point now) {
  if (failure_ || has_poll_ || now < next_poll_) return;
  next_poll_ = now + kPollInterval;
  has_poll_ = true;
}

void FailureAgreement::inquire() {
  to_inquire_ = true;
  has_poll_ = true;
}

std::optional<std::vector<int>> FailureAgreement::call_roll(std::uint64_t sequence, bool asks) {
  waits_in_ = sequence;
  asks_ = asks;
  if (!asks || roll_sequence_ != sequence) return std::nullopt;
  return roll_;
}

void FailureAgreement::give_up() {
  if (!failure_) failure_ = to_publish_;
}

std::string FailureAgreement::letter() const {
  return (is_settled_ ? kSettled : kSeen) + encode(*failure_);
}

// A rank that lost the store may have seen something else than what the others agreed on. Those who
// have the store do not take its word for it.
bool FailureAgreement::hear(const std::string& letter) {
  if (failure_ || letter.empty()) return false;
  const Failure failure = decode_failure(letter.substr(1));
  if (letter[0] == kSettled) {
    failure_ = failure;
    is_settled_ = true;
    return false;
  }
  publish(failure);
  return true;
}

FailureAgreement::Errand FailureAgreement::take() {
  return {.to_publish = to_publish_,
          .waits_in = std::exchange(waits_in_, std::nullopt),
          .asks = asks_,
          .to_inquire = std::exchange(to_inquire_, false)};
}

// Note [Roll call]
// A wait that gets long makes its rank ask who else is there, by a key that holds the number of
// the collective. Who waits in it answers at its next poll, however short it has waited, and
// goes on answering, with a count, until it is done. So one who came a moment ago is not taken
// for one who never came, and one who stopped in the middle can be told from one who waits.
FailureAgreement::Tidings FailureAgreement::run(const Errand& errand, SharedKeys& keys,
                                                const std::function<Clock::time_point()>& now) {
  Tidings tidings;
  if (errand.to_publish) {
    tidings.failure = decode_failure(keys.claim(kKey, encode(*errand.to_publish)));
  } else if (keys.has(kKey)) {
    tidings.failure = decode_failure(keys.get(kKey));
  }
  if (tidings.failure) return tidings;
  tidings.has_inquiry = keys.has(kInquiryKey);
  if (errand.waits_in && errand.asks) {
    tidings.roll = ask_roll(*errand.waits_in, keys, now);
  } else if (errand.waits_in && keys.has(kRollKey) &&
             keys.get(kRollKey) == std::to_string(*errand.waits_in)) {
    answer(*errand.waits_in, keys);
  }
  if (errand.to_inquire) keys.set(kInquiryKey, std::to_string(rank_));
  return tidings;
}

void FailureAgreement::answer(std::uint64_t sequence, SharedKeys& keys) {
  keys.set(arrival_key(rank_), std::to_string(sequence) + " " + std::to_string(++num_beats_));
}

std::optional<std::vector<int>> FailureAgreement::ask_roll(
    std::uint64_t sequence, SharedKeys& keys, const std::function<Clock::time_point()>& now) {
  if (asked_about_ != sequence) {
    asked_about_ = sequence;
    asked_since_ = now();
  }
  keys.set(kRollKey, std::to_string(sequence));
  answer(sequence, keys);
  heard_.resize(static_cast<std::size_t>(size_));
  std::vector<int> absent;
  std::vector<int> silent;
  for (int other = 0; other < size_; ++other) {
    if (other == rank_) continue;
    const std::string key = arrival_key(other);
    std::string text = keys.has(key) ? keys.get(key) : "";
    Word& word = heard_[static_cast<std::size_t>(other)];
    if (text != word.text) word = {std::move(text), now()};
    // Whoever waits in a later one has done its part here.
    const std::uint64_t place = word.text.empty() ? 0 : std::stoull(word.text);
    if (word.text.empty() || place < sequence) {
      absent.push_back(other);
    } else if (place == sequence && now() - word.since > kSilence) {
      silent.push_back(other);
    }
  }
  if (now() - asked_since_ < kAnswerTime) return std::nullopt;
  return absent.empty() ? silent : absent;
}

void FailureAgreement::settle(const Errand& errand, std::optional<Tidings> tidings) {
  // Without the store, what this rank has seen is all it will know.
  const bool has_store = tidings.has_value();
  if (!has_store) tidings.emplace().failure = errand.to_publish;
  has_inquiry_ |= tidings->has_inquiry;
  if (!failure_ && tidings->failure) {
    failure_ = tidings->failure;
    is_settled_ = has_store;
  }
  if (tidings->roll) {
    roll_sequence_ = errand.waits_in;
    roll_ = std::move(*tidings->roll);
  } else if (!has_store) {
    roll_sequence_.reset();  // who was late when it was there may have come since
  }
  if (errand.to_publish) to_publish_.reset();
  has_poll_ = to_inquire_;
}

}  // namespace tessera::comm
