"""What every module of managed collision is."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import nn

from tessera.sparse.jagged_tensor import JaggedTensor

Features = dict[str, JaggedTensor]
LARGEST = torch.iinfo(torch.int64).max
MOST_SHARDS = 1024


def apply_mc_method_to_jt_dict(mc_module: nn.Module, method: str, features_dict: Features) -> Features:
    """Return what the method of the module makes of the features, in the same order."""
    return getattr(mc_module, method)(features_dict)


def with_values(feature: JaggedTensor, values: torch.Tensor) -> JaggedTensor:
    """Return the feature with as many other values: its bags are known to be good."""
    other = JaggedTensor.__new__(JaggedTensor)
    other._take(values, feature.weights_or_none(), feature.lengths_or_none(), feature.offsets_or_none())
    return other


def slots_with_ids(
    sorted_ids: torch.Tensor, counts: Sequence[int] | None, bounds: Sequence[int], first: int
) -> torch.Tensor:
    """Return which slots of rows from `first` on have ids.

    `counts` say how many each part of the rows has, which begin at `bounds`: 2**63 - 1 may be one of them.
    A single count is that of all slots.
    """
    is_id = sorted_ids != LARGEST
    if counts is not None and len(counts) == 1:
        bounds = [first, first + sorted_ids.numel()]
    for count, begin, end in zip(counts or [], bounds, bounds[1:], strict=False):
        if begin < first or end > first + sorted_ids.numel():
            continue
        own = is_id[begin - first : end - first]
        listed = int(own.sum())
        if count > listed and listed < own.numel():
            own[listed] = True
    return is_id


def validate(module: nn.Module, _: object) -> None:
    module.validate_state()


class ManagedCollisionModule(nn.Module):
    """Map ids to rows of one table. A base class; `output_segments` are the bounds of its shards."""

    def __init__(
        self,
        device: torch.device,
        output_segments: list[int],
        skip_state_validation: bool = False,
        read_only_suffix: str = "_readonly",
        enable_per_feature_lookups: bool = False,
    ) -> None:
        super().__init__()
        if enable_per_feature_lookups:
            raise ValueError(
                "collision: enable_per_feature_lookups is there for torchrec's modules of hashed ids alone; "
                "all features of a table are mapped in one call. Leave it out."
            )
        self._device = torch.device(device)
        self._read_only_suffix = read_only_suffix
        if skip_state_validation:
            return
        if len(output_segments) > MOST_SHARDS + 1:
            raise AssertionError(
                f"ManagedCollisionModule limited to {MOST_SHARDS} shards; {len(output_segments) - 1} given."
            )
        padding = [-1] * (MOST_SHARDS + 1 - len(output_segments))
        segments = torch.tensor([*output_segments, *padding], dtype=torch.int64, device=self._device)
        self.register_buffer("_output_segments_tensor", segments)
        self.register_buffer("_current_iter_tensor", torch.zeros(1, dtype=torch.int64, device=self._device))
        self.register_load_state_dict_post_hook(validate)

    @property
    def readable_suffix(self) -> str:
        """Return the end of the names of features that no id is learned from, for modules that know any."""
        return self._read_only_suffix

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
