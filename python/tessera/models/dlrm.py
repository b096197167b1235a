"""DLRM (Naumov et al., 2019), with dot products, a cross network or projections as its interaction.

F is the number of sparse features, D the columns of every table and B the batch.

>>> import torch
>>> from tessera.modules.embedding_configs import EmbeddingBagConfig
>>> from tessera.modules.embedding_modules import EmbeddingBagCollection
>>> from tessera.sparse.jagged_tensor import KeyedJaggedTensor
>>> tables = [EmbeddingBagConfig(10, 4, "t", feature_names=["f", "g"])]
>>> model = DLRM_DCN(EmbeddingBagCollection(tables=tables), 3, [5, 4], [6, 1], 2, 2)
>>> ids = KeyedJaggedTensor.from_lengths_sync(["f", "g"], torch.tensor([1, 2]), torch.tensor([1, 0, 0, 1]))
>>> model(torch.zeros(2, 3), ids).shape
torch.Size([2, 1])
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tessera.datasets.utils import Batch
from tessera.modules.crossnet import LowRankCrossNet
from tessera.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from tessera.modules.mlp import MLP
from tessera.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "DLRM",
    "DLRM_DCN",
    "DLRMTrain",
    "DLRMWrapper",
    "DLRM_Projection",
    "DenseArch",
    "InteractionArch",
    "InteractionDCNArch",
    "InteractionProjectionArch",
    "OverArch",
    "SparseArch",
    "choose",
]


def choose(n: int, k: int) -> int:
    """Return the number of ways to take k of n things; 0 if there are fewer.

    >>> choose(4, 2)
    6
    """
    return math.comb(n, k) if 0 <= k <= n else 0


class SparseArch(nn.Module):
    """Look up the pooled rows of all features."""

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        configs = embedding_bag_collection.embedding_bag_configs()
        if not configs:
            raise AssertionError("SparseArch: the collection has no table.")
        dims = {config.embedding_dim for config in configs}
        if len(dims) > 1:
            raise AssertionError(f"SparseArch: tables of {sorted(dims)} columns; all must have the same.")
        self.D: int = dims.pop()
        self._sparse_feature_names = [
            name for names in get_embedding_names_by_table(configs) for name in names
        ]
        self.F: int = len(self._sparse_feature_names)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return (B, F, D), in the order of `sparse_feature_names`."""
        pooled = self.embedding_bag_collection(features)
        return torch.stack([pooled[name] for name in self._sparse_feature_names], dim=1)

    @property
    def sparse_feature_names(self) -> list[str]:
        """Return the names of the features, table by table."""
        return self._sparse_feature_names


class DenseArch(nn.Module):
    """Bring dense features into the space of the embeddings."""

    def __init__(self, in_features: int, layer_sizes: list[int], device: torch.device | None = None) -> None:
        super().__init__()
        self.model: nn.Module = MLP(in_features, layer_sizes, bias=True, activation="relu", device=device)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return (B, layer_sizes[-1])."""
        return self.model(features)


def _side_by_side(dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
    return torch.cat((dense_features.unsqueeze(1), sparse_features), dim=1)


class InteractionArch(nn.Module):
    """Put the dot products of all pairs of features behind the dense features."""

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self.F: int = num_sparse_features
        size = num_sparse_features + 1
        pairs = torch.triu_indices(size, size, offset=1)
        self.register_buffer("triu_indices", pairs, persistent=False)

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Return (B, D + F (F + 1) / 2) of (B, D) and (B, F, D)."""
        if self.F <= 0:
            return dense_features
        rows = _side_by_side(dense_features, sparse_features)
        products = torch.bmm(rows, rows.transpose(1, 2))
        chosen = products[:, self.triu_indices[0], self.triu_indices[1]]
        return torch.cat((dense_features, chosen), dim=1)


class InteractionDCNArch(nn.Module):
    """Give dense and sparse features, side by side, to a cross network."""

    def __init__(self, num_sparse_features: int, crossnet: nn.Module) -> None:
        super().__init__()
        self.F: int = num_sparse_features
        self.crossnet = crossnet

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Return (B, D + F D) of (B, D) and (B, F, D)."""
        if self.F <= 0:
            return dense_features
        return self.crossnet(_side_by_side(dense_features, sparse_features).flatten(1))


class InteractionProjectionArch(nn.Module):
    """Put the product of two projections of all features behind the dense features."""

    def __init__(
        self, num_sparse_features: int, interaction_branch1: nn.Module, interaction_branch2: nn.Module
    ) -> None:
        super().__init__()
        self.F: int = num_sparse_features
        self.interaction_branch1 = interaction_branch1
        self.interaction_branch2 = interaction_branch2

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Return (B, D + F1 F2) of (B, D) and (B, F, D): branches make F1 D and D F2 columns."""
        if self.F <= 0:
            return dense_features
        columns = dense_features.size(1)
        rows = _side_by_side(dense_features, sparse_features).flatten(1)
        left = self.interaction_branch1(rows).unflatten(1, (-1, columns))
        right = self.interaction_branch2(rows).unflatten(1, (columns, -1))
        return torch.cat((dense_features, torch.bmm(left, right).flatten(1)), dim=1)


class OverArch(nn.Module):
    """Turn the interaction into logits: layers with relu, then one without."""

    def __init__(self, in_features: int, layer_sizes: list[int], device: torch.device | None = None) -> None:
        super().__init__()
        if len(layer_sizes) <= 1:
            raise ValueError(f"OverArch: {layer_sizes} is one layer or none; two or more are needed.")
        self.model: nn.Module = nn.Sequential(
            MLP(in_features, layer_sizes[:-1], bias=True, activation="relu", device=device),
            nn.Linear(layer_sizes[-2], layer_sizes[-1], bias=True, device=device),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return (B, layer_sizes[-1])."""
        return self.model(features)


class DLRM(nn.Module):
    """Predict clicks from dense features and pooled rows by their dot products.

    All tables have as many columns as the last layer of the dense part.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embedding_bag_collection)
        features, columns = self.sparse_arch.F, self.sparse_arch.D
        if dense_arch_layer_sizes[-1] != columns:
            raise ValueError(
                f"DLRM: the tables have {columns} columns and the last dense layer "
                f"{dense_arch_layer_sizes[-1]}; they must be the same."
            )
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, dense_device)
        self.inter_arch: nn.Module = InteractionArch(features).to(dense_device)
        self.over_arch = OverArch(columns + choose(features + 1, 2), over_arch_layer_sizes, dense_device)

    def _interact(self, inter_arch: nn.Module, size: int, layer_sizes: list[int], device) -> None:
        """Take another interaction, of `size` columns. Both are drawn after DLRM's own, as in the peer."""
        self.inter_arch = inter_arch
        self.over_arch = OverArch(size, layer_sizes, device)

    def compile_dense_path(self, compile_mode: str = "reduce-overhead") -> None:
        """Compile everything but the tables, in place."""
        for part in (self.dense_arch, self.inter_arch, self.over_arch):
            part.compile(mode=compile_mode)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Return the logits, (B, 1)."""
        dense = self.dense_arch(dense_features)
        sparse = self.sparse_arch(sparse_features)
        return self.over_arch(self.inter_arch(dense, sparse))


class DLRM_DCN(DLRM):
    """Be DLRM with a cross network of low rank as its interaction (DCN v2)."""

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            dense_arch_layer_sizes,
            over_arch_layer_sizes,
            dense_device,
        )
        features, columns = self.sparse_arch.F, self.sparse_arch.D
        size = (features + 1) * columns
        crossnet = LowRankCrossNet(size, dcn_num_layers, dcn_low_rank_dim).to(dense_device)
        self._interact(InteractionDCNArch(features, crossnet), size, over_arch_layer_sizes, dense_device)


class DLRM_Projection(DLRM):
    """Be DLRM with the product of two projections as its interaction.

    The last layer of each branch is a multiple of the tables' columns.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        interaction_branch1_layer_sizes: list[int],
        interaction_branch2_layer_sizes: list[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            dense_arch_layer_sizes,
            over_arch_layer_sizes,
            dense_device,
        )
        features, columns = self.sparse_arch.F, self.sparse_arch.D
        branches = (interaction_branch1_layer_sizes, interaction_branch2_layer_sizes)
        for place, sizes in enumerate(branches, 1):
            if sizes[-1] % columns:
                raise ValueError(
                    f"DLRM_Projection: the last layer of branch {place} has {sizes[-1]} columns, which is no "
                    f"multiple of the tables' {columns}."
                )
        projections = [DenseArch((features + 1) * columns, sizes, dense_device) for sizes in branches]
        heights = [sizes[-1] // columns for sizes in branches]
        self._interact(
            InteractionProjectionArch(features, *projections),
            columns + heights[0] * heights[1],
            over_arch_layer_sizes,
            dense_device,
        )


def _loss_and_logits(
    model: nn.Module, logits: torch.Tensor, label: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the mean cross entropy and the logits of a model in training, the logits of others."""
    if not model.training:
        return logits
    return nn.functional.binary_cross_entropy_with_logits(logits.squeeze(), label), logits


class DLRMWrapper(DLRM):
    """Be DLRM for batches that hold `float_features`, `idlist_features` and `label`.

    In training it returns the loss and the logits, as pipelines want them; otherwise the logits.
    """

    def forward(self, model_input: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return (loss, logits), or the logits in evaluation."""
        logits = super().forward(model_input.float_features, model_input.idlist_features)
        return _loss_and_logits(self, logits, model_input.label)


class DLRMTrain(nn.Module):
    """Return the loss of a batch, for a training pipeline."""

    def __init__(self, dlrm_module: DLRM) -> None:
        super().__init__()
        self.model = dlrm_module
        self.loss_fn: nn.Module = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return the mean cross entropy, and the loss, logits and labels without history."""
        logits = self.model(dense_features=batch.dense_features, sparse_features=batch.sparse_features)
        logits = logits.squeeze(-1)
        loss = self.loss_fn(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())
