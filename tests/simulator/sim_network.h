// tests/simulator/sim_network.h — hosts, the connections between them, and the time, in one
// process.
//
// The launchers' code reads and writes real descriptors, so every connection is two pairs of
// sockets with the network in between: it takes what one side wrote and brings it to the other, in
// pieces, later, or not at all, as the seed says. The clock moves from one event to the next.

#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launch/event_loop.h"
#include "launch/socket.h"
#include "simulator/random.h"

namespace tessera::simulator {

using launch::Clock;
using Duration = std::chrono::nanoseconds;

class SimNetwork {
 public:
  explicit SimNetwork(Random& random) : random_(random) {}
  SimNetwork(const SimNetwork&) = delete;
  SimNetwork& operator=(const SimNetwork&) = delete;

  Clock::time_point now() const { return now_; }
  /// Takes up what the hosts have written, and brings what is due. Returns whether anything moved.
  bool move();
  /// When the next piece is due.
  std::optional<Clock::time_point> next_moment() const;
  /// Lets time pass.
  void jump_to(Clock::time_point moment) { now_ = std::max(now_, moment); }

  // What may go wrong between two hosts.
  void cut(int host);                       // its connections end, for both sides
  void stall(int host, Duration duration);  // what is under way from and to it waits
  void lose(int host);                      // nothing reaches it any more, nor comes from it
  bool is_lost(int host) const { return lost_.contains(host); }

  /// A connection of somebody who belongs to no host of the job. Returns its socket; none if nobody
  /// listens.
  launch::FileDescriptor connect_stranger();

  /// What a host says its addresses are: none, some, or as many as it may say.
  static std::vector<std::string> hosts_of(int host);

  /// The host that listens at the one place there is has ended.
  void close_listener() { listener_.reset(); }

 private:
  friend class SimWire;
  struct Piece {
    Clock::time_point due;
    std::string bytes;
    bool is_end = false;
  };
  // One direction of a connection.
  struct Flow {
    std::deque<Piece> pieces;
    Clock::time_point last{};
    bool has_ended = false;  // nothing more can come
  };
  struct Link {
    int caller = 0;
    int listener = 0;
    launch::FileDescriptor caller_end;
    launch::FileDescriptor listener_end;
    Flow to_listener;
    Flow to_caller;
    bool is_over() const { return !caller_end.is_open() && !listener_end.is_open(); }
  };
  struct Waiting {
    launch::FileDescriptor socket;
    std::string host;
  };
  struct SimListener {
    int host = 0;
    int fd = -1;  // an eventfd of the one who listens
    std::deque<Waiting> waiting;
  };

  launch::FileDescriptor connect(int host);
  Duration latency();
  bool take(launch::FileDescriptor& from, Flow& flow);
  bool bring(Flow& flow, launch::FileDescriptor& to);

  Random& random_;
  Clock::time_point now_{std::chrono::hours(1)};
  std::vector<std::unique_ptr<Link>> links_;
  std::optional<SimListener> listener_;
  std::set<int> lost_;
};

/// The network as one host's launcher sees it.
class SimWire final : public launch::Wire {
 public:
  SimWire(SimNetwork& network, int host) : network_(network), host_(host) {}
  launch::Listener listen(const launch::SocketAddress& address) override;
  launch::FileDescriptor accept(int listener, std::string& host) override;
  launch::FileDescriptor connect(const launch::SocketAddress& address) override;
  int outcome(int) override { return 0; }
  std::vector<std::string> hosts() override { return SimNetwork::hosts_of(host_); }

 private:
  SimNetwork& network_;
  int host_;
};

/// A host's loop by the network's time. It never waits: `run_once` serves what is ready.
class SimLoop final : public launch::EventLoop {
 public:
  explicit SimLoop(const SimNetwork& network) : network_(network) {}
  Clock::time_point now() const override { return network_.now(); }
  int64_t wall_ns() const override { return network_.now().time_since_epoch().count(); }
  /// Serves everything that is ready now; whether anything was.
  bool serve();

 protected:
  int wait_for_files(std::vector<pollfd>& files, std::chrono::nanoseconds limit) override;

 private:
  const SimNetwork& network_;
  int num_ready_ = 0;
};

}  // namespace tessera::simulator
