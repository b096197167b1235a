// The job's store and the letters of failures over a network that delays, cuts, changes, repeats
// and makes things up: nothing forged is believed, and there is one root cause.

#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/store/session.h"
#include "comm/store/table.h"
#include "core/handshake.h"
#include "core/letters.h"
#include "simulator/random.h"
#include "simulator/world.h"

namespace tessera::simulator {
namespace {

using comm::store::Client;
using comm::store::Operation;
using comm::store::Packet;
using comm::store::Session;
using comm::store::Table;
using core::Handshake;

constexpr std::size_t kOpening = 8 + 32;
constexpr std::size_t kProof = 32;

core::Secret secret_of(const char* text) { return core::Secret::from_text(text, "the simulator"); }

/// A rank that talks to the store as the library does: a handshake, then one request after another.
class Caller {
 public:
  Caller(const core::Secret& secret, std::vector<Packet> requests)
      : handshake_(Handshake::Side::kConnects, secret, comm::store::kPurpose),
        requests_(std::move(requests)) {}

  void receive(const std::string& bytes) {
    if (is_over_) return;
    received_ += bytes;
    if (!reader_) {
      const auto state = handshake_.advance(received_, unsent_);
      if (state == Handshake::State::kOpen) return;
      if (state != Handshake::State::kProven) {
        is_over_ = true;
        return;
      }
      writer_ = handshake_.writer();
      reader_ = handshake_.reader();
      ask();
    }
    try {
      while (const auto text = reader_->next(received_, comm::store::kLongest)) {
        answers_.push_back(comm::store::decode(*text));
        ask();
      }
    } catch (const core::FrameError&) {
      is_over_ = true;
    }
  }

  std::string take_unsent() { return std::exchange(unsent_, {}); }
  bool is_over() const { return is_over_; }
  bool is_proven() const { return reader_.has_value(); }
  bool is_done() const { return answers_.size() == requests_.size(); }
  const std::vector<Packet>& requests() const { return requests_; }
  const std::vector<Packet>& answers() const { return answers_; }

 private:
  void ask() {
    if (num_asked_ == requests_.size()) return;
    unsent_ += writer_->frame(comm::store::encode(requests_[num_asked_++]));
  }

  Handshake handshake_;
  std::vector<Packet> requests_;
  std::vector<Packet> answers_;
  std::size_t num_asked_ = 0;
  std::optional<core::FrameWriter> writer_;
  std::optional<core::FrameReader> reader_;
  std::string received_;
  std::string unsent_;
  bool is_over_ = false;
};

Packet packet(Operation operation, std::vector<std::string> parts) {
  return {static_cast<std::uint8_t>(operation), std::move(parts)};
}

bool same(const Packet& a, const Packet& b) { return a.code == b.code && a.parts == b.parts; }

class StoreWorld {
 public:
  StoreWorld(Random& random, bool tells)
      : random_(random), tells_(tells), table_([this](Client id, const Packet& answer) {
          Line& line = *lines_.at(id);
          line.answered.push_back(answer);
          line.session.answer(answer);
        }) {}

  void run() {
    const std::int64_t num_ranks = random_.between(2, 5);
    for (std::int64_t rank = 0; rank < num_ranks; ++rank) add_rank(rank);
    for (std::int64_t i = random_.between(0, 3); i > 0; --i) add_stranger();
    for (int i = 0; i < 2000 && step(); ++i) {
    }
    check();
  }

  /// What the ranks that heard of it take for the reason that the group ended.
  std::optional<std::string> root_cause() const { return cause_; }

 private:
  // One connection. What travels is kept in the order it was sent.
  struct Line {
    Line(const core::Secret& secret, std::unique_ptr<Caller> who)
        : session(secret), caller(std::move(who)) {}
    Session session;
    std::unique_ptr<Caller> caller;  // null: a stranger, who only sends
    std::string to_server;
    std::string to_caller;
    std::string seen;  // by whoever listens on the network: all that was sent to the server
    std::vector<Packet> served;
    std::vector<Packet> answered;
    std::size_t num_told = 0;  // bytes that went out
    bool is_tampered = false;
    bool is_cut = false;
  };

  void add_rank(std::int64_t rank) {
    const std::string name = std::to_string(rank);
    std::vector<Packet> requests;
    requests.push_back(packet(Operation::kSet, {"arrived/" + name, name}));
    if (random_.flip()) requests.push_back(packet(Operation::kAdd, {"count", "1"}));
    requests.push_back(
        packet(Operation::kCompareSet, {"failure", "", "rank " + name + " saw it first"}));
    auto line = std::make_unique<Line>(secret_, std::make_unique<Caller>(secret_, requests));
    line->is_tampered = random_.one_in(3);
    lines_[next_++] = std::move(line);
  }

  // Somebody without the secret: noise, what a rank said elsewhere, or a caller with another one.
  void add_stranger() {
    std::unique_ptr<Caller> caller;
    if (random_.flip()) {
      caller = std::make_unique<Caller>(
          secret_of("another secret, of another job, that is long enough"),
          std::vector<Packet>{packet(Operation::kSet, {"failure", "forged"})});
    }
    auto line = std::make_unique<Line>(secret_, std::move(caller));
    line->is_tampered = true;
    strangers_.insert(next_);
    lines_[next_++] = std::move(line);
  }

  // A change to what is under way on a line, by somebody between the two.
  void tamper(Line& line) {
    std::string& bytes = random_.flip() ? line.to_server : line.to_caller;
    switch (random_.below(5)) {
      case 0:
        if (!bytes.empty())
          bytes[random_.below(bytes.size())] ^= static_cast<char>(1 + random_.below(255));
        break;
      case 1: {  // again what was said before, here or on another line
        const Line& other = *lines_.at(random_.below(next_));
        if (!other.seen.empty()) {
          const std::size_t begin = random_.below(other.seen.size());
          bytes += other.seen.substr(begin, 1 + random_.below(200));
        }
        break;
      }
      case 2:
        if (!bytes.empty()) {
          const std::size_t begin = random_.below(bytes.size());
          bytes.erase(begin, 1 + random_.below(bytes.size() - begin));
        }
        break;
      case 3:
        for (std::uint64_t i = 1 + random_.below(80); i > 0; --i)
          bytes += static_cast<char>(random_.next());
        break;
      default:
        line.is_cut = random_.one_in(4);
    }
  }

  void deliver(Client id, Line& line) {
    if (line.caller) line.to_server += take(line.caller->take_unsent(), line);
    if (random_.flip() && !line.to_server.empty()) {
      const std::size_t count = 1 + random_.below(line.to_server.size());
      line.session.receive(line.to_server.substr(0, count), [&](const Packet& request) {
        line.served.push_back(request);
        table_.serve(id, request);
      });
      line.to_server.erase(0, count);
    }
    line.num_told += line.session.unsent().size();
    line.to_caller += std::exchange(line.session.unsent(), {});
    if (line.caller && !line.to_caller.empty() && random_.flip()) {
      const std::size_t count = 1 + random_.below(line.to_caller.size());
      line.caller->receive(line.to_caller.substr(0, count));
      line.to_caller.erase(0, count);
    }
  }
  static std::string take(std::string bytes, Line& line) {
    line.seen += bytes;
    return bytes;
  }

  // Returns whether anything may still happen.
  bool step() {
    const Client id = random_.below(next_);
    Line& line = *lines_.at(id);
    if (line.is_tampered && random_.one_in(6)) tamper(line);
    if (!line.is_cut) deliver(id, line);
    for (const auto& [other, each] : lines_) {
      if (!each->is_tampered && !each->caller->is_done()) return true;
    }
    return random_.below(40) != 0;
  }

  void check() {
    for (const auto& [id, line] : lines_) {
      const bool is_stranger = strangers_.contains(id);
      if (is_stranger) {
        require(!line->session.is_proven() && line->served.empty(), "a stranger is not served");
        require(line->num_told <= kOpening + kProof, "a stranger is told a number and no more");
        require(!line->caller || !line->caller->is_proven(), "a stranger is not believed");
        continue;
      }
      const auto& asked = line->caller->requests();
      require(line->served.size() <= asked.size(), "nothing is served that was not asked for");
      for (std::size_t i = 0; i < line->served.size(); ++i) {
        require(same(line->served[i], asked[i]), "what is served is what was asked, in its order");
      }
      const auto& heard = line->caller->answers();
      require(heard.size() <= line->answered.size(), "no answer comes that was not given");
      for (std::size_t i = 0; i < heard.size(); ++i) {
        require(same(heard[i], line->answered[i]), "an answer is what was answered");
      }
      if (!line->is_tampered) require(line->caller->is_done(), "who is left in peace is served");
      if (!line->caller->is_done()) continue;
      const std::string& cause = heard.back().parts.at(0);
      require(cause.starts_with("rank ") && cause.ends_with(" saw it first"),
              "the root cause is one that a rank has seen");
      require(!cause_ || *cause_ == cause, "all ranks have one root cause");
      cause_ = cause;
    }
    if (tells_)
      std::printf("  %zu lines, root cause: %s\n", lines_.size(), cause_ ? cause_->c_str() : "-");
  }

  Random& random_;
  bool tells_;
  const core::Secret secret_ = secret_of("the secret of this job, which is long enough");
  Table table_;
  std::map<Client, std::unique_ptr<Line>> lines_;
  std::set<Client> strangers_;
  Client next_ = 0;
  std::optional<std::string> cause_;
};

// The ranks tell each other by datagrams what was settled.
void run_letters(Random& random, const std::string& cause) {
  const core::Secret secret = secret_of("the secret of this job, which is long enough");
  const core::Secret other = secret_of("another secret, of another job, that is long enough");
  struct Datagram {
    std::size_t to;
    std::string bytes;
    std::size_t letter;  // which one it was, SIZE_MAX once changed or made up
  };
  struct Sent {
    std::size_t to;
    std::string text;
  };
  const auto count = static_cast<std::size_t>(random.between(2, 5));
  const auto address_of = [](std::size_t rank) {
    return "10.0.0.1 " + std::to_string(rank) + " token" + std::to_string(rank);
  };
  std::vector<core::Letters> ranks;
  for (std::size_t i = 0; i < count; ++i)
    ranks.emplace_back(secret, "token" + std::to_string(i), address_of(i));
  core::Letters forger(other, "token0", address_of(0));
  std::deque<Datagram> network;
  std::vector<Sent> sent;
  std::vector<int> num_opened;
  for (int i = 0; i < 60; ++i) {
    const std::size_t from = random.below(count);
    const std::size_t to = random.below(count);
    switch (random.below(4)) {
      case 0:
      case 1: {
        const std::string text = cause + ", told " + std::to_string(sent.size());
        network.push_back({to, ranks[from].seal(address_of(to), text), sent.size()});
        sent.push_back({to, text});
        num_opened.push_back(0);
        break;
      }
      case 2:
        network.push_back({to, forger.seal(address_of(to), "forged"), SIZE_MAX});
        break;
      default:
        break;
    }
    if (network.empty()) continue;
    // Any of them, perhaps again later, perhaps changed, perhaps to somebody else.
    const std::size_t place = random.below(network.size());
    Datagram letter = network[place];
    if (random.one_in(3)) network.erase(network.begin() + static_cast<std::ptrdiff_t>(place));
    if (random.one_in(4)) {
      letter.bytes[random.below(letter.bytes.size())] ^= static_cast<char>(1 + random.below(255));
      letter.letter = SIZE_MAX;
    }
    if (random.one_in(4)) letter.to = random.below(count);
    if (random.one_in(8)) letter.bytes.resize(random.below(letter.bytes.size()));
    const auto text = ranks[letter.to].open(letter.bytes);
    if (!text) continue;
    require(letter.letter != SIZE_MAX, "a letter that was changed or made up is not opened");
    const Sent& original = sent[letter.letter];
    require(original.to == letter.to, "a letter is opened by the one it is for");
    require(*text == original.text, "a letter says what was written");
    require(++num_opened[letter.letter] == 1, "a letter is opened once");
  }
}

}  // namespace

void run_channels(std::uint64_t seed, bool tells) {
  Random random(seed);
  StoreWorld store(random, tells);
  store.run();
  run_letters(random, store.root_cause().value_or("rank 0 saw it"));
}

}  // namespace tessera::simulator
