// launch/rendezvous.h — how the launchers of several hosts find each other and stay in touch.
//
// Node 0 listens on the endpoint; the others connect, prove the job's secret, say which node of
// which job they are, and are taken in or refused with the reason. Who does not prove the secret is
// told nothing. The connections stay open for the whole job: they carry starts, failures, signals
// and the end.

#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "channel.h"
#include "event_loop.h"
#include "socket.h"
#include "stranger_log.h"
#include "tessera/launch/launch_error.h"
#include "tessera/launch/options.h"

namespace tessera::launch {

/// Node 0's side.
class Coordinator {
 public:
  struct Events {
    std::function<void()> on_complete;  // all nodes are there
    std::function<void(int node, const Message&)> on_message;
    std::function<void(int node, const std::string& why)> on_lost;
    std::function<void(const LaunchError&)> on_timeout;
    std::function<void(const std::string&)> note;  // one line for people
  };

  /// Listens at once. `identity` is sent to every node that is taken in.
  Coordinator(EventLoop& loop, Wire& wire, const RunOptions& options, const core::Secret& secret,
              Message identity, Events events);
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;
  ~Coordinator();

  const SocketAddress& address() const noexcept { return listener_.address; }
  void broadcast(const Message& message, int except_node = 0);
  bool has_unsent() const;
  /// Whether a node that was taken in has this address, numeric and in its own form.
  bool has_host(const std::string& host) const;

 private:
  struct Guest {
    std::unique_ptr<Channel> channel;
    std::string address;
    std::set<std::string> hosts;  // all addresses of a node
    int node = -1;                // -1: has not said who it is
    EventLoop::TimerId deadline = 0;
    bool is_leaving = false;
  };

  void listen();
  void make_room();
  void accept_guests();
  bool accept_guest();
  void on_proven(int id);
  void evict_stranger();
  void on_hello(Guest& guest, const Message& hello);
  void refuse(Guest& guest, const std::string& why);
  void drop(int id);
  std::string missing_nodes() const;
  void remind();
  void time_out();

  EventLoop& loop_;
  Wire& wire_;
  const RunOptions& options_;
  const Endpoint endpoint_;
  const core::Secret secret_;
  Message identity_;
  Events events_;
  Listener listener_;
  std::map<int, Guest> guests_;
  std::set<int> strangers_;  // guests that have not proven the secret, oldest first
  StrangerLog stranger_log_;
  std::map<int, int> guest_of_node_;
  int next_guest_ = 0;
  bool is_complete_ = false;
  std::string refusals_;  // bounded
  Clock::time_point begin_;
  EventLoop::TimerId pause_ = 0;  // of listening
  EventLoop::TimerId reminder_ = 0;
  EventLoop::TimerId deadline_ = 0;
};

/// The side of every other node.
class Member {
 public:
  struct Events {
    std::function<void(const Message&)> on_welcome;
    std::function<void(const Message&)> on_message;
    std::function<void(const std::string& why)> on_lost;
    std::function<void(const LaunchError&)> on_refused;  // refused, or node 0 not found in time
    std::function<void(const std::string&)> note;
  };

  /// Begins to knock; keeps trying until the rendezvous timeout.
  Member(EventLoop& loop, Wire& wire, const RunOptions& options, const core::Secret& secret,
         Events events);
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;
  ~Member();

  void send(const Message& message);
  bool has_unsent() const;

 private:
  void knock();
  void on_connected();
  void say_hello();
  void on_closed(const std::string& why);
  void give_up(const LaunchError& error);
  void try_again(const std::string& why);
  void on_message(const Message& message);

  EventLoop& loop_;
  Wire& wire_;
  const RunOptions& options_;
  const core::Secret secret_;
  Events events_;
  SocketAddress address_;
  FileDescriptor connecting_;
  std::unique_ptr<Channel> channel_;
  std::unique_ptr<Channel> finished_;  // destroyed later, since it may be calling
  bool is_welcome_ = false;
  bool is_over_ = false;
  std::string last_reason_;
  Clock::time_point begin_;
  EventLoop::TimerId retry_ = 0;
  EventLoop::TimerId reminder_ = 0;
  EventLoop::TimerId deadline_ = 0;
};

}  // namespace tessera::launch
