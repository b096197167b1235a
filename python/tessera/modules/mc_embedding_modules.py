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

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tessera import _C
from tessera.modules._mc_growing import prepare_states
from tessera.modules._mch_state import bounds_of, put_mch_state, take_mch_state
from tessera.modules.embedding_configs import BaseEmbeddingConfig
from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.modules.mc_modules import (
    GrowingManagedCollisionModule,
    ManagedCollisionCollection,
    MCHEvictionPolicy,
)
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


def _resized(values: torch.Tensor, rows: int, filling: float) -> torch.Tensor:
    """Return the first rows of a table, and further ones of one number."""
    if values.is_sparse:
        return torch.sparse_coo_tensor(values._indices(), values._values(), (rows, values.size(1)))
    columns = values.size(1) if values.dim() == 2 else 1
    new = _C.embedding.empty_rows(rows, columns, values.dtype, values.device)
    new = new if values.dim() == 2 else new.view(rows)
    kept = min(rows, values.size(0))
    new[:kept] = values[:kept]
    new[kept:] = filling
    return new


def _put_rows(tables: nn.ModuleDict, rows: dict[str, tuple[int, torch.Tensor, torch.Tensor | None]]) -> None:
    """Give tables these numbers of rows, weights and gradients."""
    for name, (count, values, gradient) in rows.items():
        weight = tables[name].weight
        tables[name].num_embeddings = count
        weight.grad = None  # of another shape
        # A result of an earlier call that somebody still holds keeps the node that adds gradients up, which
        # knows the old shape; torch makes a new one only for another type.
        weight.data = torch.empty(0, dtype=torch.float64, device=weight.device)
        weight.data = values
        weight.grad = gradient


@contextlib.contextmanager
def _clear_errors_of_memory(weights: dict[str, torch.Tensor], sizes: dict[str, int]) -> Iterator[None]:
    """Turn the allocator's error into one that says of what, and what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        wanted = {name: rows * weights[name].size(1) for name, rows in sizes.items()}
        named = ", ".join(f"{rows} rows of table '{name}'" for name, rows in sizes.items())
        size = sum(numbers * weights[name].element_size() for name, numbers in wanted.items())
        raise MemoryError(
            f"collision.growing: no memory for {named}, {size} bytes and the state of their optimizer beside "
            "them; nothing has changed. Set a capacity with an eviction, or use more ranks."
        ) from error


_OPTIMIZER = "_tessera_optimizer."


def _weight_key(module: BaseManagedCollisionEmbeddingCollection, prefix: str, table: str) -> str:
    return f"{prefix}_embedding_module.{module._TABLES}.{table}.weight"


def _ids_prefix(prefix: str, table: str) -> str:
    return f"{prefix}_managed_collision_collection._managed_collision_modules.{table}."


def _compact_state(module, state, prefix, _) -> None:
    """Leave, of a growing table, the rows in use, in the order of the ids; add the optimizer's state."""
    growing = module._growing()
    if not growing:
        return
    optimizer = module._embedding_module.fused_optimizer()
    kept = {} if optimizer is None else optimizer.state_dict()
    for config, ids in growing:
        rows = torch.cat([torch.zeros(1, dtype=torch.int64), ids.export_ids()["rows"]])
        key = _weight_key(module, prefix, config.name)
        state[key] = state[key].detach()[rows]
        for name in ("momentum1", "momentum2"):
            value = kept.get(f"{config.name}.{name}")
            if value is not None:
                state[f"{prefix}{_OPTIMIZER}{config.name}.{name}"] = value[rows]
    if "step" in kept:
        state[f"{prefix}{_OPTIMIZER}step"] = kept["step"]


def _check_shape(table: str, what: str, value: torch.Tensor, shape: Sequence[int]) -> None:
    if list(value.shape) != list(shape):
        raise ValueError(
            f"collision.growing: {what} of table '{table}' has the shape {list(value.shape)}; for its ids it "
            f"must be {list(shape)}. Load all that was saved of it, into a table of as many columns."
        )


def _check_growing(module, state, prefix) -> None:
    """Check the state of all growing tables before the first of them changes."""
    growing = module._growing()
    counts = prepare_states(
        [(config.name, ids) for config, ids in growing],
        state,
        f"{prefix}_managed_collision_collection._managed_collision_modules.",
    )
    try:
        optimizer = module._embedding_module.fused_optimizer()
        kept = {} if optimizer is None else optimizer.state_dict()
        start = prefix + _OPTIMIZER
        for config, _ in growing:
            weight, count = state.get(_weight_key(module, prefix, config.name)), counts[config.name]
            if (weight is None) != (count is None):
                there, missing = ("ids", "rows") if weight is None else ("rows", "ids")
                raise ValueError(
                    f"collision.growing: the state has {there} of table '{config.name}', but no {missing}. "
                    "Load all that was saved of it."
                )
            if weight is None:
                continue
            rows = count + 1
            _check_shape(config.name, "the weight", weight, [rows, config.embedding_dim])
            for name in ("momentum1", "momentum2"):
                own, saved = kept.get(f"{config.name}.{name}"), state.get(f"{start}{config.name}.{name}")
                if own is None:
                    continue
                if saved is None:
                    module._begin_optimizer_state(state, prefix, config.name, rows)
                    break
                _check_shape(config.name, name, saved, [rows, *own.shape[1:]])
        if optimizer is not None:
            for name in state:
                if name.startswith(start) and name.removeprefix(start) not in kept:
                    raise ValueError(
                        f"collision.growing: '{name}' is nothing that the optimizer of these tables keeps. "
                        "Load into tables with the optimizer that was saved."
                    )
    except BaseException:
        for _, ids in growing:
            ids.forget_prepared()
        raise


def _make_room(module, state, prefix, *_) -> None:
    """Give growing tables as many rows as the state has, which may be of tables that do not grow."""
    for config, ids in module._growing():
        weight_key = _weight_key(module, prefix, config.name)
        if take_mch_state(state, _ids_prefix(prefix, config.name), weight_key, ids):
            module._begin_optimizer_state(state, prefix, config.name, state[weight_key].size(0))
    _check_growing(module, state, prefix)
    module._loaded_optimizer = {
        name: state.pop(name) for name in list(state) if name.startswith(prefix + _OPTIMIZER)
    }
    module._loaded_prefix = prefix + _OPTIMIZER
    weights = {
        config.name: state.get(_weight_key(module, prefix, config.name)) for config, _ in module._growing()
    }
    sizes = {name: weight.size(0) for name, weight in weights.items() if weight is not None}
    try:
        if sizes:
            module._resize(sizes)
    except BaseException:
        for _, ids in module._growing():
            ids.forget_prepared()
        raise


def _take_optimizer_state(module, _) -> None:
    loaded, prefix = module._loaded_optimizer, module._loaded_prefix
    optimizer = module._embedding_module.fused_optimizer() if loaded else None
    if optimizer is None:
        return
    state = optimizer.state_dict()
    state.update({name.removeprefix(prefix): value for name, value in loaded.items()})
    optimizer.load_state_dict(state)


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
        self.register_state_dict_post_hook(_compact_state)
        self.register_load_state_dict_pre_hook(_make_room)
        self.register_load_state_dict_post_hook(_take_optimizer_state)

    def _growing(self) -> list[tuple[BaseEmbeddingConfig, GrowingManagedCollisionModule]]:
        modules = self._managed_collision_collection._managed_collision_modules
        pairs = [(config, modules[config.name]) for config in self._embedding_module._configs]
        return [(config, ids) for config, ids in pairs if isinstance(ids, GrowingManagedCollisionModule)]

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

    _TABLES: str

    def _tables(self) -> nn.ModuleDict:
        return getattr(self._embedding_module, self._TABLES)

    def reset_evicted(self) -> dict[str, torch.Tensor | None]:
        """Reset the rows that got another id, and return them; growing tables get the rows they need."""
        evicted = self._managed_collision_collection.evict()
        self._fill_growing()
        if not any(rows is not None and rows.numel() > 0 for rows in evicted.values()):
            return evicted
        optimizer = self._embedding_module.fused_optimizer()
        state = {} if optimizer is None else optimizer.state_dict()
        tables = self._tables()
        for config in self._embedding_module._configs:
            rows = evicted.get(config.name)
            if rows is None or config.num_embeddings is None:
                continue
            weight = tables[config.name].weight
            reset_rows(weight, rows, config.init_fn, self._allow_in_place_embed_weight_update)
            if optimizer is not None:
                reset_state(state, config.name, rows, optimizer.options.initial_accumulator)
        return evicted

    def _make_room(self) -> None:
        """Give growing tables the rows that their ids, or those of a batch that is planned, need."""
        tables = self._tables()
        sizes = {config.name: ids.num_table_rows() for config, ids in self._growing()}
        too_small = {name: rows for name, rows in sizes.items() if rows > tables[name].weight.size(0)}
        if too_small:
            # Half as much again, so that all the copying together is in proportion to the table.
            self._resize({name: max(rows, 1024, rows + rows // 2) for name, rows in too_small.items()})

    def _fill_growing(self) -> None:
        """Make room for the rows of growing tables, and give new rows their first values."""
        self._make_room()
        tables = self._tables()
        for config, ids in self._growing():
            new_ids, rows = ids.fresh_rows()
            weight = tables[config.name].weight
            is_zero = ids._default == "zero"
            if new_ids.numel() == 0 and not is_zero:
                continue
            values = ids.first_values(new_ids, config.embedding_dim, *bounds_of(config))
            with torch.no_grad():
                weight.data[rows.to(weight.device)] = values.to(weight.device, weight.dtype)
                if is_zero:
                    weight.data[0] = 0
            optimizer = self._embedding_module.fused_optimizer()
            if optimizer is not None:
                start = optimizer.options.initial_accumulator
                reset_state(optimizer.state_dict(), config.name, rows, start)
            ids.forget_fresh_rows()

    def _resize(self, sizes: dict[str, int]) -> None:
        """Give tables another number of rows; those there are keep weights, gradients and state.

        All tables of `sizes` or, where there is no memory for one, none.
        """
        module, tables = self._embedding_module, self._tables()
        old = module.fused_optimizer()
        weights = {name: tables[name].weight for name in sizes}
        before = {n: (tables[n].num_embeddings, w.data, w.grad) for n, w in weights.items()}
        with _clear_errors_of_memory(weights, sizes):
            after = {
                name: (
                    sizes[name],
                    _resized(weight.data, sizes[name], 0.0),
                    None if weight.grad is None else _resized(weight.grad, sizes[name], 0.0),
                )
                for name, weight in weights.items()
            }
            try:
                _put_rows(tables, after)
                # Of the new tables, with a state that begins; the old one is of no use any more.
                optimizer = module.fused_optimizer()
            except BaseException:
                _put_rows(tables, before)
                raise
        if optimizer is None:
            return
        state, new = dict(old.state_dict()), optimizer.state_dict()
        for name, value in new.items():
            if name.rpartition(".")[0] in sizes:
                kept = min(value.size(0), state[name].size(0))
                value[:kept] = state[name][:kept]
                state[name] = value
        optimizer.load_state_dict(state)
        optimizer.set_learning_rate(old.options.learning_rate)

    def _begin_optimizer_state(self, state: dict[str, Any], prefix: str, table: str, rows: int) -> None:
        """Add what a fused optimizer begins with to a state that has weights alone."""
        optimizer = self._embedding_module.fused_optimizer()
        for name in ("momentum1", "momentum2"):
            kept = None if optimizer is None else optimizer.state_dict().get(f"{table}.{name}")
            if kept is not None:
                start = optimizer.options.initial_accumulator
                state[f"{prefix}{_OPTIMIZER}{table}.{name}"] = torch.full_like(kept[:1], start).expand(
                    rows, *kept.shape[1:]
                )

    def mch_state_dict(self, policy: MCHEvictionPolicy, prefix: str = "") -> dict[str, Any]:
        """Return the state that a collection with `MCHManagedCollisionModule`s of the policy loads.

        Tables that grow become tables of their capacity and one row more, for unknown ids; ids are sorted.
        The other way, a growing collection loads the state of such a one.
        """
        growing = {config.name for config, _ in self._growing()}
        own = {_ids_prefix(prefix, name) for name in growing}
        left_out = (*own, *(f"{prefix}{_OPTIMIZER}{name}." for name in growing), f"{prefix}{_OPTIMIZER}step")
        state = {n: v for n, v in self.state_dict(prefix=prefix).items() if not n.startswith(left_out)}
        metadata = [info.metadata_name for info in policy.metadata_info if info.is_mch_metadata]
        for config, ids in self._growing():
            weight = self._tables()[config.name].weight
            key = _weight_key(self, prefix, config.name)
            put_mch_state(state, _ids_prefix(prefix, config.name), key, config, ids, weight, metadata)
        return state

    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[KeyedTensor | dict[str, JaggedTensor], KeyedJaggedTensor | None]:
        """Return the rows of the ids, and the row numbers if they were asked for."""
        # Users' own collections have torchrec's two arguments.
        more = {"make_room": self._make_room} if self._growing() else {}
        mapped = self._managed_collision_collection(features, mutate_miss_lengths, **more)
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

    _TABLES = "embedding_bags"

    @property
    def _embedding_bag_collection(self) -> EmbeddingBagCollection:
        return self._embedding_module


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

    _TABLES = "embeddings"

    @property
    def _embedding_collection(self) -> EmbeddingCollection:
        return self._embedding_module
