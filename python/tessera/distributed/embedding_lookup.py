"""Rows of the parts of tables that lie on this rank.

>>> x = torch.ones(2, requires_grad=True)
>>> CommOpGradientScaling.apply(x, 4).sum().backward()
>>> x.grad.tolist()
[4.0, 4.0]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed import ProcessGroup

from tessera import _C
from tessera.distributed._infer_lookups import (
    InferGroupedEmbeddingsLookup,
    InferGroupedLookupMixin,
    InferGroupedPooledEmbeddingsLookup,
    MetaInferGroupedEmbeddingsLookup,
    MetaInferGroupedPooledEmbeddingsLookup,
)
from tessera.distributed.comm_ops import get_gradient_division
from tessera.distributed.embedding_types import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from tessera.distributed.utils import _to_bounds_check, _to_options
from tessera.modules.embedding_configs import PoolingType, data_type_to_dtype
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "CommOpGradientScaling",
    "GroupedEmbeddingsLookup",
    "GroupedPooledEmbeddingsLookup",
    "InferGroupedEmbeddingsLookup",
    "InferGroupedLookupMixin",
    "InferGroupedPooledEmbeddingsLookup",
    "MetaInferGroupedEmbeddingsLookup",
    "MetaInferGroupedPooledEmbeddingsLookup",
    "embeddings_cat_empty_rank_handle",
    "fx_wrap_tensor_view2d",
]

_engine = _C.embedding


def fx_wrap_tensor_view2d(x: torch.Tensor, dim0: int, dim1: int) -> torch.Tensor:
    """Return a view of `dim0` rows and `dim1` columns."""
    return x.view(dim0, dim1)


def embeddings_cat_empty_rank_handle(
    embeddings: list[torch.Tensor], dummy_embs_tensor: torch.Tensor, dim: int = 0
) -> torch.Tensor:
    """Return the tensors side by side along `dim`, or the dummy if there are none.

    >>> embeddings_cat_empty_rank_handle([], torch.empty(0)).shape
    torch.Size([0])
    """
    if not embeddings:
        return dummy_embs_tensor
    return embeddings[0] if len(embeddings) == 1 else torch.cat(embeddings, dim=dim)


class CommOpGradientScaling(torch.autograd.Function):
    """Do nothing, and multiply the gradient by a number.

    Gradients of exchanges are divided by the number of ranks. Weights of ids, which data parallelism
    averages later, must not be divided twice: their gradient is multiplied here.
    """

    @staticmethod
    def forward(ctx, input_tensor: torch.Tensor, scale_gradient_factor: int) -> torch.Tensor:
        """Return the tensor."""
        ctx.scale_gradient_factor = scale_gradient_factor
        return input_tensor.view_as(input_tensor)

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient times the factor."""
        return grad_output * ctx.scale_gradient_factor, None


class _Part(nn.Module):
    """Own the rows of one table's part."""

    def __init__(self, table: ShardedEmbeddingTable, device: torch.device) -> None:
        super().__init__()
        shape = (table.local_rows, table.local_cols)
        dtype = data_type_to_dtype(table.data_type)
        is_meta = device.type == "meta"
        rows = torch.empty(shape, dtype=dtype, device=device) if is_meta else None
        self.weight = nn.Parameter(rows if is_meta else _engine.empty_rows(*shape, dtype, device))
        if not is_meta:
            with torch.no_grad():
                table.init_fn(self.weight)


class _Group(nn.Module):
    """Look up the tables of one group in one call."""

    def __init__(self, config: GroupedEmbeddingConfig, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.parts = nn.ModuleList([_Part(table, device) for table in config.embedding_tables])
        self._batch: _C.embedding.TableBatch | None = None

    def batch(self) -> _C.embedding.TableBatch:
        """Return the engine's lookup, made at the first call."""
        if self._batch is None:
            self._batch = self._make_batch()
        return self._batch

    def _make_batch(self) -> _C.embedding.TableBatch:
        params = self.config.fused_params or {}
        options = _engine.TableBatchOptions()
        options.bounds_check = _to_bounds_check(params.get("bounds_check_mode"))
        if self.config.compute_kernel != EmbeddingComputeKernel.DENSE:
            options.gradients = _engine.GradientForm.FUSED
            options.optimizer = _to_options(params)
        pooling = PoolingType.SUM if self.config.pooling == PoolingType.NONE else self.config.pooling
        kind = getattr(_engine.PoolingType, pooling.value)
        tables = self.config.embedding_tables
        # Several parts of a table are tables of their own: "t", "t#1" and so on.
        counts = [sum(other.name == table.name for other in tables[:k]) for k, table in enumerate(tables)]
        names = [f"{t.name}#{count}" if count else t.name for t, count in zip(tables, counts, strict=True)]
        named = [(name, part.weight, kind) for name, part in zip(names, self.parts, strict=True)]
        features = [(name, place) for place, table in enumerate(tables) for name in table.feature_names]
        return _engine.TableBatch(named, features, options)


class _Lookup(BaseEmbeddingLookup[KeyedJaggedTensor, torch.Tensor]):
    """What pooled and unpooled lookups share: groups of tables, named `<table>.weight`."""

    def __init__(self, grouped_configs: list[GroupedEmbeddingConfig], device: torch.device | None) -> None:
        super().__init__()
        self.grouped_configs = grouped_configs
        self._device = torch.device(device or "cpu")
        self._groups = nn.ModuleList([_Group(config, self._device) for config in grouped_configs])
        self._feature_splits = [config.num_features() for config in grouped_configs]

    def _parts(self) -> Iterator[tuple[str, nn.Parameter]]:
        seen: dict[str, int] = {}
        for group in self._groups:
            for table, part in zip(group.config.embedding_tables, group.parts, strict=True):
                count = seen.get(table.name, 0)
                seen[table.name] = count + 1
                yield f"{table.name}.weight" + (f"_{count}" if count else ""), part.weight

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parts by name: `<table>.weight`, further ones of a table `weight_1` and so on."""
        for name, weight in self._parts():
            yield f"{prefix}.{name}" if prefix else name, weight

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parts by table, one entry for each."""
        for group in self._groups:
            for table, part in zip(group.config.embedding_tables, group.parts, strict=True):
                yield table.name, part.weight

    def state_dict(self, destination=None, prefix: str = "", keep_vars: bool = False) -> dict:
        """Return the parts by name."""
        destination = {} if destination is None else destination
        for name, weight in self._parts():
            destination[prefix + name] = weight if keep_vars else weight.detach()
        return destination

    def load_state_dict(self, state_dict, strict: bool = True):
        """Copy parts of the same names and shapes; return what is missing and what is too much."""
        own = dict(self._parts())
        for name, weight in own.items():
            if name not in state_dict:
                continue
            if state_dict[name].shape != weight.shape:
                raise ValueError(
                    f"sharding.lookup: {name!r} is {list(state_dict[name].shape)} in the state and "
                    f"{list(weight.shape)} here."
                )
            with torch.no_grad():
                weight.copy_(state_dict[name])
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own]
        if strict and (missing or unexpected):
            raise RuntimeError(f"sharding.lookup: missing {missing}, unexpected {unexpected}.")
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def prefetch(
        self, sparse_features: KeyedJaggedTensor, forward_stream: torch.Stream | None = None
    ) -> None:
        """Do nothing: rows lie in the memory of their device."""

    def flush(self) -> None:
        """Do nothing: there is no cache to write back."""

    def purge(self) -> None:
        """Do nothing: there is no cache to empty."""


def _batch_sizes(features: KeyedJaggedTensor) -> list[int]:
    return features.stride_per_key() if features.variable_stride_per_key() else []


class GroupedEmbeddingsLookup(_Lookup):
    """Look up the row of every id; the result is flat: group, table, feature, sample, id, column."""

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        pg: ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(grouped_configs, device)

    def forward(self, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Return the rows, flat."""
        rows = []
        for group, features in zip(self._groups, sparse_features.split(self._feature_splits), strict=True):
            ids, offsets = features.values(), features.offsets()
            rows.append(group.batch().sequence(ids, offsets, None, _batch_sizes(features)))
        dummy = torch.empty(0, device=self._device, requires_grad=True)
        return embeddings_cat_empty_rank_handle(rows, dummy)


class GroupedPooledEmbeddingsLookup(_Lookup):
    """Pool the rows of every bag: [batch, columns of all groups], or flat if batches vary.

    Variable batches are flat and ordered by rank, group, feature, sample, column, as
    `variable_batch_alltoall_pooled` wants them. `scale_weight_gradients` keeps the gradients of weights
    from being divided by the ranks of `pg`.
    """

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        device: torch.device | None = None,
        pg: ProcessGroup | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
        scale_weight_gradients: bool = True,
    ) -> None:
        super().__init__(grouped_configs, device)
        self._feature_processor = feature_processor
        scales = scale_weight_gradients and pg is not None and get_gradient_division()
        self._scale_gradient_factor = pg.size() if scales else 1

    def _weights(self, config: GroupedEmbeddingConfig, features: KeyedJaggedTensor) -> torch.Tensor | None:
        if not config.is_weighted and not config.has_feature_processor:
            return None
        weights = features.weights()
        return CommOpGradientScaling.apply(weights, self._scale_gradient_factor)

    def forward(self, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Return the pooled rows."""
        is_variable = sparse_features.variable_stride_per_key()
        pooled = []
        for group, features in zip(self._groups, sparse_features.split(self._feature_splits), strict=True):
            if group.config.has_feature_processor and self._feature_processor is not None:
                features = self._feature_processor(features)
            weights = self._weights(group.config, features)
            ids, offsets = features.values(), features.offsets()
            pooled.append(group.batch().pooled(ids, offsets, weights, _batch_sizes(features)))
        if not is_variable or not pooled:
            shape = (0,) if is_variable else (sparse_features.stride(), 0)
            dummy = torch.empty(shape, device=self._device, requires_grad=True)
            return embeddings_cat_empty_rank_handle(pooled, dummy, dim=1)
        return self._by_rank(torch.cat(pooled), sparse_features.stride_per_key_per_rank())

    def _by_rank(self, flat: torch.Tensor, strides: list[list[int]]) -> torch.Tensor:
        """Order (group, feature, rank) by rank first."""
        dims = [dim for config in self.grouped_configs for dim in config.embedding_dims()]
        sizes = [stride * dim for ranks, dim in zip(strides, dims, strict=True) for stride in ranks]
        num_ranks = len(strides[0])
        parts = flat.split(sizes)
        return torch.cat([part for rank in range(num_ranks) for part in parts[rank::num_ranks]])
