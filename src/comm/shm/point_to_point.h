// src/comm/shm/point_to_point.h — messages between two ranks of a group.
//
// Every ordered pair of ranks has a mailbox, a ring of bytes. A message is a small head and its
// data, padded; long messages pass through in pieces while the receiver takes them out. A receiver
// that waits for one message takes others from the same rank out as well and keeps them, so the
// order of receives may differ from the order of sends.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/shm/waiter.h"
#include "comm/transport.h"

namespace tessera::comm::shm {

/// One rank's sends and receives. Safe to use from several threads.
class PointToPoint {
 public:
  PointToPoint(Board board, int rank, Waiter& waiter);

  /// Returns when the whole message is in the mailbox or has been taken out of it.
  void send(const Call& call, Piece data, int destination, int tag);
  /// Returns the rank that the message came from.
  int recv(const Call& call, Piece data, int source, int tag);

 private:
  /// What goes before the data. 32 bytes, and messages are padded to 32, so it never wraps.
  struct Head {
    std::uint64_t bytes;
    std::int64_t count;
    std::int32_t tag;
    std::uint32_t dtype;
    std::uint64_t unused;
  };
  static_assert(sizeof(Head) == 32);

  /// A receive that waits, on the stack of its thread.
  struct Request {
    Piece data;
    DataType dtype;
    int source;
    int tag;
    std::uint64_t sequence;  // of the receiving call
    int came_from = -1;      // set when a message was found for it
    std::atomic<bool> is_complete = false;
  };

  /// A message that came before its receive.
  struct Parcel {
    Head head;
    std::unique_ptr<std::byte[]> data;
  };

  /// The receiving end of one mailbox. `message` is being taken out while `remaining` > 0.
  struct Inlet {
    std::uint64_t position = 0;
    Head message{};
    std::uint64_t remaining = 0;
    Request* request = nullptr;                // where the data go; null: into `parcel`, or nowhere
    std::unique_ptr<Parcel> parcel;            // being filled
    std::deque<std::unique_ptr<Parcel>> kept;  // complete, oldest first
  };

  /// The sending end of one mailbox: one message at a time.
  struct Outlet {
    std::mutex mutex;
    std::condition_variable freed;
    bool is_busy = false;
  };

  /// Holds an outlet. Waits for it like for anything else: with a limit.
  class OutletHold {
   public:
    OutletHold(Outlet& outlet, Waiter& waiter, const Call& call, int destination);
    ~OutletHold();
    OutletHold(const OutletHold&) = delete;
    OutletHold& operator=(const OutletHold&) = delete;

   private:
    Outlet& outlet_;
  };

  bool has_mail(int source) const noexcept;
  bool take_kept(Request& request);
  void take_out(int source, const Request& wanted);
  void begin_message(int source, Inlet& inlet, const Head& head);
  void end_message(int source, Inlet& inlet);
  Request* find_request(int source, int tag);
  void hand_over(const Parcel& parcel, Request& request, int source);
  void check_believable(int source, const Head& head);
  [[noreturn]] void refuse(int source, const std::string& what);
  void check_match(const Head& head, const Request& request, int source);
  void forget(Request& request) noexcept;

  Board board_;
  int rank_;
  Waiter& waiter_;
  std::unique_ptr<Outlet[]> outlets_;  // by destination
  std::mutex mutex_;                   // guards what follows
  std::vector<Inlet> inlets_;
  std::vector<Request*> requests_;  // oldest first
};

}  // namespace tessera::comm::shm
