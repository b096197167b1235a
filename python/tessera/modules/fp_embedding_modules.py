"""Pooled tables whose features get weights first, from processors with parameters of their own.

>>> import torch
>>> from tessera.modules.embedding_configs import EmbeddingBagConfig
>>> from tessera.modules.feature_processor_ import PositionWeightedModule
>>> from tessera.sparse.jagged_tensor import KeyedJaggedTensor
>>> tables = [EmbeddingBagConfig(5, 2, "t", feature_names=["f"], init_fn=torch.nn.init.ones_)]
>>> module = FeatureProcessedEmbeddingBagCollection(
...     EmbeddingBagCollection(tables, is_weighted=True), {"f": PositionWeightedModule(3)}
... )
>>> features = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([4, 1, 0]), torch.tensor([1, 2]))
>>> module(features)["f"].tolist()
[[1.0, 1.0], [2.0, 2.0]]
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tessera.modules.embedding_configs import EmbeddingBagConfig
from tessera.modules.embedding_modules import EmbeddingBagCollection
from tessera.modules.feature_processor import PositionWeightedProcessor
from tessera.modules.feature_processor_ import (
    FeatureProcessor,
    FeatureProcessorsCollection,
    PositionWeightedModule,
)
from tessera.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

__all__ = [
    "FeatureProcessedEmbeddingBagCollection",
    "FeatureProcessorDictWrapper",
    "apply_feature_processors_to_kjt",
]


def apply_feature_processors_to_kjt(
    features: KeyedJaggedTensor, feature_processors: Mapping[str, nn.Module]
) -> KeyedJaggedTensor:
    """Return the features with the weights of their processors; those without one weigh 1."""
    weights = []
    for key, feature in features.to_dict().items():
        if key in feature_processors:
            weights.append(feature_processors[key](feature).weights())
        else:
            weights.append(torch.ones(feature.values().numel(), device=feature.values().device))
    return features.with_weights(torch.cat(weights)) if weights else features


class FeatureProcessorDictWrapper(FeatureProcessorsCollection):
    """Process every feature with the processor of its name."""

    def __init__(self, feature_processors: nn.ModuleDict) -> None:
        super().__init__()
        self._feature_processors = feature_processors

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the same features with weights."""
        return apply_feature_processors_to_kjt(features, self._feature_processors)


class FeatureProcessedEmbeddingBagCollection(nn.Module):
    """Process features, then look them up in an EmbeddingBagCollection, which is weighted.

    `feature_processors` is one processor for each feature of the tables, by name, or a collection that
    processes them all. Both tables and processors get gradients.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        feature_processors: dict[str, FeatureProcessor] | FeatureProcessorsCollection,
    ) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            raise ValueError(
                "embed.feature_processed: the collection is not weighted. Make it with is_weighted=True."
            )
        configs = embedding_bag_collection.embedding_bag_configs()
        names = {name for config in configs for name in config.feature_names}
        if not isinstance(feature_processors, FeatureProcessorsCollection):
            if set(feature_processors) != names:
                raise ValueError(
                    f"embed.feature_processed: the processors are of {sorted(feature_processors)}, the "
                    f"tables have the features {sorted(names)}."
                )
            feature_processors = nn.ModuleDict(feature_processors)
        self._embedding_bag_collection = embedding_bag_collection
        self._feature_processors = feature_processors

    def split(self) -> tuple[FeatureProcessorsCollection, EmbeddingBagCollection]:
        """Return the processors, as one, and the tables."""
        return _as_collection(self._feature_processors), self._embedding_bag_collection

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the tables."""
        return self._embedding_bag_collection.embedding_bag_configs()

    def is_weighted(self) -> bool:
        """Return True: processors give weights."""
        return self._embedding_bag_collection.is_weighted()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled rows of the processed features."""
        return self._embedding_bag_collection(_process(self._feature_processors, features))


def _as_collection(processors: nn.ModuleDict | FeatureProcessorsCollection) -> FeatureProcessorsCollection:
    is_dict = isinstance(processors, nn.ModuleDict)
    return FeatureProcessorDictWrapper(processors) if is_dict else processors


def _process(
    processors: nn.ModuleDict | FeatureProcessorsCollection, features: KeyedJaggedTensor
) -> KeyedJaggedTensor:
    if isinstance(processors, nn.ModuleDict):
        return apply_feature_processors_to_kjt(features, processors)
    return processors(features)


def _longest_bags(processors: nn.ModuleDict | FeatureProcessorsCollection) -> list[tuple[str, int]]:
    """Return how many ids a bag may hold, for the features whose processors are known to say so."""
    if isinstance(processors, PositionWeightedProcessor):
        return list(processors.max_feature_lengths.items())
    if not isinstance(processors, nn.ModuleDict):
        return []
    return [
        (name, processor.position_weight.numel())
        for name, processor in processors.items()
        if isinstance(processor, PositionWeightedModule)
    ]
