#include "comm/shm/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace tessera::comm::shm {

namespace {

constexpr std::uint64_t kUnit = 32;

std::uint64_t padded(std::uint64_t position) { return (position + kUnit - 1) / kUnit * kUnit; }

std::string describe(DataType dtype, std::int64_t count) {
  return std::string(name_of(dtype)) + " [" + std::to_string(count) + "]";
}

}  // namespace

PointToPoint::PointToPoint(Board board, int rank, Waiter& waiter)
    : board_(board),
      rank_(rank),
      waiter_(waiter),
      outlets_(new Outlet[static_cast<std::size_t>(board.size())]),
      inlets_(static_cast<std::size_t>(board.size())) {}

PointToPoint::OutletHold::OutletHold(Outlet& outlet, Waiter& waiter, const Call& call,
                                     int destination)
    : outlet_(outlet) {
  std::unique_lock lock(outlet.mutex);
  const Clock::time_point begin = outlet.is_busy ? Clock::now() : Clock::time_point{};
  while (outlet.is_busy) {
    outlet.freed.wait_for(lock, Waiter::kSlice);
    if (outlet.is_busy) waiter.consult(call, rank_bit(destination), begin);
  }
  outlet.is_busy = true;
}

PointToPoint::OutletHold::~OutletHold() {
  {
    const std::lock_guard lock(outlet_.mutex);
    outlet_.is_busy = false;
  }
  outlet_.freed.notify_one();
}

void PointToPoint::send(const Call& call, Piece data, int destination, int tag) {
  if (destination < 0 || destination >= board_.size()) {
    throw std::invalid_argument("comm.send: destination " + std::to_string(destination) +
                                " is not in the group of " + std::to_string(board_.size()) +
                                " ranks.");
  }
  waiter_.check();
  const OutletHold hold(outlets_[static_cast<std::size_t>(destination)], waiter_, call,
                        destination);
  Mailbox& box = board_.mailbox(rank_, destination);
  std::byte* mail = board_.mail(rank_, destination);
  const std::uint64_t capacity = board_.layout().sizes().mailbox_bytes;
  const auto bytes = static_cast<std::uint64_t>(data.count) * size_of(call.dtype);
  const auto* from = static_cast<const std::byte*>(data.data);
  // Only this rank writes the position, and only who holds the outlet.
  std::uint64_t position = box.written.load(std::memory_order_relaxed);

  const auto room = [&] {
    return capacity - (position - box.read.load(std::memory_order_seq_cst));
  };
  const auto wait_for_room = [&] {
    waiter_.wait(
        board_.rank(rank_).outbox, call, [&] { return room() >= kUnit; },
        [&] { return rank_bit(destination); });
  };
  const auto announce = [&] { publish(box.written, position, board_.rank(destination).inbox); };

  wait_for_room();
  const Head head{bytes, data.count, tag, static_cast<std::uint32_t>(call.dtype), 0};
  std::memcpy(mail + position % capacity, &head, sizeof(head));
  position += sizeof(head);
  // A quarter of the mailbox at a time, so that the receiver copies while we do.
  const std::uint64_t largest = std::max(capacity / 4 / kUnit * kUnit, kUnit);
  for (std::uint64_t done = 0; done < bytes;) {
    if (room() < kUnit) {
      announce();
      wait_for_room();
    }
    const std::uint64_t start = position % capacity;
    const std::uint64_t length =
        std::min({bytes - done, room() / kUnit * kUnit, capacity - start, largest});
    std::memcpy(mail + start, from + done, length);
    done += length;
    position += length;
    if (done < bytes) announce();
  }
  position = padded(position);
  announce();
}

bool PointToPoint::has_mail(int source) const noexcept {
  const Mailbox& box = board_.mailbox(source, rank_);
  return box.written.load(std::memory_order_seq_cst) != box.read.load(std::memory_order_relaxed);
}

void PointToPoint::check_match(const Head& head, const Request& request, int source) {
  const auto sent = static_cast<DataType>(head.dtype);
  if (sent == request.dtype && head.count == request.data.count) return;
  waiter_.fail(FailureKind::kMismatch, rank_bit(source) | rank_bit(rank_),
               "comm.recv #" + std::to_string(request.sequence) + ": rank " +
                   std::to_string(source) + " sent " + describe(sent, head.count) + " with tag " +
                   std::to_string(head.tag) + ", but rank " + std::to_string(rank_) + " receives " +
                   describe(request.dtype, request.data.count) +
                   ". Give both sides the same type and size.");
  waiter_.raise();
}

PointToPoint::Request* PointToPoint::find_request(int source, int tag) {
  const auto found = std::find_if(requests_.begin(), requests_.end(), [&](const Request* request) {
    return request->came_from < 0 && request->tag == tag &&
           (request->source < 0 || request->source == source);
  });
  return found == requests_.end() ? nullptr : *found;
}

void PointToPoint::hand_over(const Parcel& parcel, Request& request, int source) {
  check_match(parcel.head, request, source);
  if (parcel.head.bytes != 0) {
    std::memcpy(request.data.data, parcel.data.get(), parcel.head.bytes);
  }
  request.came_from = source;
  request.is_complete = true;
}

bool PointToPoint::take_kept(Request& request) {
  const int first = request.source < 0 ? 0 : request.source;
  const int last = request.source < 0 ? board_.size() - 1 : request.source;
  for (int source = first; source <= last; ++source) {
    auto& kept = inlets_[static_cast<std::size_t>(source)].kept;
    const auto found = std::find_if(kept.begin(), kept.end(), [&](const auto& parcel) {
      return parcel->head.tag == request.tag;
    });
    if (found == kept.end()) continue;
    hand_over(**found, request, source);
    kept.erase(found);
    return true;
  }
  return false;
}

/// What a peer wrote is looked at before it is used; what cannot be ends the group.
void PointToPoint::check_believable(int source, const Head& head) {
  const bool is_type = head.dtype <= static_cast<std::uint32_t>(DataType::kFloat64);
  const std::uint64_t width = is_type ? size_of(static_cast<DataType>(head.dtype)) : 1;
  constexpr std::int64_t kMost = std::int64_t{1} << 56;
  if (is_type && head.count >= 0 && head.count < kMost &&
      head.bytes == static_cast<std::uint64_t>(head.count) * width) {
    return;
  }
  refuse(source, "a message of " + std::to_string(head.bytes) + " bytes for " +
                     std::to_string(head.count) + " elements");
}

void PointToPoint::refuse(int source, const std::string& what) {
  waiter_.fail(FailureKind::kAborted, rank_bit(source),
               "comm.recv: rank " + std::to_string(source) + " says it has " + what +
                   ", which is not believable. Its part of the shared memory is damaged.");
  waiter_.raise();
}

void PointToPoint::begin_message(int source, Inlet& inlet, const Head& head) {
  check_believable(source, head);
  inlet.message = head;
  inlet.remaining = head.bytes;
  inlet.request = find_request(source, head.tag);
  if (inlet.request != nullptr) {
    check_match(head, *inlet.request, source);
    inlet.request->came_from = source;
    return;
  }
  inlet.parcel = std::make_unique<Parcel>();
  inlet.parcel->head = head;
  inlet.parcel->data = std::make_unique_for_overwrite<std::byte[]>(head.bytes);
}

void PointToPoint::end_message(int source, Inlet& inlet) {
  inlet.position = padded(inlet.position);
  if (inlet.request != nullptr) {
    inlet.request->is_complete = true;
    inlet.request = nullptr;
  } else if (inlet.parcel != nullptr) {
    std::unique_ptr<Parcel> parcel = std::move(inlet.parcel);
    // Its receive may have come while the message was on its way.
    Request* request = find_request(source, parcel->head.tag);
    if (request == nullptr) {
      inlet.kept.push_back(std::move(parcel));
      return;
    }
    hand_over(*parcel, *request, source);
  }
  // The receive may belong to another thread of this process.
  board_.rank(rank_).inbox.ring_if_heard();
}

/// Takes out what the mailbox holds now, until `wanted` is complete; what comes later stays, and is
/// copied once when its receive comes. Never waits; called with the lock held, which bounds the
/// time for which a buffer of another thread's receive is in use.
void PointToPoint::take_out(int source, const Request& wanted) {
  Inlet& inlet = inlets_[static_cast<std::size_t>(source)];
  Mailbox& box = board_.mailbox(source, rank_);
  const std::byte* mail = board_.mail(source, rank_);
  const std::uint64_t capacity = board_.layout().sizes().mailbox_bytes;
  const std::uint64_t written = box.written.load(std::memory_order_seq_cst);
  if (written - inlet.position > capacity || written % kUnit != 0) {
    refuse(source, std::to_string(written - inlet.position) + " bytes in a mailbox of " +
                       std::to_string(capacity));
  }
  while (inlet.position != written && !wanted.is_complete) {
    const std::uint64_t start = inlet.position % capacity;
    if (inlet.remaining == 0) {
      Head head;
      std::memcpy(&head, mail + start, sizeof(head));
      begin_message(source, inlet, head);
      inlet.position += sizeof(head);
    } else {
      const std::uint64_t length =
          std::min({inlet.remaining, written - inlet.position, capacity - start});
      const std::uint64_t done = inlet.message.bytes - inlet.remaining;
      if (inlet.request != nullptr) {
        std::memcpy(static_cast<std::byte*>(inlet.request->data.data) + done, mail + start, length);
      } else if (inlet.parcel != nullptr) {
        std::memcpy(inlet.parcel->data.get() + done, mail + start, length);
      }
      inlet.position += length;
      inlet.remaining -= length;
    }
    if (inlet.remaining == 0) end_message(source, inlet);
    publish(box.read, inlet.position, board_.rank(source).outbox);
  }
}

void PointToPoint::forget(Request& request) noexcept {
  std::erase(requests_, &request);
  for (Inlet& inlet : inlets_) {
    if (inlet.request == &request) inlet.request = nullptr;
  }
}

int PointToPoint::recv(const Call& call, Piece data, int source, int tag) {
  const int size = board_.size();
  if (source < -1 || source >= size) {
    throw std::invalid_argument("comm.recv: source " + std::to_string(source) +
                                " is not in the group of " + std::to_string(size) + " ranks.");
  }
  waiter_.check();
  const int first = source < 0 ? 0 : source;
  const int last = source < 0 ? size - 1 : source;
  Request request{
      .data = data, .dtype = call.dtype, .source = source, .tag = tag, .sequence = call.sequence};
  std::unique_lock lock(mutex_);
  if (take_kept(request)) return request.came_from;
  requests_.push_back(&request);
  try {
    while (true) {
      for (int peer = first; peer <= last && !request.is_complete; ++peer) take_out(peer, request);
      if (request.is_complete) break;
      lock.unlock();
      const auto ready = [&] {
        if (request.is_complete) return true;
        for (int peer = first; peer <= last; ++peer) {
          if (has_mail(peer)) return true;
        }
        return false;
      };
      const auto missing = [&] {
        return source >= 0 ? rank_bit(source) : ~RankSet{0} >> (kMaxRanks - size);
      };
      waiter_.wait(board_.rank(rank_).inbox, call, ready, missing);
      lock.lock();
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    forget(request);
    throw;
  }
  forget(request);
  return request.came_from;
}

}  // namespace tessera::comm::shm
