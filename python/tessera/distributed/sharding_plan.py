"""Plans made by hand: which part of which table lies on which rank.

>>> import torch
>>> sharding = row_wise()(torch.empty(10, 4), local_size=4, world_size=4)
>>> [shard.shard_sizes for shard in sharding.sharding_spec.shards]
[[3, 4], [3, 4], [3, 4], [1, 4]]
>>> print(EmbeddingModuleShardingPlan({"a": sharding, "b": column_wise([1, 0])(torch.empty(6, 8), 4, 4)}))
table  type         kernel  rank  rows     columns
a      row_wise     dense   0     [0, 3)   [0, 4)
                            1     [3, 6)   [0, 4)
                            2     [6, 9)   [0, 4)
                            3     [9, 10)  [0, 4)
b      column_wise  dense   1     [0, 6)   [0, 4)
                            0     [0, 6)   [4, 8)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata

from tessera import _C
from tessera.distributed.comm import get_local_size
from tessera.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from tessera.distributed.utils import _names_steps

__all__ = [
    "ParameterShardingGenerator",
    "apply_to_all",
    "column_wise",
    "construct_module_sharding_plan",
    "data_parallel",
    "get_default_sharders",
    "get_module_to_default_sharders",
    "get_sharding_constructor_from_type",
    "grid_shard",
    "placement",
    "plan_from_json",
    "plan_to_json",
    "row_wise",
    "table_column_wise",
    "table_row_wise",
    "table_wise",
]

_engine = _C.sharding

# Kernels of the reference beside the engine's two: where rows lie is said beside them (_row_cache.py).
_KERNELS = {"dense": "dense", "fused": "fused", "fused_uvm": "fused", "fused_uvm_caching": "fused"}


def placement(compute_device: str, rank: int, local_size: int) -> str:
    """Return where a shard lies, as plans say it: each rank of a host has a device of its own.

    >>> placement("cpu", 3, 2)
    'rank:3/cpu'
    """
    device = compute_device
    if compute_device not in ("cpu", "meta"):
        index = rank % local_size
        if compute_device == "cuda" and torch.cuda.is_available():
            index %= torch.cuda.device_count()  # more ranks than GPUs share them
        device = f"{compute_device}:{index}"
    return f"rank:{rank}/{device}"


def _from_engine(
    sharding: _C.sharding.ParameterSharding, kernel: str, device_type: str, local_size: int
) -> ParameterSharding:
    spec = None
    if sharding.type != ShardingType.DATA_PARALLEL.value:
        spec = EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=[shard.row, shard.column],
                    shard_sizes=[shard.rows, shard.columns],
                    placement=placement(device_type, shard.rank, local_size),
                )
                for shard in sharding.shards
            ]
        )
    shape = (
        max((shard.row + shard.rows for shard in sharding.shards), default=0),
        max((shard.column + shard.columns for shard in sharding.shards), default=0),
    )
    return ParameterSharding(sharding.type, kernel, list(sharding.ranks), spec, _shape=shape)


def _table(name: str, rows: int, columns: int) -> _C.embedding.EmbeddingTableConfig:
    return _C.embedding.EmbeddingTableConfig(
        rows, columns, name, _C.embedding.DataType.FP32, [], _C.embedding.PoolingType.SUM
    )


def _wish_of(sharding: ParameterSharding, local_size: int) -> _C.sharding.Placement:
    """Return what a sharding without a spec asks for."""
    ranks = sharding.ranks or []
    makers = {
        "data_parallel": lambda: _engine.data_parallel(),
        "row_wise": lambda: _engine.row_wise([]),
        "table_wise": lambda: _engine.table_wise(ranks[0]),
        "column_wise": lambda: _engine.column_wise(ranks, []),
        "table_column_wise": lambda: _engine.table_column_wise(ranks, []),
        "table_row_wise": lambda: _engine.table_row_wise(ranks[0] // local_size),
        "grid_shard": lambda: _engine.grid_shard([rank // local_size for rank in ranks[::local_size]], []),
    }
    if sharding.sharding_type not in makers:
        raise ValueError(f"sharding.plan: {sharding.sharding_type!r} is not one of {', '.join(makers)}.")
    if not ranks and sharding.sharding_type not in ("data_parallel", "row_wise"):
        raise ValueError(f"sharding.plan: {sharding.sharding_type} needs ranks or a sharding_spec.")
    return makers[sharding.sharding_type]()


def _to_engine(
    name: str, sharding: ParameterSharding, rows: int, columns: int, world_size: int, local_size: int
) -> _C.sharding.ParameterSharding:
    """Return the engine's record of a sharding; `rows` and `columns` are the whole table's."""
    kernel = _KERNELS.get(sharding.compute_kernel)
    if kernel is None:
        raise ValueError(
            f"sharding.plan: table {name!r} has the kernel {sharding.compute_kernel!r}, which is not one of "
            f"{', '.join(_KERNELS)}."
        )
    shards = getattr(sharding.sharding_spec, "shards", None)
    if shards is None:
        wish = _wish_of(sharding, local_size).with_kernel(kernel)
        return wish.place(_table(name, rows, columns), world_size, local_size)
    parts = [
        _engine.Shard(*shard.shard_offsets, *shard.shard_sizes, shard.placement.rank()) for shard in shards
    ]
    return _engine.ParameterSharding(sharding.sharding_type, kernel, [part.rank for part in parts], parts)


def _steps_in_backward(param: torch.Tensor, sharder: ModuleSharder | None) -> bool:
    """Tell whether an optimizer was given to the parameter for backward, or to all tables by the sharder."""
    own = getattr(param, "_optimizer_classes", None) or getattr(param, "_in_backward_optimizers", None)
    return bool(own) or _names_steps(getattr(sharder, "fused_params", None))


class ParameterShardingGenerator:
    """Hold a wish for one table; called with its parameter and the ranks, it gives the sharding."""

    def __init__(
        self,
        wish: _C.sharding.Placement,
        compute_kernel: str | None = None,
        device: str | None = None,
        device_types: Sequence[str] | None = None,
    ) -> None:
        if compute_kernel is not None and compute_kernel not in _KERNELS:
            raise ValueError(f"sharding.plan: {compute_kernel!r} is not one of {', '.join(_KERNELS)}.")
        self._wish = wish
        self._kernel = compute_kernel
        self._device = device
        self._device_types = device_types

    @property
    def sharding_type(self) -> str:
        """Return the type of sharding that is wished for."""
        return self._wish.type

    def _choose_kernel(self, param: torch.Tensor, device_type: str, sharder: ModuleSharder | None) -> str:
        """Return what was asked for; otherwise fused only where something says how backward steps rows."""
        if self._kernel is not None:
            return self._kernel
        if self.sharding_type == ShardingType.DATA_PARALLEL.value or not _steps_in_backward(param, sharder):
            return "dense"
        offered = sharder.compute_kernels(self.sharding_type, device_type) if sharder else ["fused"]
        return "fused" if "fused" in offered else "dense"

    def __call__(
        self,
        param: torch.Tensor,
        local_size: int,
        world_size: int,
        device_type: str = "cpu",
        sharder: ModuleSharder | None = None,
        name: str = "",
    ) -> ParameterSharding:
        """Return where the parts of `param` lie. `name` is for errors."""
        kernel = self._choose_kernel(param, device_type, sharder)
        wish = self._wish.with_kernel(_KERNELS[kernel])
        placed = wish.place(_table(name, *param.shape), world_size, local_size)
        sharding = _from_engine(placed, kernel, self._device or device_type, local_size)
        shards = sharding.sharding_spec.shards if self._device_types else []
        for shard, kind in zip(shards, self._device_types or [], strict=True):
            shard.placement = torch.distributed._remote_device(
                placement(kind, shard.placement.rank(), local_size)
            )
        return sharding


def data_parallel() -> ParameterShardingGenerator:
    """Wish for the whole table on every rank."""
    return ParameterShardingGenerator(_engine.data_parallel())


def table_wise(
    rank: int, device: str | None = None, compute_kernel: str | None = None
) -> ParameterShardingGenerator:
    """Wish for the whole table on one rank."""
    return ParameterShardingGenerator(_engine.table_wise(rank), compute_kernel, device)


def row_wise(
    sizes_placement: tuple[Sequence[int], str] | None = None,
    compute_kernel: str | None = None,
    num_buckets: int | None = None,
) -> ParameterShardingGenerator:
    """Wish for the rows cut over all ranks: ceil(rows / W) each, or `sizes_placement` = (rows, device)."""
    if num_buckets is not None:
        raise ValueError(
            "sharding.row_wise: num_buckets is for torchrec's virtual tables. Leave it out, or say with "
            "sizes_placement how many rows each rank has."
        )
    sizes, device = sizes_placement or ([], None)
    return ParameterShardingGenerator(_engine.row_wise(list(sizes)), compute_kernel, device)


def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
    device_types: Sequence[str] | None = None,
) -> ParameterShardingGenerator:
    """Wish for one part of the columns per entry of `ranks`, equal or as wide as `size_per_rank` says.

    Without ranks, part i of `size_per_rank` lies on rank i. `device_types` says for each part on which type
    of device it is placed, if not on that of the plan.
    """
    if ranks is None and size_per_rank is None:
        raise ValueError("sharding.column_wise: give ranks or size_per_rank.")
    places = list(range(len(size_per_rank)) if ranks is None else ranks)
    if device_types is not None and len(device_types) != len(places):
        raise ValueError(
            f"sharding.column_wise: there are {len(device_types)} device_types for {len(places)} parts."
        )
    wish = _engine.column_wise(places, list(size_per_rank or []))
    return ParameterShardingGenerator(wish, compute_kernel, device_types=device_types)


def table_row_wise(host_index: int, compute_kernel: str | None = None) -> ParameterShardingGenerator:
    """Wish for the rows cut over the ranks of one host."""
    return ParameterShardingGenerator(_engine.table_row_wise(host_index), compute_kernel)


def table_column_wise(
    ranks: Sequence[int],
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
) -> ParameterShardingGenerator:
    """Wish for the columns cut over ranks of one host."""
    wish = _engine.table_column_wise(list(ranks), list(size_per_rank or []))
    return ParameterShardingGenerator(wish, compute_kernel)


def grid_shard(
    host_indexes: Sequence[int],
    size_per_host: Sequence[int] | None = None,
    compute_kernel: str | None = None,
) -> ParameterShardingGenerator:
    """Wish for the columns cut over hosts, and in each host the rows over its ranks."""
    wish = _engine.grid_shard(list(host_indexes), list(size_per_host or []))
    return ParameterShardingGenerator(wish, compute_kernel)


def get_sharding_constructor_from_type(
    sharding_type: ShardingType,
) -> Callable[..., ParameterShardingGenerator]:
    """Return the function above that makes wishes of this type."""
    return {
        ShardingType.DATA_PARALLEL: data_parallel,
        ShardingType.TABLE_WISE: table_wise,
        ShardingType.ROW_WISE: row_wise,
        ShardingType.COLUMN_WISE: column_wise,
        ShardingType.TABLE_ROW_WISE: table_row_wise,
        ShardingType.TABLE_COLUMN_WISE: table_column_wise,
        ShardingType.GRID_SHARD: grid_shard,
    }[sharding_type]


def get_default_sharders() -> list[ModuleSharder[nn.Module]]:
    """Return a sharder for every type of module that can be sharded."""
    from tessera.distributed.embedding import EmbeddingCollectionSharder
    from tessera.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
    from tessera.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
    from tessera.distributed.fused_embedding import FusedEmbeddingCollectionSharder
    from tessera.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
    from tessera.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
    from tessera.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder

    return [
        EmbeddingBagCollectionSharder(),
        EmbeddingBagSharder(),
        EmbeddingCollectionSharder(),
        FeatureProcessedEmbeddingBagCollectionSharder(),
        FusedEmbeddingBagCollectionSharder(),
        FusedEmbeddingCollectionSharder(),
        ManagedCollisionEmbeddingBagCollectionSharder(),
        ManagedCollisionEmbeddingCollectionSharder(),
    ]


def get_module_to_default_sharders() -> dict[type[nn.Module], ModuleSharder[nn.Module]]:
    """Return the default sharders by the type of module they shard."""
    return {sharder.module_type: sharder for sharder in get_default_sharders()}


def _sharder_of(module: nn.Module, sharder: ModuleSharder | None) -> ModuleSharder:
    sharder = sharder or get_module_to_default_sharders().get(type(module))
    if sharder is None:
        raise ValueError(f"sharding.plan: there is no sharder for {type(module).__name__}.")
    return sharder


def apply_to_all(
    module: nn.Module,
    parameter_sharding_generator: ParameterShardingGenerator,
    sharder: ModuleSharder[nn.Module] | None = None,
) -> dict[str, ParameterShardingGenerator]:
    """Return the same wish for every table of a module."""
    shardable = _sharder_of(module, sharder).shardable_parameters(module)
    return {name: parameter_sharding_generator for name in shardable}


def construct_module_sharding_plan(
    module: nn.Module,
    per_param_sharding: Mapping[str, ParameterShardingGenerator],
    sharder: ModuleSharder[nn.Module] | None = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """Return the plan of one module: where every table's parts lie.

    Tables are fused where the wish says so, or an optimizer was set to run in backward: by
    `apply_optimizer_in_backward`, or by the sharder's `fused_params`. All others are dense: their gradients
    are left to an optimizer of one's own.

    Not collective. Raises ValueError, naming the table, for a table without a wish, a wish without a
    table, and a wish that cannot be met.
    """
    sharder = _sharder_of(module, sharder)
    if sharder.module_type is not type(module):
        names = sharder.module_type.__name__, type(module).__name__
        raise ValueError(f"sharding.plan: a sharder of {names[0]} cannot shard {names[1]}.")
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    world_size = world_size or dist.get_world_size()
    local_size = local_size or get_local_size(world_size)
    shardable = sharder.shardable_parameters(module)
    for name in shardable:
        if name not in per_param_sharding:
            raise ValueError(f"sharding.plan: nothing is said about table {name!r}.")
    for name in per_param_sharding:
        if name not in shardable:
            raise ValueError(f"sharding.plan: there is no table {name!r}.")
    plan = EmbeddingModuleShardingPlan()
    for name, wish in per_param_sharding.items():
        arguments = (shardable[name], local_size, world_size, device_type, sharder)
        named = isinstance(wish, ParameterShardingGenerator)
        plan[name] = wish(*arguments, name=name) if named else wish(*arguments)
    return plan


def _record(name: str, sharding: ParameterSharding) -> _C.sharding.ParameterSharding:
    if sharding.sharding_spec is not None:
        return _to_engine(name, sharding, 0, 0, 0, 0)
    if sharding._shape is None:
        raise ValueError(
            f"sharding.plan_to_json: table {name!r} has neither a sharding_spec nor a size. "
            "Make its sharding with construct_module_sharding_plan."
        )
    world_size = len(sharding.ranks)
    return _to_engine(name, sharding, *sharding._shape, world_size, world_size)


def plan_to_json(plan: ShardingPlan) -> str:
    """Return the plan as JSON, for files and for people; C++ reads the same."""
    return _engine.to_json(
        {
            path: {name: _record(name, sharding) for name, sharding in tables.items()}
            for path, tables in plan.plan.items()
        }
    )


def plan_from_json(text: str, device_type: str = "cpu", local_size: int = 1) -> ShardingPlan:
    """Return the plan that the JSON says. Raises ValueError with the path of what is wrong.

    JSON says nothing of devices: shards are placed on `device_type`, of which a host has `local_size`.
    """
    modules = _engine.plan_from_json(text)
    return ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan(
                {
                    name: _from_engine(sharding, sharding.kernel, device_type, local_size)
                    for name, sharding in tables.items()
                }
            )
            for path, tables in modules.items()
        }
    )
