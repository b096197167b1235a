"""What formulas are told: factors, a hardware's configuration, and the numbers of one shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tessera.distributed.planner.constants import (
    BIGINT_DTYPE,
    BWD_COMPUTE_MULTIPLIER,
    DDR_MEM_BW,
    HBM_MEM_BW,
    NUM_POOLINGS,
    SSD_MEM_BW,
    WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,
    WEIGHTED_KERNEL_MULTIPLIER,
    kernel_bw_lookup,
)
from tessera.distributed.planner.estimator.annotations import (
    get_bwd_coefficient,
    get_fwd_coefficient,
    get_prefetch_coefficient,
)
from tessera.distributed.planner.types import (
    GeneralizedCommsBandwidth,
    ParameterConstraints,
    Perf,
    SharderData,
    ShardingOption,
    Topology,
)
from tessera.distributed.types import CommOp
from tessera.modules.embedding_configs import DATA_TYPE_NUM_BITS

__all__ = [
    "EstimatorPerfCoefficients",
    "HardwarePerfConfig",
    "PerfCoefficient",
    "PerfCoefficientConfig",
    "PrefetchCoefficients",
    "ShardPerfContext",
]

CACHED = "fused_uvm_caching"


@dataclass(frozen=True)
class PerfCoefficient:
    """Multiply the bytes of ids, of rows that are read, of what is written, and the rows of the table."""

    input_read_size_multiplier: float = 1.0
    lookup_size_multiplier: float = 1.0
    embedding_output_multiplier: float = 1.0
    hash_size_multiplier: float = 0.0


@dataclass(frozen=True)
class EstimatorPerfCoefficients:
    """Hold the factors of a sharding type. Without `bwd`, the way back is a multiple of the way there."""

    fwd: PerfCoefficient = field(default_factory=PerfCoefficient)
    bwd: PerfCoefficient | None = None


@dataclass(frozen=True)
class PrefetchCoefficients:
    """Hold milliseconds per lookup, per distinct lookup, and per number that is fetched ahead."""

    expected_num_lookups_coefficient: float = 0.0
    expected_num_unique_lookups_coefficient: float = 0.0
    expected_size_cache_fetches_coefficient: float = 0.0


@dataclass
class PerfCoefficientConfig:
    """Hold the factors of all sharding types; `by_kernel` (type, kernel) wins."""

    table_wise: EstimatorPerfCoefficients | None = None
    row_wise: EstimatorPerfCoefficients | None = None
    table_row_wise: EstimatorPerfCoefficients | None = None
    data_parallel: EstimatorPerfCoefficients | None = None
    column_wise: EstimatorPerfCoefficients | None = None
    by_kernel: dict[tuple[str, str], EstimatorPerfCoefficients] = field(default_factory=dict)
    default: EstimatorPerfCoefficients = field(default_factory=EstimatorPerfCoefficients)
    bwd_compute_multiplier: float = BWD_COMPUTE_MULTIPLIER
    weighted_kernel_multiplier: float = WEIGHTED_KERNEL_MULTIPLIER
    weighted_feature_bwd_compute_multiplier: float = WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER
    prefetch: PrefetchCoefficients | None = None

    def get_coefficients(
        self, sharding_type: str, compute_kernel: str | None = None
    ) -> EstimatorPerfCoefficients:
        """Return the factors of a sharding type; grids are as rows over a host, columns of a host as columns.

        >>> factors = EstimatorPerfCoefficients(bwd=PerfCoefficient(2.0))
        >>> PerfCoefficientConfig(table_row_wise=factors).get_coefficients("grid_shard") is factors
        True
        """
        kind = sharding_type.lower()
        if compute_kernel and (kind, compute_kernel.lower()) in self.by_kernel:
            return self.by_kernel[kind, compute_kernel.lower()]
        kind = {"grid_shard": "table_row_wise", "table_column_wise": "column_wise"}.get(kind, kind)
        known = ("table_wise", "row_wise", "table_row_wise", "data_parallel", "column_wise")
        return (getattr(self, kind) if kind in known else None) or self.default


class HardwarePerfConfig:
    """Describe one piece of hardware; inherit from it, and decorate the class and its methods.

    >>> from tessera.distributed.planner.estimator import device_bw, supported_sharding_types
    >>> @device_bw(100.0)
    ... @supported_sharding_types("table_wise")
    ... class Slow(HardwarePerfConfig):
    ...     name = "slow"
    >>> Slow().get_device_bw("cuda", "fused", 8.0, 2.0, 1.0, 4.0)
    100.0
    >>> Slow().is_sharding_type_supported("row_wise")
    False
    """

    name: str = "default"
    hbm_mem_bw: float = HBM_MEM_BW
    ddr_mem_bw: float = DDR_MEM_BW
    ssd_mem_bw: float = SSD_MEM_BW
    device_bw: float | None = None
    hbm_to_ddr_mem_bw: float | None = None
    intra_host_bw: float | None = None
    inter_host_bw: float | None = None
    kernel_device_bandwidths: dict[tuple[str, str], float] = {}  # noqa: RUF012
    _coefficients: PerfCoefficientConfig | None = None
    _supported_sharding_types: frozenset[str] | None = None
    _default_output_data_type_size: float | None = None
    _bwd_compute_multiplier: float | None = None
    _weighted_feature_bwd_compute_multiplier: float | None = None
    _use_linear_regression_prefetch_estimate: bool = False

    @property
    def coefficients(self) -> PerfCoefficientConfig:
        """Return the factors that marked methods say, of all sharding types."""
        if self._coefficients is None:
            kinds = ("table_wise", "row_wise", "table_row_wise", "column_wise", "data_parallel")
            found: dict[str, Any] = {kind: self._marked(kind) for kind in kinds}
            self._coefficients = PerfCoefficientConfig(**found, prefetch=get_prefetch_coefficient(self))
        return self._coefficients

    def _marked(self, sharding_type: str) -> EstimatorPerfCoefficients | None:
        there, back = get_fwd_coefficient(self, sharding_type), get_bwd_coefficient(self, sharding_type)
        if there is None and back is None:
            return None
        return EstimatorPerfCoefficients(there or PerfCoefficient(), back)

    def get_coefficients_for_sharding(
        self, sharding_type: str, compute_kernel: str | None = None
    ) -> EstimatorPerfCoefficients:
        """Return the factors of a sharding type: of marked methods, else of `coefficients`."""
        return self._marked(sharding_type) or self.coefficients.get_coefficients(
            sharding_type, compute_kernel
        )

    def get_bwd_compute_multiplier(self, ctx_multiplier: float) -> float:
        """Return this hardware's factor of the way back, else the topology's."""
        own = self._bwd_compute_multiplier
        return ctx_multiplier if own is None else own

    def get_weighted_feature_bwd_compute_multiplier(self, ctx_multiplier: float) -> float:
        """Return this hardware's factor of weighted features, else the topology's."""
        own = self._weighted_feature_bwd_compute_multiplier
        return ctx_multiplier if own is None else own

    def is_sharding_type_supported(self, sharding_type: str) -> bool:
        """Return whether tables may be cut so."""
        return (
            self._supported_sharding_types is None or sharding_type.lower() in self._supported_sharding_types
        )

    def validate_sharding_type(self, sharding_type: str) -> None:
        """Raise ValueError if tables may not be cut so."""
        if not self.is_sharding_type_supported(sharding_type):
            some = ", ".join(sorted(self._supported_sharding_types or ()))
            raise ValueError(
                f"Sharding type {sharding_type!r} is not supported by {type(self).__name__}: it has {some}."
            )

    def post_process_perfs(
        self,
        shard_perfs: list[Perf],
        shard_sizes: list[list[int]],
        sharding_type: str,
        uneven_sharding_perf_multiplier: float = 1.0,
    ) -> list[Perf]:
        """Return the milliseconds of a table's shards as they are; for subclasses."""
        return shard_perfs

    def get_device_bw(
        self,
        compute_device: str,
        compute_kernel: str,
        hbm_mem_bw: float,
        ddr_mem_bw: float,
        ssd_mem_bw: float,
        hbm_to_ddr_mem_bw: float,
        caching_ratio: float | None = None,
        prefetch_pipeline: bool = False,
    ) -> float | None:
        """Return how fast a kernel reads rows: of it, of the hardware, or by the topology's speeds."""
        device, kernel = compute_device.lower(), compute_kernel.lower()
        if prefetch_pipeline and device == "cuda" and kernel == CACHED:
            kernel = "fused"  # what is asked for has been fetched
        if (device, kernel) in self.kernel_device_bandwidths:
            return self.kernel_device_bandwidths[device, kernel]
        if self.device_bw is not None:
            return self.device_bw
        found = kernel_bw_lookup(
            compute_device, compute_kernel, hbm_mem_bw, ddr_mem_bw, hbm_to_ddr_mem_bw, caching_ratio,
            prefetch_pipeline, ssd_mem_bw,
        )  # fmt: skip
        if found is None:
            raise ValueError(f"There is no kernel {compute_kernel!r} on {compute_device!r}.")
        return found


@dataclass
class ShardPerfContext:
    """Hold the numbers of one shard, its table and the ranks."""

    sharding_type: str = ""
    compute_kernel: str = ""
    hash_size: int = 0
    emb_dim: int = 0
    batch_sizes: list[int] = field(default_factory=list)
    num_poolings: list[float] = field(default_factory=list)
    input_lengths: list[float] = field(default_factory=list)
    world_size: int = 1
    local_world_size: int = 1
    intra_group_size: int = 1
    input_data_type_size: float = BIGINT_DTYPE
    table_data_type_size: float = 4.0
    output_data_type_size: float = 4.0
    fwd_a2a_comm_data_type_size: float = 4.0
    bwd_a2a_comm_data_type_size: float = 4.0
    fwd_sr_comm_data_type_size: float = 4.0
    bwd_sr_comm_data_type_size: float = 4.0
    device_bw: float = HBM_MEM_BW
    hbm_to_ddr_mem_bw: float = HBM_MEM_BW
    intra_host_bw: float = 0.0
    inter_host_bw: float = 0.0
    comms_bandwidths: GeneralizedCommsBandwidth | None = None
    is_inference: bool = False
    is_weighted: bool = False
    is_pooled: bool = True
    has_feature_processor: bool = False
    bwd_compute_multiplier: float = BWD_COMPUTE_MULTIPLIER
    weighted_feature_bwd_compute_multiplier: float = WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER
    use_linear_regression_prefetch_estimate: bool = False
    use_batch_inputs_for_expected_cache_fetches: bool = False
    caching_ratio: float | None = None
    table_name: str = ""
    hash_size_for_clamping: int = 0
    cache_stats_expected_lookups: float | None = None
    expected_miss_rate: float | None = None

    @classmethod
    def build_shard_perf_contexts(
        cls,
        config: HardwarePerfConfig,
        shard_sizes: Sequence[Sequence[int]],
        sharding_option: ShardingOption,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None,
        sharder_data: SharderData,
        is_inference: bool = False,
        use_batch_inputs_for_expected_cache_fetches: bool = False,
        use_linear_regression_prefetch_estimate: bool = False,
    ) -> list[ShardPerfContext]:
        """Return the numbers of every shard of one option."""
        option, cache = sharding_option, sharding_option.cache_params
        own = (constraints or {}).get(option.name)
        ratio = option.cache_load_factor
        if ratio is None:
            ratio = sharder_data.fused_params.get("cache_load_factor")
        fetches_ahead = (cache.prefetch_pipeline if cache else None) or sharder_data.fused_params.get(
            "prefetch_pipeline", False
        )
        processes = bool(getattr(option, "has_feature_processor", False))
        weighted = option.is_weighted
        if weighted is None:
            weighted = own is not None and own.is_weighted
        bytes_of_number = option.tensor.element_size()
        out = getattr(config, "_default_output_data_type_size", None)
        if option.output_dtype is not None:
            out = DATA_TYPE_NUM_BITS[option.output_dtype] / 8
        lookups = misses = None
        if ratio is not None and cache and cache.stats is not None and option.compute_kernel == CACHED:
            lookups, misses = cache.stats.expected_lookups, cache.stats.expected_miss_rate(ratio)
        speed = config.get_device_bw(
            topology.compute_device, option.compute_kernel, topology.hbm_mem_bw, topology.ddr_mem_bw,
            topology.ssd_mem_bw, topology.hbm_to_ddr_mem_bw, ratio, bool(fetches_ahead),
        )  # fmt: skip
        assert speed is not None
        common: dict[str, Any] = {
            **_load_of(option, own),
            **_wire_sizes(option, sharder_data),
            "sharding_type": option.sharding_type,
            "compute_kernel": option.compute_kernel,
            "world_size": topology.world_size,
            "local_world_size": topology.local_world_size,
            "intra_group_size": topology.intra_group_size,
            "input_data_type_size": getattr(config, "_input_data_type_size", BIGINT_DTYPE),
            "table_data_type_size": bytes_of_number,
            "output_data_type_size": bytes_of_number if out is None else out,
            "device_bw": speed,
            "hbm_to_ddr_mem_bw": topology.hbm_to_ddr_mem_bw,
            "comms_bandwidths": topology.comms_bandwidths,
            "is_inference": is_inference,
            "is_weighted": bool(weighted) or processes,
            "is_pooled": option.is_pooled,
            "has_feature_processor": processes,
            "bwd_compute_multiplier": topology.bwd_compute_multiplier,
            "weighted_feature_bwd_compute_multiplier": topology.weighted_feature_bwd_compute_multiplier,
            "use_linear_regression_prefetch_estimate": use_linear_regression_prefetch_estimate,
            "use_batch_inputs_for_expected_cache_fetches": use_batch_inputs_for_expected_cache_fetches,
            "caching_ratio": ratio,
            "table_name": option.name,
            "hash_size_for_clamping": option.tensor.shape[0],
            "cache_stats_expected_lookups": lookups,
            "expected_miss_rate": misses,
        }
        return [cls(hash_size=rows, emb_dim=columns, **common) for rows, columns in shard_sizes]

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts."""
        return max(1, self.world_size // self.local_world_size)

    @property
    def num_twrw_groups(self) -> int:
        """Return the number of groups of ranks over which rows of a table may be cut."""
        return max(1, self.world_size // self.intra_group_size)

    @property
    def batch_inputs(self) -> float:
        """Return the ids of one rank's batch."""
        return sum(
            ids * times * batch
            for ids, times, batch in zip(self.input_lengths, self.num_poolings, self.batch_sizes, strict=True)
        )

    @property
    def batch_outputs(self) -> float:
        """Return the rows of one rank's batch: one a bag, if bags are pooled."""
        if not self.is_pooled:
            return self.batch_inputs
        return sum(
            min(1.0, ids) * times * batch
            for ids, times, batch in zip(self.input_lengths, self.num_poolings, self.batch_sizes, strict=True)
        )

    @property
    def is_uvm_caching(self) -> bool:
        """Return whether rows are cached on the device."""
        return self.compute_kernel == CACHED


def _load_of(option: ShardingOption, own: ParameterConstraints | None) -> dict[str, Any]:
    """Return ids, poolings and samples of every feature; they must be as many of each."""
    ids = option.input_lengths
    times = option.num_poolings if option.num_poolings and len(option.num_poolings) == len(ids) else None
    if times is None:
        times = (own.num_poolings if own else None) or [NUM_POOLINGS] * len(ids)
    batches = (own.batch_sizes if own else None) or [option.batch_size] * option.num_inputs
    if not len(ids) == len(times) == len(batches):
        raise ValueError(
            f"Table {option.name!r} has {len(ids)} pooling_factors, {len(times)} num_poolings and "
            f"{len(batches)} batch_sizes: there must be one of each for every feature."
        )
    return {"input_lengths": ids, "num_poolings": list(times), "batch_sizes": list(batches)}


def _wire_sizes(option: ShardingOption, data: SharderData) -> dict[str, float]:
    """Return the bytes of a number on its way, with the sharder's codecs."""
    kind = "POOLED" if option.is_pooled else "SEQUENCE"
    plain = (option.tensor.element_size(),) * 2
    there, back = data.qcomm_dtype_sizes.get(f"{kind}_EMBEDDINGS_ALL_TO_ALL", plain)
    sums = data.qcomm_dtype_sizes.get(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name, plain)
    sums = sums if option.is_pooled else plain
    return {
        "fwd_a2a_comm_data_type_size": there,
        "bwd_a2a_comm_data_type_size": back,
        "fwd_sr_comm_data_type_size": sums[0],
        "bwd_sr_comm_data_type_size": sums[1],
    }


def sharder_data_of(sharder: object) -> SharderData:
    """Return what formulas ask of a sharder; it may be that already, or None."""
    if isinstance(sharder, SharderData):
        return sharder
    sizes = {}
    for name, codecs in (getattr(sharder, "qcomm_codecs_registry", None) or {}).items():
        ways = (codecs.forward.quantized_dtype, codecs.backward.quantized_dtype)
        sizes[name] = tuple(float(torch.empty(0, dtype=dtype).element_size()) for dtype in ways)
    return SharderData(dict(getattr(sharder, "fused_params", None) or {}), sizes)  # type: ignore[arg-type]
