"""Tables behind managed collision: any ids in, rows of their own out.

>>> import torch
>>> from tessera.modules.embedding_configs import EmbeddingBagConfig
>>> from tessera.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule
>>> from tessera.sparse.jagged_tensor import KeyedJaggedTensor
>>> tables = [EmbeddingBagConfig(4, 2, "t", feature_names=["f"], init_fn=torch.nn.init.ones_)]
>>> ids = MCHManagedCollisionModule(4, torch.device("cpu"), LFU_EvictionPolicy(), eviction_interval=1)
>>> module = ManagedCollisionEmbeddingBagCollection(
...     EmbeddingBagCollection(tables), ManagedCollisionCollection({"t": ids}, tables),
...     return_remapped_features=True)
>>> features = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([10, 10, 11]), torch.tensor([2, 1]))
>>> pooled, remapped = module(features)
>>> pooled["f"].tolist(), remapped["f"].values()
([[2.0, 2.0], [1.0, 1.0]], tensor([1, 1, 2]))
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.modules.mc_modules import ManagedCollisionCollection
from tessera.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = [
    "BaseManagedCollisionEmbeddingCollection",
    "ManagedCollisionEmbeddingBagCollection",
    "ManagedCollisionEmbeddingCollection",
]


def reset_rows(weight: torch.Tensor, rows: torch.Tensor, init_fn, in_place: bool) -> None:
    """Fill some rows of a table as `init_fn` fills a new table.

    With `in_place`, autograd does not see it: a backward pass of an earlier lookup still runs.
    """
    if rows.numel() == 0:
        return
    fresh = torch.empty((rows.numel(), weight.size(1)), dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        init_fn(fresh)
        (weight.data if in_place else weight)[rows.to(weight.device)] = fresh


def reset_state(state: dict[str, torch.Tensor], table: str, rows: torch.Tensor, value: float) -> None:
    """Give some rows of a table the state that a fused optimizer begins with."""
    for name in ("momentum1", "momentum2"):
        kept = state.get(f"{table}.{name}")
        if kept is not None and rows.numel() > 0:
            kept[rows.to(kept.device)] = value


class BaseManagedCollisionEmbeddingCollection(nn.Module):
    """What both collections do: map the ids, reset rows that got another id, look up.

    Rows are reset, with the state of a fused optimizer, before the lookup of the same call. An optimizer
    that steps the parameters from outside keeps its own state of the row.
    """

    def __init__(
        self,
        embedding_module: EmbeddingBagCollection | EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__()
        self._managed_collision_collection = managed_collision_collection
        self._return_remapped_features = return_remapped_features
        self._allow_in_place_embed_weight_update = allow_in_place_embed_weight_update
        self._embedding_module = embedding_module
        configs = embedding_module._configs
        if list(managed_collision_collection.embedding_configs()) != list(configs):
            ours = [config.name for config in configs]
            theirs = [config.name for config in managed_collision_collection.embedding_configs()]
            raise AssertionError(
                "collision: the embedding module and the managed collision collection must have the same "
                f"configs; they have {ours} and {theirs}."
            )
        self._name_features()

    def _name_features(self) -> None:
        """Make the lookup ask for the names that mapped features have, where tables share one."""
        module, ids = self._embedding_module, self._managed_collision_collection
        if not ids._shared:
            return
        configs = module._configs
        module._configs = [dataclasses.replace(c, feature_names=ids.features_of(c.name)) for c in configs]
        module._make_lookup()
        module._configs = configs

    def __setstate__(self, state):
        super().__setstate__(state)
        self._name_features()

    def _tables(self) -> nn.ModuleDict:
        raise NotImplementedError

    def reset_evicted(self) -> dict[str, torch.Tensor | None]:
        """Reset the rows that got another id, and return them."""
        evicted = self._managed_collision_collection.evict()
        if not any(rows is not None and rows.numel() > 0 for rows in evicted.values()):
            return evicted
        optimizer = self._embedding_module.fused_optimizer()
        state = {} if optimizer is None else optimizer.state_dict()
        tables = self._tables()
        for config in self._embedding_module._configs:
            rows = evicted.get(config.name)
            if rows is None:
                continue
            weight = tables[config.name].weight
            reset_rows(weight, rows, config.init_fn, self._allow_in_place_embed_weight_update)
            if optimizer is not None:
                reset_state(state, config.name, rows, optimizer.options.initial_accumulator)
        return evicted

    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[KeyedTensor | dict[str, JaggedTensor], KeyedJaggedTensor | None]:
        """Return the rows of the ids, and the row numbers if they were asked for."""
        mapped = self._managed_collision_collection(features, mutate_miss_lengths)
        self.reset_evicted()
        found = self._embedding_module(mapped)
        return found, mapped if self._return_remapped_features else None


class ManagedCollisionEmbeddingBagCollection(BaseManagedCollisionEmbeddingCollection):
    """Map ids, then pool the rows of an EmbeddingBagCollection."""

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            managed_collision_collection,
            return_remapped_features,
            allow_in_place_embed_weight_update,
        )

    @property
    def _embedding_bag_collection(self) -> EmbeddingBagCollection:
        return self._embedding_module

    def _tables(self) -> nn.ModuleDict:
        return self._embedding_module.embedding_bags


class ManagedCollisionEmbeddingCollection(BaseManagedCollisionEmbeddingCollection):
    """Map ids, then look up the rows of an EmbeddingCollection."""

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(
            embedding_collection,
            managed_collision_collection,
            return_remapped_features,
            allow_in_place_embed_weight_update,
        )

    @property
    def _embedding_collection(self) -> EmbeddingCollection:
        return self._embedding_module

    def _tables(self) -> nn.ModuleDict:
        return self._embedding_module.embeddings
