"""Normalised entropy of each group of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_namespace import MetricName, MetricNamespace
from tessera.metrics.ne import ETA, compute_cross_entropy, compute_logloss, compute_ne
from tessera.metrics.rec_metric import RecMetric, RecMetricException

__all__ = ["GroupingKeyConfig", "SegmentedNEMetric", "SegmentedNEMetricComputation"]

_STATES = ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")


@dataclass
class GroupingKeyConfig:
    """Name a tensor of group numbers, how many there are, and whether floating-point numbers are taken."""

    name: str
    num_groups: int = 1
    cast_keys_to_int: bool = False


def _configs(keys: Any, num_groups: int, cast_keys_to_int: bool) -> list[GroupingKeyConfig]:
    found = []
    for key in [keys] if isinstance(keys, str) else keys:
        plain = {"num_groups": num_groups, "cast_keys_to_int": cast_keys_to_int}
        if isinstance(key, GroupingKeyConfig):
            found.append(key)
        elif isinstance(key, dict):
            found.append(GroupingKeyConfig(**(plain | key)))
        elif isinstance(key, str):
            found.append(GroupingKeyConfig(key, **plain))
        else:
            raise ValueError(f"metrics.segmented_ne: a grouping key is a {type(key).__name__}, not a name.")
    return found


class SegmentedNEMetricComputation(SummedComputation):
    """Add up cross entropies and labels by group."""

    def __init__(
        self,
        *args: Any,
        include_logloss: bool = False,
        num_groups: int = 1,
        grouping_keys: Any = "grouping_keys",
        cast_keys_to_int: bool = False,
    ) -> None:
        self._configs = _configs(grouping_keys, num_groups, cast_keys_to_int)
        self._include_logloss = include_logloss
        names = [config.name for config in self._configs]
        self._is_plain = isinstance(grouping_keys, str) or names == ["grouping_keys"]
        shapes = {self._state(c, name): (1, c.num_groups) for c in self._configs for name in _STATES}
        self._names = tuple(shapes)
        super().__init__(*args, shapes=shapes)

    def sums(self) -> tuple[str, ...]:
        """Return the names of the sums."""
        return self._names

    def _state(self, config: GroupingKeyConfig, name: str) -> str:
        return name if self._is_plain else f"{config.name}_{name}"

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        raise RecMetricException("metrics.segmented_ne: samples come with their groups.")

    def _groups(self, config: GroupingKeyConfig, keys: torch.Tensor) -> torch.Tensor:
        if keys.is_floating_point() and not config.cast_keys_to_int:
            raise RecMetricException(
                f"metrics.segmented_ne: {config.name!r} is {keys.dtype}; integers, or cast_keys_to_int."
            )
        groups = keys.long()
        outside = groups[(groups < 0) | (groups >= config.num_groups)]
        if outside.numel():
            raise RecMetricException(
                f"metrics.segmented_ne: {config.name!r} has group {outside[0].item()}; there are "
                f"{config.num_groups}."
            )
        return groups

    def _sums_with(self, predictions, labels, weights, inputs) -> Mapping[str, torch.Tensor]:
        entropies = compute_cross_entropy(labels, predictions, weights, ETA)
        samples = (entropies, weights, weights * labels, weights * (1.0 - labels))
        added = {}
        for config in self._configs:
            groups = self._groups(config, inputs[config.name])
            for name, values in zip(_STATES, samples, strict=True):
                zeros = values.new_zeros(config.num_groups)
                added[self._state(config, name)] = zeros.index_add(0, groups, values)
        return added

    def _numbers(self, sums) -> dict[tuple[MetricName, str], torch.Tensor]:
        found = {}
        for config in self._configs:
            entropy, count, positive, negative = (sums[self._state(config, name)] for name in _STATES)
            kinds = {MetricName.SEGMENTED_NE: compute_ne(entropy, count, positive, negative, ETA)}
            if self._include_logloss:
                kinds[MetricName.LOG_LOSS] = compute_logloss(entropy, positive, negative, ETA)
            end = "" if self._is_plain else f"@{config.name}"
            for kind, values in kinds.items():
                found |= {(kind, f"_{g}{end}"): values[:, g] for g in range(config.num_groups)}
        return found


class SegmentedNEMetric(RecMetric):
    """Compute the normalised entropy of each group; NaN for one without samples."""

    _namespace = MetricNamespace.SEGMENTED_NE
    _computation_class = SegmentedNEMetricComputation

    def get_required_inputs(self) -> set[str]:
        """Return the names of the tensors of group numbers."""
        keys = self._options.get("grouping_keys", "grouping_keys")
        return {config.name for config in _configs(keys, 1, False)}
