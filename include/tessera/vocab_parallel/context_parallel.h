// tessera/vocab_parallel/context_parallel.h — sequences cut over the ranks of a context group.
//
// The cut is the load-balanced one: a sequence is made of 2 n pieces for n ranks, and rank r holds
// pieces r and 2 n - 1 - r. In a packed row every sequence is cut by itself. Lengths must be
// multiples of 2 n; nothing is dropped silently.

#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::vocab_parallel {

/// Returns the places of rank `rank`'s tokens in the whole row, int64, in the order it holds them.
///
/// `starts` are the starts of the sequences and the end of the last (a row that is not packed: 0
/// and its length). Not collective. Throws ValueError if a length is not a multiple of 2 `size`;
/// starts on a CUDA device are not looked at.
TESSERA_API at::Tensor places_of_context_rank(const at::Tensor& starts, std::int64_t total,
                                              int rank, int size);

/// Returns rank `rank`'s part of `x` along `dim`. Not collective. Throws as above.
TESSERA_API at::Tensor part_of_context_rank(const at::Tensor& x, int rank, int size,
                                            std::int64_t dim,
                                            const std::optional<at::Tensor>& starts = std::nullopt);

/// Returns the whole sequence from the ranks' parts, in its own order, the same on all ranks.
///
/// Collective over `group`. Differentiable any number of times; the gradients of all ranks are
/// added up before each takes its part: a loss that every rank computes from the whole must be
/// divided by the number of ranks.
TESSERA_API at::Tensor gather_context(const at::Tensor& x, const comm::Group& group,
                                      std::int64_t dim,
                                      const std::optional<at::Tensor>& starts = std::nullopt);

/// Returns this rank's window of the whole sequence, the r-th of equal ones, from its load-balanced
/// part. Collective, differentiable as gather_context.
TESSERA_API at::Tensor context_window(const at::Tensor& x, const comm::Group& group,
                                      std::int64_t dim);

/// Returns `x` ([batch, window, ...], consecutive windows in rank order) moved one place to the
/// left over the whole sequence: the last place of a window gets the first of the next rank's, that
/// of the last rank `fill`. Collective. Not differentiable.
TESSERA_API at::Tensor shift_next(const at::Tensor& x, const std::optional<comm::Group>& group,
                                  double fill);

/// Returns [tokens / ranks, columns * ranks] from [tokens, columns]: tokens are dealt out, and the
/// vocabulary comes together. Collective, differentiable any number of times;
/// `to_vocabulary_shards` is the way back. Throws ValueError if the ranks do not divide the tokens.
TESSERA_API at::Tensor to_token_shards(const at::Tensor& x, const comm::Group& group);
TESSERA_API at::Tensor to_vocabulary_shards(const at::Tensor& x, const comm::Group& group);

}  // namespace tessera::vocab_parallel
