#include "comm/hierarchical_transport.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/piece_tensor.h"
#include "comm/rendezvous.h"
#include "comm/shm/shm_transport.h"

namespace tessera::comm {
namespace {

c10::intrusive_ptr<c10d::Store> prefixed(const c10::intrusive_ptr<c10d::Store>& store,
                                         const std::string& prefix) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

// Those who wait for what their leader brings from other hosts give up a little later than it does,
// so that its reason, which knows more, comes first, even if the store does not answer it.
constexpr auto kLeaderFirst = std::chrono::milliseconds(1500);

// A collective inside one of the two levels, as part of `call`.
Call inner(const Call& call, Operator op, DataType dtype, std::optional<ReduceOp> reduce,
           int root) {
  Call result = call;
  result.op = op;
  result.dtype = dtype;
  result.reduce = reduce;
  result.root = root;
  result.whole = &call;
  return result;
}

// The last step of an operation, where the leader hands down its result.
Call handed_down(const Call& call, Operator op, DataType dtype, int root) {
  Call result = inner(call, op, dtype, std::nullopt, root);
  result.deadline += kLeaderFirst;
  return result;
}

// An average is a sum that is divided at the end.
ReduceOp reduction_of_parts(const Call& call) {
  return call.reduce == ReduceOp::kAvg ? ReduceOp::kSum : *call.reduce;
}

void divide(DataType dtype, Piece data, int divisor) { as_tensor(dtype, data).div_(divisor); }

// All hosts have shared memory or none uses it: a rank that failed says so to all.
void agree_on_shared_memory(const c10::intrusive_ptr<c10d::Store>& store,
                            const GroupMonitor& monitor, const std::string& problem,
                            Clock::time_point deadline) {
  set_text(*store, "available/" + std::to_string(monitor.rank()), problem);
  StoreBootstrap bootstrap(store);
  for (std::size_t rank = 0; rank < monitor.members().size(); ++rank) {
    const std::string answer = bootstrap.get("available/" + std::to_string(rank), deadline);
    if (!answer.empty()) throw Failure(FailureKind::kUnavailable, {}, answer);
  }
}

}  // namespace

HierarchicalTransport::HierarchicalTransport(std::shared_ptr<GroupMonitor> monitor)
    : monitor_(std::move(monitor)), table_(static_cast<int>(monitor_->members().size())) {
  std::map<std::string, int> index_of_host;
  for (int r = 0; r < size(); ++r) {
    const auto [entry, is_new] =
        index_of_host.try_emplace(monitor_->members()[r].host, static_cast<int>(hosts_.size()));
    if (is_new) hosts_.emplace_back();
    hosts_[entry->second].push_back(r);
    host_index_.push_back(entry->second);
  }
  host_ = host_index_[rank()];
  const auto& mine = hosts_[host_];
  local_rank_ = static_cast<int>(std::find(mine.begin(), mine.end(), rank()) - mine.begin());
}

std::shared_ptr<HierarchicalTransport> HierarchicalTransport::create(
    const c10::intrusive_ptr<c10d::Store>& store, const std::shared_ptr<GroupMonitor>& monitor,
    const GroupOptions& options, const std::string& address, Clock::time_point deadline) {
  // No make_shared: the constructor is private.
  std::shared_ptr<HierarchicalTransport> self(new HierarchicalTransport(monitor));
  const auto& mine = self->hosts_[self->host_];
  self->local_monitor_ = std::make_shared<GroupMonitor>(monitor, mine);
  std::string problem;
  try {
    StoreBootstrap bootstrap(prefixed(store, "host/" + std::to_string(self->host_)));
    self->local_ =
        shm::ShmTransport::create(self->local_rank_, static_cast<int>(mine.size()), bootstrap,
                                  *self->local_monitor_, {.deadline = deadline});
  } catch (const Failure& failure) {
    if (failure.kind() != FailureKind::kUnavailable) throw;
    problem = failure.what();
  }
  agree_on_shared_memory(store, *monitor, problem, deadline);

  // One channel for all levels: whoever waits anywhere learns of a failure anywhere else.
  self->channel_ = make_channel(store, *monitor, address);
  self->flat_ = std::make_shared<GlooTransport>(prefixed(store, "flat"), monitor, self->channel_,
                                                options.timeout, address, /*check_calls=*/false);
  self->channel_->meet(*store);  // Gloo has met, so all channels are there
  if (self->is_leader()) {
    std::vector<int> leaders;
    for (const auto& host : self->hosts_) leaders.push_back(host.front());
    self->leaders_monitor_ = std::make_shared<GroupMonitor>(monitor, leaders);
    self->leaders_ =
        std::make_shared<GlooTransport>(prefixed(store, "leaders"), self->leaders_monitor_,
                                        self->channel_, options.timeout, address,
                                        /*check_calls=*/false);
  }
  return self;
}

template <class Body>
void HierarchicalTransport::guard(const Body& body) {
  if (auto failure = channel_->known()) throw std::move(*failure);
  try {
    body();
  } catch (const Failure& failure) {
    abort(failure.kind(), failure.ranks(), failure.what());
    throw *channel_->known();
  }
}

void HierarchicalTransport::abort(FailureKind kind, std::vector<int> ranks,
                                  const std::string& reason) {
  const Failure root_cause = channel_->publish(Failure(kind, std::move(ranks), reason));
  local_->abort(root_cause.kind(), root_cause.ranks(), root_cause.what());
}

std::vector<std::byte> HierarchicalTransport::gather_bytes(
    const Call& call, const void* data, std::int64_t bytes,
    const std::vector<std::int64_t>& bytes_of_rank) {
  const std::int64_t all_bytes =
      std::accumulate(bytes_of_rank.begin(), bytes_of_rank.end(), std::int64_t{0});
  std::vector<std::byte> all(static_cast<std::size_t>(all_bytes));
  std::vector<Piece> of_host;   // one piece per host
  std::vector<Piece> of_local;  // one piece per rank of this host
  std::int64_t offset = 0;
  for (int host = 0; host < static_cast<int>(hosts_.size()); ++host) {
    const std::int64_t begin = offset;
    for (const int r : hosts_[host]) {
      if (host == host_) of_local.push_back({all.data() + offset, bytes_of_rank[r]});
      offset += bytes_of_rank[r];
    }
    of_host.push_back({all.data() + begin, offset - begin});
  }
  Piece mine{const_cast<void*>(data), bytes};
  local_->gather(inner(call, Operator::kGather, DataType::kUInt8, std::nullopt, 0), mine,
                 is_leader() ? std::span<const Piece>(of_local) : std::span<const Piece>());
  if (is_leader()) {
    leaders_->all_gather(inner(call, Operator::kAllGather, DataType::kUInt8, std::nullopt, -1),
                         of_host[host_], of_host);
  }
  local_->broadcast(handed_down(call, Operator::kBroadcast, DataType::kUInt8, 0),
                    {all.data(), all_bytes});
  return all;
}

void HierarchicalTransport::agree(const Call& call, std::int64_t count,
                                  std::span<const Piece> inputs, std::span<const Piece> outputs) {
  const auto record = table_.record(call, count, inputs, outputs);
  const auto bytes = static_cast<std::int64_t>(table_.record_bytes());
  const auto gathered =
      gather_bytes(call, record.data(), bytes, std::vector<std::int64_t>(size(), bytes));
  // From host by host to rank by rank.
  std::vector<std::int64_t> records(record.size() * size());
  std::size_t place = 0;
  for (const auto& host : hosts_) {
    for (const int r : host) {
      std::memcpy(records.data() + r * record.size(), gathered.data() + place, bytes);
      place += bytes;
    }
  }
  table_.check(call, rank(), records.data());
}

void HierarchicalTransport::all_reduce(const Call& call, Piece data) {
  guard([&] {
    agree(call, data.count, {}, {});
    // Averages are taken once, at the end, over the whole group: sums travel.
    const ReduceOp op = reduction_of_parts(call);
    local_->reduce(inner(call, Operator::kReduce, call.dtype, op, 0), data);
    if (is_leader()) {
      leaders_->all_reduce(inner(call, Operator::kAllReduce, call.dtype, op, -1), data);
      if (call.reduce == ReduceOp::kAvg) divide(call.dtype, data, size());
    }
    local_->broadcast(handed_down(call, Operator::kBroadcast, call.dtype, 0), data);
  });
}

void HierarchicalTransport::reduce(const Call& call, Piece data) {
  guard([&] {
    agree(call, data.count, {}, {});
    const ReduceOp op = reduction_of_parts(call);
    const auto bytes = static_cast<std::size_t>(data.count) * size_of(call.dtype);
    // Only the root's data may change, so leaders work on a copy.
    std::vector<std::byte> copy(static_cast<const std::byte*>(data.data),
                                static_cast<const std::byte*>(data.data) + bytes);
    Piece sum{copy.data(), data.count};
    local_->reduce(inner(call, Operator::kReduce, call.dtype, op, 0), sum);
    const int root_host = host_index_[call.root];
    if (is_leader()) {
      leaders_->reduce(inner(call, Operator::kReduce, call.dtype, op, root_host), sum);
      if (host_ == root_host && call.reduce == ReduceOp::kAvg) divide(call.dtype, sum, size());
    }
    if (host_ != root_host) return;
    local_->broadcast(handed_down(call, Operator::kBroadcast, call.dtype, 0), sum);
    if (rank() == call.root && bytes > 0) std::memcpy(data.data, copy.data(), bytes);
  });
}

void HierarchicalTransport::broadcast(const Call& call, Piece data) {
  guard([&] {
    agree(call, data.count, {}, {});
    const int root_host = host_index_[call.root];
    const auto& ranks = hosts_[root_host];
    const int root_local =
        static_cast<int>(std::find(ranks.begin(), ranks.end(), call.root) - ranks.begin());
    const auto down = [&](int root) {
      local_->broadcast(handed_down(call, Operator::kBroadcast, call.dtype, root), data);
    };
    if (host_ == root_host) down(root_local);
    if (is_leader()) {
      leaders_->broadcast(inner(call, Operator::kBroadcast, call.dtype, std::nullopt, root_host),
                          data);
    }
    if (host_ != root_host) down(0);
  });
}

void HierarchicalTransport::all_gather(const Call& call, Piece input,
                                       std::span<const Piece> outputs) {
  guard([&] {
    agree(call, input.count, {}, outputs);
    const auto width = static_cast<std::int64_t>(size_of(call.dtype));
    std::vector<std::int64_t> bytes_of_rank;
    for (const Piece& piece : outputs) bytes_of_rank.push_back(piece.count * width);
    const auto all = gather_bytes(call, input.data, input.count * width, bytes_of_rank);
    std::size_t place = 0;
    for (const auto& host : hosts_) {
      for (const int r : host) {
        const auto bytes = static_cast<std::size_t>(bytes_of_rank[r]);
        if (bytes > 0) std::memcpy(outputs[r].data, all.data() + place, bytes);
        place += bytes;
      }
    }
  });
}

void HierarchicalTransport::reduce_scatter(const Call& call, std::span<const Piece> inputs,
                                           Piece output) {
  guard([&] {
    agree(call, output.count, inputs, {});
    const ReduceOp op = reduction_of_parts(call);
    const auto width = static_cast<std::int64_t>(size_of(call.dtype));
    // The parts in order of hosts, so that what a host keeps is one piece.
    std::int64_t count = 0;
    for (const Piece& piece : inputs) count += piece.count;
    std::vector<std::byte> sums(static_cast<std::size_t>(count * width));
    std::vector<Piece> of_host;
    std::vector<Piece> of_local;
    std::int64_t offset = 0;
    for (int host = 0; host < static_cast<int>(hosts_.size()); ++host) {
      const std::int64_t begin = offset;
      for (const int r : hosts_[host]) {
        const std::int64_t bytes = inputs[r].count * width;
        if (bytes > 0) std::memcpy(sums.data() + offset, inputs[r].data, bytes);
        if (host == host_) of_local.push_back({sums.data() + offset, inputs[r].count});
        offset += bytes;
      }
      of_host.push_back({sums.data() + begin, (offset - begin) / width});
    }
    local_->reduce(inner(call, Operator::kReduce, call.dtype, op, 0), {sums.data(), count});
    if (is_leader()) {
      std::vector<std::byte> kept(static_cast<std::size_t>(of_host[host_].count * width));
      Piece mine{kept.data(), of_host[host_].count};
      leaders_->reduce_scatter(inner(call, Operator::kReduceScatter, call.dtype, op, -1), of_host,
                               mine);
      if (call.reduce == ReduceOp::kAvg) divide(call.dtype, mine, size());
      if (!kept.empty()) std::memcpy(of_host[host_].data, kept.data(), kept.size());
    }
    local_->scatter(handed_down(call, Operator::kScatter, call.dtype, 0),
                    is_leader() ? std::span<const Piece>(of_local) : std::span<const Piece>(),
                    output);
  });
}

void HierarchicalTransport::gather(const Call& call, Piece input, std::span<const Piece> outputs) {
  guard([&] {
    agree(call, input.count, {}, outputs);
    flat_->gather(call, input, outputs);
  });
}

void HierarchicalTransport::scatter(const Call& call, std::span<const Piece> inputs, Piece output) {
  guard([&] {
    agree(call, output.count, inputs, {});
    flat_->scatter(call, inputs, output);
  });
}

void HierarchicalTransport::all_to_all(const Call& call, std::span<const Piece> inputs,
                                       std::span<const Piece> outputs) {
  guard([&] {
    agree(call, call.count, inputs, outputs);
    flat_->all_to_all(call, inputs, outputs);
  });
}

void HierarchicalTransport::barrier(const Call& call) {
  guard([&] { agree(call, 0, {}, {}); });
}

void HierarchicalTransport::send(const Call& call, Piece data, int destination, int tag) {
  flat_->send(call, data, destination, tag);
}

int HierarchicalTransport::recv(const Call& call, Piece data, int source, int tag) {
  return flat_->recv(call, data, source, tag);
}

}  // namespace tessera::comm
