"""Any ids onto the rows of tables: managed collision.

>>> import torch
>>> from tessera.sparse.jagged_tensor import JaggedTensor
>>> module = MCHManagedCollisionModule(4, torch.device("cpu"), LFU_EvictionPolicy(), eviction_interval=1)
>>> batch = {"f": JaggedTensor(torch.tensor([10, 10, 11]), lengths=torch.tensor([2, 1]))}
>>> module(batch)["f"].values()
tensor([1, 1, 2])
>>> module.evict(), module.open_slots()
(tensor([1, 2]), tensor([1]))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tessera import _C
from tessera.modules._mc_base import (
    LARGEST,
    Features,
    ManagedCollisionModule,
    apply_mc_method_to_jt_dict,
    slots_with_ids,
    with_values,
)
from tessera.modules._mc_growing import GrowingManagedCollisionModule, prepare_states, undo_plans
from tessera.modules._mc_policies import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHEvictionPolicy,
    MCHEvictionPolicyMetadataInfo,
    average_threshold_filter,
    dynamic_threshold_filter,
    probabilistic_threshold_filter,
)
from tessera.modules.embedding_configs import BaseEmbeddingConfig
from tessera.modules.embedding_modules import TableDict
from tessera.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

__all__ = [
    "DistanceLFU_EvictionPolicy",
    "GrowingManagedCollisionModule",
    "LFU_EvictionPolicy",
    "LRU_EvictionPolicy",
    "MCHEvictionPolicy",
    "MCHEvictionPolicyMetadataInfo",
    "MCHManagedCollisionModule",
    "ManagedCollisionCollection",
    "ManagedCollisionModule",
    "apply_mc_method_to_jt_dict",
    "average_threshold_filter",
    "dynamic_threshold_filter",
    "probabilistic_threshold_filter",
]

_engine = _C.collision
_HISTORY_IDS = "_tessera_history_ids"
_HISTORY_ITER = "_tessera_history_iter"
_NUM_IDS = "_tessera_num_ids"


class MCHManagedCollisionModule(ManagedCollisionModule):
    """Give the best ids a row each, by a policy; all others share the last row.

    In train mode every call counts its ids; every `eviction_interval` calls, before the ids of that call
    are mapped, new ids may take the rows of worse ones. All of int64 are legal ids. With an
    `input_hash_size` and no `input_hash_func`, ids outside [0, input_hash_size) are a ValueError, or with
    `out_of_range="fold"` hashed into it.

    The buffers are the reference's. What they lack is saved beside them when there is some:
    `_tessera_history_ids` and `_tessera_history_iter`, the ids that wait for the next interval, and
    `_tessera_num_ids` if 2**63 - 1 is among the ids.
    """

    def __init__(
        self,
        zch_size: int,
        device: torch.device,
        eviction_policy: MCHEvictionPolicy,
        eviction_interval: int,
        input_hash_size: int = LARGEST,
        input_hash_func: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
        mch_size: int | None = None,
        mch_hash_func: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
        name: str | None = None,
        output_global_offset: int = 0,
        output_segments: list[int] | None = None,
        buckets: int = 1,
        *,
        out_of_range: str = "check",
    ) -> None:
        if mch_size is not None or mch_hash_func is not None:
            raise ValueError(
                "collision.mch: mch_size and mch_hash_func have no effect. "
                "Leave them out; ids without a row of their own share the last one."
            )
        if zch_size < 1 or eviction_interval < 1:
            raise AssertionError(
                f"collision.mch: zch_size {zch_size} and eviction_interval {eviction_interval} "
                "must be at least 1."
            )
        if out_of_range not in ("check", "fold"):
            raise ValueError(f"collision.mch: out_of_range is '{out_of_range}'; use 'check' or 'fold'.")
        bounds = [output_global_offset, output_global_offset + zch_size]
        super().__init__(device, output_segments or bounds)
        self._own_segments = self._output_segments_tensor.clone()
        self._name = name
        self._zch_size = zch_size
        self._eviction_policy = eviction_policy
        self._eviction_interval = eviction_interval
        self._input_hash_size = input_hash_size
        self._input_hash_func = input_hash_func
        self._output_global_offset = output_global_offset
        self._buckets = buckets
        self._out_of_range = out_of_range
        full = torch.full((zch_size,), LARGEST, dtype=torch.int64, device=self._device)
        self.register_buffer("_mch_sorted_raw_ids", full)
        rows = torch.arange(*bounds, dtype=torch.int64, device=self._device)
        self.register_buffer("_mch_remapped_ids_mapping", rows)
        for info in eviction_policy.metadata_info:
            if info.is_mch_metadata:
                self.register_buffer(f"_mch_{info.metadata_name}", torch.zeros_like(rows))
        self._unknown_row = output_global_offset + zch_size - 1
        self._num_ids = 0
        self._history: list[tuple[int, torch.Tensor, dict[str, torch.Tensor]]] = []
        self._evicted: torch.Tensor | None = None
        self._index: Any = None
        self._indexed: tuple[int, int, int] | None = None

    def _metadata(self) -> dict[str, torch.Tensor]:
        infos = self._eviction_policy.metadata_info
        return {i.metadata_name: getattr(self, f"_mch_{i.metadata_name}") for i in infos if i.is_mch_metadata}

    # ---- one batch ----

    def preprocess(self, features: Features) -> Features:
        """Return the ids hashed, if there is a function for it, or checked against their bound."""
        if self._input_hash_func is not None:
            hashed = self._input_hash_func
            return {
                name: with_values(feature, hashed(feature.values(), self._input_hash_size))
                for name, feature in features.items()
            }
        if self._input_hash_size == LARGEST:
            return features
        return {name: self._within_bounds(name, feature) for name, feature in features.items()}

    def _within_bounds(self, name: str, feature: JaggedTensor) -> JaggedTensor:
        values = feature.values()
        is_wrong = (values < 0) | (values >= self._input_hash_size)
        if not bool(is_wrong.any()):
            return feature
        if self._out_of_range == "fold":
            folded = _engine.hash_ids(values).to(values.device) % self._input_hash_size
            return with_values(feature, torch.where(is_wrong, folded, values))
        position = int(is_wrong.nonzero()[0])
        raise ValueError(
            f"collision.mch: id {int(values[position])} at position {position} of '{name}' is not within "
            f"0 to {self._input_hash_size - 1}. Leave input_hash_size out to allow all ids, or give "
            "out_of_range='fold'."
        )

    @torch.no_grad()
    def profile(self, features: Features) -> Features:
        """Count the ids in train mode, and every `eviction_interval` calls let new ones in."""
        if not self.training:
            return features
        self._current_iter_tensor += 1
        current = int(self._current_iter_tensor)
        for feature in features.values():
            self._remember(current, feature.values().to(torch.int64))
        if current % self._eviction_interval == 0:
            self._coalesce_history(current)
        return features

    def _remember(self, iteration: int, ids: torch.Tensor) -> None:
        if ids.numel() == 0:
            return
        infos = self._eviction_policy.metadata_info
        metadata = {i.metadata_name: torch.zeros_like(ids) for i in infos if i.is_history_metadata}
        self._eviction_policy.record_history_metadata(iteration, ids, metadata)
        self._history.append((iteration, ids.clone(), metadata))

    def _coalesce_history(self, current: int) -> None:
        history, self._history = self._history, []
        if not history:
            return
        policy = self._eviction_policy
        ids, inverse, counts = torch.unique(
            torch.cat([ids for _, ids, _ in history]), return_inverse=True, return_counts=True
        )
        mask = None
        if policy._threshold_filtering_func is not None:
            mask, _ = policy._threshold_filtering_func(counts)
        metadata = policy.coalesce_history_metadata(
            current,
            {name: torch.cat([part[name] for _, _, part in history]) for name in history[0][2]},
            counts,
            inverse,
            threshold_mask=mask,
        )
        if mask is not None:
            ids, counts = ids[mask], counts[mask]
        self._update_and_evict(current, ids, counts, metadata)

    def _update_and_evict(self, current, ids, counts, metadata) -> None:
        order = torch.argsort(counts, descending=True, stable=True)
        ids, counts = ids[order], counts[order]
        self._find()
        is_known, slots = _engine.mch_match(self._mch_sorted_raw_ids, self._num_ids, ids)
        kept = self._metadata()
        evicted, selected = self._eviction_policy.update_metadata_and_generate_eviction_scores(
            current, self._zch_size, order, counts, is_known, slots, kept, metadata
        )
        rows = self._mch_remapped_ids_mapping[evicted]
        self._evicted = rows if self._evicted is None else torch.unique(torch.cat([self._evicted, rows]))
        if evicted.numel() > 0:
            self._replace(list(kept.values()), evicted, ids[~is_known][selected])

    def _replace(self, kept: list[torch.Tensor], slots: torch.Tensor, ids: torch.Tensor) -> None:
        own = [self._mch_sorted_raw_ids, self._mch_remapped_ids_mapping, *kept]
        on_cpu = [tensor.cpu() for tensor in own]
        self._find()
        self._num_ids = self._index.replace(on_cpu[0], on_cpu[1], on_cpu[2:], self._num_ids, slots, ids)
        for tensor, changed in zip(own, on_cpu, strict=True):
            if changed.data_ptr() != tensor.data_ptr():
                tensor.copy_(changed)
        self._indexed = self._identity()

    def _identity(self) -> tuple:
        """Tell whether somebody else changed the buffers."""
        buffers = (self._mch_sorted_raw_ids, self._mch_remapped_ids_mapping)
        return (self._num_ids, *(part for b in buffers for part in (b.data_ptr(), b._version)))

    def _find(self) -> Any:
        if self._index is None or self._indexed != self._identity():
            ids = self._mch_sorted_raw_ids
            has_largest = self._num_ids == int((ids != LARGEST).sum()) + 1
            counts = [self._num_ids] if has_largest else None
            self._order_slots(slots_with_ids(ids, counts, [], self._output_global_offset))
            self._index = _engine.MchIndex()
            self._index.rebuild(
                self._mch_sorted_raw_ids.cpu(), self._mch_remapped_ids_mapping.cpu(), self._num_ids
            )
            self._indexed = self._identity()
        return self._index

    def remap(
        self,
        features: Features,
        mutate_miss_lengths: bool = True,
        write_weights: torch.Tensor | None = None,
    ) -> Features:
        """Return the rows in place of the ids; unknown ids get the last row."""
        index = self._find()
        return {
            name: with_values(feature, index.remap(feature.values(), self._unknown_row))
            for name, feature in features.items()
        }

    def evict(self) -> torch.Tensor | None:
        """Return the rows that got another id since the last call, to be reset; None if nobody looked."""
        evicted, self._evicted = self._evicted, None
        return evicted

    # ---- what others ask ----

    def output_size(self) -> int:
        """Return the number of rows."""
        return self._zch_size

    def input_size(self) -> int:
        """Return the bound of the ids."""
        return self._input_hash_size

    def buckets(self) -> int:
        """Return the number of equal parts that shards are made of."""
        return self._buckets

    def open_slots(self) -> torch.Tensor:
        """Return how many ids can still come without one going."""
        return torch.tensor([self._zch_size - 1 - self._num_ids], device=self._device)

    def reset_inference_mode(self) -> None:
        """Forget evictions that nobody has asked for."""
        self._evicted = None

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> MCHManagedCollisionModule:
        """Return an empty module for a range of the rows: a shard."""
        return type(self)(
            zch_size=output_id_range[1] - output_id_range[0],
            device=device or self._device,
            eviction_policy=self._eviction_policy,
            eviction_interval=self._eviction_interval,
            input_hash_size=self._input_hash_size,
            input_hash_func=self._input_hash_func,
            name=self._name,
            output_global_offset=output_id_range[0],
            output_segments=output_segments,
            buckets=len(output_segments) - 1,
            out_of_range=self._out_of_range,
        )

    # ---- state ----

    def validate_state(self) -> None:
        """Check that the rows are a union of the saved shards, and bring what was loaded into order."""
        begin, end = self._output_global_offset, self._output_global_offset + self._zch_size
        segments = self._output_segments_tensor.tolist()
        if begin not in segments or end not in segments:
            bounds = [bound for bound in segments if bound >= 0]
            raise AssertionError(
                f"collision.mch: rows {begin} to {end - 1} are not a union of the saved shards, whose bounds "
                f"are {bounds}."
            )
        self._output_segments_tensor.copy_(self._own_segments)
        bounds = [bound for bound in segments if bound >= 0]
        self._order_slots(slots_with_ids(self._mch_sorted_raw_ids, self._loaded_num_ids, bounds, begin))
        self._evicted = None
        self._find()

    @torch.no_grad()
    def _order_slots(self, is_id: torch.Tensor) -> None:
        """Bring the slots into order: those with ids by id, then the others."""
        num_ids = int(is_id.sum())
        order = torch.argsort(self._mch_sorted_raw_ids, stable=True)
        order = torch.cat([order[is_id[order]], order[~is_id[order]]])
        for tensor in (self._mch_sorted_raw_ids, self._mch_remapped_ids_mapping, *self._metadata().values()):
            tensor.copy_(tensor[order])
        # Every part had a last slot that is never given up; of these only the last is one here.
        for tensor in self._metadata().values():
            tensor[num_ids:-1] = 0
        self._num_ids = num_ids

    _loaded_num_ids: Sequence[int] | None = None

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._history:
            history = torch.cat([ids for _, ids, _ in self._history])
            iterations = [torch.full_like(ids, iteration) for iteration, ids, _ in self._history]
            destination[prefix + _HISTORY_IDS] = history
            destination[prefix + _HISTORY_ITER] = torch.cat(iterations)
        if self._num_ids > 0 and int(self._mch_sorted_raw_ids[self._num_ids - 1]) == LARGEST:
            destination[prefix + _NUM_IDS] = torch.tensor([self._num_ids])

    def _load_from_state_dict(self, state_dict, prefix, *args):
        ids = state_dict.get(prefix + _HISTORY_IDS)
        iterations = state_dict.get(prefix + _HISTORY_ITER)
        num_ids = state_dict.get(prefix + _NUM_IDS)
        own = {prefix + name for name in (_HISTORY_IDS, _HISTORY_ITER, _NUM_IDS)}
        known = {name: value for name, value in state_dict.items() if name not in own}
        super()._load_from_state_dict(known, prefix, *args)
        unexpected = args[3]
        unexpected[:] = [name for name in unexpected if name not in own]
        self._loaded_num_ids = None if num_ids is None else num_ids.flatten().tolist()
        self._history = []
        if ids is not None and iterations is not None:
            for iteration in iterations.unique().tolist():
                self._remember(iteration, ids[iterations == iteration].to(self._device))

    # The index is made anew by copies and unpickled modules.
    def __getstate__(self):
        state = self.__dict__.copy()
        state["_index"] = state["_indexed"] = None
        return state


def _prepare_growing(module: ManagedCollisionCollection, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Check the state of all growing tables before the first of them changes."""
    prepare_states(module._managed_collision_modules.items(), state, f"{prefix}_managed_collision_modules.")


class ManagedCollisionCollection(nn.Module):
    """Map the ids of many tables, each with its own module, by the name of the table.

    A feature of several tables is mapped for each: its keys in the result are `feature@table`.
    """

    def __init__(
        self,
        managed_collision_modules: dict[str, ManagedCollisionModule],
        embedding_configs: Sequence[BaseEmbeddingConfig],
        need_preprocess: bool = True,
    ) -> None:
        super().__init__()
        self._embedding_configs = embedding_configs
        self.need_preprocess = need_preprocess
        for config in embedding_configs:
            module = managed_collision_modules.get(config.name)
            if module is None:
                raise ValueError(f"Table {config.name} is not present in managed_collision_modules")
            if isinstance(module, GrowingManagedCollisionModule):
                if config.num_embeddings is not None:
                    raise AssertionError(
                        f"collision: table {config.name} has {config.num_embeddings} rows, but its ids grow. "
                        "Give it num_embeddings=None."
                    )
                module.begin(config.name)
            elif module.output_size() != config.num_embeddings:
                raise AssertionError(
                    f"max_output_id in managed collision module for {config.name} is "
                    f"{module.output_size()}; it must match {config.num_embeddings}"
                )
        self._managed_collision_modules = TableDict(managed_collision_modules)
        self._table_to_features = {c.name: list(c.feature_names or [c.name]) for c in embedding_configs}
        used = [feature for features in self._table_to_features.values() for feature in features]
        self._shared = {feature for feature in used if used.count(feature) > 1}
        self.register_load_state_dict_pre_hook(_prepare_growing)

    def embedding_configs(self) -> Sequence[BaseEmbeddingConfig]:
        """Return the configs of the tables."""
        return self._embedding_configs

    def table_to_number_buckets(self) -> dict[str, int]:
        """Return the number of buckets of every table."""
        return {name: module.buckets() for name, module in self._managed_collision_modules.items()}

    def features_of(self, table: str) -> list[str]:
        """Return the names that the features of a table have in the result."""
        return [f"{f}@{table}" if f in self._shared else f for f in self._table_to_features[table]]

    def _inputs(self, features: KeyedJaggedTensor) -> list[tuple[str, str, str]]:
        """Return table, feature and name in the result, checked."""
        keys = set(features.keys())
        wanted = []
        for table, own in self._table_to_features.items():
            for feature, name in zip(own, self.features_of(table), strict=True):
                if feature not in keys:
                    raise ValueError(
                        f"collision: there is no feature '{feature}', which table '{table}' needs, among "
                        f"the {len(keys)} keys of the batch."
                    )
                wanted.append((table, feature, name))
        return wanted

    def forward(
        self,
        features: KeyedJaggedTensor,
        mutate_miss_lengths: bool = True,
        *,
        make_room: Callable[[], None] | None = None,
    ) -> KeyedJaggedTensor:
        """Return the same bags with rows in place of ids, in the order of the tables.

        `make_room` is called when it is known how many rows tables that grow will have, before any id is
        kept; if it raises, nothing has changed.
        """
        wanted = self._inputs(features)
        keys = features.keys()
        arranged = features.permute([keys.index(feature) for _, feature, _ in wanted])
        parts = dict(zip([name for _, _, name in wanted], _features_of(arranged), strict=True))
        # One call for all features of a table: one iteration, one decision.
        together = {}
        for table in self._managed_collision_modules:
            if table in self._table_to_features:
                own = [parts[name] for name in self.features_of(table)]
                together[table] = JaggedTensor(
                    torch.cat([part.values() for part in own]),
                    lengths=torch.cat([part.lengths() for part in own]),
                )
        for table, rows in self._rows_of(together, mutate_miss_lengths, make_room).items():
            names = self.features_of(table)
            sizes = [parts[name].values().numel() for name in names]
            parts.update(zip(names, rows.split(sizes), strict=True))
        values = [parts[name] for _, _, name in wanted]
        return _renamed(arranged, [name for _, _, name in wanted], torch.cat(values), features)

    def _rows_of(
        self, together: Features, mutate_miss_lengths: bool, make_room: Callable[[], None] | None
    ) -> dict[str, torch.Tensor]:
        """Return the rows of every table's ids; tables that grow admit all of them, or none."""
        modules = {table: self._managed_collision_modules[table] for table in together}
        growing = {t: m for t, m in modules.items() if isinstance(m, GrowingManagedCollisionModule)}
        rows = {}
        try:
            for table, module in growing.items():
                module.plan({table: together[table]})
            if make_room is not None:
                make_room()
            for table in sorted(modules, key=lambda table: table in growing):  # what may fail yet first
                features = {table: together[table]}
                rows[table] = modules[table](features, mutate_miss_lengths)[table].values()
        except BaseException:
            undo_plans(growing.values())
            raise
        return rows

    def evict(self) -> dict[str, torch.Tensor | None]:
        """Return the rows of every table that got another id, to be reset."""
        return {name: module.evict() for name, module in self._managed_collision_modules.items()}

    def open_slots(self) -> dict[str, torch.Tensor]:
        """Return how many ids every table has room for."""
        return {name: module.open_slots() for name, module in self._managed_collision_modules.items()}


def _features_of(features: KeyedJaggedTensor) -> list[JaggedTensor]:
    """Return the features in order; two may have one name."""
    pieces = features.split([1] * len(features.keys()))
    return [JaggedTensor(piece.values(), lengths=piece.lengths()) for piece in pieces]


def _renamed(
    arranged: KeyedJaggedTensor, keys: list[str], values: torch.Tensor, original: KeyedJaggedTensor
) -> KeyedJaggedTensor:
    """Return the bags of `arranged` with other keys and values."""
    options = {}
    if arranged.variable_stride_per_key():
        options = {"stride_per_key_per_rank": arranged.stride_per_key_per_rank()}
    else:
        options = {"stride": arranged.stride()}
    inverse = original.inverse_indices_or_none()
    if inverse is not None:
        names, indices = inverse
        sources = [key.rpartition("@")[0] if key not in names and "@" in key else key for key in keys]
        options["inverse_indices"] = (list(keys), indices[[names.index(name) for name in sources]])
    return KeyedJaggedTensor(
        keys, values, weights=arranged.weights_or_none(), lengths=arranged.lengths(), **options
    )
