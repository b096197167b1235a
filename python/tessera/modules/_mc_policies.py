"""Which ids keep their rows: the policies of hash tables of many columns."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import NamedTuple

import torch

from tessera import _C
from tessera.modules._mc_base import LARGEST

_engine = _C.collision

Filter = Callable[[torch.Tensor], tuple[torch.Tensor, "float | torch.Tensor"]]


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
                kept[mch_size - 1] = LARGEST
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
