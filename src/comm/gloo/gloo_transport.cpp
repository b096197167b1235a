#include "comm/gloo/gloo_transport.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/broken_pipe.h"
#include "comm/gloo/gloo_backend.h"
#include "comm/gloo/gloo_sockets.h"
#include "comm/gloo/pair_proofs.h"
#include "comm/network.h"
#include "comm/piece_tensor.h"
#include "comm/short_slice.h"
#include "comm/start_thread.h"
#include "kernels/reduce.h"

namespace tessera::comm {
namespace {

// Gloo gets a little longer than we do, so that our own report comes first.
constexpr auto kGlooSlack = std::chrono::seconds(5);
constexpr auto kSlice = std::chrono::milliseconds(20);
// How long Gloo may take to end an operation whose connections are closed. It takes milliseconds.
constexpr auto kEndLimit = std::chrono::milliseconds(300);

std::int64_t bytes_of(const Call& call, std::int64_t count) {
  return count * static_cast<std::int64_t>(size_of(call.dtype));
}

at::Tensor as_bytes(const Call& call, Piece piece) {
  return at::from_blob(piece.data, {bytes_of(call, piece.count)}, at::kByte);
}

// On bytes that hold bools, "or" is the maximum and "and" the minimum.
c10d::ReduceOp gloo_reduction(const Call& call) {
  const bool is_bool = call.dtype == DataType::kBool;
  switch (call.reduce.value_or(ReduceOp::kSum)) {
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kProduct:
      return is_bool ? c10d::ReduceOp::MIN : c10d::ReduceOp::PRODUCT;
    case ReduceOp::kBand:
      return c10d::ReduceOp::BAND;
    case ReduceOp::kBor:
      return c10d::ReduceOp::BOR;
    case ReduceOp::kBxor:
      return c10d::ReduceOp::BXOR;
    default:
      return is_bool ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
  }
}

// Gloo's error without the place in its source and its advice.
std::string gloo_says(const std::exception& error) {
  const std::string text = error.what();
  const std::size_t bracket = text.rfind("[/", 0) == 0 ? text.find("] ") : std::string::npos;
  const std::size_t begin = bracket == std::string::npos ? 0 : bracket + 2;
  const std::size_t end = std::min(text.find(". ", begin), text.find('\n', begin));
  return "Gloo says: " + text.substr(begin, end == std::string::npos ? end : end - begin) + ".";
}

// LibTorch before 2.13 writes the first operation of a group into a list of the whole process,
// without a lock: groups that start at the same time on two threads can break it. Starting waits
// for nobody.
std::mutex& starting() {
  static auto* mutex = new std::mutex;  // never destroyed: groups may outlive static destructors
  return *mutex;
}

std::int64_t total(std::span<const Piece> pieces) {
  std::int64_t sum = 0;
  for (const Piece& piece : pieces) sum += piece.count;
  return sum;
}

}  // namespace

GlooTransport::GlooTransport(const c10::intrusive_ptr<c10d::Store>& store,
                             std::shared_ptr<GroupMonitor> monitor,
                             std::shared_ptr<FailureChannel> channel,
                             std::chrono::milliseconds timeout, const std::string& address,
                             bool check_calls)
    : monitor_(std::move(monitor)),
      channel_(std::move(channel)),
      table_(static_cast<int>(monitor_->members().size())) {
  // Gloo's threads start here. They write without asking whether the peer is there, and wait for
  // it more than they compute.
  const BrokenPipeGuard guard;
  const ShortSliceGuard short_slices;
  const GlooSockets sockets;
  const auto secret = job_secret();
  try {
    gloo_ = make_gloo_backend(c10::make_intrusive<c10d::PrefixStore>("gloo", store),
                              monitor_->rank(), size(), timeout + kGlooSlack, address);
    if (size() > 1 && secret) prove_pairs(*gloo_, *store, *secret, timeout);
  } catch (const std::system_error& refusal) {
    throw refused_thread("comm.init", refusal);
  } catch (const Error&) {
    throw;
  } catch (const c10::DistError&) {
    throw;  // the store's
  } catch (const std::exception& error) {
    throw ConnectionLost("comm.init: rank " + std::to_string(monitor_->rank()) +
                         " lost the connection to another rank while group '" +
                         monitor_->group_name() + "' was made. " + gloo_says(error) +
                         " Look at the other ranks' own output for the reason.");
  }
  if (size() == 1) return;
  sockets.keep_from_children(*store, rank(), size(), address);
  if (check_calls) calls_.emplace(*store, rank(), size(), address, timeout, secret);
}

GlooTransport::~GlooTransport() {
  // Its destructor would wait for the operation. The process is about to end or to make a new
  // group.
  if (is_stuck_) static_cast<void>(gloo_.release());
}

void GlooTransport::translate(const Call& call, const std::string& says) {
  // The broken connection arrives before the reason does: give those who see it a moment. They may
  // be in the same operation and have had all they need from the one that died, so they are asked.
  channel_->inquire();
  const auto limit = Clock::now() + std::chrono::milliseconds(800);
  do {
    if (auto failure = channel_->poll()) throw std::move(*failure);
    if (const auto death = monitor_->find_death(call)) throw channel_->publish(*death);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  } while (Clock::now() < limit);
  throw channel_->publish(Failure(FailureKind::kPeerLost, {},
                                  GroupMonitor::title(call) + ": rank " +
                                      std::to_string(monitor_->members()[rank()].world_rank) +
                                      " lost the connection to another rank " +
                                      monitor_->details(call) + ". No rank could say why; " +
                                      says));
}

// Note [How Gloo's operations are ended]
// Gloo offers no way to end a collective that waits for a peer, and the memory it works on must not
// go away under it. But when a receive runs out of time, Gloo closes all connections of its
// context, and every operation under way ends with an error. So a receive that nobody answers is
// made to do so.
void GlooTransport::close_connections() noexcept {
  if (size() == 1) return;
  if (calls_) calls_->close();
  const BrokenPipeGuard guard;
  // Towards every peer: a connection that is closed already fails at once and does not count.
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    try {
      std::vector<at::Tensor> tensors{at::empty({1}, at::kByte)};
      constexpr int kUnusedTag = 0x7fffffff;
      gloo_->recv(tensors, peer, kUnusedTag)->wait(std::chrono::milliseconds(1));
    } catch (const std::exception&) {
      // As intended.
    }
  }
}

void GlooTransport::look(const Call& call, std::span<const int> late, Clock::time_point begin) {
  monitor_->check_limits(call, late, Clock::now() - begin);
  // A process that has ended is no failure by itself: it may have done its part, and if not, its
  // connections say so.
  if (!channel_->has_inquiry()) return;
  if (const auto death = monitor_->find_death(call)) throw Failure(*death);
}

void GlooTransport::run(const Call& call, const std::function<Work()>& start) {
  if (auto failure = channel_->known()) throw std::move(*failure);
  struct Completion {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_done = false;
  };
  const auto begin = Clock::now();
  auto completion = std::make_shared<Completion>();
  Work work;
  try {
    const std::lock_guard lock(starting());
    work = start();
  } catch (const std::exception& error) {
    translate(call, gloo_says(error));
  }
  work->getFuture()->addCallback([completion](c10::ivalue::Future&) {
    std::lock_guard lock(completion->mutex);
    completion->is_done = true;
    completion->changed.notify_all();
  });
  const auto is_done = [&] { return completion->is_done; };
  // Gloo does not say who is late; all others are suspects.
  std::vector<int> others;
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) others.push_back(r);
  }
  std::unique_lock lock(completion->mutex);
  while (!completion->changed.wait_for(lock, kSlice, is_done)) {
    lock.unlock();
    try {
      look(call, others, begin);
    } catch (const Failure& failure) {
      const Failure root_cause = channel_->publish(failure);
      // See Note [How Gloo's operations are ended].
      close_connections();
      lock.lock();
      is_stuck_ |= !completion->changed.wait_for(lock, kEndLimit, is_done);
      throw root_cause;
    }
    lock.lock();
  }
  lock.unlock();
  try {
    work->wait();
  } catch (const std::exception& error) {
    translate(call, gloo_says(error));
  }
}

int GlooTransport::run_message(const Call& call, int peer, const std::function<Work()>& start) {
  if (auto failure = channel_->known()) throw std::move(*failure);
  std::vector<int> suspects;
  for (int r = 0; r < size(); ++r) {
    if (r != rank() && (peer < 0 || r == peer)) suspects.push_back(r);
  }
  try {
    watch_.start(GroupMonitor::title(call));
  } catch (const Error& refused) {
    throw channel_->publish(Failure(FailureKind::kUnavailable, {rank()}, refused.what()));
  }
  const BrokenPipeGuard guard;
  const auto begin = Clock::now();
  std::optional<Failure> failure;
  try {
    const Work work = start();
    const auto look = [&] {
      if (failure) return true;
      try {
        monitor_->check_limits(call, suspects, Clock::now() - begin);
        return false;
      } catch (const Failure& found) {
        failure = channel_->publish(found);
        work->abort();
        return true;
      }
    };
    watch_.during(look, [&] { work->wait(); });
    if (!failure) return peer < 0 ? work->sourceRank() : peer;
  } catch (const std::exception& error) {
    if (!failure) translate(call, gloo_says(error));
  }
  throw Failure(*failure);
}

void GlooTransport::announce(const Call& call) noexcept {
  if (!calls_) return;
  const auto record = table_.record(call, call.count, {}, {});
  calls_->announce(std::as_bytes(std::span(record)));
}

void GlooTransport::agree(const Call& call, std::int64_t count, std::span<const Piece> inputs,
                          std::span<const Piece> outputs) {
  if (auto failure = channel_->known()) throw std::move(*failure);
  if (!calls_) return;
  const auto record = table_.record(call, count, inputs, outputs);
  std::vector<std::int64_t> records(record.size() * size());
  const auto begin = Clock::now();
  try {
    calls_->all_gather(std::as_bytes(std::span(record)),
                       std::as_writable_bytes(std::span(records)).data(),
                       [&](std::span<const int> late) { look(call, late, begin); });
  } catch (const ConnectionLost& error) {
    translate(call, error.what());
  } catch (const Failure& failure) {
    const Failure root_cause = channel_->publish(failure);
    close_connections();
    throw Failure(root_cause);
  }
  try {
    table_.check(call, rank(), records.data());
  } catch (const Failure& failure) {
    throw channel_->publish(failure);
  }
}

void GlooTransport::all_reduce(const Call& call, Piece data) {
  agree(call, data.count);
  if (data.count == 0 || size() == 1) return;
  at::Tensor values = as_tensor(call.dtype, data);
  // Gloo has no 16-bit integers.
  const bool is_widened = call.dtype == DataType::kInt16;
  std::vector<at::Tensor> tensors{is_widened ? values.to(at::kInt) : values};
  c10d::AllreduceOptions options;
  options.reduceOp = gloo_reduction(call);
  run(call, [&] { return gloo_->allreduce(tensors, options); });
  if (is_widened) values.copy_(tensors[0]);
  if (call.reduce == ReduceOp::kAvg) values.div_(size());
}

void GlooTransport::reduce(const Call& call, Piece data) {
  agree(call, data.count);
  if (data.count == 0 || size() == 1) return;
  at::Tensor values = as_tensor(call.dtype, data);
  // Gloo uses the buffers of the other ranks as scratch space, and they are not ours to change.
  std::vector<at::Tensor> tensors{call.dtype == DataType::kInt16 ? values.to(at::kInt)
                                                                 : values.clone()};
  c10d::ReduceOptions options;
  options.reduceOp = gloo_reduction(call);
  options.rootRank = call.root;
  run(call, [&] { return gloo_->reduce(tensors, options); });
  if (rank() != call.root) return;
  values.copy_(tensors[0]);
  if (call.reduce == ReduceOp::kAvg) values.div_(size());
}

void GlooTransport::broadcast(const Call& call, Piece data) {
  agree(call, data.count);
  if (data.count == 0 || size() == 1) return;
  std::vector<at::Tensor> tensors{as_bytes(call, data)};
  c10d::BroadcastOptions options;
  options.rootRank = call.root;
  run(call, [&] { return gloo_->broadcast(tensors, options); });
}

void GlooTransport::exchange(const Call& call, std::span<const Piece> inputs,
                             std::span<const Piece> outputs) {
  at::Tensor source = at::empty({bytes_of(call, total(inputs))}, at::kByte);
  at::Tensor target = at::empty({bytes_of(call, total(outputs))}, at::kByte);
  std::vector<std::int64_t> send_bytes;
  std::vector<std::int64_t> recv_bytes;
  auto* place = source.data_ptr<std::uint8_t>();
  for (int r = 0; r < size(); ++r) {
    const std::int64_t sent = inputs.empty() ? 0 : bytes_of(call, inputs[r].count);
    if (sent > 0) std::memcpy(place, inputs[r].data, sent);
    place += sent;
    send_bytes.push_back(sent);
    recv_bytes.push_back(outputs.empty() ? 0 : bytes_of(call, outputs[r].count));
  }
  // Gloo takes the counts away, hence the copies.
  run(call, [&, sends = send_bytes, receives = recv_bytes]() mutable {
    return gloo_->alltoall_base(target, source, receives, sends, c10d::AllToAllOptions());
  });
  place = target.data_ptr<std::uint8_t>();
  for (int r = 0; r < size(); ++r) {
    if (recv_bytes[r] > 0) std::memcpy(outputs[r].data, place, recv_bytes[r]);
    place += recv_bytes[r];
  }
}

void GlooTransport::all_gather(const Call& call, Piece input, std::span<const Piece> outputs) {
  agree(call, input.count, {}, outputs);
  const bool is_even = std::all_of(outputs.begin(), outputs.end(),
                                   [&](const Piece& piece) { return piece.count == input.count; });
  if (!is_even) {
    // Gloo's all-gather takes equal parts only.
    exchange(call, std::vector<Piece>(size(), input), outputs);
    return;
  }
  if (input.count == 0) return;
  at::Tensor mine = as_bytes(call, input);
  const std::int64_t bytes = mine.numel();
  const bool is_flat = [&] {
    for (int r = 1; r < size(); ++r) {
      if (static_cast<char*>(outputs[r].data) != static_cast<char*>(outputs[0].data) + r * bytes) {
        return false;
      }
    }
    return true;
  }();
  at::Tensor all = is_flat ? at::from_blob(outputs[0].data, {bytes * size()}, at::kByte)
                           : at::empty({bytes * size()}, at::kByte);
  run(call, [&] { return gloo_->_allgather_base(all, mine, c10d::AllgatherOptions()); });
  if (is_flat) return;
  for (int r = 0; r < size(); ++r) {
    std::memcpy(outputs[r].data, all.data_ptr<std::uint8_t>() + r * bytes, bytes);
  }
}

void GlooTransport::gather(const Call& call, Piece input, std::span<const Piece> outputs) {
  agree(call, input.count, {}, outputs);
  std::vector<Piece> inputs(size());
  inputs[call.root] = input;
  exchange(call, inputs, outputs);
}

void GlooTransport::scatter(const Call& call, std::span<const Piece> inputs, Piece output) {
  agree(call, output.count, inputs, {});
  std::vector<Piece> outputs(size());
  outputs[call.root] = output;
  exchange(call, inputs, outputs);
}

void GlooTransport::reduce_scatter(const Call& call, std::span<const Piece> inputs, Piece output) {
  agree(call, output.count, inputs, {});
  // Every rank collects its own part of all inputs and reduces them in rank order.
  const std::int64_t bytes = bytes_of(call, output.count);
  std::vector<std::byte> parts(static_cast<std::size_t>(bytes) * size());
  std::vector<Piece> outputs;
  std::vector<const void*> sources;
  for (int r = 0; r < size(); ++r) {
    outputs.push_back({parts.data() + r * bytes, output.count});
    sources.push_back(outputs.back().data);
  }
  exchange(call, inputs, outputs);
  void* const target = output.data;
  kernels::reduce(call.dtype, *call.reduce, sources, {&target, 1}, output.count,
                  kernels::Store::kCached);
}

void GlooTransport::all_to_all(const Call& call, std::span<const Piece> inputs,
                               std::span<const Piece> outputs) {
  agree(call, call.count, inputs, outputs);
  exchange(call, inputs, outputs);
}

void GlooTransport::barrier(const Call& call) {
  if (calls_ || size() == 1) {
    agree(call, 0);  // the exchange of calls is a barrier already
  } else {
    run(call, [&] { return gloo_->barrier(c10d::BarrierOptions()); });
  }
}

// A message is two of Gloo's: what is coming, then the data. Gloo aborts the process when they do
// not fit; the receiver sees it coming.
void GlooTransport::send(const Call& call, Piece data, int destination, int tag) {
  std::int64_t words[2] = {static_cast<std::int64_t>(call.dtype), data.count};
  std::vector<at::Tensor> head{at::from_blob(words, {2}, at::kLong)};
  std::vector<at::Tensor> body{as_bytes(call, data)};
  run_message(call, destination, [&] { return gloo_->send(head, destination, 2 * tag); });
  if (data.count == 0) return;
  run_message(call, destination, [&] { return gloo_->send(body, destination, 2 * tag + 1); });
}

int GlooTransport::recv(const Call& call, Piece data, int source, int tag) {
  std::int64_t words[2] = {};
  std::vector<at::Tensor> head{at::from_blob(words, {2}, at::kLong)};
  std::vector<at::Tensor> body{as_bytes(call, data)};
  const int sender = run_message(call, source, [&] {
    return source < 0 ? gloo_->recvAnysource(head, 2 * tag) : gloo_->recv(head, source, 2 * tag);
  });
  if (words[0] != static_cast<std::int64_t>(call.dtype) || words[1] != data.count) {
    throw channel_->publish(Failure(
        FailureKind::kMismatch, {std::min(sender, rank()), std::max(sender, rank())},
        GroupMonitor::title(call) + ": rank " + std::to_string(sender) + " sent " +
            std::string(name_of(static_cast<DataType>(words[0]))) + " [" +
            std::to_string(words[1]) + "] with tag " + std::to_string(tag) + ", but rank " +
            std::to_string(rank()) + " receives " + std::string(name_of(call.dtype)) + " [" +
            std::to_string(data.count) + "]. Give both sides the same type and size."));
  }
  if (data.count > 0) {
    run_message(call, sender, [&] { return gloo_->recv(body, sender, 2 * tag + 1); });
  }
  return sender;
}

void GlooTransport::abort(FailureKind kind, std::vector<int> ranks, const std::string& reason) {
  channel_->publish(Failure(kind, std::move(ranks), reason));
  // Peers that cannot reach the store learn at least that this rank is gone.
  close_connections();
}

}  // namespace tessera::comm
