"""The published formulas, one evaluator a sharding type, and the estimator that fills in shards.

Milliseconds are bytes over bandwidths: ids and rows that are read and rows that are written, over the
device's memory; what is sent, over the links of its collective.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from tessera.distributed.planner.constants import (
    BATCHED_COPY_PERF_FACTOR,
    DP_ELEMENTWISE_KERNELS_PERF_FACTOR,
    FULL_BLOCK_EMB_DIM,
    HALF_BLOCK_PENALTY,
    QUARTER_BLOCK_PENALTY,
)
from tessera.distributed.planner.estimator.annotations import (
    get_backward_compute,
    get_bwd_comms,
    get_forward_compute,
    get_fwd_comms,
    get_input_dist_comms,
    get_output_write_size,
    get_prefetch_compute,
)
from tessera.distributed.planner.estimator.types import (
    HardwarePerfConfig,
    PerfCoefficient,
    ShardPerfContext,
    sharder_data_of,
)
from tessera.distributed.planner.types import (
    CollectiveType,
    ParameterConstraints,
    Perf,
    ShardEstimator,
    ShardingOption,
    Topology,
)

__all__ = [
    "ColumnWiseEvaluator",
    "ColumnWiseInferenceEvaluator",
    "DataParallelEvaluator",
    "DataParallelInferenceEvaluator",
    "EmbeddingPerfEstimator",
    "EmbeddingPerfEstimatorFactory",
    "EmbeddingPerfEstimatorV2",
    "EmbeddingShardingPerfEvaluator",
    "GridShardEvaluator",
    "GridShardInferenceEvaluator",
    "InferenceShardingPerfEvaluator",
    "RowWiseEvaluator",
    "RowWiseInferenceEvaluator",
    "TableColumnWiseEvaluator",
    "TableColumnWiseInferenceEvaluator",
    "TableRowWiseEvaluator",
    "TableRowWiseInferenceEvaluator",
    "TableWiseEvaluator",
    "TableWiseInferenceEvaluator",
    "compute_block_usage_penalty",
    "get_embedding_perf_sharding_evaluator",
]

_LEAST_COLUMNS = 32  # that a lookup of a whole row reads


def compute_block_usage_penalty(embedding_dim: int) -> float:
    """Return by how much narrow rows cost more than their bytes.

    >>> [compute_block_usage_penalty(columns) for columns in (128, 64, 32)]
    [1.0, 1.15, 1.75]
    """
    if embedding_dim >= FULL_BLOCK_EMB_DIM:
        return 1.0
    return HALF_BLOCK_PENALTY if embedding_dim >= FULL_BLOCK_EMB_DIM // 2 else QUARTER_BLOCK_PENALTY


def _weighted_size(factors: PerfCoefficient, ids: float, rows: float, written: float, height: int) -> float:
    return (
        factors.input_read_size_multiplier * ids
        + factors.lookup_size_multiplier * rows
        + factors.embedding_output_multiplier * written
        + factors.hash_size_multiplier * height
    )


class EmbeddingShardingPerfEvaluator(ABC):
    """Say the milliseconds of one shard. A formula of the configuration's own wins over each of these."""

    _min_dim_by_default = False
    _penalty_by_default = False

    def compute_perf(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> Perf:
        """Return all parts."""
        return Perf(
            fwd_compute=self.compute_fwd_comp(ctx, config),
            fwd_comms=self.compute_fwd_comms(ctx, config),
            bwd_compute=self.compute_bwd_comp(ctx, config),
            bwd_comms=self.compute_bwd_comms(ctx, config),
            prefetch_compute=self.compute_prefetch_comp(ctx, config),
            input_dist_comms=self.compute_input_dist_comms(ctx, config),
        )

    # What differs between sharding types.

    def get_batch_inputs_divisor(self, ctx: ShardPerfContext) -> int:
        """Return over how many ranks the ids of a table are spread."""
        return 1

    def get_prefetch_divisor(self, ctx: ShardPerfContext) -> int:
        """Return over how many ranks the rows of a table are spread."""
        return self.get_batch_inputs_divisor(ctx)

    def get_batch_inputs(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Return the ids of one rank's batch that come to this shard."""
        return ctx.batch_inputs / self.get_batch_inputs_divisor(ctx)

    def use_min_dim_for_lookup(self, config: HardwarePerfConfig) -> bool:
        """Return whether narrow rows are read as such of 32 columns."""
        return getattr(config, "_use_min_dim_for_lookup", self._min_dim_by_default)

    def use_block_usage_penalty(self, config: HardwarePerfConfig) -> bool:
        """Return whether narrow rows cost more than their bytes."""
        return getattr(config, "_use_block_usage_penalty", self._penalty_by_default)

    def use_bytes_for_input_read_size(self, config: HardwarePerfConfig) -> bool:
        """Return whether ids are counted in bytes, or each as one."""
        return getattr(config, "_use_bytes_for_input_read_size", True)

    # Bytes.

    def _ids_size(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        each = ctx.input_data_type_size if self.use_bytes_for_input_read_size(config) else 1
        return math.ceil(ctx.batch_inputs * ctx.world_size * each) * (2 if ctx.is_weighted else 1)

    def _rows_size(self, ctx: ShardPerfContext, least_columns: int = 0) -> float:
        columns = max(ctx.emb_dim, least_columns)
        return ctx.batch_inputs * ctx.world_size * columns * ctx.table_data_type_size

    def _written_size(self, ctx: ShardPerfContext, data_type_size: float) -> float:
        return ctx.batch_outputs * ctx.world_size * ctx.emb_dim * data_type_size

    def _wire_size(self, ctx: ShardPerfContext, is_fwd: bool) -> float:
        return ctx.fwd_a2a_comm_data_type_size if is_fwd else ctx.bwd_a2a_comm_data_type_size

    def _out_size(self, ctx: ShardPerfContext, is_fwd: bool) -> float:
        return self._written_size(ctx, self._wire_size(ctx, is_fwd))

    def _written(self, ctx: ShardPerfContext, config: HardwarePerfConfig, is_fwd: bool) -> float:
        own = get_output_write_size(config, ctx.sharding_type)
        return self._out_size(ctx, is_fwd) if own is None else own(ctx, is_fwd=is_fwd)

    @staticmethod
    def _send(
        ctx: ShardPerfContext, size: float, what: CollectiveType, world: int = 0, local: int = 0
    ) -> float:
        assert ctx.comms_bandwidths is not None
        speed = ctx.comms_bandwidths.get_bw(
            world_size=world or ctx.world_size,
            local_world_size=local or ctx.local_world_size,
            collective_type=what,
        )
        return size / speed

    # Milliseconds.

    def compute_fwd_comp(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Return the milliseconds of the lookup."""
        own = get_forward_compute(config, ctx.sharding_type)
        return self._default_fwd_comp(ctx, config) if own is None else own(ctx)

    def _default_fwd_comp(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        factors = config.get_coefficients_for_sharding(ctx.sharding_type, ctx.compute_kernel).fwd
        least = _LEAST_COLUMNS if self.use_min_dim_for_lookup(config) else 0
        size = _weighted_size(
            factors, self._ids_size(ctx, config), self._rows_size(ctx, least),
            self._written(ctx, config, is_fwd=True), ctx.hash_size,
        )  # fmt: skip
        dearer = compute_block_usage_penalty(ctx.emb_dim) if self.use_block_usage_penalty(config) else 1.0
        return size * dearer / ctx.device_bw

    def compute_bwd_comp(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Return the milliseconds of gradients and step."""
        own = get_backward_compute(config, ctx.sharding_type)
        return self._default_bwd_comp(ctx, config) if own is None else own(ctx)

    def _default_bwd_comp(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        factors = config.get_coefficients_for_sharding(ctx.sharding_type, ctx.compute_kernel).bwd
        there = self._default_fwd_comp(ctx, config)
        if factors is None:
            back = there * config.get_bwd_compute_multiplier(ctx.bwd_compute_multiplier)
        else:
            written = self._written(ctx, config, is_fwd=False)
            ids, rows = self._ids_size(ctx, config), self._rows_size(ctx)
            back = _weighted_size(factors, ids, rows, written, ctx.hash_size) / ctx.device_bw
        if not ctx.is_weighted:
            return back
        back *= config.get_weighted_feature_bwd_compute_multiplier(
            ctx.weighted_feature_bwd_compute_multiplier
        )
        return back + there * config.coefficients.weighted_kernel_multiplier  # gradients of the weights

    def compute_prefetch_comp(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Return the milliseconds of rows fetched ahead."""
        own = get_prefetch_compute(config)
        return self._default_prefetch_comp(ctx, config) if own is None else own(ctx)

    def get_expected_lookups_for_prefetch(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Return the lookups of a step."""
        return float(math.ceil(ctx.batch_inputs * ctx.world_size)) * (2 if ctx.is_weighted else 1)

    def _default_prefetch_comp(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        fits_a_line = ctx.use_linear_regression_prefetch_estimate
        factors = config.coefficients.prefetch
        fetched = lookups = distinct = None
        if (
            ctx.is_uvm_caching
            and ctx.caching_ratio is not None
            and ctx.cache_stats_expected_lookups is not None
            and ctx.expected_miss_rate is not None
        ):
            all_ids = math.ceil(ctx.world_size * ctx.batch_inputs)
            distinct = ctx.cache_stats_expected_lookups
            if fits_a_line:
                distinct = min(distinct, all_ids, ctx.hash_size_for_clamping)
            by_ids = ctx.use_batch_inputs_for_expected_cache_fetches
            spread = self.get_prefetch_divisor(ctx)
            fetched = ctx.expected_miss_rate * (all_ids if by_ids else distinct) / spread
            lookups = self.get_expected_lookups_for_prefetch(ctx, config) / spread
            distinct = distinct / spread
        if fits_a_line and factors is None:
            raise ValueError(
                f"{type(config).__name__} has no factors for rows that are fetched ahead: mark a method "
                "with @prefetch_coefficient, or leave out use_linear_regression_prefetch_estimate."
            )
        if fetched is None:
            return 0.0
        if fits_a_line and factors is not None and lookups is not None and distinct is not None:
            return (
                factors.expected_num_lookups_coefficient * lookups
                + factors.expected_num_unique_lookups_coefficient * distinct
                + factors.expected_size_cache_fetches_coefficient * fetched * ctx.emb_dim
            )
        speed = config.hbm_to_ddr_mem_bw if config.hbm_to_ddr_mem_bw is not None else ctx.hbm_to_ddr_mem_bw
        return fetched * ctx.emb_dim * ctx.table_data_type_size / speed if speed > 0 else 0.0

    def compute_fwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Return the milliseconds of rows on their way."""
        own = get_fwd_comms(config, ctx.sharding_type)
        return self._default_fwd_comms(ctx, config) if own is None else own(ctx)

    def compute_bwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Return the milliseconds of gradients on their way."""
        own = get_bwd_comms(config, ctx.sharding_type)
        return self._default_bwd_comms(ctx, config) if own is None else own(ctx)

    @abstractmethod
    def _default_fwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float: ...

    @abstractmethod
    def _default_bwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float: ...

    def compute_input_dist_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Return the milliseconds of ids on their way."""
        own = get_input_dist_comms(config, ctx.sharding_type)
        return self._default_input_dist_comms(ctx, config) if own is None else own(ctx)

    def _default_input_dist_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        size = math.ceil(ctx.batch_inputs * ctx.world_size * ctx.input_data_type_size)
        return self._send(ctx, size, CollectiveType.ALL_TO_ALL)


class TableWiseEvaluator(EmbeddingShardingPerfEvaluator):
    """Of tables that are whole, and of parts of columns."""

    _min_dim_by_default = True
    _penalty_by_default = True

    def _default_fwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        return self._send(ctx, self._out_size(ctx, is_fwd=True), CollectiveType.ALL_TO_ALL)

    def _default_bwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        return self._send(ctx, self._out_size(ctx, is_fwd=False), CollectiveType.ALL_TO_ALL)


class ColumnWiseEvaluator(TableWiseEvaluator):
    """Of parts of columns."""


class TableColumnWiseEvaluator(TableWiseEvaluator):
    """Of parts of columns on the ranks of one host."""


class _RowsEvaluator(EmbeddingShardingPerfEvaluator):
    """Of tables whose rows are cut: each rank has a share of the ids."""

    def _ids_size(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        ids = ctx.batch_inputs / self.get_batch_inputs_divisor(ctx)
        return math.ceil(ids * ctx.world_size * ctx.input_data_type_size) * (2 if ctx.is_weighted else 1)

    def _rows_size(self, ctx: ShardPerfContext, least_columns: int = 0) -> float:
        ids = ctx.batch_inputs / self.get_batch_inputs_divisor(ctx)
        return ids * ctx.world_size * ctx.emb_dim * ctx.table_data_type_size

    def _written_size(self, ctx: ShardPerfContext, data_type_size: float) -> float:
        whole = super()._written_size(ctx, data_type_size)
        return whole if ctx.is_pooled else whole / self.get_batch_inputs_divisor(ctx)

    def _wire_size(self, ctx: ShardPerfContext, is_fwd: bool) -> float:
        return ctx.fwd_sr_comm_data_type_size if is_fwd else ctx.bwd_sr_comm_data_type_size

    def _copied(self, ctx: ShardPerfContext) -> float:
        """Return the milliseconds of gradients that are copied once they are all there."""
        return self._out_size(ctx, is_fwd=False) * BATCHED_COPY_PERF_FACTOR / ctx.device_bw


class RowWiseEvaluator(_RowsEvaluator):
    """Of tables whose rows are cut over all ranks."""

    def get_batch_inputs_divisor(self, ctx: ShardPerfContext) -> int:
        """Return the number of ranks."""
        return ctx.world_size

    def _wire_size(self, ctx: ShardPerfContext, is_fwd: bool) -> float:
        rows = super()._wire_size(ctx, is_fwd)
        return rows if ctx.is_pooled else EmbeddingShardingPerfEvaluator._wire_size(self, ctx, is_fwd)

    def get_expected_lookups_for_prefetch(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Return the bytes of the ids, as the published formula has it."""
        return float(math.ceil(ctx.batch_inputs * ctx.input_data_type_size)) * (2 if ctx.is_weighted else 1)

    def _default_fwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        return self._send(ctx, self._out_size(ctx, is_fwd=True), CollectiveType.REDUCE_SCATTER)

    def _default_bwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        sent = self._send(ctx, self._out_size(ctx, is_fwd=False), CollectiveType.ALL_GATHER)
        return sent + self._copied(ctx)


class TableRowWiseEvaluator(_RowsEvaluator):
    """Of tables whose rows are cut over the ranks of a host: sums are made there, then sent to the others."""

    def get_batch_inputs_divisor(self, ctx: ShardPerfContext) -> int:
        """Return the number of ranks of a group."""
        return ctx.intra_group_size

    def get_expected_lookups_for_prefetch(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Return the bytes of the ids of a group, as the published formula has it."""
        return float(self._ids_size(ctx, config))

    def _both_levels(
        self, ctx: ShardPerfContext, inside: CollectiveType, is_fwd: bool, wire_size: float
    ) -> float:
        local = min(ctx.intra_group_size, ctx.local_world_size)
        sums = self._send(ctx, self._out_size(ctx, is_fwd), inside, ctx.intra_group_size, local)
        if ctx.num_twrw_groups == 1:
            return sums
        between = ctx.batch_outputs * ctx.num_twrw_groups * ctx.emb_dim * wire_size
        return sums + self._send(ctx, between, CollectiveType.ALL_TO_ALL, ctx.num_twrw_groups, 1)

    def _default_fwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        if ctx.comms_bandwidths is None:
            return 0.0
        wire = ctx.fwd_a2a_comm_data_type_size
        return self._both_levels(ctx, CollectiveType.REDUCE_SCATTER, True, wire)

    def _default_bwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        wire = ctx.bwd_a2a_comm_data_type_size
        return self._both_levels(ctx, CollectiveType.ALL_GATHER, False, wire) + self._copied(ctx)


class GridShardEvaluator(TableRowWiseEvaluator):
    """Of parts of columns whose rows are cut over the ranks of a host."""


class DataParallelEvaluator(EmbeddingShardingPerfEvaluator):
    """Of tables that every rank has: nothing is sent but gradients, all of them."""

    def _ids_size(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        return math.ceil(ctx.batch_inputs * ctx.input_data_type_size) * (2 if ctx.is_weighted else 1)

    def _rows_size(self, ctx: ShardPerfContext, least_columns: int = 0) -> float:
        return ctx.batch_inputs * ctx.emb_dim * ctx.table_data_type_size

    def _written_size(self, ctx: ShardPerfContext, data_type_size: float) -> float:
        return ctx.batch_outputs * ctx.emb_dim * ctx.table_data_type_size

    def _default_fwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        return 0.0

    def _default_bwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        size = ctx.hash_size * ctx.emb_dim * ctx.table_data_type_size
        hosts = min(ctx.world_size / ctx.local_world_size, 2)
        summed = 0.0
        if ctx.comms_bandwidths is not None:
            summed = self._send(ctx, size * (2 * hosts - 1) / hosts, CollectiveType.ALL_REDUCE)
        if ctx.world_size > 2 * ctx.local_world_size:
            summed *= 2
        return summed + size * DP_ELEMENTWISE_KERNELS_PERF_FACTOR / ctx.device_bw

    def compute_prefetch_comp(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Return 0: nothing is fetched ahead."""
        return 0.0

    def compute_input_dist_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Return 0: ids stay where they are."""
        return 0.0


class InferenceShardingPerfEvaluator(EmbeddingShardingPerfEvaluator):
    """Of serving: there is no way back."""

    def compute_bwd_comp(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Return 0."""
        return 0.0

    def compute_bwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Return 0."""
        return 0.0


class TableWiseInferenceEvaluator(InferenceShardingPerfEvaluator, TableWiseEvaluator):
    """Of tables that are whole, served."""


class RowWiseInferenceEvaluator(InferenceShardingPerfEvaluator, RowWiseEvaluator):
    """Of tables whose rows are cut over all ranks, served."""


class TableRowWiseInferenceEvaluator(InferenceShardingPerfEvaluator, TableRowWiseEvaluator):
    """Of tables whose rows are cut over a host, served."""


class ColumnWiseInferenceEvaluator(InferenceShardingPerfEvaluator, ColumnWiseEvaluator):
    """Of parts of columns, served."""


class DataParallelInferenceEvaluator(InferenceShardingPerfEvaluator, DataParallelEvaluator):
    """Of tables that every rank has, served."""


class TableColumnWiseInferenceEvaluator(InferenceShardingPerfEvaluator, TableColumnWiseEvaluator):
    """Of parts of columns on one host, served."""


class GridShardInferenceEvaluator(InferenceShardingPerfEvaluator, GridShardEvaluator):
    """Of parts of columns whose rows are cut over a host, served."""


TRAINING_EVALUATORS: dict[str, EmbeddingShardingPerfEvaluator] = {
    "table_wise": TableWiseEvaluator(),
    "row_wise": RowWiseEvaluator(),
    "table_row_wise": TableRowWiseEvaluator(),
    "column_wise": ColumnWiseEvaluator(),
    "data_parallel": DataParallelEvaluator(),
    "table_column_wise": TableColumnWiseEvaluator(),
    "grid_shard": GridShardEvaluator(),
}
INFERENCE_EVALUATORS: dict[str, EmbeddingShardingPerfEvaluator] = {
    "table_wise": TableWiseInferenceEvaluator(),
    "row_wise": RowWiseInferenceEvaluator(),
    "table_row_wise": TableRowWiseInferenceEvaluator(),
    "column_wise": ColumnWiseInferenceEvaluator(),
    "data_parallel": DataParallelInferenceEvaluator(),
    "table_column_wise": TableColumnWiseInferenceEvaluator(),
    "grid_shard": GridShardInferenceEvaluator(),
}


def get_embedding_perf_sharding_evaluator(
    sharding_type: str, is_inference: bool = False
) -> EmbeddingShardingPerfEvaluator:
    """Return the formulas of a sharding type.

    >>> type(get_embedding_perf_sharding_evaluator("grid_shard", is_inference=True)).__name__
    'GridShardInferenceEvaluator'
    """
    evaluators = INFERENCE_EVALUATORS if is_inference else TRAINING_EVALUATORS
    if sharding_type not in evaluators:
        raise ValueError(f"There is no sharding type {sharding_type!r}; there are {', '.join(evaluators)}.")
    return evaluators[sharding_type]


class EmbeddingPerfEstimator(ShardEstimator):
    """Fill in the milliseconds of shards by the published formulas, with a hardware's configuration."""

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        is_inference: bool = False,
        config: HardwarePerfConfig | None = None,
        use_batch_inputs_for_expected_cache_fetches: bool = False,
        use_linear_regression_prefetch_estimate: bool = False,
    ) -> None:
        self._topology, self._constraints, self._is_inference = topology, constraints, is_inference
        self._config = config if config is not None else HardwarePerfConfig()
        self._by_ids = use_batch_inputs_for_expected_cache_fetches
        self._fits_a_line = use_linear_regression_prefetch_estimate

    @property
    def config(self) -> HardwarePerfConfig:
        """Return the hardware's configuration."""
        return self._config

    @property
    def is_inference(self) -> bool:
        """Return whether tables are served only."""
        return self._is_inference

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: Mapping[str, Any] | None = None
    ) -> None:
        """Fill in `perf` of every shard. The map's values are sharders, or their `SharderData`."""
        known = {key: sharder_data_of(one) for key, one in (sharder_data_map or {}).items()}
        for option in sharding_options:
            self._config.validate_sharding_type(option.sharding_type)
            sizes = [shard.size for shard in option.shards]
            contexts = ShardPerfContext.build_shard_perf_contexts(
                config=self._config,
                shard_sizes=sizes,
                sharding_option=option,
                topology=self._topology,
                constraints=self._constraints,
                sharder_data=known.get(option.module_type_key) or sharder_data_of(None),
                is_inference=self._is_inference,
                use_batch_inputs_for_expected_cache_fetches=self._by_ids,
                use_linear_regression_prefetch_estimate=self._fits_a_line,
            )
            evaluator = get_embedding_perf_sharding_evaluator(option.sharding_type, self._is_inference)
            perfs = self._config.post_process_perfs(
                shard_perfs=[evaluator.compute_perf(ctx, self._config) for ctx in contexts],
                shard_sizes=sizes,
                sharding_type=option.sharding_type,
                uneven_sharding_perf_multiplier=self._topology.uneven_sharding_perf_multiplier,
            )
            for shard, perf in zip(option.shards, perfs, strict=True):
                shard.perf = perf


EmbeddingPerfEstimatorV2 = EmbeddingPerfEstimator


class EmbeddingPerfEstimatorFactory:
    """Make estimators of registered configurations, by name in any case of letters."""

    _registry: dict[str, type[HardwarePerfConfig]] = {}  # noqa: RUF012

    @classmethod
    def register(cls, name: str) -> Callable[[type[HardwarePerfConfig]], type[HardwarePerfConfig]]:
        """Decorate a configuration: it gets that name."""

        def decorator(config: type[HardwarePerfConfig]) -> type[HardwarePerfConfig]:
            cls._registry[name.lower()] = config
            return config

        return decorator

    @classmethod
    def create(
        cls,
        hardware_name: str,
        is_inference: bool = False,
        topology: Topology | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        use_batch_inputs_for_expected_cache_fetches: bool = False,
        use_linear_regression_prefetch_estimate: bool = False,
    ) -> EmbeddingPerfEstimator:
        """Return an estimator with the configuration of that name."""
        config = cls._registry.get(hardware_name.lower())
        if config is None:
            some = ", ".join(cls.list_registered())
            raise ValueError(f"There is no hardware {hardware_name!r}; there are {some}.")
        return cls.create_with_config(
            config(),
            is_inference,
            topology,
            constraints,
            use_batch_inputs_for_expected_cache_fetches,
            use_linear_regression_prefetch_estimate,
        )

    @classmethod
    def create_with_config(
        cls,
        config: HardwarePerfConfig,
        is_inference: bool = False,
        topology: Topology | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        use_batch_inputs_for_expected_cache_fetches: bool = False,
        use_linear_regression_prefetch_estimate: bool = False,
    ) -> EmbeddingPerfEstimator:
        """Return an estimator with a configuration of one's own."""
        if topology is None:
            raise ValueError("An estimator needs a topology.")
        return EmbeddingPerfEstimator(
            topology,
            constraints,
            is_inference,
            config,
            use_batch_inputs_for_expected_cache_fetches,
            use_linear_regression_prefetch_estimate,
        )

    @classmethod
    def list_registered(cls) -> list[str]:
        """Return the names there are."""
        return list(cls._registry)

    @classmethod
    def is_registered(cls, name: str) -> bool:
        """Return whether there is a configuration of that name."""
        return name.lower() in cls._registry
