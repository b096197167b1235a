"""Types that the distributed modules share.

>>> tables = EmbeddingModuleShardingPlan({"t": ParameterSharding("data_parallel", "dense")})
>>> plan = ShardingPlan({"ebc": tables})
>>> plan.get_plan_for_module("ebc")["t"].sharding_type
'data_parallel'
>>> plan.get_plan_for_module("other") is None
True
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardingSpec, ShardMetadata

from tessera.comm import Awaitable, LazyAwaitable, LazyNoWait, NoWait
from tessera.distributed._codecs import (
    NoOpQuantizedCommCodec,
    QuantizationContext,
    QuantizedCommCodec,
    QuantizedCommCodecs,
)
from tessera.modules.embedding_configs import BoundsCheckMode, DataType, ShardingType
from tessera.streamable import Multistreamable

__all__ = [
    "Awaitable",
    "BoundsCheckMode",
    "CacheParams",
    "CacheStatistics",
    "CommOp",
    "ComputeKernel",
    "DMPCollectionConfig",
    "EmbeddingModuleShardingPlan",
    "EnumerableShardingSpec",
    "GenericMeta",
    "LazyAwaitable",
    "LazyNoWait",
    "ModuleSharder",
    "ModuleShardingPlan",
    "NoOpQuantizedCommCodec",
    "NoWait",
    "NullShardedModuleContext",
    "NullShardingContext",
    "ParameterSharding",
    "ParameterStorage",
    "PipelineType",
    "QuantizationContext",
    "QuantizedCommCodec",
    "QuantizedCommCodecs",
    "ShardMetadata",
    "ShardedModule",
    "ShardedTensor",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "ShardingStrategy",
    "ShardingType",
    "get_tensor_size_bytes",
    "scope",
]

M = TypeVar("M", bound=nn.Module)
Out = TypeVar("Out")
CompIn = TypeVar("CompIn")
DistOut = TypeVar("DistOut")
ShrdCtx = TypeVar("ShrdCtx")

# Classes may be generic and abstract at once without a metaclass of their own.
GenericMeta = type


def scope(method):
    """Return the method: names of torch.fx scopes are not kept."""

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return wrapper


@unique
class ShardingStrategy(Enum):
    """Say how DMPCollection lays replicas of sharded models."""

    DEFAULT = "default"
    PER_MODULE = "per_module"
    FULLY_SHARDED = "fully_sharded"


@unique
class ParameterStorage(Enum):
    """Name the memory that a plan may have to spare."""

    HBM = "hbm"
    DDR = "ddr"


@unique
class PipelineType(Enum):
    """Name the pipelines of training whose batches on their way take memory."""

    NONE = "none"
    TRAIN_BASE = "train_base"
    TRAIN_SPARSE_DIST = "train_sparse_dist"
    TRAIN_PREFETCH_SPARSE_DIST = "train_prefetch_sparse_dist"


@unique
class ComputeKernel(Enum):
    """Name the kernel of a module that has no choice of them."""

    DEFAULT = "default"


@unique
class CommOp(Enum):
    """Name the exchanges that have codecs; a registry is keyed by these names."""

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"


class CacheStatistics(abc.ABC):
    """Say how the ids of a table would use a cache."""

    @property
    @abc.abstractmethod
    def expected_lookups(self) -> float:
        """Return the number of different ids of a step, over all ranks."""

    @abc.abstractmethod
    def expected_miss_rate(self, clf: float) -> float:
        """Return the share of lookups that miss a cache of `clf` times the table: 1 at 0, 0 at 1."""

    @property
    @abc.abstractmethod
    def cacheability(self) -> float:
        """Return how hard the ids are to cache whatever the size: 0 easy, 1 hard."""


@dataclass
class CacheParams:
    """Say how the cache of a table is made. Statistics do not count in comparisons by hash."""

    algorithm: Enum | None = None
    load_factor: float | None = None
    reserved_memory: float | None = None
    precision: DataType | None = None
    prefetch_pipeline: bool | None = None
    stats: CacheStatistics | None = None

    def __hash__(self) -> int:
        return hash(
            (self.algorithm, self.load_factor, self.reserved_memory, self.precision, self.prefetch_pipeline)
        )


@dataclass
class ParameterSharding:
    """Say how one table lies: its shards are in `sharding_spec`, `ranks` has the rank of each.

    Without a spec the ranks decide: the rank of a table-wise table, one rank per part of a column-wise
    one, the first rank of the host of a table-row-wise one; row-wise and data-parallel tables need none.
    """

    sharding_type: str
    compute_kernel: str
    ranks: list[int] | None = None
    sharding_spec: ShardingSpec | None = None
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: BoundsCheckMode | None = None
    # Rows and columns of the whole table, if they were known; data-parallel tables have no spec to ask.
    _shape: tuple[int, int] | None = field(default=None, repr=False, compare=False)


class ModuleShardingPlan:
    """Stand for the plan of one module."""


class EmbeddingModuleShardingPlan(ModuleShardingPlan, dict[str, ParameterSharding]):
    """Map the tables of one module to their shardings."""

    def __str__(self) -> str:
        lines = [("table", "type", "kernel", "rank", "rows", "columns")]
        for table, sharding in self.items():
            head = (table, sharding.sharding_type, sharding.compute_kernel)
            shards = getattr(sharding.sharding_spec, "shards", None)
            if shards is None:
                ranks = "all" if sharding.ranks is None else ", ".join(map(str, sharding.ranks))
                lines.append((*head, ranks, "", ""))
                continue
            for shard in shards:
                ranges = [
                    f"[{begin}, {begin + size})"
                    for begin, size in zip(shard.shard_offsets, shard.shard_sizes, strict=True)
                ]
                lines.append((*head, str(shard.placement.rank()), *ranges))
                head = ("", "", "")
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
        return "\n".join(rows)


@dataclass
class ShardingPlan:
    """Map the paths of modules to their plans."""

    plan: dict[str, ModuleShardingPlan]

    def get_plan_for_module(self, module_path: str) -> ModuleShardingPlan | None:
        """Return the plan of the module at `module_path`, or None."""
        return self.plan.get(module_path)

    def __str__(self) -> str:
        return "\n\n".join(f"module: {path}\n{plan}" for path, plan in self.plan.items())


class NullShardedModuleContext(Multistreamable):
    """Hold nothing: the module needs no context."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Do nothing."""

    def __setattr__(self, key: str, value: Any) -> None:
        raise NotImplementedError(f"NullShardedModuleContext: {key!r} cannot be set.")


class NullShardingContext(Multistreamable):
    """Hold nothing: the sharding needs no context."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Do nothing."""


class ShardingEnv:
    """Say who the ranks are: a group, or in inference the devices of one process.

    State dicts hold torch's ShardedTensors; there are no DTensors in their place.

    >>> env = ShardingEnv.from_local(2, 0)
    >>> env.world_size, env.rank, env.process_group
    (2, 0, None)
    """

    def __init__(
        self, world_size: int, rank: int, pg: ProcessGroup | None = None, output_dtensor: bool = False
    ) -> None:
        if output_dtensor:
            raise ValueError(
                "sharding: states of sharded tables are ShardedTensors; output_dtensor is not there. Leave "
                "it out: torch's distributed checkpoints take both."
            )
        self.world_size = world_size
        self.rank = rank
        self.process_group: ProcessGroup | None = pg
        self.output_dtensor = False

    @classmethod
    def from_process_group(cls, pg: ProcessGroup | None) -> ShardingEnv:
        """Return the environment of a group. Raise ValueError for None, as WORLD is before there is one."""
        if pg is None:
            raise ValueError("sharding: there is no group yet. Call init_process_group first.")
        return cls(pg.size(), pg.rank(), pg)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """Return the environment of one process that drives `world_size` devices."""
        return cls(world_size, rank, None)


@dataclass
class DMPCollectionConfig:
    """Say how the modules of one type are replicated apart from the rest; DMPCollection refuses it."""

    module: type[nn.Module]
    plan: ShardingPlan
    sharding_group_size: int
    node_group_size: int | None = None
    use_inter_host_allreduce: bool = False
    sharding_strategy: ShardingStrategy = ShardingStrategy.DEFAULT


class ShardedModule(abc.ABC, nn.Module, Generic[CompIn, DistOut, Out, ShrdCtx]):
    """Compute on features that lie on other ranks: input and output are this rank's own batch.

    `forward` is input_dist, waited for twice, then compute_and_output_dist. All ranks call it.
    """

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        super().__init__()
        self._qcomm_codecs_registry = {} if qcomm_codecs_registry is None else qcomm_codecs_registry

    @property
    def qcomm_codecs_registry(self) -> dict[str, QuantizedCommCodecs] | None:
        """Return the codecs by the names of CommOp."""
        return self._qcomm_codecs_registry

    @abc.abstractmethod
    def create_context(self) -> ShrdCtx:
        """Return what one batch leaves behind between the steps."""

    @abc.abstractmethod
    def input_dist(self, ctx: ShrdCtx, *input: Any, **kwargs: Any) -> Awaitable[Awaitable[CompIn]]:
        """Start sending the input to the ranks that compute with it."""

    @abc.abstractmethod
    def compute(self, ctx: ShrdCtx, dist_input: CompIn) -> DistOut:
        """Compute with what arrived."""

    @abc.abstractmethod
    def output_dist(self, ctx: ShrdCtx, output: DistOut) -> LazyAwaitable[Out]:
        """Start sending the results home."""

    def compute_and_output_dist(self, ctx: ShrdCtx, input: CompIn) -> LazyAwaitable[Out]:
        """Compute, and send each result home as soon as it is there."""
        return self.output_dist(ctx, self.compute(ctx, input))

    def forward(self, *input: Any, **kwargs: Any) -> LazyAwaitable[Out]:
        """Take all steps, one after the other."""
        ctx = self.create_context()
        dist_input = self.input_dist(ctx, *input, **kwargs).wait().wait()
        return self.compute_and_output_dist(ctx, dist_input)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Return the names of the parameters that are sharded: all of them."""
        for name, _ in self.named_parameters(prefix):
            yield name

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """Return the type of the module before it was sharded."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it was.")


_BITS = {torch.quint4x2: 4, torch.quint2x4: 2}


def get_tensor_size_bytes(t: torch.Tensor) -> int:
    """Return the bytes of the elements; several share a byte in 4 and 2 bit tensors.

    >>> get_tensor_size_bytes(torch.empty(3, 2))
    24
    """
    if t.dtype in _BITS:
        return t.numel() * _BITS[t.dtype] // 8
    return t.element_size() * t.nelement()


def _quantised_size_bytes(rows: torch.Tensor) -> int:
    """Return the bytes of rows with few bits; codes that are a part of whole rows count as these.

    >>> rows = torch.empty(3, 12, dtype=torch.uint8)  # four bytes of scale and bias, then codes
    >>> _quantised_size_bytes(rows), _quantised_size_bytes(rows[:, 4:]), _quantised_size_bytes(rows[:1, 4:])
    (36, 36, 12)
    """
    if rows.dim() != 2:
        return get_tensor_size_bytes(rows)
    # Not by whether it is contiguous: of one row every part is.
    return rows.size(0) * max(rows.size(1), rows.stride(0)) * rows.element_size()


class ModuleSharder(abc.ABC, Generic[M]):
    """Know how one type of module is cut over ranks."""

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        self._qcomm_codecs_registry = qcomm_codecs_registry

    @abc.abstractmethod
    def shard(
        self,
        module: M,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedModule[Any, Any, Any, Any]:
        """Return the module over the ranks of `env` as `params` says. All ranks call it."""

    @property
    @abc.abstractmethod
    def module_type(self) -> type[M]:
        """Return the type of module that is sharded."""

    @property
    def qcomm_codecs_registry(self) -> dict[str, QuantizedCommCodecs] | None:
        """Return the codecs by the names of CommOp."""
        return self._qcomm_codecs_registry

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Return the parameters that can be sharded, by the names that plans use."""
        return dict(module.named_parameters())

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the types of sharding there are on such a device."""
        return [ShardingType.DATA_PARALLEL.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the kernels there are for a type of sharding."""
        return [ComputeKernel.DEFAULT.value]

    def storage_usage(
        self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str
    ) -> dict[str, int]:
        """Return the bytes that a parameter takes, by kind of memory."""
        return {_storage(compute_device_type).value: get_tensor_size_bytes(tensor)}


def _storage(compute_device_type: str, compute_kernel: str = "") -> ParameterStorage:
    """Return the memory of a device; what a kernel keeps in managed memory lies in DDR."""
    kinds = {"cuda": ParameterStorage.HBM, "cpu": ParameterStorage.DDR, "mtia": ParameterStorage.DDR}
    if compute_device_type not in kinds:
        raise ValueError(f"sharding: {compute_device_type!r} is not one of {', '.join(kinds)}.")
    return ParameterStorage.DDR if "_uvm" in compute_kernel else kinds[compute_device_type]


class ShardingPlanner(abc.ABC):
    """Decide how the modules of a model are sharded."""

    @abc.abstractmethod
    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Return a plan. Not collective."""

    @abc.abstractmethod
    def collective_plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Return rank 0's plan on all ranks. Collective."""
