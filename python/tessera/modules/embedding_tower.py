"""Towers: tables and the layers above them, as one module.

>>> import torch
>>> from tessera.modules.embedding_configs import EmbeddingBagConfig
>>> from tessera.modules.embedding_modules import EmbeddingBagCollection
>>> from tessera.sparse.jagged_tensor import KeyedJaggedTensor
>>> config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=8, feature_names=["f"])
>>> tower = EmbeddingTower(EmbeddingBagCollection([config]), lambda pooled: pooled.values().relu())
>>> features = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 2]), torch.tensor([1, 1]))
>>> tower(features).shape
torch.Size([2, 4])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tessera.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["EmbeddingTower", "EmbeddingTowerCollection", "tower_input_params"]


def tower_input_params(module: nn.Module) -> tuple[bool, bool]:
    """Tell whether a tower's tables take features, and whether they take features with weights."""
    if isinstance(module, EmbeddingCollection):
        return True, False
    if isinstance(module, EmbeddingBagCollection):
        return not module.is_weighted(), module.is_weighted()
    return True, True


class EmbeddingTower(nn.Module):
    """Call `interaction_module` with what `embedding_module` returns."""

    def __init__(
        self,
        embedding_module: nn.Module,
        interaction_module: nn.Module | Callable[..., torch.Tensor],
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding_module
        self.interaction = interaction_module

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the tower's output, [batch, columns]."""
        return self.interaction(self.embedding(*args, **kwargs))


class EmbeddingTowerCollection(nn.Module):
    """Call towers and lay their outputs side by side."""

    def __init__(self, towers: list[EmbeddingTower], device: torch.device | None = None) -> None:
        super().__init__()
        self.towers = nn.ModuleList(towers)

    def forward(
        self,
        features: KeyedJaggedTensor | None = None,
        weighted_features: KeyedJaggedTensor | None = None,
    ) -> torch.Tensor:
        """Return all outputs, [batch, columns]. Raise ValueError naming a tower without its features."""
        outputs = []
        for place, tower in enumerate(self.towers):
            takes = tower_input_params(tower.embedding)
            given = [
                batch for batch, taken in zip((features, weighted_features), takes, strict=True) if taken
            ]
            if any(batch is None for batch in given):
                kind = "features" if takes[0] and features is None else "weighted_features"
                raise ValueError(f"embedding_tower: tower {place} needs {kind}.")
            outputs.append(tower(*given))
        return torch.cat(outputs, dim=1)
