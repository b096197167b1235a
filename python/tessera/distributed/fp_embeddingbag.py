"""Pooled lookups of tables that lie over the ranks of a group, of features that get weights first.

    sharder = FeatureProcessedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused_params))
    plan = construct_module_sharding_plan(module, {"users": row_wise(), "items": table_wise(0)}, sharder)
    sharded = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD))
    pooled = sharded(features)  # this rank's own samples; all ranks call it

>>> FeatureProcessedEmbeddingBagCollectionSharder().module_type.__name__
'FeatureProcessedEmbeddingBagCollection'
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tessera.distributed._sharded_tables import CollectionSharder
from tessera.distributed.embedding_types import ShardedEmbeddingModule
from tessera.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from tessera.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from tessera.distributed.utils import append_prefix, init_parameters
from tessera.modules.embedding_configs import EmbeddingBagConfig
from tessera.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
    _longest_bags,
    _process,
)
from tessera.optim.keyed import CombinedOptimizer
from tessera.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

__all__ = [
    "FeatureProcessedEmbeddingBagCollectionSharder",
    "ShardedFeatureProcessedEmbeddingBagCollection",
]

_BAGS = "_embedding_bag_collection"


@dataclass
class _Context(EmbeddingBagCollectionContext):
    """Keep the features until the rows are read: then they are processed."""

    features: KeyedJaggedTensor | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the tensors until `stream` has used them."""
        super().record_stream(stream)
        if self.features is not None:
            self.features.record_stream(stream)


class ShardedFeatureProcessedEmbeddingBagCollection(
    ShardedEmbeddingModule[list, list, KeyedTensor, EmbeddingBagCollectionContext]
):
    """Process this rank's features, and pool rows of tables that lie over the ranks as a plan says.

    The processors are whole on every rank. They run when the rows are read, so that ids sent ahead meet
    the parameters of their turn; their weights travel then, and the gradients of the weights travel back.
    Gradients of the processors are those of the rank's own loss: DistributedModelParallel averages them.
    A bag longer than its position weights is the same ValueError on all ranks.

    Parameters are `_embedding_bag_collection.embedding_bags.<table>.weight` and, whole, those under
    `_feature_processors`. Everything else is as for `ShardedEmbeddingBagCollection`.
    """

    def __init__(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        ebc_sharder: EmbeddingBagCollectionSharder,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(ebc_sharder.qcomm_codecs_registry)
        processors = module._feature_processors
        init_parameters(processors, torch.device(device or "cpu"))
        self._embedding_bag_collection = ShardedEmbeddingBagCollection(
            module._embedding_bag_collection,
            table_name_to_parameter_sharding,
            env,
            ebc_sharder.fused_params,
            device,
            ebc_sharder.qcomm_codecs_registry,
            weights_come_later=True,
            longest_bags=_longest_bags(processors),
        )
        self._feature_processors = processors

    # ---- one batch ----

    def create_context(self) -> EmbeddingBagCollectionContext:
        """Return the context of one batch."""
        return _Context()

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[list]]:
        """Start sending the ids. Collective."""
        ctx.features = features
        return self._embedding_bag_collection.input_dist(ctx, features)

    def compute(self, ctx: EmbeddingBagCollectionContext, dist_input: list) -> list:
        """Process the features, send their weights, and read the rows. Collective."""
        weights = _process(self._feature_processors, ctx.features).weights()
        return self._embedding_bag_collection.compute_weighted(dist_input, weights)

    def output_dist(self, ctx: EmbeddingBagCollectionContext, output: list) -> LazyAwaitable[KeyedTensor]:
        """Return the rows to come."""
        return self._embedding_bag_collection.output_dist(ctx, output)

    # ---- what others ask ----

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the tables."""
        return self._embedding_bag_collection.embedding_bag_configs()

    def is_weighted(self) -> bool:
        """Return True: processors give weights."""
        return True

    def gather_tables(self) -> dict[str, torch.Tensor]:
        """Return the whole tables, on every rank. Collective; for small models."""
        return self._embedding_bag_collection.gather_tables()

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """Return the optimizers of the tables whose rows are stepped here."""
        return CombinedOptimizer([(_BAGS, self._embedding_bag_collection.fused_optimizer)])

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the gradients of tables that accumulate them to this 2-norm over all ranks. Collective."""
        return self._embedding_bag_collection.clip_grad_norm(max_norm)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Return the names of the tables' parameters; data parallelism averages the processors'."""
        yield from self._embedding_bag_collection.sharded_parameter_names(append_prefix(prefix, _BAGS))

    def _replica_parameters(self) -> set[str]:
        return {append_prefix(_BAGS, name) for name in self._embedding_bag_collection._replica_parameters()}

    def _tables_for_others(self) -> list[str]:
        return self._embedding_bag_collection._tables_for_others()

    def _empty_pass(self) -> torch.Tensor:
        # The processors stay out of it: their gradients are answered by data parallelism.
        return self._embedding_bag_collection._empty_pass()

    @property
    def unsharded_module_type(self) -> type[FeatureProcessedEmbeddingBagCollection]:
        """Return FeatureProcessedEmbeddingBagCollection."""
        return FeatureProcessedEmbeddingBagCollection


class FeatureProcessedEmbeddingBagCollectionSharder(
    CollectionSharder[FeatureProcessedEmbeddingBagCollection]
):
    """Shard FeatureProcessedEmbeddingBagCollection; `ebc_sharder` says how its tables are stepped."""

    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry=qcomm_codecs_registry)
        self._ebc_sharder = ebc_sharder or EmbeddingBagCollectionSharder(
            qcomm_codecs_registry=qcomm_codecs_registry
        )

    def _make(self, module, params, env, device) -> ShardedFeatureProcessedEmbeddingBagCollection:
        return ShardedFeatureProcessedEmbeddingBagCollection(module, params, self._ebc_sharder, env, device)

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """Return how rows are stepped."""
        return self._ebc_sharder.fused_params

    def shardable_parameters(self, module: FeatureProcessedEmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """Return the tables by name."""
        return self._ebc_sharder.shardable_parameters(module._embedding_bag_collection)

    @property
    def module_type(self) -> type[FeatureProcessedEmbeddingBagCollection]:
        """Return FeatureProcessedEmbeddingBagCollection."""
        return FeatureProcessedEmbeddingBagCollection
