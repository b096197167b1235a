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
from typing import Dict, List  # noqa: UP035  (the names that torch.jit reads)

import torch
from torch import nn
from torch.fx import Proxy

from tessera import _C
from tessera.modules import _scripted_rows, _traced_rows
from tessera.modules.embedding_configs import (
    BaseEmbeddingConfig,
    BoundsCheckMode,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    _to_engine,
    data_type_to_dtype,
)
from tessera.sparse._jagged import jts_of
from tessera.sparse._keyed import kt_of
from tessera.sparse._traced import is_traced
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

    _HOLDER: str  # the attribute that the tables are in

    __jit_unused_properties__ = ("device",)

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
        self._make_traced()

    def _make_traced(self):
        """Note what a traced forward needs: it cannot ask the engine."""
        names = get_embedding_names_by_table(self._configs)
        self._outputs = [
            (name, feature, config.embedding_dim)
            for config, own in zip(self._configs, names, strict=True)
            for name, feature in zip(own, config.feature_names or [config.name], strict=True)
        ]
        bounds_check_mode, sparse_gradients, optimizer = self._options
        # What a script reads: its language knows numbers, texts and lists of them.
        self._names_by_table = names
        self._features_by_table = [list(config.feature_names or [config.name]) for config in self._configs]
        self._dims = [dim for _, _, dim in self._outputs]
        self._means = [getattr(config, "pooling", None) == PoolingType.MEAN for config in self._configs]
        self._reads_row_0 = bounds_check_mode != BoundsCheckMode.FATAL
        self._is_sparse = sparse_gradients
        self._steps_rows = optimizer is not None
        self._anchor = torch.zeros(0, requires_grad=optimizer is not None)
        uses_weights = getattr(self, "_is_weighted", False)
        if optimizer is not None or sparse_gradients:
            self._reader = _traced_rows.name_of(self)
        else:
            self._reader = _traced_rows.description(
                self._operation, self._configs, self._is_pooled, uses_weights, bounds_check_mode.value
            )

    def _check_scripted(self) -> None:
        if self._steps_rows and torch.is_grad_enabled():
            raise RuntimeError(
                "embed: backward steps these rows, which a script cannot: use torch.no_grad()."
            )

    def _tables(self) -> nn.ModuleDict:
        return getattr(self, self._HOLDER)

    def _weights(self) -> list[torch.Tensor]:
        return [table.weight for table in self._tables().values()]

    def _leaves(self) -> list[torch.Tensor]:
        """Return the tables that get a gradient of their own from a traced forward."""
        return [] if self._options[2] is not None else self._weights()

    @property
    def device(self) -> torch.device:
        """Return the device the tables were made on."""
        return self._device

    def fused_optimizer(self) -> _C.embedding.RowOptimizer | None:
        """Return the optimizer that backward steps with; None if there is none."""
        return self._lookup.optimizer(self._weights())

    def reset_parameters(self) -> None:
        """Fill the tables anew with their `init_fn`; nothing on the meta device."""
        for config in self._configs:
            weight = self._tables()[config.name].weight
            if weight.device.type != "meta":
                with torch.no_grad():
                    # The one row that a growing table begins with is that of unknown ids.
                    weight.zero_() if config.num_embeddings is None else config.init_fn(weight)

    # The engine's part is made anew by copies and unpickled modules.
    def __getstate__(self):
        state = self.__dict__.copy()
        for name in ("_lookup", "_anchor", "_reader", "_outputs"):
            state.pop(name, None)
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

    _HOLDER = "embedding_bags"

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
        if torch.jit.is_scripting():
            self._check_scripted()
            return self._inside(features)
        else:
            return self._find(features)

    def _inside(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the same in the language of torch.jit.script, and as nodes of torch.fx."""
        by_name = features.to_dict()
        columns: List[torch.Tensor] = []  # noqa: UP006
        names: List[str] = []  # noqa: UP006
        for place, table in enumerate(self.embedding_bags.values()):
            for name in self._features_by_table[place]:
                columns.append(
                    _scripted_rows.pooled_rows(
                        features,
                        name,
                        by_name[name],
                        table.weight,
                        self._means[place],
                        self._is_weighted,
                        self._reads_row_0,
                        self._is_sparse,
                    )
                )
            names.extend(self._names_by_table[place])
        return KeyedTensor(names, self._dims, torch.cat(columns, 1))

    def _find(self, features: KeyedJaggedTensor) -> KeyedTensor:
        if isinstance(features, Proxy):
            return _traced_rows.as_module_node(self, features)
        if is_traced(features.values()):
            return _traced_rows.pooled(
                features,
                self._is_weighted,
                self._leaves(),
                self._anchor,
                [name for name, _, _ in self._outputs],
                [dim for _, _, dim in self._outputs],
                self._reader,
            )
        weights = self._weights()
        if weights[0].is_meta and features.values().is_meta:
            return self._on_meta(features)
        return kt_of(self._lookup.pooled(features._engine(), weights, self._is_weighted))

    def _read(self, features: KeyedJaggedTensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        weights = leaves or self._weights()
        return [self._lookup.pooled(features._engine(), weights, self._is_weighted).values()]

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
    results. Parameters are named `embeddings.<table>.weight`. The arguments that speak of `gather_select` say
    how torchrec puts rows back in order; they change nothing.
    """

    _HOLDER = "embeddings"

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | None = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
        use_gather_select_per_sharding: dict[str, bool] | None = None,
        *,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
        sparse_gradients: bool = False,
        optimizer: _C.embedding.OptimizerOptions | None = None,
    ) -> None:
        super().__init__()
        self._need_indices = need_indices
        self._gather_select = (use_gather_select, use_gather_select_per_sharding)
        self.embeddings = self._make(
            "embed.collection", tables, False, device, bounds_check_mode, sparse_gradients, optimizer
        )
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the rows of every id, in bags as long as the feature's, by name."""
        if torch.jit.is_scripting():
            self._check_scripted()
            return self._inside(features)
        else:
            return self._find(features)

    def _inside(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the same in the language of torch.jit.script, and as nodes of torch.fx."""
        by_name = features.to_dict()
        found: Dict[str, JaggedTensor] = {}  # noqa: UP006
        for place, table in enumerate(self.embeddings.values()):
            for at, name in enumerate(self._features_by_table[place]):
                found[self._names_by_table[place][at]] = _scripted_rows.rows_apart(
                    features,
                    name,
                    by_name[name],
                    table.weight,
                    self._need_indices,
                    self._reads_row_0,
                    self._is_sparse,
                )
        return found

    def _find(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        if isinstance(features, Proxy):
            return _traced_rows.as_module_node(self, features)
        if is_traced(features.values()):
            return _traced_rows.apart(
                features, self._need_indices, self._leaves(), self._anchor, self._outputs, self._reader
            )
        weights = self._weights()
        return jts_of(self._lookup.sequence(features._engine(), weights, self._need_indices))

    def _read(self, features: KeyedJaggedTensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        weights = leaves or self._weights()
        found = self._lookup.sequence(features._engine(), weights, False)
        return [rows.values() for rows in found.values()]

    def need_indices(self) -> bool:
        """Return whether the ids go along as weights."""
        return self._need_indices

    def use_gather_select(self) -> bool:
        """Return what the collection was made with."""
        return self._gather_select[0]

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        """Return what the collection was made with, by type of sharding."""
        return self._gather_select[1]

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
