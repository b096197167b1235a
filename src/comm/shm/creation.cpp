#include "comm/shm/creation.h"

#include <poll.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "comm/shm/handover.h"
#include "comm/shm/waiter.h"

namespace tessera::comm::shm {

namespace {

using std::chrono::milliseconds;

constexpr const char* kSegmentKey = "shm/segment";
constexpr const char* kRefusedKey = "shm/refused";
constexpr const char* kVerdictKey = "shm/verdict";
constexpr milliseconds kSlice{20};
constexpr milliseconds kKeySlice{100};
// Rank 0 gives up first, so that its reason reaches everybody.
constexpr std::chrono::seconds kHostFirst{2};
// From the end of a line to the moment its process can be seen to have ended.
constexpr milliseconds kDeathDelay{900};

constexpr std::string_view kTitle = "comm.shm: ";

/// What one rank tells the others of a failure: kind, ranks as bits, text.
std::string encode(const Failure& failure) {
  RankSet ranks = 0;
  for (const int rank : failure.ranks()) {
    if (rank >= 0 && rank < kMaxRanks) ranks |= rank_bit(rank);
  }
  return "failed " + std::to_string(static_cast<int>(failure.kind())) + " " +
         std::to_string(ranks) + " " + failure.what();
}

/// Whole words of a message, as numbers. False unless there are exactly as many.
bool read_numbers(const std::string& text, const std::string& title,
                  std::vector<std::uint64_t>& numbers) {
  if (text.rfind(title, 0) != 0) return false;
  const char* place = text.data() + title.size();
  const char* const end = text.data() + text.size();
  for (std::uint64_t& number : numbers) {
    if (place == end || *place != ' ') return false;
    const auto [next, error] = std::from_chars(place + 1, end, number);
    if (error != std::errc() || next == place + 1) return false;
    place = next;
  }
  return place == end;
}

/// The text with nothing in it that a terminal would obey, and not too much of it.
std::string shown(const std::string& text) {
  std::string result;
  for (const char c : text.substr(0, 80)) result += c >= ' ' && c <= '~' ? c : '?';
  return "'" + result + (text.size() > 80 ? "...'" : "'");
}

Failure decode(const std::string& text) {
  std::istringstream words(text);
  std::string title;
  int kind = -1;
  RankSet ranks = 0;
  words >> title >> kind >> ranks;
  words.ignore(1);
  std::string what;
  std::getline(words, what, '\0');
  if (title != "failed" || kind < 0 || kind > static_cast<int>(FailureKind::kUnavailable)) {
    return {FailureKind::kAborted,
            {},
            std::string(kTitle) + "what another rank said is not believable: " + shown(text) + "."};
  }
  return {static_cast<FailureKind>(kind), ranks_in(ranks), what};
}

Failure in_the_name_of(int rank, const Failure& failure) {
  std::string text = failure.what();
  if (text.rfind(kTitle, 0) == 0) {
    text.insert(kTitle.size(), "rank " + std::to_string(rank) + ": ");
  }
  return {failure.kind(), {rank}, text};
}

/// A key that has been set, if it has.
std::optional<std::string> find_key(Bootstrap& bootstrap, const std::string& key,
                                    Clock::time_point until) {
  try {
    return bootstrap.get(key, until);
  } catch (const Failure& failure) {
    if (failure.kind() != FailureKind::kTimeout) throw;
    return std::nullopt;
  }
}

GroupSegment make_segment(int size, const ShmOptions& options) {
  const std::string directory = options.directory.empty() ? default_directory() : options.directory;
  GroupSegment made;
  made.sizes = Layout::complete(
      size, {options.slot_bytes, options.ring_bytes, options.mailbox_bytes, options.heap_bytes});
  const std::size_t reserved = Layout(size, made.sizes).reserved_bytes();
  const std::size_t available = free_bytes(directory);
  const std::size_t spare = available > reserved ? available - reserved : 0;
  made.sizes.heap_bytes = std::min(made.sizes.heap_bytes, spare / static_cast<std::size_t>(size)) /
                          kHugePageBytes * kHugePageBytes;
  const Layout layout(size, made.sizes);
  made.segment = Segment::create(directory, reserved, layout.total_bytes());
  GroupBlock& group = Board(made.segment->base(), layout).group();
  group.magic = GroupBlock::kMagic;
  group.size = static_cast<std::uint64_t>(size);
  return made;
}

std::string offer_of(const GroupSegment& made) {
  std::ostringstream text;
  text << "segment " << made.sizes.slot_bytes << ' ' << made.sizes.ring_bytes << ' '
       << made.sizes.mailbox_bytes << ' ' << made.sizes.heap_bytes << ' ' << made.segment->bytes();
  return text.str();
}

/// Takes what rank 0 offers, if it holds together.
GroupSegment take_segment(int size, Delivery offer) {
  std::vector<std::uint64_t> numbers(5);
  if (!read_numbers(offer.text, "segment", numbers) || offer.file.get() < 0) {
    throw Failure(FailureKind::kAborted, {},
                  std::string(kTitle) + "rank 0's offer of a segment is not believable: " +
                      shown(offer.text) + ". Run the same version on every rank.");
  }
  GroupSegment taken;
  taken.sizes = {numbers[0], numbers[1], numbers[2], numbers[3]};
  std::string why = Layout::why_not_believable(size, taken.sizes);
  if (why.empty() && Layout(size, taken.sizes).total_bytes() != numbers[4]) {
    why = std::to_string(numbers[4]) + " bytes in total";
  }
  if (!why.empty()) {
    throw Failure(FailureKind::kAborted, {},
                  std::string(kTitle) + "rank 0's offer of a segment is not believable: it has " +
                      why + ". Run the same version on every rank.");
  }
  taken.segment = Segment::adopt(offer.file.release(), numbers[4]);
  const GroupBlock& group = Board(taken.segment->base(), Layout(size, taken.sizes)).group();
  if (group.magic != GroupBlock::kMagic || group.size != static_cast<std::uint64_t>(size)) {
    throw Failure(FailureKind::kAborted, {},
                  std::string(kTitle) + "the segment is for a group of " +
                      std::to_string(group.size) + " ranks, not " + std::to_string(size) +
                      ". Give every rank the same group size.");
  }
  return taken;
}

/// Rank 0's side: hands the segment to all who come, and collects what they say.
class Host {
 public:
  Host(int size, const GroupSegment& made, Bootstrap& bootstrap, WaitMonitor& monitor,
       Clock::time_point deadline)
      : size_(size),
        made_(made),
        bootstrap_(bootstrap),
        monitor_(monitor),
        deadline_(deadline),
        guests_(static_cast<std::size_t>(size)) {}

  std::string name() const { return listener_.name(); }

  /// Returns when every rank has the segment; throws when one cannot have it. Tells all either way.
  void serve() {
    try {
      while (!missing().empty()) {
        wait_for_news();
        look_around();
      }
    } catch (const Failure& failure) {
      tell_all(encode(failure));
      bootstrap_.set(kVerdictKey, encode(failure));
      throw;
    }
    tell_all("ok");
  }

 private:
  struct Guest {
    std::optional<Line> line;
    bool is_done = false;
    Clock::time_point ended{};  // when its line did
  };

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int rank = 1; rank < size_; ++rank) {
      if (!guests_[static_cast<std::size_t>(rank)].is_done) ranks.push_back(rank);
    }
    return ranks;
  }

  void wait_for_news() {
    std::vector<pollfd> sockets{{listener_.socket(), POLLIN, 0}};
    for (const Line& line : unknown_) sockets.push_back({line.socket(), POLLIN, 0});
    for (const Guest& guest : guests_) {
      if (guest.line && !guest.line->has_ended()) {
        sockets.push_back({guest.line->socket(), POLLIN, 0});
      }
    }
    ::poll(sockets.data(), sockets.size(), static_cast<int>(kSlice.count()));
    while (auto line = listener_.accept()) unknown_.push_back(std::move(*line));
    for (Line& line : unknown_) welcome(line);
    std::erase_if(unknown_, [](const Line& line) { return line.socket() < 0 || line.has_ended(); });
    for (int rank = 1; rank < size_; ++rank) hear(rank);
  }

  void welcome(Line& line) {
    const auto hello = line.receive();
    if (!hello) return;
    std::vector<std::uint64_t> numbers(2);
    const bool is_hello = read_numbers(hello->text, "hello", numbers) && numbers[0] >= 1 &&
                          numbers[0] < static_cast<std::uint64_t>(size_);
    if (!is_hello || numbers[1] != static_cast<std::uint64_t>(size_) ||
        guests_[numbers[0]].line.has_value()) {
      line.send(
          encode(Failure(FailureKind::kAborted, {},
                         std::string(kTitle) + "rank 0 of a group of " + std::to_string(size_) +
                             " has no segment for " + shown(hello->text) + ".")));
      return;
    }
    line.send(offer_of(made_), made_.segment->file());
    guests_[numbers[0]].line.emplace(std::move(line));
  }

  void hear(int rank) {
    Guest& guest = guests_[static_cast<std::size_t>(rank)];
    if (!guest.line || guest.is_done) return;
    if (const auto answer = guest.line->receive()) {
      if (answer->text != "ok") throw in_the_name_of(rank, decode(answer->text));
      guest.is_done = true;
    } else if (guest.line->has_ended()) {
      if (guest.ended == Clock::time_point{}) guest.ended = Clock::now();
      if (Clock::now() - guest.ended < kDeathDelay) return;
      throw Failure(FailureKind::kPeerLost, {rank},
                    std::string(kTitle) + "rank " + std::to_string(rank) +
                        " left while the group was being made. Look at that rank's own output for "
                        "the reason.");
    }
  }

  void look_around() {
    const Clock::time_point now = Clock::now();
    if (now - looked_ < kSlice) return;
    looked_ = now;
    const std::vector<int> ranks = missing();
    monitor_.check_creation(ranks);
    if (now - asked_ >= kKeySlice) {
      asked_ = now;
      if (const auto refusal = find_key(bootstrap_, kRefusedKey, now)) throw decode(*refusal);
    }
    if (now < deadline_) return;
    std::string list;
    for (const int rank : ranks) list += (list.empty() ? "" : ", ") + std::to_string(rank);
    throw Failure(FailureKind::kTimeout, ranks,
                  std::string(kTitle) + "rank" + (ranks.size() == 1 ? " " : "s ") + list +
                      " did not come for the group's segment in time.");
  }

  void tell_all(const std::string& verdict) {
    for (Guest& guest : guests_) {
      if (guest.line) guest.line->send(verdict);
    }
  }

  int size_;
  const GroupSegment& made_;
  Bootstrap& bootstrap_;
  WaitMonitor& monitor_;
  Clock::time_point deadline_;
  Listener listener_;
  std::vector<Line> unknown_;
  std::vector<Guest> guests_;  // by rank
  Clock::time_point looked_ = Clock::now();
  Clock::time_point asked_ = looked_;
};

/// Another rank's side.
class Caller {
 public:
  Caller(int rank, int size, Bootstrap& bootstrap, WaitMonitor& monitor, Clock::time_point deadline)
      : rank_(rank),
        size_(size),
        bootstrap_(bootstrap),
        monitor_(monitor),
        deadline_(deadline + kHostFirst) {}

  GroupSegment call() {
    const std::string record = await_key(kSegmentKey);
    if (record.rfind("failed ", 0) == 0) throw decode(record);
    std::optional<Line> line;
    try {
      line = connect(record);
    } catch (const Failure& failure) {
      // Rank 0 cannot be told over a line; what it then tells all is the reason.
      const Failure mine = in_the_name_of(rank_, failure);
      bootstrap_.set(kRefusedKey, encode(mine));
      const std::string verdict = await_key(kVerdictKey);
      throw verdict.rfind("failed ", 0) == 0 ? decode(verdict) : mine;
    }
    line->send("hello " + std::to_string(rank_) + " " + std::to_string(size_));
    GroupSegment taken;
    Delivery offer = await(*line);
    if (offer.text.rfind("failed ", 0) == 0) throw decode(offer.text);
    try {
      taken = take_segment(size_, std::move(offer));
      line->send("ok");
    } catch (const Failure& failure) {
      line->send(encode(failure));
    }
    const Delivery verdict = await(*line);
    if (verdict.text != "ok" || !taken.segment) throw decode(verdict.text);
    return taken;
  }

 private:
  std::optional<Line> connect(const std::string& record) {
    const std::string title = "ok ";
    if (record.rfind(title, 0) != 0 || !is_listener_name(record.substr(title.size()))) {
      throw Failure(
          FailureKind::kAborted, {},
          std::string(kTitle) +
              "the store's record of the group's segment is not believable: " + shown(record) +
              ". Nothing of it was used. Run the same version on every rank; if they "
              "are, somebody else has written into the job's store.");
    }
    while (true) {
      if (auto line = Line::connect(record.substr(title.size()))) return line;
      check_time();
      ::poll(nullptr, 0, 1);  // the listener has no room at the moment
    }
  }

  std::string await_key(const char* key) {
    while (true) {
      const auto until = std::min(deadline_, Clock::now() + kKeySlice);
      if (const auto value = find_key(bootstrap_, key, until)) return *value;
      try {
        check_time();
      } catch (const Failure&) {
        if (const auto value = told_at_last(key)) return *value;
        throw;
      }
    }
  }

  // Rank 0 tells why it gives up, and ends: who finds that it has ended may not have heard it yet.
  std::optional<std::string> told_at_last(const char* key) {
    try {
      return find_key(bootstrap_, key, Clock::now());
    } catch (const Failure&) {
      return std::nullopt;  // the store has ended with it
    }
  }

  Delivery await(Line& line) {
    Clock::time_point ended{};
    while (true) {
      if (auto delivery = line.receive()) return std::move(*delivery);
      if (line.has_ended()) {
        // Rank 0 may have failed before it knew who this is.
        if (const auto verdict = find_key(bootstrap_, kVerdictKey, Clock::now())) {
          throw decode(*verdict);
        }
        if (ended == Clock::time_point{}) ended = Clock::now();
        if (Clock::now() - ended >= kDeathDelay) {
          throw Failure(FailureKind::kPeerLost, {0},
                        std::string(kTitle) +
                            "rank 0 left while the group was being made. Look at that rank's "
                            "own output for the reason.");
        }
        ::poll(nullptr, 0, static_cast<int>(kSlice.count()));
      } else {
        pollfd socket{line.socket(), POLLIN, 0};
        if (::poll(&socket, 1, static_cast<int>(kSlice.count())) > 0) continue;
      }
      try {
        check_time();
      } catch (const Failure&) {
        if (auto delivery = line.receive()) return std::move(*delivery);
        if (const auto verdict = told_at_last(kVerdictKey)) throw decode(*verdict);
        throw;
      }
    }
  }

  void check_time() {
    constexpr int kHost = 0;
    monitor_.check_creation({&kHost, 1});
    if (Clock::now() < deadline_) return;
    throw Failure(FailureKind::kTimeout, {0},
                  std::string(kTitle) + "no word from rank 0 about the group's segment in time.");
  }

  int rank_;
  int size_;
  Bootstrap& bootstrap_;
  WaitMonitor& monitor_;
  Clock::time_point deadline_;
};

GroupSegment host_segment(int size, Bootstrap& bootstrap, WaitMonitor& monitor,
                          const ShmOptions& options) {
  if (size == 1) return make_segment(size, options);
  GroupSegment made;
  std::optional<Host> host;
  try {
    made = make_segment(size, options);
    host.emplace(size, made, bootstrap, monitor, options.deadline);
  } catch (const Failure& failure) {
    bootstrap.set(kSegmentKey, encode(failure));
    throw;
  }
  bootstrap.set(kSegmentKey, "ok " + host->name());
  host->serve();
  return made;
}

}  // namespace

GroupSegment make_group_segment(int rank, int size, Bootstrap& bootstrap, WaitMonitor& monitor,
                                const ShmOptions& options) {
  if (rank == 0) return host_segment(size, bootstrap, monitor, options);
  return Caller(rank, size, bootstrap, monitor, options.deadline).call();
}

}  // namespace tessera::comm::shm
