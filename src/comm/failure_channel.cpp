#include "comm/failure_channel.h"

#include <sstream>

namespace tessera::comm {
namespace {

constexpr const char* kKey = "failure";
constexpr auto kPollInterval = std::chrono::milliseconds(100);
// Long enough for a busy store, short enough not to delay the report of what this rank saw itself.
constexpr auto kStoreLimit = std::chrono::milliseconds(2000);

std::vector<std::uint8_t> encode(const Failure& failure) {
  std::ostringstream text;
  text << static_cast<int>(failure.kind()) << ' ' << failure.ranks().size();
  for (const int rank : failure.ranks()) text << ' ' << rank;
  text << '\n' << failure.what();
  const std::string bytes = text.str();
  return {bytes.begin(), bytes.end()};
}

Failure decode(const std::vector<std::uint8_t>& bytes) {
  const std::string text(bytes.begin(), bytes.end());
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

FailureChannel::FailureChannel(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    // A connection of its own: the shared one may be inside a long wait of another thread.
    store_ = store->clone();
    store_->setTimeout(kStoreLimit);
  } catch (const std::exception&) {
    store_ = nullptr;
  }
}

std::optional<Failure> FailureChannel::ask_store() {
  if (failure_ || !store_) return failure_;
  try {
    if (store_->check({kKey})) failure_ = decode(store_->get(kKey));
  } catch (const std::exception&) {
    store_ = nullptr;
  }
  return failure_;
}

Failure FailureChannel::publish(const Failure& failure) noexcept {
  std::lock_guard lock(mutex_);
  if (failure_) return *failure_;
  failure_ = failure;
  if (store_) {
    try {
      failure_ = decode(store_->compareSet(kKey, {}, encode(failure)));
    } catch (const std::exception&) {
      store_ = nullptr;
    }
  }
  return *failure_;
}

std::optional<Failure> FailureChannel::poll() noexcept {
  std::lock_guard lock(mutex_);
  if (!failure_ && Clock::now() >= next_poll_) {
    next_poll_ = Clock::now() + kPollInterval;
    return ask_store();
  }
  return failure_;
}

std::optional<Failure> FailureChannel::known() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace tessera::comm
