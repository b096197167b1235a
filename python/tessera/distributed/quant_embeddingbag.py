"""Quantised tables over the devices of one process: no group, nothing is communicated.

>>> from tessera.distributed.types import ParameterSharding, ShardingEnv
>>> from tessera.modules.embedding_configs import DataType, EmbeddingBagConfig
>>> tables = [EmbeddingBagConfig(4, 2, "t", DataType.INT8, feature_names=["f"])]
>>> module = QuantEmbeddingBagCollection(tables, False, table_name_to_weights={"t": torch.ones(4, 2)})
>>> plan = {"t": ParameterSharding("row_wise", "quant")}
>>> sharded = QuantEmbeddingBagCollectionSharder().shard(module, plan, ShardingEnv.from_local(2, 0))
>>> features = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([0, 3]), torch.tensor([2]))
>>> sharded(features)["f"].tolist()
[[2.0, 2.0]]
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from tessera.distributed._infer_lookups import (
    FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    FUSED_PARAM_ROW_ALIGNMENT,
    InferGroupedPooledEmbeddingsLookup,
    _check_device,
    device_of_rank,
)
from tessera.distributed.dist_data import EmbeddingsAllToOne, EmbeddingsAllToOneReduce, KJTOneToAll
from tessera.distributed.embedding_sharding import EmbeddingShardingInfo
from tessera.distributed.embedding_types import (
    BaseQuantEmbeddingSharder,
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    KJTList,
    ListOfKJTList,
    ShardedEmbeddingTable,
)
from tessera.distributed.types import (
    NullShardedModuleContext,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from tessera.modules.embedding_configs import DATA_TYPE_NUM_BITS, EmbeddingBagConfig, PoolingType
from tessera.modules.embedding_modules import get_embedding_names_by_table
from tessera.modules.feature_processor_ import FeatureProcessorsCollection
from tessera.quant._tables import IntNBitTableBatchedEmbeddingBagsCodegen
from tessera.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from tessera.quant.embedding_modules import (
    FeatureProcessedEmbeddingBagCollection as QuantFeatureProcessedEmbeddingBagCollection,
)
from tessera.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

__all__ = [
    "QuantEmbeddingBagCollectionSharder",
    "QuantFeatureProcessedEmbeddingBagCollectionSharder",
    "ShardedQuantEmbeddingBagCollection",
    "ShardedQuantFeatureProcessedEmbeddingBagCollection",
    "create_infer_embedding_bag_sharding",
    "flatten_feature_lengths",
]


def flatten_feature_lengths(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the features with lengths of one dimension; the same object if they have that."""
    return features.flatten_lengths() if features.lengths().dim() > 1 else features


@dataclass
class _Shard:
    """A part of a table: where it lies, and how large it is."""

    rank: int
    row: int
    rows: int
    column: int
    columns: int


def _cut(size: int, parts: int) -> list[tuple[int, int]]:
    """Where parts of a size begin, and how large they are; the first ones are full."""
    block = -(-size // parts) if parts else 0
    return [(min(k * block, size), max(min(block, size - k * block), 0)) for k in range(parts)]


def _shards_of(info: EmbeddingShardingInfo, world_size: int) -> list[_Shard]:
    config, plan = info.embedding_config, info.param_sharding
    rows, columns = config.num_embeddings, config.embedding_dim
    kind = ShardingType(plan.sharding_type)
    spec = getattr(plan.sharding_spec, "shards", None)
    if spec and kind != ShardingType.TABLE_WISE:
        shards = [
            _Shard(shard.placement.rank(), shard.shard_offsets[0], shard.shard_sizes[0],
                   shard.shard_offsets[1], shard.shard_sizes[1])
            for shard in spec
        ]  # fmt: skip
        if kind == ShardingType.ROW_WISE:  # the columns of the state are bytes
            shards = [_Shard(s.rank, s.row, s.rows, 0, columns) for s in shards]
    elif kind == ShardingType.ROW_WISE:
        ranks = list(plan.ranks or range(world_size))
        cuts = _cut(rows, len(ranks))
        shards = [
            _Shard(rank, row, count, 0, columns) for rank, (row, count) in zip(ranks, cuts, strict=True)
        ]
    elif kind == ShardingType.COLUMN_WISE:
        ranks = list(plan.ranks or range(world_size))
        cuts = _cut(columns, len(ranks))
        shards = [
            _Shard(rank, 0, rows, column, count) for rank, (column, count) in zip(ranks, cuts, strict=True)
        ]
    else:
        ranks = list(plan.ranks or ([spec[0].placement.rank()] if spec else [0]))
        shards = [_Shard(ranks[0], 0, rows, 0, columns)]
    covered = sum(shard.rows * shard.columns for shard in shards)
    if covered != rows * columns:
        raise ValueError(
            f"sharding.quant: the shards of table {config.name!r} hold {covered} of its {rows * columns} "
            "numbers."
        )
    per_byte = 8 // min(DATA_TYPE_NUM_BITS[config.data_type], 8)
    for shard in shards:
        if not 0 <= shard.rank < world_size:
            raise ValueError(
                f"sharding.quant: table {config.name!r} has a shard on device {shard.rank} of {world_size}."
            )
        if shard.column % per_byte:
            raise ValueError(
                f"sharding.quant: table {config.name!r} is cut at column {shard.column}; {per_byte} columns "
                f"of {config.data_type} share a byte."
            )
    return [shard for shard in shards if shard.rows > 0 and shard.columns > 0]


class _InferSharding:
    """One type of sharding: which features go to which device, and what becomes of the results."""

    def __init__(self, kind: ShardingType, infos: list[EmbeddingShardingInfo], env: ShardingEnv) -> None:
        self.kind = kind
        self.env = env
        self.infos = infos
        self.shards = [_shards_of(info, env.world_size) for info in infos]
        # Which shards of which tables each device has, in order.
        self.places: list[list[tuple[int, int]]] = [[] for _ in range(env.world_size)]
        for table, shards in enumerate(self.shards):
            for number, shard in enumerate(shards):
                self.places[shard.rank].append((table, number))
        if kind == ShardingType.ROW_WISE:
            for places in self.places:
                if len({table for table, _ in places}) < len(places):
                    raise ValueError("sharding.quant: a device has two shards of the rows of one table.")

    def _features(self, table: int) -> list[str]:
        return list(self.infos[table].embedding_config.feature_names)

    def feature_names(self) -> list[str]:
        """Return the features in the order they are sent."""
        return [name for names in self.feature_names_per_rank() for name in names]

    def feature_names_per_rank(self) -> list[list[str]]:
        """Return the features of each device."""
        return [[name for table, _ in places for name in self._features(table)] for places in self.places]

    def features_per_rank(self) -> list[int]:
        """Return the number of features of each device."""
        return [len(names) for names in self.feature_names_per_rank()]

    def embedding_names(self) -> list[str]:
        """Return the names of the outputs, table by table."""
        configs = [info.embedding_config for info in self.infos]
        return [name for names in get_embedding_names_by_table(configs) for name in names]

    def embedding_dims(self) -> list[int]:
        """Return the columns of each output."""
        return [
            info.embedding_config.embedding_dim
            for info in self.infos
            for _ in info.embedding_config.feature_names
        ]

    def grouped_configs_per_rank(self, is_weighted: bool) -> list[list[GroupedEmbeddingConfig]]:
        """Return the groups of each device: neighbours of one pooling, in the order of their features."""
        found = []
        for places in self.places:
            groups: list[GroupedEmbeddingConfig] = []
            for table, number in places:
                config, shard = self.infos[table].embedding_config, self.shards[table][number]
                pooling = config.pooling
                weighs = is_weighted
                if self.kind == ShardingType.ROW_WISE and pooling == PoolingType.MEAN:
                    pooling, weighs = PoolingType.SUM, True  # see _MeanWeights
                own = ShardedEmbeddingTable(
                    num_embeddings=config.num_embeddings,
                    embedding_dim=config.embedding_dim,
                    name=config.name,
                    data_type=config.data_type,
                    feature_names=list(config.feature_names),
                    pooling=pooling,
                    local_rows=shard.rows,
                    local_cols=shard.columns,
                    compute_kernel=EmbeddingComputeKernel.QUANT,
                )
                last = groups[-1] if groups else None
                if last is None or (last.pooling, last.is_weighted) != (pooling, weighs):
                    groups.append(
                        GroupedEmbeddingConfig(
                            config.data_type, pooling, weighs, False, EmbeddingComputeKernel.QUANT, []
                        )
                    )
                groups[-1].embedding_tables.append(own)
            found.append(groups)
        return found

    def create_lookup(
        self, device=None, fused_params=None, feature_processor=None, is_weighted: bool = False
    ) -> InferGroupedPooledEmbeddingsLookup:
        """Return the lookups of all devices."""
        return InferGroupedPooledEmbeddingsLookup(
            self.grouped_configs_per_rank(is_weighted), self.env.world_size, fused_params, device
        )

    def create_input_dist(self, device=None) -> nn.Module:
        """Return what cuts features for the devices."""
        if self.kind == ShardingType.ROW_WISE:
            return _RowInputDist(self)
        return _KeyInputDist(self, [device_of_rank(device, rank) for rank in range(self.env.world_size)])

    def create_output_dist(self, device=None) -> nn.Module:
        """Return what joins the results of the devices, on `device`."""
        kind = _RowOutputDist if self.kind == ShardingType.ROW_WISE else _ColumnOutputDist
        return kind(self, device_of_rank(device, 0))


class _KeyInputDist(nn.Module):
    """Send each feature to the devices that have columns of its table."""

    def __init__(self, sharding: _InferSharding, devices: list[torch.device]) -> None:
        super().__init__()
        self._names = sharding.feature_names()
        self._dist = KJTOneToAll(sharding.features_per_rank(), sharding.env.world_size)
        self._dist._devices = devices  # which may be one, of several shards

    def forward(self, features: KeyedJaggedTensor) -> KJTList:
        keys = features.keys()
        return KJTList(self._dist(features.permute([keys.index(name) for name in self._names])))


class _RowInputDist(nn.Module):
    """Send each id to the device that has its row.

    The mean is over all ids of a bag, wherever their rows lie: ids get weights of one over their number,
    and devices sum.
    """

    def __init__(self, sharding: _InferSharding) -> None:
        super().__init__()
        self._sharding = sharding

    def forward(self, features: KeyedJaggedTensor) -> KJTList:
        sharding = self._sharding
        keys = features.keys()
        bags = {name: feature for name, feature in features.to_dict().items() if name in keys}
        any_mean = any(i.embedding_config.pooling == PoolingType.MEAN for i in sharding.infos)
        found = []
        for places in sharding.places:
            names, ids, lengths, weights = [], [], [], []
            for table, number in places:
                config, shard = sharding.infos[table].embedding_config, sharding.shards[table][number]
                for name in config.feature_names:
                    bag = bags[name]
                    values, counts = bag.values().long(), bag.lengths().long()
                    self._check(config, name, values)
                    is_here = (values >= shard.row) & (values < shard.row + shard.rows)
                    sample = torch.repeat_interleave(
                        torch.arange(counts.numel(), device=counts.device), counts
                    )
                    names.append(name)
                    ids.append(values[is_here] - shard.row)
                    lengths.append(torch.bincount(sample[is_here], minlength=counts.numel()))
                    own = bag.weights_or_none()
                    if own is not None or any_mean:
                        factor = torch.ones_like(values, dtype=torch.float) if own is None else own.float()
                        if config.pooling == PoolingType.MEAN:
                            factor = factor / counts[sample]
                        weights.append(factor[is_here])
            found.append(
                KeyedJaggedTensor(
                    names,
                    torch.cat(ids) if ids else torch.empty(0, dtype=torch.long),
                    weights=torch.cat(weights) if weights else None,
                    lengths=torch.cat(lengths).int() if lengths else torch.empty(0, dtype=torch.int32),
                    stride=features.stride(),
                )
            )
        return KJTList(found)

    @staticmethod
    def _check(config: EmbeddingBagConfig, name: str, values: torch.Tensor) -> None:
        is_outside = (values < 0) | (values >= config.num_embeddings)
        if is_outside.any():
            position = int(is_outside.nonzero()[0])
            raise IndexError(
                f"sharding.quant: table {config.name!r} has {config.num_embeddings} rows; id "
                f"{int(values[position])} at position {position} of feature {name!r} is not one of them."
            )


class _ColumnOutputDist(nn.Module):
    """Put the columns of the devices side by side, each feature's together."""

    def __init__(self, sharding: _InferSharding, device: torch.device) -> None:
        super().__init__()
        self._num_used = sum(bool(places) for places in sharding.places)
        self._dist = EmbeddingsAllToOne(device, self._num_used, 1)
        begins: dict[tuple[int, int, int], int] = {}
        place = 0
        for places in sharding.places:
            for table, number in places:
                for feature in range(len(sharding._features(table))):
                    begins[table, feature, number] = place
                    place += sharding.shards[table][number].columns
        order: list[int] = []
        for table, shards in enumerate(sharding.shards):
            for feature in range(len(sharding._features(table))):
                for number in sorted(range(len(shards)), key=lambda n: shards[n].column):
                    begin = begins[table, feature, number]
                    order += range(begin, begin + shards[number].columns)
        self._order = None if order == list(range(place)) else torch.tensor(order, device=device)

    def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
        joined = self._dist(parts)
        return joined if self._order is None else joined.index_select(1, self._order)


class _RowOutputDist(nn.Module):
    """Sum the results of the devices in their order."""

    def __init__(self, sharding: _InferSharding, device: torch.device) -> None:
        super().__init__()
        dims = sharding.embedding_dims()
        self._width = sum(dims)
        # Where the columns of each device go: one without rows of a table has none of its columns.
        begins, place = {}, 0
        for table, info in enumerate(sharding.infos):
            count = info.embedding_config.embedding_dim * len(info.embedding_config.feature_names)
            begins[table] = (place, count)
            place += count
        self._columns: list[torch.Tensor] = []
        for places in sharding.places:
            if places:
                spans = [begins[table] for table, _ in places]
                self._columns.append(torch.cat([torch.arange(b, b + count) for b, count in spans]))
        self._dist = EmbeddingsAllToOneReduce(device, len(self._columns))

    def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
        whole = []
        for part, columns in zip(parts, self._columns, strict=True):
            if part.size(1) < self._width:
                wide = torch.zeros(part.size(0), self._width, dtype=part.dtype, device=part.device)
                part = wide.index_copy_(1, columns.to(part.device), part)
            whole.append(part)
        return self._dist(whole)


def create_infer_embedding_bag_sharding(
    sharding_type: str,
    sharding_infos: list[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
) -> _InferSharding:
    """Return how tables lie on the devices of one process: table_wise, row_wise or column_wise."""
    known = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE)
    if sharding_type not in [kind.value for kind in known]:
        raise ValueError(f"Sharding type not supported {sharding_type}")
    return _InferSharding(ShardingType(sharding_type), sharding_infos, env)


class ShardedQuantEmbeddingBagCollection(nn.Module):
    """Pool rows of quantised tables that lie on several devices of this process.

    Rows are copied from `module`: the result is that of `module` at once, to the rounding of sums. The
    state has the names and shapes of `module`, whatever the plan; loading one cuts it. `env` is
    `ShardingEnv.from_local`.
    """

    def __init__(
        self,
        module: QuantEmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._device = _check_device(device)
        self._embedding_bag_configs = module.embedding_bag_configs()
        self._is_weighted = module.is_weighted()
        self._fused_params = {
            "output_dtype": module.output_dtype(),
            FUSED_PARAM_ROW_ALIGNMENT: module.row_alignment,
            FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS: module._splits_state,
        } | (fused_params or {})
        kinds: dict[str, list[EmbeddingShardingInfo]] = {}
        for config in self._embedding_bag_configs:
            plan = table_name_to_parameter_sharding.get(config.name)
            if plan is None:
                raise ValueError(f"sharding.quant: table {config.name!r} has no sharding in the plan.")
            rows = module.embedding_bags[config.name].weight
            info = EmbeddingShardingInfo(config, plan, rows, self._fused_params)
            kinds.setdefault(plan.sharding_type, []).append(info)
        self._sharding_infos = kinds
        self._shardings = {
            kind: create_infer_embedding_bag_sharding(kind, infos, env) for kind, infos in kinds.items()
        }
        self._input_dists = nn.ModuleList([s.create_input_dist(device) for s in self._shardings.values()])
        self._lookups = nn.ModuleList(
            [
                s.create_lookup(device, self._fused_params, is_weighted=self._is_weighted)
                for s in self._shardings.values()
            ]
        )
        self._output_dists = nn.ModuleList([s.create_output_dist(device) for s in self._shardings.values()])
        self._embedding_names = [name for s in self._shardings.values() for name in s.embedding_names()]
        self._embedding_dims = [dim for s in self._shardings.values() for dim in s.embedding_dims()]
        for config in self._embedding_bag_configs:
            tbe, place = module._whole_rows(config.name)
            self._load_table(config.name, tbe.rows(place))

    def _parts(self, name: str):
        """The shards of a table, each with the rows that hold it."""
        for sharding, lookup in zip(self._shardings.values(), self._lookups, strict=True):
            tbes = iter(lookup._embedding_lookups_per_rank)
            for places in sharding.places:
                if not places:
                    continue
                tables = [
                    (group.tbe, k)
                    for group in next(tbes)._emb_modules
                    for k in range(len(group.tbe.embedding_specs))
                ]
                for (table, number), (tbe, k) in zip(places, tables, strict=True):
                    if sharding.infos[table].embedding_config.name == name:
                        yield sharding.shards[table][number], tbe.rows(k)

    def _config(self, name: str) -> EmbeddingBagConfig:
        return next(config for config in self._embedding_bag_configs if config.name == name)

    def _spans(self, name: str, shard: _Shard) -> tuple[int, int, int]:
        """Bytes in front of the codes, and where the codes of a shard begin and end behind them."""
        bits = DATA_TYPE_NUM_BITS[self._config(name).data_type]
        head = 4 if bits <= 8 else 0
        begin = shard.column * bits // 8
        return head, begin, begin + -(-shard.columns * bits // 8)

    def _load_table(self, name: str, whole: torch.Tensor) -> None:
        for shard, rows in self._parts(name):
            head, begin, end = self._spans(name, shard)
            own = whole[shard.row : shard.row + shard.rows]
            rows[:, :head] = own[:, :head]  # a shard of columns has the row's scale and bias too
            rows[:, head : head + end - begin] = own[:, head + begin : head + end]

    def _whole_module(self) -> QuantEmbeddingBagCollection:
        """The unsharded module with the rows of the shards."""
        whole = QuantEmbeddingBagCollection(
            self._embedding_bag_configs,
            self._is_weighted,
            output_dtype=self._fused_params["output_dtype"],
            quant_state_dict_split_scale_bias=bool(
                self._fused_params[FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS]
            ),
            row_alignment=self._fused_params[FUSED_PARAM_ROW_ALIGNMENT],
        )
        for config in self._embedding_bag_configs:
            tbe, place = whole._whole_rows(config.name)
            rows = tbe.rows(place)
            for shard, own in self._parts(config.name):
                head, begin, end = self._spans(config.name, shard)
                target = rows[shard.row : shard.row + shard.rows]
                target[:, :head] = own[:, :head]
                target[:, head + begin : head + end] = own[:, head : head + end - begin]
        return whole

    def state_dict(self, destination=None, prefix: str = "", keep_vars: bool = False) -> dict:
        """Return whole tables under the names of the unsharded module: copies."""
        destination = {} if destination is None else destination
        for name, rows in self._whole_module().state_dict().items():
            destination[prefix + name] = rows
        return destination

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False) -> _IncompatibleKeys:
        """Cut whole tables into the shards. A table of another width is an error that names both."""
        whole = self._whole_module()
        keys = whole.load_state_dict(state_dict, strict=strict)
        for config in self._embedding_bag_configs:
            tbe, place = whole._whole_rows(config.name)
            self._load_table(config.name, tbe.rows(place))
        return keys

    def create_context(self) -> NullShardedModuleContext:
        """Return an empty context."""
        return NullShardedModuleContext()

    def input_dist(self, ctx: NullShardedModuleContext, features: KeyedJaggedTensor) -> ListOfKJTList:
        """Cut the features for the devices, for each type of sharding."""
        if features.variable_stride_per_key():
            raise ValueError("sharding.quant: all features of a batch must have the same number of samples.")
        features = flatten_feature_lengths(features)
        keys = features.keys()
        needed = [name for s in self._shardings.values() for name in s.feature_names()]
        missing = sorted(set(needed) - set(keys))
        if missing:
            raise ValueError(f"sharding.quant: the batch has no features {missing}.")
        return ListOfKJTList([dist(features) for dist in self._input_dists])

    def compute(self, ctx: NullShardedModuleContext, dist_input: ListOfKJTList) -> list[list[torch.Tensor]]:
        """Look up on all devices. IndexError names an id that is not a row."""
        return [lookup(features) for lookup, features in zip(self._lookups, dist_input, strict=True)]

    def output_dist(self, ctx: NullShardedModuleContext, output: list[list[torch.Tensor]]) -> KeyedTensor:
        """Join the results of the devices."""
        joined = [dist(parts) for dist, parts in zip(self._output_dists, output, strict=True)]
        return KeyedTensor(self._embedding_names, self._embedding_dims, torch.cat(joined, dim=1))

    def compute_and_output_dist(self, ctx: NullShardedModuleContext, input: ListOfKJTList) -> KeyedTensor:
        """Look up and join."""
        return self.output_dist(ctx, self.compute(ctx, input))

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return pooled rows by feature."""
        ctx = self.create_context()
        return self.compute_and_output_dist(ctx, self.input_dist(ctx, features))

    def copy(self, device: torch.device) -> ShardedQuantEmbeddingBagCollection:
        """Return a copy on the same devices. ValueError unless `device` is where their results are."""
        wanted, own = device_of_rank(device, 0), device_of_rank(self._device, 0)
        if wanted == own or wanted.type == own.type == "cpu":
            return copy.deepcopy(self)
        raise ValueError(f"sharding.quant: the tables lie on {self._device}; shard the module on {device}.")

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the tables."""
        return self._embedding_bag_configs

    def sharding_type_to_sharding_infos(self) -> dict[str, list[EmbeddingShardingInfo]]:
        """Return what is known of the tables, by type of sharding."""
        return self._sharding_infos

    @property
    def shardings(self) -> dict[str, _InferSharding]:
        """Return the shardings by type."""
        return self._shardings

    def tbes_configs(self) -> dict[IntNBitTableBatchedEmbeddingBagsCodegen, GroupedEmbeddingConfig]:
        """Return the objects that look up, with the groups they are for."""
        return {t: config for lookup in self._lookups for t, config in lookup.get_tbes_to_register().items()}


class QuantEmbeddingBagCollectionSharder(BaseQuantEmbeddingSharder[QuantEmbeddingBagCollection]):
    """Shard a quantised EmbeddingBagCollection over the devices of one process."""

    def shard(
        self,
        module: QuantEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedQuantEmbeddingBagCollection:
        """Return the sharded module, with the rows of `module`."""
        return ShardedQuantEmbeddingBagCollection(module, params, env, self.fused_params, device)

    @property
    def module_type(self) -> type[QuantEmbeddingBagCollection]:
        """Return what is sharded."""
        return QuantEmbeddingBagCollection


def _processed(processor: nn.Module, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the features with weights; a device with two parts of a table has its features twice."""
    keys = features.keys()
    if len(set(keys)) == len(keys):
        return processor(features) if keys else features
    return KeyedJaggedTensor.concat([processor(part) for part in features.split([1] * len(keys))])


class ShardedQuantFeatureProcessedEmbeddingBagCollection(ShardedQuantEmbeddingBagCollection):
    """Process features on each device before they are looked up there."""

    def __init__(
        self,
        module: QuantFeatureProcessedEmbeddingBagCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        feature_processor: FeatureProcessorsCollection | None = None,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, env, fused_params, device)
        kinds = sorted(set(self._shardings) - {"table_wise", "column_wise"})
        if kinds:
            raise ValueError(
                f"sharding.quant: tables behind feature processors are cut by table or column, not {kinds}: "
                "positions are those of whole bags."
            )
        processor = module.feature_processor if feature_processor is None else feature_processor
        self.feature_processors_per_rank = nn.ModuleList(
            [copy.deepcopy(processor).to(device_of_rank(device, rank)) for rank in range(env.world_size)]
        )

    def state_dict(self, destination=None, prefix: str = "", keep_vars: bool = False) -> dict:
        """Return whole tables and one processor under the names of the unsharded module."""
        destination = super().state_dict(destination, prefix, keep_vars)
        for name, tensor in self.feature_processors_per_rank[0].state_dict().items():
            destination[f"{prefix}feature_processor.{name}"] = tensor
        return destination

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False) -> _IncompatibleKeys:
        """Cut whole tables into the shards, and give every device the processor."""
        begin = "feature_processor."
        own = {name[len(begin) :]: t for name, t in state_dict.items() if name.startswith(begin)}
        for processor in self.feature_processors_per_rank:
            keys = processor.load_state_dict(own, strict)
        rest = {name: t for name, t in state_dict.items() if not name.startswith(begin)}
        tables = super().load_state_dict(rest, strict)
        return _IncompatibleKeys(
            tables.missing_keys + [begin + name for name in keys.missing_keys],
            tables.unexpected_keys + [begin + name for name in keys.unexpected_keys],
        )

    def apply_feature_processor(self, kjt_list: KJTList) -> KJTList:
        """Return the features of each device with the weights of its processor."""
        processors = self.feature_processors_per_rank
        with torch.no_grad():
            return KJTList(
                [
                    _processed(processor, features)
                    for processor, features in zip(processors, kjt_list, strict=True)
                ]
            )

    def compute(self, ctx: NullShardedModuleContext, dist_input: ListOfKJTList) -> list[list[torch.Tensor]]:
        """Process features and look up, on all devices."""
        return super().compute(ctx, ListOfKJTList([self.apply_feature_processor(own) for own in dist_input]))


class QuantFeatureProcessedEmbeddingBagCollectionSharder(
    BaseQuantEmbeddingSharder[QuantFeatureProcessedEmbeddingBagCollection]
):
    """Shard a quantised collection behind feature processors."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the types of sharding: whole tables or columns."""
        return [ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the kernel."""
        return [EmbeddingComputeKernel.QUANT.value]

    def shard(
        self,
        module: QuantFeatureProcessedEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedQuantFeatureProcessedEmbeddingBagCollection:
        """Return the sharded module, with the rows and processors of `module`."""
        return ShardedQuantFeatureProcessedEmbeddingBagCollection(
            module, params, env, self.fused_params, device
        )

    @property
    def module_type(self) -> type[QuantFeatureProcessedEmbeddingBagCollection]:
        """Return what is sharded."""
        return QuantFeatureProcessedEmbeddingBagCollection
