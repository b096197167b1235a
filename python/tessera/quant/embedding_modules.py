"""Collections of tables with rows in few bits.

>>> from tessera.modules.embedding_configs import EmbeddingBagConfig
>>> tables = [EmbeddingBagConfig(4, 2, "t", feature_names=["f"], init_fn=torch.nn.init.ones_)]
>>> float_module = OriginalEmbeddingBagCollection(tables)
>>> float_module.qconfig = QuantConfig.of(torch.qint8)
>>> module = EmbeddingBagCollection.from_float(float_module)
>>> features = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([3, 0]), torch.tensor([2, 0]))
>>> module(features)["f"].tolist()
[[2.0, 2.0], [0.0, 0.0]]
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Dict, List  # noqa: UP035  (the names that torch.jit reads)

import torch
from torch import nn
from torch.fx import Proxy

from tessera.modules import _scripted_rows
from tessera.modules._traced_rows import as_module_node
from tessera.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    QuantConfig,
    dtype_to_data_type,
)
from tessera.modules.embedding_modules import EmbeddingBagCollection as OriginalEmbeddingBagCollection
from tessera.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from tessera.modules.embedding_modules import EmbeddingCollection as OriginalEmbeddingCollection
from tessera.modules.feature_processor_ import FeatureProcessorsCollection
from tessera.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection as OriginalFeatureProcessedEmbeddingBagCollection,
)
from tessera.modules.fp_embedding_modules import FeatureProcessorDictWrapper
from tessera.quant._tables import (
    DEFAULT_ROW_ALIGNMENT,
    IntNBitTableBatchedEmbeddingBagsCodegen,
    output_dtype_of,
    row_type,
)
from tessera.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = [
    "DEFAULT_ROW_ALIGNMENT",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "FeatureProcessedEmbeddingBagCollection",
    "IntNBitTableBatchedEmbeddingBagsCodegen",
    "QuantConfig",
    "QuantEmbeddingBagCollection",
    "QuantEmbeddingCollection",
    "for_each_module_of_type_do",
    "quant_prep_customize_row_alignment",
    "quant_prep_enable_cache_features_order",
    "quant_prep_enable_quant_state_dict_split_scale_bias",
    "quant_prep_enable_quant_state_dict_split_scale_bias_for_types",
    "quant_prep_enable_register_tbes",
]

_SPLIT = "__quant_state_dict_split_scale_bias__"
_ALIGNMENT = "__register_row_alignment_in_named_modules__"


def for_each_module_of_type_do(
    module: nn.Module, module_types: list[type[nn.Module]], op: Callable[[nn.Module], None]
) -> None:
    """Call `op` with every part of a model that is of one of these types."""
    for part in module.modules():
        if isinstance(part, tuple(module_types)):
            op(part)


def quant_prep_enable_quant_state_dict_split_scale_bias(module: nn.Module) -> None:
    """Let scales and biases stand beside the codes in the state of what is made of `module`."""
    setattr(module, _SPLIT, True)


def quant_prep_enable_quant_state_dict_split_scale_bias_for_types(
    module: nn.Module, module_types: list[type[nn.Module]]
) -> None:
    """Do so for every part of a model that is of one of these types."""
    for_each_module_of_type_do(module, module_types, quant_prep_enable_quant_state_dict_split_scale_bias)


def quant_prep_customize_row_alignment(
    module: nn.Module, module_types: list[type[nn.Module]], row_alignment: int
) -> None:
    """Let rows of what is made of parts of these types begin at multiples of so many bytes."""
    for_each_module_of_type_do(module, module_types, lambda part: setattr(part, _ALIGNMENT, row_alignment))


def quant_prep_enable_register_tbes(module: nn.Module, module_types: list[type[nn.Module]]) -> None:
    """Do nothing: rows are in the state under their tables' names alone."""


def quant_prep_enable_cache_features_order(module: nn.Module, module_types: list[type[nn.Module]]) -> None:
    """Do nothing: the order of features is found in every call."""


def _typed_configs(module: nn.Module, configs: Sequence) -> list:
    """Return the configs with the data types that the module's qconfig asks for."""
    if not hasattr(module, "qconfig"):
        raise ValueError("embed.quantised: the module has no qconfig, which says the types to round to.")
    own = getattr(module.qconfig, "per_table_weight_dtype", None) or {}
    typed = []
    for config in configs:
        config = copy.copy(config)
        wish = dtype_to_data_type(own.get(config.name, module.qconfig.weight().dtype))
        config.data_type = DataType.INT8 if wish == DataType.UINT8 else wish
        typed.append(config)
    unknown = sorted(set(own) - {config.name for config in typed})
    if unknown:
        raise ValueError(f"embed.quantised: there are no tables {unknown}, for which types are given.")
    return typed


def _options(module: nn.Module, tables: nn.ModuleDict) -> dict[str, Any]:
    """Return how the rows of `tables` become those of a quantised collection, as `module` asks for it."""
    return {
        "output_dtype": module.qconfig.activation().dtype,
        "table_name_to_weights": {name: table.weight for name, table in tables.items()},
        "quant_state_dict_split_scale_bias": getattr(module, _SPLIT, False),
        "row_alignment": getattr(module, _ALIGNMENT, DEFAULT_ROW_ALIGNMENT),
    }


def _check_names(configs: Sequence) -> None:
    names = [config.name for config in configs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"embed.quantised: Duplicate table name {name}")


def _in_order(features: KeyedJaggedTensor, names: list[str]) -> KeyedJaggedTensor:
    if features.variable_stride_per_key():
        raise ValueError("embed.quantised: all features of a batch must have the same number of samples.")
    keys = features.keys()
    missing = [name for name in names if name not in keys]
    if missing:
        raise ValueError(f"embed.quantised: the batch has no features {missing}.")
    return features if keys == names else features.permute([keys.index(name) for name in names])


class _Groups(nn.Module):
    """What pooled and unpooled collections share: groups of tables, and their rows as state."""

    __jit_unused_properties__ = ("device",)

    def _make(self, groups, state_name, output_dtype, split, row_alignment, weights, device) -> None:
        self._device = torch.device(device or "cpu")
        self._output_dtype = output_dtype_of(output_dtype)
        self._splits_state = split
        self.row_alignment = row_alignment
        self._groups: list[list] = [tables for _, tables in groups]
        self._emb_modules = []
        holders = nn.ModuleDict()
        for pooling, tables in groups:
            module = IntNBitTableBatchedEmbeddingBagsCodegen(
                [(t.name, t.num_embeddings, t.embedding_dim, t.data_type, None) for t in tables],
                [place for place, t in enumerate(tables) for _ in t.feature_names],
                pooling,
                self._device,
                self._output_dtype,
                row_alignment,
                [name for t in tables for name in t.feature_names],
            )
            self._emb_modules.append(module)
            for table, config in enumerate(tables):
                if weights and config.name in weights:
                    module.assign(table, weights[config.name])
        self._feature_names = [name for tables in self._groups for t in tables for name in t.feature_names]
        # What a script reads: its language knows numbers, texts and lists of them.
        self._kinds = [row_type(t.data_type) for tables in self._groups for t in tables]
        self._dims_by_table = [t.embedding_dim for tables in self._groups for t in tables]
        self._means = [pooling == PoolingType.MEAN for pooling, tables in groups for _ in tables]
        self._features_by_table = [list(t.feature_names) for tables in self._groups for t in tables]
        self._feature_splits = [sum(t.num_features() for t in tables) for tables in self._groups]
        self._state_name = state_name
        setattr(self, state_name, holders)
        self._register()

    def _register(self) -> None:
        """Show the rows as buffers; they share memory with the tables."""
        holders = getattr(self, self._state_name)
        for tables, module in zip(self._groups, self._emb_modules, strict=True):
            parts = module.split_embedding_weights_with_scale_bias(2 if self._splits_state else 0)
            for config, (weight, scale, bias) in zip(tables, parts, strict=True):
                holder = nn.Module()
                holder.register_buffer("weight", weight)
                if scale is not None:
                    holder.register_buffer("weight_qscale", scale)
                    holder.register_buffer("weight_qbias", bias)
                holders[config.name] = holder

    def __deepcopy__(self, memo):
        copied = self.__class__.__new__(self.__class__)
        nn.Module.__init__(copied)
        memo[id(self)] = copied
        for key, value in self.__dict__.items():
            if key not in copied.__dict__:
                copied.__dict__[key] = copy.deepcopy(value, memo)
        for name, child in self.named_children():
            is_state = name == self._state_name
            copied.add_module(name, nn.ModuleDict() if is_state else copy.deepcopy(child, memo))
        copied._register()
        return copied

    def _parts(self, features: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
        return _in_order(features, self._feature_names).split(self._feature_splits)

    def _check_whole(self) -> None:
        if self._splits_state:
            raise ValueError(
                "embed.quantised: scales that stand beside the codes in the state cannot be scripted. Make "
                "the collection without quant_state_dict_split_scale_bias."
            )

    def __prepare_scriptable__(self) -> Any:
        """Be asked by torch.jit.script, which saves tensors of two types in one memory wrongly."""
        self._check_whole()
        return self

    def _whole_rows(self, name: str) -> tuple[IntNBitTableBatchedEmbeddingBagsCodegen, int]:
        for tables, module in zip(self._groups, self._emb_modules, strict=True):
            for place, config in enumerate(tables):
                if config.name == name:
                    return module, place
        raise ValueError(f"embed.quantised: there is no table {name!r}.")

    def output_dtype(self) -> torch.dtype:
        """Return the type of the outputs."""
        return self._output_dtype

    @property
    def device(self) -> torch.device:
        """Return where the rows lie."""
        return self._device


class EmbeddingBagCollection(_Groups, EmbeddingBagCollectionInterface):
    """Pool rows in few bits, as the collection that was trained pools its own.

    Rows are `embedding_bags.<table>.weight` in the state: uint8 [rows, row bytes], with scale and bias in
    front of the codes; with `quant_state_dict_split_scale_bias` codes alone, beside `weight_qscale` and
    `weight_qbias`. Tables start with zeros unless `table_name_to_weights` has their numbers.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool,
        device: torch.device | None = None,
        output_dtype: torch.dtype = torch.float32,
        table_name_to_weights: dict[str, torch.Tensor] | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: int = DEFAULT_ROW_ALIGNMENT,
    ) -> None:
        super().__init__()
        _check_names(tables)
        self._is_weighted = is_weighted
        self._embedding_bag_configs = list(tables)
        groups: dict[PoolingType, list[EmbeddingBagConfig]] = {}
        for table in tables:
            groups.setdefault(table.pooling, []).append(table)
        self._make(
            list(groups.items()),
            "embedding_bags",
            output_dtype,
            quant_state_dict_split_scale_bias,
            row_alignment,
            table_name_to_weights,
            device,
        )
        ordered = [table for group in groups.values() for table in group]
        self._embedding_names = [name for names in get_embedding_names_by_table(ordered) for name in names]
        self._length_per_key = [t.embedding_dim for t in ordered for _ in t.feature_names]
        if register_tbes:
            self.tbes = nn.ModuleList(self._emb_modules)

    @classmethod
    def from_float(
        cls, module: OriginalEmbeddingBagCollection, use_precomputed_fake_quant: bool = False
    ) -> EmbeddingBagCollection:
        """Return the tables of `module`, rounded to the types of `module.qconfig`."""
        configs = _typed_configs(module, module.embedding_bag_configs())
        return cls(configs, module.is_weighted(), **_options(module, module.embedding_bags))

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return pooled rows by feature. IndexError names an id that is not a row."""
        if torch.jit.is_scripting():
            return self._inside(features)
        else:
            return self._find(features)

    def _inside(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the same in the language of torch.jit.script, and as nodes of torch.fx."""
        self._check_whole()
        by_name = features.to_dict()
        columns: List[torch.Tensor] = []  # noqa: UP006
        for place, table in enumerate(self.embedding_bags.values()):
            for name in self._features_by_table[place]:
                columns.append(
                    _scripted_rows.pooled_quantised_rows(
                        by_name[name],
                        table.weight,
                        self._dims_by_table[place],
                        self._kinds[place],
                        self._means[place],
                        self._is_weighted,
                    )
                )
        values = torch.cat(columns, 1).to(self._output_dtype)
        return KeyedTensor(self._embedding_names, self._length_per_key, values)

    def _find(self, features: KeyedJaggedTensor) -> KeyedTensor:
        if isinstance(features, Proxy):
            return as_module_node(self, features)
        pooled = [
            module(part.values(), part.offsets(), part.weights() if self._is_weighted else None)
            for module, part in zip(self._emb_modules, self._parts(features), strict=True)
        ]
        return KeyedTensor(self._embedding_names, self._length_per_key, torch.cat(pooled, dim=1))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs, with the types that rows are rounded to."""
        return self._embedding_bag_configs

    def is_weighted(self) -> bool:
        """Return whether ids come with weights."""
        return self._is_weighted


class EmbeddingCollection(_Groups, EmbeddingCollectionInterface):
    """Look up rows in few bits one by one."""

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | None = None,
        need_indices: bool = False,
        output_dtype: torch.dtype = torch.float32,
        table_name_to_weights: dict[str, torch.Tensor] | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: int = DEFAULT_ROW_ALIGNMENT,
    ) -> None:
        super().__init__()
        _check_names(tables)
        if len({table.embedding_dim for table in tables}) > 1:
            raise ValueError("embed.quantised: all tables of an EmbeddingCollection have one width.")
        self._embedding_configs = list(tables)
        self._need_indices = need_indices
        self._embedding_names_by_table = get_embedding_names_by_table(tables)
        self._make(
            [(PoolingType.NONE, list(tables))],
            "embeddings",
            output_dtype,
            quant_state_dict_split_scale_bias,
            row_alignment,
            table_name_to_weights,
            device,
        )
        if register_tbes:
            self.tbes = nn.ModuleList(self._emb_modules)

    @classmethod
    def from_float(
        cls, module: OriginalEmbeddingCollection, use_precomputed_fake_quant: bool = False
    ) -> EmbeddingCollection:
        """Return the tables of `module`, rounded to the types of `module.qconfig`."""
        configs = _typed_configs(module, module.embedding_configs())
        return cls(configs, need_indices=module.need_indices(), **_options(module, module.embeddings))

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the rows of every id, by feature. IndexError names an id that is not a row."""
        if torch.jit.is_scripting():
            return self._inside(features)
        else:
            return self._find(features)

    def _inside(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the same in the language of torch.jit.script, and as nodes of torch.fx."""
        self._check_whole()
        by_name = features.to_dict()
        found: Dict[str, JaggedTensor] = {}  # noqa: UP006
        for place, table in enumerate(self.embeddings.values()):
            for at, name in enumerate(self._features_by_table[place]):
                feature = by_name[name]
                rows = _scripted_rows.quantised_rows(
                    feature,
                    table.weight,
                    self._dims_by_table[place],
                    self._kinds[place],
                )
                found[self._embedding_names_by_table[place][at]] = JaggedTensor(
                    rows.to(self._output_dtype),
                    feature.values() if self._need_indices else None,
                    feature.lengths(),
                    None,
                )
        return found

    def _find(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        if isinstance(features, Proxy):
            return as_module_node(self, features)
        part = self._parts(features)[0]
        rows = self._emb_modules[0](part.values(), part.offsets())
        names = [name for names in self._embedding_names_by_table for name in names]
        found = {}
        per_key = part.length_per_key()
        lengths = part.lengths().view(len(names), -1)
        for number, (name, own, ids) in enumerate(
            zip(names, rows.split(per_key), part.values().split(per_key), strict=True)
        ):
            found[name] = JaggedTensor(own, ids if self._need_indices else None, lengths[number])
        return found

    def need_indices(self) -> bool:
        """Return whether ids are given back as weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the columns of a row."""
        return self._embedding_configs[0].embedding_dim

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the configs, with the types that rows are rounded to."""
        return self._embedding_configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the names of the outputs, table by table."""
        return self._embedding_names_by_table


class FeatureProcessedEmbeddingBagCollection(EmbeddingBagCollection):
    """Process features, then pool rows in few bits."""

    def __init__(
        self, tables: list[EmbeddingBagConfig], feature_processor: FeatureProcessorsCollection, **options
    ) -> None:
        options.pop("is_weighted", None)
        super().__init__(tables, is_weighted=True, **options)
        self.feature_processor = feature_processor

    @classmethod
    def from_float(
        cls,
        module: OriginalFeatureProcessedEmbeddingBagCollection,
        use_precomputed_fake_quant: bool = False,
    ) -> FeatureProcessedEmbeddingBagCollection:
        """Return the tables of `module`, rounded, behind a copy of its processors."""
        inner = module._embedding_bag_collection
        processors = copy.deepcopy(module._feature_processors)
        configs = _typed_configs(module, inner.embedding_bag_configs())
        return cls(
            configs,
            FeatureProcessorDictWrapper(processors) if isinstance(processors, nn.ModuleDict) else processors,
            **_options(module, inner.embedding_bags),
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return pooled rows by feature, weighted by the processors."""
        with torch.no_grad():
            return self._find(self.feature_processor(features))


QuantEmbeddingBagCollection = EmbeddingBagCollection
QuantEmbeddingCollection = EmbeddingCollection
