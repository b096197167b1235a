#include "comm/lending.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>

#include "comm/backend.h"
#include "comm/engines.h"
#include "comm/lent_memory.h"
#include "comm/tensor_memory.h"
#include "core/kept_memory.h"
#include "tessera/core/check.h"

namespace tessera::comm {
namespace {

// What a rank tells another of the tensor it has for it.
struct Offer {
  std::int64_t readers = 0;   // place of the count of the block's readers; 0: not lent
  std::int64_t data = 0;      // place of the first element
  std::int64_t given = 0;     // elements
  std::int64_t expected = 0;  // elements that come the other way
  std::int64_t dtype = 0;     // at::ScalarType
};
constexpr std::size_t kWords = sizeof(Offer) / sizeof(std::int64_t);

[[noreturn]] void fail_all(Transport& transport, FailureKind kind, const std::vector<int>& ranks,
                           const std::string& text) {
  transport.abort(kind, ranks, text);
  throw Failure(kind, ranks, text);
}

/// offers[from * size + to], the same on all ranks.
void check_offers(Transport& transport, const Call& call, const std::vector<Offer>& offers) {
  const int size = transport.size();
  for (int rank = 1; rank < size; ++rank) {
    const auto type_of = [&](int from) {
      return static_cast<at::ScalarType>(offers[static_cast<std::size_t>(from * size)].dtype);
    };
    if (type_of(rank) == type_of(0)) continue;
    fail_all(transport, FailureKind::kMismatch, {0, rank},
             "comm.all_to_all #" + std::to_string(call.sequence) + ": rank 0 gives elements of " +
                 c10::toString(type_of(0)) + ", rank " + std::to_string(rank) + " of " +
                 c10::toString(type_of(rank)) + ". Give all ranks tensors of one type.");
  }
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      const std::int64_t given = offers[static_cast<std::size_t>(from * size + to)].given;
      const std::int64_t expected = offers[static_cast<std::size_t>(to * size + from)].expected;
      if (from == to || given == expected) continue;
      const std::vector<int> ranks{std::min(from, to), std::max(from, to)};
      fail_all(transport, FailureKind::kMismatch, ranks,
               "comm.all_to_all #" + std::to_string(call.sequence) + ": rank " +
                   std::to_string(from) + " gives " + std::to_string(given) +
                   " elements for rank " + std::to_string(to) + ", which expects " +
                   std::to_string(expected) + ". Give every rank the same table of sizes.");
    }
  }
}

}  // namespace

bool can_lend(const Group& group) {
  EngineBackend* engine = engine_of(group);
  return engine != nullptr && engine->transport().reaches_peers();
}

at::Tensor lendable(std::int64_t size, at::ScalarType dtype, const Group& group) {
  EngineBackend* engine = engine_of(group);
  const std::size_t bytes = static_cast<std::size_t>(size) * c10::elementSize(dtype);
  std::shared_ptr<void> memory = engine == nullptr || engine->is_inherited()
                                     ? nullptr
                                     : engine->lent_memory().take(engine->transport(), bytes);
  if (!memory) return core::empty_kept({size}, at::TensorOptions(dtype));
  void* data = memory.get();
  return at::from_blob(
      data, {size}, [memory = std::move(memory)](void*) mutable { memory.reset(); },
      at::TensorOptions(dtype));
}

Awaitable<std::vector<at::Tensor>> lend_async(std::vector<at::Tensor> inputs,
                                              std::vector<std::int64_t> counts,
                                              const Group& group) {
  EngineBackend* engine = engine_of(group);
  TESSERA_INTERNAL_ASSERT(engine != nullptr, "a group that cannot lend");
  check_tensors("all_to_all", inputs, group.engine());
  auto found = std::make_shared<std::vector<at::Tensor>>();
  const auto work = engine->lend(std::move(inputs), std::move(counts), found);
  return Awaitable<std::vector<at::Tensor>>(
      [work, found] {
        work->wait();
        return std::move(*found);
      },
      [work] { return static_cast<EngineWork&>(*work).is_ready(); });
}

c10::intrusive_ptr<c10d::Work> EngineBackend::lend(std::vector<at::Tensor> inputs,
                                                   std::vector<std::int64_t> counts,
                                                   std::shared_ptr<std::vector<at::Tensor>> found) {
  Step step = [this, inputs = std::move(inputs), counts = std::move(counts),
               found = std::move(found)](Transport& transport, Call& call) {
    const auto size = static_cast<std::size_t>(size_);
    const auto own = static_cast<std::size_t>(rank_);
    const auto options = inputs[0].options().requires_grad(false);
    std::vector<Offer> mine(size);
    for (std::size_t r = 0; r < size; ++r) {
      mine[r].dtype = static_cast<std::int64_t>(inputs[0].scalar_type());
      if (r == own) continue;
      mine[r].given = inputs[r].numel();
      mine[r].expected = counts[r];
      if (inputs[r].numel() == 0) continue;
      const void* data = inputs[r].const_data_ptr();
      mine[r].data = static_cast<std::int64_t>(transport.place_of(data, inputs[r].nbytes()));
      mine[r].readers =
          static_cast<std::int64_t>(lent_memory_->lend(transport, data, inputs[r].nbytes(), 1));
    }
    std::vector<Offer> offers(size * size);
    std::vector<Piece> rows;
    for (std::size_t r = 0; r < size; ++r) {
      rows.push_back({&offers[r * size], static_cast<std::int64_t>(size * kWords)});
    }
    Call told = call;
    told.op = Operator::kAllGather;
    told.dtype = DataType::kInt64;
    told.count = static_cast<std::int64_t>(size * kWords);
    transport.all_gather(told, {mine.data(), told.count}, rows);
    check_offers(transport, call, offers);
    bool is_lent = true;
    for (const Offer& offer : offers) is_lent &= offer.given == 0 || offer.readers != 0;
    found->resize(size);
    for (std::size_t r = 0; r < size; ++r) {
      if (r == own) continue;
      const Offer& offer = offers[r * size + own];
      at::Tensor& tensor = (*found)[r];
      if (!is_lent || offer.given == 0) {
        tensor = core::empty_kept({offer.given}, options);
        continue;
      }
      const std::size_t bytes = static_cast<std::size_t>(offer.given) * options.dtype().itemsize();
      auto memory = LentMemory::borrow(transport, static_cast<std::uint64_t>(offer.data), bytes,
                                       static_cast<std::uint64_t>(offer.readers));
      if (!memory) {
        fail_all(transport, FailureKind::kAborted, {static_cast<int>(r)},
                 "comm.all_to_all #" + std::to_string(call.sequence) + ": rank " +
                     std::to_string(r) + " lends " + std::to_string(bytes) + " bytes at offset " +
                     std::to_string(offer.data) + " of the segment, which is not believable.");
      }
      void* data = memory.get();
      tensor = at::from_blob(
          data, {offer.given}, [memory = std::move(memory)](void*) mutable { memory.reset(); },
          options);
    }
    if (is_lent) return;
    std::vector<Piece> sent(size);
    std::vector<Piece> received(size);
    for (std::size_t r = 0; r < size; ++r) {
      if (r == own) continue;
      if (mine[r].readers != 0) {
        lent_memory_->take_back(inputs[r].const_data_ptr(), inputs[r].nbytes(), 1);
      }
      sent[r] = TensorMemory(inputs[r], TensorMemory::Use::kRead).piece();
      received[r] = TensorMemory((*found)[r], TensorMemory::Use::kWrite).piece();
    }
    Call copied = call;
    ++copied.sequence;
    copied.op = Operator::kAllToAll;
    copied.dtype = TensorMemory(inputs[0], TensorMemory::Use::kRead).dtype();
    transport.all_to_all(copied, sent, received);
  };
  return submit({c10d::OpType::ALLTOALL, "all_to_all", {}, options_->timeout, true, 2},
                {std::move(step)});
}

}  // namespace tessera::comm
