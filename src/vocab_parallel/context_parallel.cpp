#include "tessera/vocab_parallel/context_parallel.h"

#include <vector>

#include <ATen/Functions.h>
#include <ATen/WrapDimUtils.h>

#include "core/autograd.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"
#include "tessera/regions/gather_shared.h"

namespace tessera::vocab_parallel {
namespace {

at::Tensor starts_or_whole(const std::optional<at::Tensor>& starts, std::int64_t total) {
  return starts ? *starts : at::tensor(std::vector<std::int64_t>{0, total}, at::kLong);
}

void check_lengths(const at::Tensor& starts, std::int64_t total, int size) {
  TESSERA_CHECK_VALUE(starts.dim() == 1 && starts.numel() >= 1,
                      "vocab.context: the starts of the sequences have shape ", starts.sizes(),
                      ". Give one row: the starts and the end of the last.");
  if (!starts.is_cpu()) return;
  const auto* at_place = starts.const_data_ptr<std::int64_t>();
  const std::int64_t num_sequences = starts.numel() - 1;
  TESSERA_CHECK_VALUE(at_place[0] == 0 && at_place[num_sequences] == total,
                      "vocab.context: the sequences cover [", at_place[0], ", ",
                      at_place[num_sequences], "), the row has ", total, " places.");
  for (std::int64_t i = 0; i < num_sequences; ++i) {
    const std::int64_t length = at_place[i + 1] - at_place[i];
    TESSERA_CHECK_VALUE(length >= 0 && length % (2 * size) == 0, "vocab.context: sequence ", i,
                        " has ", length, " places, which ", size,
                        " ranks cannot share in two pieces each. Pad it to a multiple of ",
                        2 * size, ".");
  }
}

struct SavedGroup : torch::CustomClassHolder {
  explicit SavedGroup(comm::Group given) : group(std::move(given)) {}
  comm::Group group;
};

template <bool kToTokens>
struct Deal : Function<Deal<kToTokens>> {
  static Variable forward(AutogradContext* context, const Variable& x, const comm::Group& group) {
    carry(context, c10::make_intrusive<SavedGroup>(group));
    const std::int64_t ranks = group.size();
    if constexpr (kToTokens) {
      const std::int64_t tokens = x.size(0) / ranks;
      return comm::all_to_all(x.detach().contiguous(), group)
          .view({ranks, tokens, x.size(1)})
          .transpose(0, 1)
          .reshape({tokens, ranks * x.size(1)});
    } else {
      const std::int64_t columns = x.size(1) / ranks;
      const at::Tensor parts =
          x.detach().reshape({x.size(0), ranks, columns}).transpose(0, 1).contiguous();
      return comm::all_to_all(parts.view({ranks * x.size(0), columns}), group);
    }
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = carried<SavedGroup>(context);
    return {Deal<!kToTokens>::apply(grads[0], saved->group), Variable()};
  }
};

}  // namespace

at::Tensor places_of_context_rank(const at::Tensor& starts, std::int64_t total, int rank,
                                  int size) {
  TESSERA_CHECK_VALUE(size >= 1 && rank >= 0 && rank < size, "vocab.context: rank ", rank,
                      " is not in a group of ", size, ".");
  const at::Tensor begin = starts.to(at::kLong).contiguous();
  check_lengths(begin, total, size);
  // Of every sequence the rank holds one in `size` places, sequence behind sequence.
  const at::Tensor own_begin = begin.floor_divide(size);
  const at::Tensor place = at::arange(total / size, begin.options());
  const at::Tensor sequence =
      at::searchsorted(own_begin, place, /*out_int32=*/false, /*right=*/true) - 1;
  const at::Tensor first = begin.index_select(0, sequence);
  const at::Tensor piece = (begin.index_select(0, sequence + 1) - first).floor_divide(2 * size);
  const at::Tensor within = place - own_begin.index_select(0, sequence);
  return first +
         at::where(within < piece, within + rank * piece, within + (2 * size - 2 - rank) * piece);
}

at::Tensor part_of_context_rank(const at::Tensor& x, int rank, int size, std::int64_t dim,
                                const std::optional<at::Tensor>& starts) {
  dim = at::maybe_wrap_dim(dim, x.dim());
  if (size == 1) return x;
  const std::int64_t total = x.size(dim);
  return x.index_select(
      dim,
      places_of_context_rank(starts_or_whole(starts, total), total, rank, size).to(x.device()));
}

at::Tensor gather_context(const at::Tensor& x, const comm::Group& group, std::int64_t dim,
                          const std::optional<at::Tensor>& starts) {
  if (group.size() == 1) return x;
  dim = at::maybe_wrap_dim(dim, x.dim());
  const std::int64_t total = x.size(dim) * group.size();
  const at::Tensor from = starts_or_whole(starts, total);
  std::vector<at::Tensor> places;
  for (int r = 0; r < group.size(); ++r) {
    places.push_back(places_of_context_rank(from, total, r, group.size()));
  }
  const at::Tensor order = at::cat(places).argsort().to(x.device());
  const regions::Sizes sizes(static_cast<std::size_t>(group.size()), x.size(dim));
  return regions::gather_shared(x, group, dim, sizes).index_select(dim, order);
}

at::Tensor context_window(const at::Tensor& x, const comm::Group& group, std::int64_t dim) {
  if (group.size() == 1) return x;
  dim = at::maybe_wrap_dim(dim, x.dim());
  return gather_context(x, group, dim)
      .narrow(dim, group.rank() * x.size(dim), x.size(dim))
      .contiguous();
}

at::Tensor shift_next(const at::Tensor& x, const std::optional<comm::Group>& group, double fill) {
  const at::NoGradGuard no_grad;
  TESSERA_CHECK_VALUE(x.dim() >= 2 && x.size(1) >= 1, "vocab.cp_shift_next: a tensor of shape ",
                      x.sizes(), " has no sequence. Use [batch, length, ...].");
  at::Tensor out = x.roll(-1, 1);
  at::Tensor last = out.select(1, x.size(1) - 1);
  const int ranks = group ? group->size() : 1;
  if (ranks == 1) {
    last.fill_(fill);
    return out;
  }
  const at::Tensor first = comm::all_gather(x.select(1, 0).unsqueeze(0).contiguous(), *group);
  if (group->rank() + 1 < ranks) {
    last.copy_(first[group->rank() + 1]);
  } else {
    last.fill_(fill);
  }
  return out;
}

at::Tensor to_token_shards(const at::Tensor& x, const comm::Group& group) {
  TESSERA_CHECK_VALUE(x.dim() == 2 && x.size(0) % group.size() == 0,
                      "vocab.all_to_all_vp2sq: a tensor of shape ", x.sizes(),
                      " cannot be dealt out to ", group.size(),
                      " ranks. Use [tokens, columns] with tokens a multiple of the ranks.");
  return group.size() == 1 ? x : Deal<true>::apply(x, group);
}

at::Tensor to_vocabulary_shards(const at::Tensor& x, const comm::Group& group) {
  TESSERA_CHECK_VALUE(x.dim() == 2 && x.size(1) % group.size() == 0,
                      "vocab.all_to_all_sq2vp: a tensor of shape ", x.sizes(),
                      " cannot be dealt out to ", group.size(),
                      " ranks. Use [tokens, vocabulary] with a vocabulary that is a multiple of "
                      "the ranks.");
  return group.size() == 1 ? x : Deal<false>::apply(x, group);
}

}  // namespace tessera::vocab_parallel
