"""Weights that depend on the place of an id in its bag, for many features.

>>> import torch
>>> from tessera.sparse.jagged_tensor import KeyedJaggedTensor
>>> features = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([7, 8, 9]), torch.tensor([2, 1]))
>>> processor = PositionWeightedProcessor({"f": 2})
>>> with torch.no_grad():
...     _ = processor.position_weights["f"].copy_(torch.tensor([1.0, 0.5]))
>>> processor(features).weights().tolist()
[1.0, 0.5, 1.0]
"""

from __future__ import annotations

import abc
from typing import Any, List  # noqa: UP035  (the name that torch.jit reads)

import torch
from torch import nn

from tessera import _C
from tessera.modules import _scripted_rows
from tessera.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

__all__ = [
    "BaseFeatureProcessor",
    "BaseGroupedFeatureProcessor",
    "PositionWeightedModule",
    "PositionWeightedProcessor",
]


def _ones(name: str, length: int, device: torch.device | None) -> nn.Parameter:
    if length <= 0:
        raise ValueError(
            f"embed.position_weighted: feature '{name}' has a longest bag of {length}. It must be at least 1."
        )
    return nn.Parameter(torch.ones(length, device=device))


class _PositionWeights(nn.Module):
    """Hold one weight for every place in the bags of features."""

    def __prepare_scriptable__(self) -> Any:
        """Be asked by torch.jit.script, which cannot look into a ParameterDict."""
        self._weights_by_name = dict(self.position_weights.items())
        return self

    def __init__(self, max_feature_lengths: dict[str, int], device: torch.device | None = None) -> None:
        super().__init__()
        self.max_feature_lengths = max_feature_lengths
        self.position_weights = nn.ParameterDict(
            {name: _ones(name, length, device) for name, length in max_feature_lengths.items()}
        )

    def reset_parameters(self) -> None:
        """Make all weights one."""
        with torch.no_grad():
            for weight in self.position_weights.values():
                weight.fill_(1.0)


class BaseFeatureProcessor(nn.Module, metaclass=abc.ABCMeta):
    """Change features that come by name."""

    @abc.abstractmethod
    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Return the changed features."""


class PositionWeightedModule(_PositionWeights, BaseFeatureProcessor):
    """Give features weights by position: `position_weights.<feature>`, ones at first.

    A bag longer than its feature's weights is a ValueError that names feature, sample and length.
    """

    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Return `features` with the weights filled in."""
        if torch.jit.is_scripting():
            for name, weight in self._weights_by_name.items():
                feature = features[name]
                weights = _scripted_rows.weights_by_position(feature, weight)
                features[name] = JaggedTensor(feature.values(), weights, feature.lengths(), feature.offsets())
            return features
        else:
            return self._weigh(features)

    def _weigh(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        weighted = {}
        for name, weight in self.position_weights.items():
            feature = features[name]
            weights = _C.embedding.position_weights_of_feature(feature._engine(), weight, False, name)
            weighted[name] = JaggedTensor(feature.values(), weights, feature.lengths(), feature.offsets())
        features.update(weighted)
        return features


class BaseGroupedFeatureProcessor(nn.Module, metaclass=abc.ABCMeta):
    """Change the features of a batch."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the changed features."""


class PositionWeightedProcessor(_PositionWeights, BaseGroupedFeatureProcessor):
    """Give the features of a batch weights by position; features not named weigh 1.

    If the features have weights already, those are the positions: that is how ids arrive that were
    spread over ranks.
    """

    __jit_unused_properties__ = ("position_weights_dict",)

    @property
    def position_weights_dict(self) -> dict[str, nn.Parameter]:
        """Return the weights by feature."""
        return dict(self.position_weights.items())

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the same features with weights."""
        if torch.jit.is_scripting():
            found: List[torch.Tensor] = []  # noqa: UP006
            for name, feature in features.to_dict().items():
                if name in self._weights_by_name:
                    weight = self._weights_by_name[name]
                    found.append(_scripted_rows.weights_by_position(feature, weight))
                else:
                    found.append(torch.ones(feature.values().shape[0], device=feature.values().device))
            return features.with_weights(torch.cat(found))
        else:
            return self._weigh(features)

    def _weigh(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        weights = _C.embedding.position_weights(features._engine(), list(self.position_weights.items()))
        return features.with_weights(weights)
