"""Pooled rows of sharded tables on their way home."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from tessera import _C
from tessera.distributed.types import Awaitable, LazyAwaitable
from tessera.sparse._keyed import kt_of
from tessera.sparse.jagged_tensor import KeyedTensor


def construct_output_kt(
    embeddings: list[torch.Tensor], embedding_names: list[str], embedding_dims: list[int]
) -> KeyedTensor:
    """Return the outputs of several shardings side by side, under their names.

    >>> construct_output_kt([torch.ones(2, 1), torch.zeros(2, 2)], ["a", "b"], [1, 2])["b"].shape
    torch.Size([2, 2])
    """
    values = embeddings[0] if len(embeddings) == 1 else torch.cat(embeddings, dim=1)
    return KeyedTensor(embedding_names, embedding_dims, values)


class EmbeddingBagCollectionAwaitable(LazyAwaitable[KeyedTensor]):
    """Hold the pooled rows of all tables on their way home."""

    def __init__(
        self, pending: Sequence[_C.sharding.PendingPooled], names: Sequence[Mapping[str, str]]
    ) -> None:
        super().__init__()
        self._pending = pending
        self._names = names

    def _wait_impl(self) -> KeyedTensor:
        parts = [kt_of(pending.wait()) for pending in self._pending]
        if len(parts) == 1:
            return parts[0]
        keys = [names[key] for names, part in zip(self._names, parts, strict=True) for key in part.keys()]  # noqa: SIM118
        dims = [dim for part in parts for dim in part.length_per_key()]
        return construct_output_kt([part.values() for part in parts], keys, dims)


class VariableBatchEmbeddingBagCollectionAwaitable(LazyAwaitable[KeyedTensor]):
    """Hold the pooled rows of variable batches on their way home.

    Each awaitable gives the rows of one sharding, flat: output, sample, column; together they have the
    outputs of `uncombined_embedding_names`, each with its own number of samples. `inverse_indices` say
    which of them every sample of the full batch reads; `permute_op` then combines the parts of outputs.
    """

    def __init__(
        self,
        awaitables: list[Awaitable[torch.Tensor]],
        inverse_indices: tuple[list[str], torch.Tensor],
        batch_size_per_feature_pre_a2a: list[int],
        uncombined_embedding_names: list[str],
        uncombined_embedding_dims: list[int],
        embedding_names: list[str],
        embedding_dims: list[int],
        permute_op: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._awaitables = awaitables
        self._inverse_indices = inverse_indices
        self._batches = batch_size_per_feature_pre_a2a
        self._parts = list(zip(uncombined_embedding_names, uncombined_embedding_dims, strict=True))
        self._names = embedding_names
        self._dims = embedding_dims
        self._permute_op = permute_op

    def _wait_impl(self) -> KeyedTensor:
        flat = torch.cat([awaitable.wait() for awaitable in self._awaitables])
        names, inverse = self._inverse_indices
        rows_of = {name: inverse[place] for place, name in enumerate(names)}
        sizes = [batch * dim for batch, (_, dim) in zip(self._batches, self._parts, strict=True)]
        columns = [
            rows.view(-1, dim).index_select(0, rows_of[name.split("@")[0]])
            for rows, (name, dim) in zip(flat.split(sizes), self._parts, strict=True)
        ]
        values = torch.cat(columns, dim=1)
        if self._permute_op is not None:
            values = self._permute_op(values)
        return KeyedTensor(self._names, self._dims, values)


class EmbeddingAwaitable(LazyAwaitable[torch.Tensor]):
    """Hold pooled rows on their way home."""

    def __init__(self, awaitable: Awaitable[KeyedTensor]) -> None:
        super().__init__()
        self._awaitable = awaitable

    def _wait_impl(self) -> torch.Tensor:
        return self._awaitable.wait().values()
