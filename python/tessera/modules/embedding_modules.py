"""Many embedding tables, looked up in one call.

>>> import torch
>>> from tessera.modules.embedding_configs import EmbeddingBagConfig
>>> from tessera.sparse.jagged_tensor import KeyedJaggedTensor
>>> table = EmbeddingBagConfig(4, 2, "t", feature_names=["f"], init_fn=torch.nn.init.ones_)
>>> ebc = EmbeddingBagCollection(tables=[table])
>>> features = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([0, 3, 3]), torch.tensor([2, 0, 1]))
>>> ebc(features)["f"].tolist()
[[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import nn

from tessera import _C
from tessera.modules.embedding_configs import (
    BaseEmbeddingConfig,
    BoundsCheckMode,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    _to_engine,
    data_type_to_dtype,
)
from tessera.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionInterface",
    "EmbeddingCollection",
    "EmbeddingCollectionInterface",
    "get_embedding_names_by_table",
]

_engine = _C.embedding


def get_embedding_names_by_table(tables: Sequence[BaseEmbeddingConfig]) -> list[list[str]]:
    """Return the names of the outputs: the feature's, or `feature@table` if several tables use it."""
    return _engine.embedding_names_by_table([_to_engine(table) for table in tables])


def _table(config: BaseEmbeddingConfig, is_pooled: bool, device: torch.device) -> nn.Module:
    """Return torch's module of one table, with memory for its rows."""
    shape = (1 if config.num_embeddings is None else config.num_embeddings, config.embedding_dim)
    dtype = data_type_to_dtype(config.data_type)
    is_meta = device.type == "meta"
    rows = torch.empty(shape, dtype=dtype, device=device) if is_meta else None
    rows = rows if is_meta else _engine.empty_rows(*shape, dtype, device)
    if not is_pooled:
        return nn.Embedding(*shape, _weight=rows)
    mode = "mean" if config.pooling == PoolingType.MEAN else "sum"
    return nn.EmbeddingBag(*shape, mode=mode, include_last_offset=True, _weight=rows)


class TableDict(nn.ModuleDict):
    """Hold tables by name: any name, also "items" and "keys", which torch's own dict refuses."""

    def __setitem__(self, key: str, module: nn.Module) -> None:
        if hasattr(self, key):
            self._modules[key] = module
        else:
            super().__setitem__(key, module)


class _Tables:
    """What both collections do: make the tables, and keep the engine's lookup beside them."""

    def _make(self, operation, tables, is_pooled, device, bounds_check_mode, sparse_gradients, optimizer):
        self._configs = list(tables)
        self._is_pooled = is_pooled
        self._operation = operation
        self._device = torch.device(device or torch.get_default_device())
        self._options = (bounds_check_mode, sparse_gradients, optimizer)
        self._make_lookup()
        for config in self._configs:
            if not config.feature_names:
                config.feature_names = [config.name]
        return TableDict({config.name: _table(config, is_pooled, self._device) for config in self._configs})

    def _make_lookup(self):
        bounds_check_mode, sparse_gradients, optimizer = self._options
        options = _engine.TableBatchOptions()
        options.bounds_check = getattr(_engine.BoundsCheckMode, bounds_check_mode.value)
        if optimizer is not None:
            options.gradients = _engine.GradientForm.FUSED
            options.optimizer = optimizer
        elif sparse_gradients:
            options.gradients = _engine.GradientForm.SPARSE
        configs = [_to_engine(config) for config in self._configs]
        self._lookup = _engine.CollectionLookup(self._operation, configs, self._is_pooled, options)

    def _reset(self, tables):
        for config in self._configs:
            weight = tables[config.name].weight
            if weight.device.type != "meta":
                with torch.no_grad():
                    # The one row that a growing table begins with is that of unknown ids.
                    weight.zero_() if config.num_embeddings is None else config.init_fn(weight)

    # The engine's part is made anew by copies and unpickled modules.
    def __getstate__(self):
        state = self.__dict__.copy()
        state.pop("_lookup", None)
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        self._make_lookup()


class EmbeddingBagCollectionInterface(abc.ABC, nn.Module):
    """Pool the rows of many tables."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled rows of every feature, side by side."""

    @abc.abstractmethod
    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the tables."""

    @abc.abstractmethod
    def is_weighted(self) -> bool:
        """Return whether the features' weights multiply the rows."""


class EmbeddingBagCollection(_Tables, EmbeddingBagCollectionInterface):
    """Hold many tables and pool their rows, bag by bag.

    The result is float32; its keys are the tables in order and in a table its features in order,
    `feature@table` where several tables use a feature. The weighted mean is the weighted sum divided by
    the number of ids. Parameters are named `embedding_bags.<table>.weight`.

    Beyond the reference: `bounds_check_mode` says what happens to ids outside their table;
    `sparse_gradients` makes gradients sparse tensors of the rows looked up; `optimizer`
    (`tessera._C.embedding.OptimizerOptions`) makes backward step the rows at once.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | None = None,
        *,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
        sparse_gradients: bool = False,
        optimizer: _C.embedding.OptimizerOptions | None = None,
    ) -> None:
        super().__init__()
        self._is_weighted = is_weighted
        self.embedding_bags = self._make(
            "embed.bag_collection", tables, True, device, bounds_check_mode, sparse_gradients, optimizer
        )
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled rows of every feature, side by side."""
        weights = [table.weight for table in self.embedding_bags.values()]
        if weights[0].is_meta and features.values().is_meta:
            return self._on_meta(features)
        return self._lookup.pooled(features, weights, self._is_weighted)

    def _on_meta(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return a result without memory: its names and shape."""
        names = get_embedding_names_by_table(self._configs)
        dims = [config.embedding_dim for config in self._configs for _ in config.feature_names]
        values = torch.empty(features.stride(), sum(dims), device="meta")
        return KeyedTensor([name for group in names for name in group], dims, values)

    def is_weighted(self) -> bool:
        """Return whether the features' weights multiply the rows."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the tables."""
        return self._configs

    @property
    def device(self) -> torch.device:
        """Return the device the tables were made on."""
        return self._device

    def reset_parameters(self) -> None:
        """Fill the tables anew with their `init_fn`; nothing on the meta device."""
        self._reset(self.embedding_bags)

    def fused_optimizer(self) -> _C.embedding.RowOptimizer | None:
        """Return the optimizer that backward steps with; None if there is none."""
        return self._lookup.optimizer([table.weight for table in self.embedding_bags.values()])


class EmbeddingCollectionInterface(abc.ABC, nn.Module):
    """Look up the rows of many tables, without pooling."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the rows of every id, by name."""

    @abc.abstractmethod
    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the configs of the tables."""

    @abc.abstractmethod
    def need_indices(self) -> bool:
        """Return whether the ids go along as weights."""

    @abc.abstractmethod
    def embedding_dim(self) -> int:
        """Return the number of columns of all tables."""

    @abc.abstractmethod
    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the names of the outputs, table by table."""


class EmbeddingCollection(_Tables, EmbeddingCollectionInterface):
    """Hold many tables and return the row of every id.

    Tables may have different numbers of columns. With `need_indices` the ids are the weights of the
    results. Parameters are named `embeddings.<table>.weight`.
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | None = None,
        need_indices: bool = False,
        *,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
        sparse_gradients: bool = False,
        optimizer: _C.embedding.OptimizerOptions | None = None,
    ) -> None:
        super().__init__()
        self._need_indices = need_indices
        self.embeddings = self._make(
            "embed.collection", tables, False, device, bounds_check_mode, sparse_gradients, optimizer
        )
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the rows of every id, in bags as long as the feature's, by name."""
        weights = [table.weight for table in self.embeddings.values()]
        return self._lookup.sequence(features, weights, self._need_indices)

    def need_indices(self) -> bool:
        """Return whether the ids go along as weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the number of columns of all tables; ValueError if they differ."""
        dims = {config.embedding_dim for config in self._configs}
        if len(dims) > 1:
            raise ValueError(f"embed.collection: the tables have {sorted(dims)} columns, not one number.")
        return dims.pop()

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the configs of the tables."""
        return self._configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the names of the outputs, table by table."""
        return get_embedding_names_by_table(self._configs)

    @property
    def device(self) -> torch.device:
        """Return the device the tables were made on."""
        return self._device

    def reset_parameters(self) -> None:
        """Fill the tables anew with their `init_fn`; nothing on the meta device."""
        self._reset(self.embeddings)

    def fused_optimizer(self) -> _C.embedding.RowOptimizer | None:
        """Return the optimizer that backward steps with; None if there is none."""
        return self._lookup.optimizer([table.weight for table in self.embeddings.values()])
