"""DeepFM (Guo et al., 2017) over pooled rows.

>>> import torch
>>> from tessera.modules.embedding_configs import EmbeddingBagConfig
>>> from tessera.modules.embedding_modules import EmbeddingBagCollection
>>> from tessera.sparse.jagged_tensor import KeyedJaggedTensor
>>> model = SimpleDeepFMNN(3, EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "f")]), 5, 2)
>>> ids = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1]), torch.tensor([1, 0]))
>>> model(torch.zeros(2, 3), ids).shape
torch.Size([2, 1])
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tessera.models.dlrm import _loss_and_logits
from tessera.modules.deepfm import DeepFM, FactorizationMachine
from tessera.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from tessera.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

__all__ = [
    "DenseArch",
    "FMInteractionArch",
    "OverArch",
    "SimpleDeepFMNN",
    "SimpleDeepFMNNWrapper",
    "SparseArch",
]


class SparseArch(nn.Module):
    """Look up the pooled rows of all features."""

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the rows by name."""
        return self.embedding_bag_collection(features)


class DenseArch(nn.Module):
    """Bring dense features into the space of the embeddings."""

    def __init__(self, in_features: int, hidden_layer_size: int, embedding_dim: int) -> None:
        super().__init__()
        self.model: nn.Module = nn.Sequential(
            nn.Linear(in_features, hidden_layer_size),
            nn.ReLU(),
            nn.Linear(hidden_layer_size, embedding_dim),
            nn.ReLU(),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return (batch, embedding_dim)."""
        return self.model(features)


class FMInteractionArch(nn.Module):
    """Put what both halves of DeepFM make of all features behind the dense features."""

    def __init__(self, fm_in_features: int, sparse_feature_names: list[str], deep_fm_dimension: int) -> None:
        super().__init__()
        self.sparse_feature_names = sparse_feature_names
        self.deep_fm = DeepFM(nn.Sequential(nn.Linear(fm_in_features, deep_fm_dimension), nn.ReLU()))
        self.fm = FactorizationMachine()

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedTensor) -> torch.Tensor:
        """Return the dense features, `deep_fm_dimension` columns and one more."""
        if len(self.sparse_feature_names) == 0:
            return dense_features
        rows = [dense_features] + [sparse_features[name] for name in self.sparse_feature_names]
        return torch.cat([dense_features, self.deep_fm(rows), self.fm(rows)], dim=1)


class OverArch(nn.Module):
    """Turn the interaction into a chance."""

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.model: nn.Module = nn.Sequential(nn.Linear(in_features, 1), nn.Sigmoid())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return (batch, 1), between 0 and 1."""
        return self.model(features)


class SimpleDeepFMNN(nn.Module):
    """Predict clicks from dense features and pooled rows. All tables have the same number of columns."""

    def __init__(
        self,
        num_dense_features: int,
        embedding_bag_collection: EmbeddingBagCollection,
        hidden_layer_size: int,
        deep_fm_dimension: int,
    ) -> None:
        super().__init__()
        configs = embedding_bag_collection.embedding_bag_configs()
        if not configs:
            raise AssertionError("SimpleDeepFMNN: the collection has no table.")
        columns = configs[0].embedding_dim
        wrong = [config.name for config in configs if config.embedding_dim != columns]
        if wrong:
            raise AssertionError(f"SimpleDeepFMNN: the tables {wrong} do not have {columns} columns.")
        names = [name for group in get_embedding_names_by_table(configs) for name in group]
        self.sparse_arch = SparseArch(embedding_bag_collection)
        self.dense_arch = DenseArch(num_dense_features, hidden_layer_size, columns)
        self.inter_arch = FMInteractionArch((len(names) + 1) * columns, names, deep_fm_dimension)
        self.over_arch = OverArch(columns + deep_fm_dimension + 1)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Return the chances, (batch, 1)."""
        dense = self.dense_arch(dense_features)
        sparse = self.sparse_arch(sparse_features)
        return self.over_arch(self.inter_arch(dense, sparse))


class SimpleDeepFMNNWrapper(SimpleDeepFMNN):
    """Be SimpleDeepFMNN for batches that hold `float_features`, `idlist_features` and `label`.

    As in the peer the chances are taken for logits by the loss, which is told in training beside them.
    """

    def forward(self, model_input: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return (loss, chances), or the chances in evaluation."""
        chances = super().forward(model_input.float_features, model_input.idlist_features)
        return _loss_and_logits(self, chances, model_input.label)
