"""Weights that depend on the place of an id in its bag: one feature, or a collection of them.

>>> import torch
>>> from tessera.sparse.jagged_tensor import JaggedTensor
>>> module = PositionWeightedModule(max_feature_length=2)
>>> module(JaggedTensor(torch.tensor([7, 8, 9]), lengths=torch.tensor([2, 1]))).weights().tolist()
[1.0, 1.0, 1.0]
"""

from __future__ import annotations

import abc

import torch
from torch import nn

from tessera import _C
from tessera.modules import _scripted_rows
from tessera.modules.feature_processor import PositionWeightedProcessor, _ones
from tessera.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from tessera.types import ModuleCopyMixin

__all__ = [
    "FeatureProcessor",
    "FeatureProcessorsCollection",
    "PositionWeightedModule",
    "PositionWeightedModuleCollection",
]


class FeatureProcessor(nn.Module, metaclass=abc.ABCMeta):
    """Change one feature."""

    @abc.abstractmethod
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Return the changed feature."""


class PositionWeightedModule(FeatureProcessor):
    """Give a feature weights by position: `position_weight`, ones at first."""

    def __init__(self, max_feature_length: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.position_weight = _ones("", max_feature_length, device)

    def reset_parameters(self) -> None:
        """Make all weights one."""
        with torch.no_grad():
            self.position_weight.fill_(1.0)

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Return the same bags with weights."""
        if torch.jit.is_scripting():
            weights = _scripted_rows.weights_by_position(features, self.position_weight)
            return JaggedTensor(features.values(), weights, features.lengths(), features.offsets())
        else:
            return self._weigh(features)

    def _weigh(self, features: JaggedTensor) -> JaggedTensor:
        weights = _C.embedding.position_weights_of_feature(
            features._engine(), self.position_weight, False, ""
        )
        return JaggedTensor(features.values(), weights, features.lengths(), features.offsets())


class FeatureProcessorsCollection(nn.Module, metaclass=abc.ABCMeta):
    """Change the features of a batch."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the changed features."""


class PositionWeightedModuleCollection(
    PositionWeightedProcessor, FeatureProcessorsCollection, ModuleCopyMixin
):
    """Give the features of a batch weights by position; features not named weigh 1."""
