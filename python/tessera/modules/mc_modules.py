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

import abc
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tessera import _C
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
_LARGEST = torch.iinfo(torch.int64).max
_MOST_SHARDS = 1024

Features = dict[str, JaggedTensor]
Filter = Callable[[torch.Tensor], tuple[torch.Tensor, "float | torch.Tensor"]]


def apply_mc_method_to_jt_dict(mc_module: nn.Module, method: str, features_dict: Features) -> Features:
    """Return what the method of the module makes of the features, in the same order."""
    return getattr(mc_module, method)(features_dict)


@torch.no_grad()
def dynamic_threshold_filter(
    id_counts: torch.Tensor, threshold_skew_multiplier: float = 10.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which ids came more often than a multiple of the mean, and that threshold.

    >>> dynamic_threshold_filter(torch.tensor([1, 1, 40]), 2.0)
    (tensor([False, False,  True]), tensor(28.))
    """
    threshold = id_counts.sum() * (threshold_skew_multiplier / max(id_counts.numel(), 1))
    return id_counts > threshold, threshold


@torch.no_grad()
def average_threshold_filter(id_counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which ids came more often than the mean, and the mean.

    >>> average_threshold_filter(torch.tensor([1, 2, 6]))
    (tensor([False, False,  True]), tensor(3.))
    """
    threshold = id_counts.float().mean()
    return id_counts > threshold, threshold


@torch.no_grad()
def probabilistic_threshold_filter(
    id_counts: torch.Tensor, per_id_probability: float = 0.01
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a draw in which each sighting of an id counts with a probability, and the drawn numbers."""
    scores = 1 - torch.pow(torch.full_like(id_counts, 1 - per_id_probability, dtype=torch.float), id_counts)
    threshold = torch.rand(id_counts.size(), device=id_counts.device)
    return scores > threshold, threshold


def _with_values(feature: JaggedTensor, values: torch.Tensor) -> JaggedTensor:
    return JaggedTensor(
        values, lengths=feature.lengths(), offsets=feature.offsets(), weights=feature.weights_or_none()
    )


def _validate(module: nn.Module, _: object) -> None:
    module.validate_state()


class ManagedCollisionModule(nn.Module):
    """Map ids to rows of one table. A base class; `output_segments` are the bounds of its shards."""

    def __init__(
        self, device: torch.device, output_segments: list[int], skip_state_validation: bool = False
    ) -> None:
        super().__init__()
        self._device = torch.device(device)
        if skip_state_validation:
            return
        if len(output_segments) > _MOST_SHARDS + 1:
            raise AssertionError(
                f"ManagedCollisionModule limited to {_MOST_SHARDS} shards; {len(output_segments) - 1} given."
            )
        padding = [-1] * (_MOST_SHARDS + 1 - len(output_segments))
        segments = torch.tensor([*output_segments, *padding], dtype=torch.int64, device=self._device)
        self.register_buffer("_output_segments_tensor", segments)
        self.register_buffer("_current_iter_tensor", torch.zeros(1, dtype=torch.int64, device=self._device))
        self.register_load_state_dict_post_hook(_validate)

    @property
    def device(self) -> torch.device:
        """Return the device the module was made on."""
        return self._device

    @abc.abstractmethod
    def preprocess(self, features: Features) -> Features:
        """Return the features as `profile` and `remap` want them."""

    @abc.abstractmethod
    def profile(self, features: Features) -> Features:
        """Learn from the features in train mode; they are returned as they are."""

    @abc.abstractmethod
    def remap(
        self,
        features: Features,
        mutate_miss_lengths: bool = True,
        write_weights: torch.Tensor | None = None,
    ) -> Features:
        """Return the rows in place of the ids."""

    @abc.abstractmethod
    def evict(self) -> torch.Tensor | None:
        """Return the rows that got another id since the last call, to be reset; None if none did."""

    @abc.abstractmethod
    def output_size(self) -> int:
        """Return the number of rows."""

    @abc.abstractmethod
    def input_size(self) -> int:
        """Return the bound of the ids."""

    @abc.abstractmethod
    def buckets(self) -> int:
        """Return the number of equal parts that shards are made of."""

    @abc.abstractmethod
    def open_slots(self) -> torch.Tensor:
        """Return how many ids can still come without one going, as a tensor of one element."""

    @abc.abstractmethod
    def validate_state(self) -> None:
        """Check, and bring into order, what was loaded."""

    @abc.abstractmethod
    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> ManagedCollisionModule:
        """Return an empty module for a range of the rows: a shard."""

    def forward(self, features: Features, mutate_miss_lengths: bool = True) -> Features:
        """Return the rows in place of the ids; learn from them first, in train mode."""
        features = self.profile(self.preprocess(features))
        return self.remap(features, mutate_miss_lengths)


class MCHEvictionPolicyMetadataInfo(NamedTuple):
    """Name a tensor that a policy keeps: of the slots, of the history, or both."""

    metadata_name: str
    is_mch_metadata: bool
    is_history_metadata: bool


class MCHEvictionPolicy(abc.ABC):
    """Decide which ids have slots. `threshold_filtering_func` sees the counts of the ids first.

    It returns a mask, or the places, of those that may come, and a threshold.
    """

    def __init__(
        self,
        metadata_info: list[MCHEvictionPolicyMetadataInfo],
        threshold_filtering_func: Filter | None = None,
    ) -> None:
        self._metadata_info = metadata_info
        self._threshold_filtering_func = threshold_filtering_func

    @property
    def metadata_info(self) -> list[MCHEvictionPolicyMetadataInfo]:
        """Return what the policy keeps."""
        return self._metadata_info

    @abc.abstractmethod
    def record_history_metadata(
        self, current_iter: int, incoming_ids: torch.Tensor, history_metadata: dict[str, torch.Tensor]
    ) -> None:
        """Write what is to be remembered of the ids, one element for each."""

    @abc.abstractmethod
    def coalesce_history_metadata(
        self,
        current_iter: int,
        history_metadata: dict[str, torch.Tensor],
        unique_ids_counts: torch.Tensor,
        unique_inverse_mapping: torch.Tensor,
        additional_ids: torch.Tensor | None = None,
        threshold_mask: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return what is remembered of the different ids, of those in the mask."""

    @abc.abstractmethod
    def update_metadata_and_generate_eviction_scores(
        self,
        current_iter: int,
        mch_size: int,
        coalesced_history_argsort_mapping: torch.Tensor,
        coalesced_history_sorted_unique_ids_counts: torch.Tensor,
        coalesced_history_mch_matching_elements_mask: torch.Tensor,
        coalesced_history_mch_matching_indices: torch.Tensor,
        mch_metadata: dict[str, torch.Tensor],
        coalesced_history_metadata: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots whose ids go, and which of the new ids come, after the metadata is updated."""

    def _compute_selected_eviction_and_replacement_indices(
        self, pivot: int, eviction_scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _engine.mch_select(eviction_scores, pivot)


class _ScoredPolicy(MCHEvictionPolicy):
    """What the three policies share: keep counts or last iterations, and score by them."""

    _keeps_counts = False
    _keeps_iterations = False

    def __init__(self, threshold_filtering_func: Filter | None = None) -> None:
        info = []
        if self._keeps_counts:
            info.append(MCHEvictionPolicyMetadataInfo("counts", True, False))
        if self._keeps_iterations:
            info.append(MCHEvictionPolicyMetadataInfo("last_access_iter", True, True))
        super().__init__(info, threshold_filtering_func)

    def _scores(self, current_iter: int, metadata: dict[str, torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError

    def record_history_metadata(
        self, current_iter: int, incoming_ids: torch.Tensor, history_metadata: dict[str, torch.Tensor]
    ) -> None:
        """Write the iteration."""
        if self._keeps_iterations:
            history_metadata["last_access_iter"].fill_(current_iter)

    def coalesce_history_metadata(
        self,
        current_iter: int,
        history_metadata: dict[str, torch.Tensor],
        unique_ids_counts: torch.Tensor,
        unique_inverse_mapping: torch.Tensor,
        additional_ids: torch.Tensor | None = None,
        threshold_mask: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the newest iteration of every id."""
        if not self._keeps_iterations:
            return {}
        iterations = history_metadata["last_access_iter"]
        if additional_ids is not None:
            iterations = torch.cat([iterations, torch.full_like(additional_ids, current_iter)])
        newest = torch.zeros_like(unique_ids_counts).scatter_reduce_(
            0, unique_inverse_mapping, iterations, reduce="amax", include_self=False
        )
        return {"last_access_iter": newest if threshold_mask is None else newest[threshold_mask]}

    def update_metadata_and_generate_eviction_scores(
        self,
        current_iter: int,
        mch_size: int,
        coalesced_history_argsort_mapping: torch.Tensor,
        coalesced_history_sorted_unique_ids_counts: torch.Tensor,
        coalesced_history_mch_matching_elements_mask: torch.Tensor,
        coalesced_history_mch_matching_indices: torch.Tensor,
        mch_metadata: dict[str, torch.Tensor],
        coalesced_history_metadata: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count known ids, and let the best of all stay; the last slot is never given up."""
        is_known, slots = coalesced_history_mch_matching_elements_mask, coalesced_history_mch_matching_indices
        new, merged = {}, {}
        for name, kept in mch_metadata.items():
            if name == "counts":
                seen = coalesced_history_sorted_unique_ids_counts
                kept[slots] += seen[is_known]
                kept[mch_size - 1] = _LARGEST
            else:
                seen = coalesced_history_metadata[name][coalesced_history_argsort_mapping]
                kept[slots] = seen[is_known]
                kept[mch_size - 1] = current_iter
            new[name] = seen[~is_known]
            merged[name] = torch.cat([kept, new[name]])
        evicted, selected = self._compute_selected_eviction_and_replacement_indices(
            mch_size, self._scores(current_iter, merged)
        )
        for name, kept in mch_metadata.items():
            kept[evicted] = new[name][selected]
        return evicted, selected


class LFU_EvictionPolicy(_ScoredPolicy):
    """Keep the ids that came most often."""

    _keeps_counts = True

    def _scores(self, current_iter, metadata):
        return metadata["counts"]


class LRU_EvictionPolicy(_ScoredPolicy):
    """Keep the ids that came last."""

    _keeps_iterations = True

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__(threshold_filtering_func)
        self._decay_exponent = decay_exponent

    def _scores(self, current_iter, metadata):
        return -torch.pow(current_iter - metadata["last_access_iter"] + 1, self._decay_exponent)


class DistanceLFU_EvictionPolicy(_ScoredPolicy):
    """Keep the ids with the most sightings for each iteration since the last, to a power."""

    _keeps_counts = True
    _keeps_iterations = True

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: Filter | None = None) -> None:
        super().__init__(threshold_filtering_func)
        self._decay_exponent = decay_exponent

    def _scores(self, current_iter, metadata):
        distance = torch.pow(current_iter - metadata["last_access_iter"] + 1, self._decay_exponent)
        return metadata["counts"] / distance


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
        input_hash_size: int = _LARGEST,
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
        full = torch.full((zch_size,), _LARGEST, dtype=torch.int64, device=self._device)
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
                name: _with_values(feature, hashed(feature.values(), self._input_hash_size))
                for name, feature in features.items()
            }
        if self._input_hash_size == _LARGEST:
            return features
        return {name: self._within_bounds(name, feature) for name, feature in features.items()}

    def _within_bounds(self, name: str, feature: JaggedTensor) -> JaggedTensor:
        values = feature.values()
        is_wrong = (values < 0) | (values >= self._input_hash_size)
        if not bool(is_wrong.any()):
            return feature
        if self._out_of_range == "fold":
            folded = _engine.hash_ids(values).to(values.device) % self._input_hash_size
            return _with_values(feature, torch.where(is_wrong, folded, values))
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
            name: _with_values(feature, index.remap(feature.values(), self._unknown_row))
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
        is_id = self._mch_sorted_raw_ids != _LARGEST
        num_ids = int(is_id.sum())
        if self._loaded_num_ids > num_ids:  # 2**63 - 1 is one of the ids
            last = (~is_id).nonzero().flatten()[: self._loaded_num_ids - num_ids]
            is_id[last] = True
            num_ids = self._loaded_num_ids
        order = torch.argsort(self._mch_sorted_raw_ids, stable=True)
        order = torch.cat([order[is_id[order]], order[~is_id[order]]])
        for tensor in (self._mch_sorted_raw_ids, self._mch_remapped_ids_mapping, *self._metadata().values()):
            tensor.copy_(tensor[order])
        self._num_ids = num_ids
        self._evicted = None
        self._find()

    _loaded_num_ids = 0

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._history:
            history = torch.cat([ids for _, ids, _ in self._history])
            iterations = [torch.full_like(ids, iteration) for iteration, ids, _ in self._history]
            destination[prefix + _HISTORY_IDS] = history
            destination[prefix + _HISTORY_ITER] = torch.cat(iterations)
        if self._num_ids > 0 and int(self._mch_sorted_raw_ids[self._num_ids - 1]) == _LARGEST:
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
        self._loaded_num_ids = 0 if num_ids is None else int(num_ids)
        self._history = []
        if ids is not None and iterations is not None:
            for iteration in iterations.unique_consecutive().tolist():
                self._remember(iteration, ids[iterations == iteration].to(self._device))

    # The index is made anew by copies and unpickled modules.
    def __getstate__(self):
        state = self.__dict__.copy()
        state["_index"] = state["_indexed"] = None
        return state


def _admission(text: str, seed: int) -> _C.collision.Admission:
    """Read `always`, `freq:N` or `prob:P`."""
    admission = _engine.Admission()
    admission.seed = seed
    kind, _, number = text.partition(":")
    try:
        if kind == "freq":
            admission.kind, admission.sightings = _engine.AdmissionKind.FREQUENCY, int(number)
        elif kind == "prob":
            admission.kind, admission.probability = _engine.AdmissionKind.PROBABILITY, float(number)
        elif text != "always":
            raise ValueError
    except ValueError:
        raise ValueError(
            f"collision.growing: admission is '{text}'; use 'always', 'freq:N' or 'prob:P'."
        ) from None
    return admission


def _eviction(text: str, decay_exponent: float, interval: int) -> _C.collision.Eviction:
    """Read `none`, `lfu`, `lru`, `distance-lfu` or `ttl:N`."""
    eviction = _engine.Eviction()
    eviction.decay_exponent = decay_exponent
    eviction.interval = interval
    kinds = {
        "none": "NONE",
        "lfu": "LFU",
        "lru": "LRU",
        "distance-lfu": "DISTANCE_LFU",
        "ttl": "TIME_TO_LIVE",
    }
    kind, _, number = text.partition(":")
    if kind not in kinds or (kind == "ttl") != number.isdigit():
        raise ValueError(
            f"collision.growing: eviction is '{text}'; use 'none', 'lfu', 'lru', 'distance-lfu' or 'ttl:N'."
        )
    eviction.kind = getattr(_engine.EvictionKind, kinds[kind])
    if number:
        eviction.time_to_live = int(number)
    return eviction


class GrowingManagedCollisionModule(ManagedCollisionModule):
    """Give every id a row of its own; the table grows with them.

    `capacity` is the most ids, None for no limit; each of 1024 buckets of ids has its part of it, rounded
    up. `admission` says which unknown ids get a row: `always`, `freq:N` from the n-th sighting on, `prob:P`
    each sighting with a probability. `eviction` says which go when a bucket is full: `none` (then
    `when_full`: `error` or `refuse`), `lfu`, `lru`, `distance-lfu`, or `ttl:N`, those not seen for N calls.

    Row 0 is for ids without a row. `default` says what they read: `row`, a row that trains; `zero`;
    `init`, what their row would begin with. A row's first values depend on `seed`, the table's name and the
    id alone.

    >>> ids = GrowingManagedCollisionModule()
    >>> batch = {"t": JaggedTensor(torch.tensor([-5, 2**62, -5]), lengths=torch.tensor([3]))}
    >>> ids(batch)["t"].values(), len(ids)
    (tensor([1, 2, 1]), 2)
    """

    def __init__(
        self,
        capacity: int | None = None,
        device: torch.device | None = None,
        *,
        admission: str = "always",
        eviction: str = "none",
        default: str = "row",
        when_full: str = "error",
        decay_exponent: float = 1.0,
        eviction_interval: int = 1,
        protect: Sequence[int] = (),
        seed: int = 0,
        name: str = "",
    ) -> None:
        super().__init__(device or torch.device("cpu"), [], skip_state_validation=True)
        if capacity is not None and capacity < 1:
            raise ValueError(
                f"collision.growing: a capacity of {capacity} cannot be. Give at least 1, or None."
            )
        if default not in ("row", "zero", "init"):
            raise ValueError(f"collision.growing: default is '{default}'; use 'row', 'zero' or 'init'.")
        if when_full not in ("error", "refuse"):
            raise ValueError(f"collision.growing: when_full is '{when_full}'; use 'error' or 'refuse'.")
        self.register_buffer("_current_iter_tensor", torch.zeros(1, dtype=torch.int64))
        self.register_load_state_dict_post_hook(_validate)
        self._capacity = capacity
        self._default = default
        self._seed = seed
        self._settings = (admission, eviction, when_full, decay_exponent, eviction_interval, list(protect))
        self._evicted: list[torch.Tensor] = []
        self.begin(name)

    def begin(self, name: str) -> None:
        """Take the name of the table; before the first ids."""
        self._name = name
        # Tables of one seed begin with different rows.
        digest = hashlib.sha256(name.encode()).digest()
        self._row_seed = self._seed ^ int.from_bytes(digest[:8], "little") if name else self._seed
        self._ids = self._new_table()
        self._forget_changes()

    def _new_table(self) -> _C.collision.IdTable:
        admission, eviction, when_full, decay_exponent, interval, protect = self._settings
        options = _engine.IdTableOptions()
        options.name = self._name or "ids"
        options.capacity = self._capacity or 0
        options.admission = _admission(admission, self._seed)
        options.eviction = _eviction(eviction, decay_exponent, interval)
        options.refuse_when_full = when_full == "refuse"
        options.protect = protect
        return _engine.IdTable(options)

    def _forget_changes(self) -> None:
        nothing = torch.empty(0, dtype=torch.int64)
        self._fresh = (nothing, nothing)  # ids, and the rows to fill for them
        self._gone: list[torch.Tensor] = []
        self._num_scratch = 0

    # ---- one batch ----

    def preprocess(self, features: Features) -> Features:
        """Return the features as they are: all ids are legal."""
        return features

    def profile(self, features: Features) -> Features:
        """Return the features as they are: `remap` counts them."""
        return features

    @torch.no_grad()
    def remap(
        self,
        features: Features,
        mutate_miss_lengths: bool = True,
        write_weights: torch.Tensor | None = None,
    ) -> Features:
        """Return the rows in place of the ids; in train mode unknown ids may get one."""
        values = torch.cat([feature.values() for feature in features.values()]).cpu().to(torch.int64)
        self._num_scratch = 0
        if self.training:
            step = int(self._current_iter_tensor) + 1
            rows, changes = self._ids.admit(values, None, step)
            self._current_iter_tensor += 1
            self._take_changes(*changes)
        else:
            rows = self._ids.find(values)
        rows += 1
        if self._default == "init":
            self._add_scratch(values, rows)
        sizes = [feature.values().numel() for feature in features.values()]
        parts = rows.to(self._device).split(sizes)
        pairs = zip(features.items(), parts, strict=True)
        return {name: _with_values(feature, part) for (name, feature), part in pairs}

    def _take_changes(self, new_ids, new_rows, evicted_ids, evicted_rows, num_refused) -> None:
        self.num_refused += num_refused
        self.num_evicted += evicted_ids.numel()
        self.num_admitted += new_ids.numel()
        if evicted_ids.numel() > 0:
            self._gone.append(evicted_ids)
        ids, rows = self._fresh
        self._fresh = (torch.cat([ids, new_ids]), torch.cat([rows, new_rows + 1]))

    def _add_scratch(self, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Let unknown ids read rows behind all others, which hold what their own would begin with."""
        is_unknown = rows == 0
        if not bool(is_unknown.any()):
            return
        unknown, places = torch.unique(values[is_unknown], return_inverse=True)
        first = self._ids.num_rows() + 1
        rows[is_unknown] = places + first
        self._num_scratch = unknown.numel()
        ids, fresh = self._fresh
        self._fresh = (torch.cat([ids, unknown]), torch.cat([fresh, torch.arange(unknown.numel()) + first]))

    def take_fresh_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and rows that must be filled before the next lookup, once."""
        fresh = self._fresh
        nothing = torch.empty(0, dtype=torch.int64)
        self._fresh = (nothing, nothing)
        return fresh

    def take_removed_ids(self) -> torch.Tensor:
        """Return the ids that lost their row since the last call, for those who keep copies."""
        gone, self._gone = self._gone, []
        return torch.cat(gone) if gone else torch.empty(0, dtype=torch.int64)

    def first_values(self, ids: torch.Tensor, columns: int, low: float, high: float) -> torch.Tensor:
        """Return what the rows of these ids begin with."""
        return _engine.init_rows(ids, self._row_seed & (2**64 - 1), columns, low, high)

    def evict(self) -> torch.Tensor | None:
        """Return the rows that got an id since they were last filled; None if none did."""
        rows = self._fresh[1]
        return rows.to(self._device) if rows.numel() > 0 else None

    # ---- what others ask ----

    num_admitted = 0
    num_refused = 0
    num_evicted = 0

    def __len__(self) -> int:
        return len(self._ids)

    def __bool__(self) -> bool:
        return True

    def num_table_rows(self) -> int:
        """Return how many rows the table must have for the next lookup."""
        return 1 + self._ids.num_rows() + self._num_scratch

    def output_size(self) -> int | None:
        """Return the most ids; None if there is no limit."""
        return self._capacity

    def input_size(self) -> int:
        """Return 2**63 - 1: all ids are legal."""
        return _LARGEST

    def buckets(self) -> int:
        """Return 1024."""
        return _engine.NUM_BUCKETS

    def open_slots(self) -> torch.Tensor:
        """Return how many ids can still come without one going; 2**63 - 1 without a limit."""
        most = _LARGEST if self._capacity is None else max(self._capacity - len(self._ids), 0)
        return torch.tensor([most], device=self._device)

    def export_ids(self) -> dict[str, torch.Tensor]:
        """Return all ids with their rows, counts and last calls, in order of bucket and row."""
        ids, rows, counts, last_steps = self._ids.export_ids()
        return {"ids": ids, "rows": rows + 1, "counts": counts, "last_steps": last_steps}

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> ManagedCollisionModule:
        """Refuse: rows of a growing table have no ranges."""
        raise ValueError("collision.growing: the rows of a growing table are not cut by ranges.")

    # ---- state: rows are numbered anew, in the order of the file ----

    _STATE = ("ids", "counts", "last_steps", "sketch_buckets", "sketch_counters", "sketch_sightings")

    def validate_state(self) -> None:
        """Do nothing: what was loaded has been checked."""

    def get_extra_state(self) -> dict[str, Any]:
        """Return what the ids mean."""
        return {"id_hash": _engine.ID_HASH, "seed": self._seed, "name": self._name}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Check that the saved ids were hashed as here; take their seed."""
        if state["id_hash"] != _engine.ID_HASH:
            raise ValueError(
                f"collision.growing: table '{self._name}' was saved with the hash '{state['id_hash']}'; this "
                f"is '{_engine.ID_HASH}'."
            )
        self._seed = state["seed"]
        digest = hashlib.sha256(self._name.encode()).digest()
        self._row_seed = self._seed ^ int.from_bytes(digest[:8], "little") if self._name else self._seed

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        ids, _, counts, last_steps = self._ids.export_ids()
        values = (ids, counts, last_steps, *self._ids.export_sketch())
        destination.update({f"{prefix}_{n}": v for n, v in zip(self._STATE, values, strict=True)})

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        own = {f"{prefix}_{name}" for name in self._STATE}
        known = {name: value for name, value in state_dict.items() if name not in own}
        super()._load_from_state_dict(known, prefix, metadata, strict, missing, unexpected, errors)
        missing.extend(sorted(own - set(state_dict)))
        if own - set(state_dict):
            return
        ids, counts, last_steps, *sketch = (state_dict[f"{prefix}_{name}"] for name in self._STATE)
        table = self._new_table()
        table.load(ids, counts, last_steps)
        table.load_sketch(*sketch)
        self._ids = table
        self._forget_changes()

    def __getstate__(self):
        raise TypeError(
            "collision.growing: a growing table is not copied, as its rows would be numbered anew. Make "
            "another module and load the state dict."
        )


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

    def forward(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> KeyedJaggedTensor:
        """Return the same bags with rows in place of ids, in the order of the tables."""
        wanted = self._inputs(features)
        keys = features.keys()
        arranged = features.permute([keys.index(feature) for _, feature, _ in wanted])
        parts = dict(zip([name for _, _, name in wanted], _features_of(arranged), strict=True))
        values = []
        for table, module in self._managed_collision_modules.items():
            if table not in self._table_to_features:
                continue
            # One call for all features of the table: one iteration, one decision.
            own = {name: parts[name] for name in self.features_of(table)}
            together = JaggedTensor(
                torch.cat([part.values() for part in own.values()]),
                lengths=torch.cat([part.lengths() for part in own.values()]),
            )
            rows = module({table: together}, mutate_miss_lengths)[table].values()
            sizes = [part.values().numel() for part in own.values()]
            parts.update(zip(own, rows.split(sizes), strict=True))
        values = [parts[name] for _, _, name in wanted]
        return _renamed(arranged, [name for _, _, name in wanted], torch.cat(values), features)

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
