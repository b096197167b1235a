"""What shards cost: milliseconds and bytes, by the engine's one cost function."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tessera import _C
from tessera.distributed.planner._tables import (
    PlannedTable,
    constraints_of,
    entry_of,
    ranks_of,
    tables_of_options,
)
from tessera.distributed.planner.constants import (
    BIGINT_DTYPE,
    KV_CACHING_RATIO,
    UVM_CACHING_RATIO,
    kernel_bw_lookup,
)
from tessera.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    ShardEstimator,
    ShardingOption,
    Storage,
    Topology,
)
from tessera.distributed.planner.utils import prod
from tessera.distributed.types import CacheStatistics, ModuleSharder, PipelineType

__all__ = [
    "EmbeddingOffloadStats",
    "EmbeddingPerfEstimator",
    "EmbeddingStorageEstimator",
    "calculate_pipeline_io_cost",
    "calculate_shard_storages",
]

Sharders = Mapping[str, ModuleSharder[nn.Module]]


def perf_and_storage(
    options: Sequence[ShardingOption],
    tables: Sequence[PlannedTable],
    constraints: Mapping[str, ParameterConstraints] | None,
    topology: Topology,
    kernels: Sequence[str] | None = None,
) -> list[list[tuple[Perf, Storage]]]:
    """Return milliseconds and bytes of every shard of every option.

    `kernels` are the engine's, if they are known: a dense table that is not copied is stepped by the user,
    and priced as a fused one.
    """
    if not options:
        return []
    entries = {
        table.key: entry_of(table, constraints_of(table, constraints), options[0].batch_size)
        for table in tables
    }
    ranks = [{**rank, "memory": 1e18} for rank in ranks_of(topology)]
    problem = {
        "tables": list(entries.values()),
        "batch": options[0].batch_size,
        "ranks": ranks,
        "ranks_per_host": topology.local_world_size,
        "reserved_percent": 0,
    }
    asked = []
    for i, option in enumerate(options):
        is_copied = option.sharding_type == "data_parallel" and option.compute_kernel == "dense"
        kernel = kernels[i] if kernels else "dense" if is_copied else "fused"
        shards = [(*shard.size, shard.rank or 0) for shard in option.shards]
        asked.append((_key(option), option.sharding_type, kernel, shards))
    numbers = _C.planner.shard_costs(json.dumps(problem), asked)
    return [
        [_numbers_of(option, entries[_key(option)], shard.size, cost, topology)
         for shard, cost in zip(option.shards, costs, strict=True)]
        for option, costs in zip(options, numbers, strict=True)
    ]  # fmt: skip


def _key(option: ShardingOption) -> str:
    return f"{option.path}.{option.name}" if option.path else option.name


def _numbers_of(
    option: ShardingOption, entry: dict[str, Any], size: list[int], cost: Sequence[float], topology: Topology
) -> tuple[Perf, Storage]:
    ids, lookup, out, grads, step, held = cost
    kernel, on_device = option.compute_kernel, topology.compute_device != "cpu"
    slower, prefetch, factor = 1.0, 0.0, option.cache_load_factor
    if on_device and "uvm" in kernel:
        speed = kernel_bw_lookup(
            topology.compute_device, kernel, topology.hbm_mem_bw, topology.ddr_mem_bw,
            topology.hbm_to_ddr_mem_bw, factor,
        )  # fmt: skip
        slower = topology.hbm_mem_bw / speed if speed else 1.0
        stats = option.cache_params.stats if option.cache_params else None
        if "caching" in kernel and stats is not None:
            missed = stats.expected_lookups * stats.expected_miss_rate(factor or UVM_CACHING_RATIO)
            share = size[0] / max(1, entry["rows"])
            prefetch = missed * share * size[1] * entry["element_bytes"] / topology.hbm_to_ddr_mem_bw
    perf = Perf(
        fwd_compute=slower * 1e3 * lookup,
        fwd_comms=1e3 * (ids + out),  # nothing can be looked up before
        bwd_compute=slower * 1e3 * step,
        bwd_comms=1e3 * grads,
        input_dist_comms=1e3 * ids,
        prefetch_compute=prefetch,
    )
    if not on_device:
        return perf, Storage(0, int(held))
    if "uvm" not in kernel:
        return perf, Storage(int(held), 0)
    weights = size[0] * (
        size[1] * entry["element_bytes"]
        + entry["state_bytes_per_row"]
        + entry["state_bytes_per_element"] * size[1]
    )
    cached = weights * (factor or UVM_CACHING_RATIO) if "caching" in kernel else 0
    return perf, Storage(int(held - weights + cached), int(weights))


class EmbeddingPerfEstimator(ShardEstimator):
    """Fill in the milliseconds of shards: the engine's costs, on the topology's or the measured speeds."""

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        is_inference: bool = False,
    ) -> None:
        self._topology, self._constraints, self._is_inference = topology, constraints, is_inference

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: Sharders | None = None
    ) -> None:
        """Fill in `perf` of every shard."""
        tables = tables_of_options(sharding_options, sharder_data_map)
        found = perf_and_storage(sharding_options, tables, self._constraints, self._topology)
        for option, numbers in zip(sharding_options, found, strict=True):
            for shard, (perf, _) in zip(option.shards, numbers, strict=True):
                if self._is_inference:
                    perf.bwd_compute = perf.bwd_comms = 0.0
                shard.perf = perf


class EmbeddingStorageEstimator(ShardEstimator):
    """Fill in the bytes of shards: weights, state, input, rows that leave, work space of the step.

    Serving keeps the weights only. A pipeline with a batch on its way is what the engine counts; the other
    parameters are there for programs that pass them.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        pipeline_type: PipelineType = PipelineType.NONE,
        run_embedding_at_peak_memory: bool = False,
        is_inference: bool = False,
    ) -> None:
        self._topology, self._constraints = topology, constraints
        self._pipeline_type = pipeline_type
        self._run_embedding_at_peak_memory = run_embedding_at_peak_memory
        self._is_inference = is_inference

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: Sharders | None = None
    ) -> None:
        """Fill in `storage` of every shard."""
        tables = tables_of_options(sharding_options, sharder_data_map)
        found = perf_and_storage(sharding_options, tables, self._constraints, self._topology)
        on_device = self._topology.compute_device != "cpu"
        for option, numbers in zip(sharding_options, found, strict=True):
            for shard, (_, storage) in zip(option.shards, numbers, strict=True):
                if self._is_inference:
                    weights = prod(shard.size) * option.tensor.element_size()
                    storage = Storage(weights, 0) if on_device else Storage(0, weights)
                shard.storage = storage


def calculate_pipeline_io_cost(
    input_size: int,
    output_size: int,
    prefetch_size: int,
    pipeline_type: PipelineType,
    multipass_prefetch_max_pass: int | None,
    count_ephemeral_storage_cost: bool = False,
    is_inference: bool = False,
) -> int:
    """Return the bytes that batches on their way take, by the kind of pipeline."""
    if is_inference:
        return 0
    leaving = output_size if count_ephemeral_storage_cost else 0
    if pipeline_type == PipelineType.TRAIN_SPARSE_DIST:
        return 2 * input_size + leaving
    if pipeline_type == PipelineType.TRAIN_PREFETCH_SPARSE_DIST:
        burst = 1 + 6 / (multipass_prefetch_max_pass or 1)
        return 3 * input_size + int(burst * prefetch_size) + leaving
    return input_size + output_size


def _io_sizes(
    sharding_type: str, batches: list[int], world: int, local: int, lengths: list[float], dim: int,
    shards: list[list[int]], in_bytes: float, out_bytes: float, poolings: list[float], is_pooled: bool,
) -> list[tuple[int, int]]:  # fmt: skip
    """Return the bytes that enter and leave each shard in one step."""
    per_feature = list(zip(lengths, poolings, batches, strict=True))
    ids = sum(i * n * b for i, n, b in per_feature)
    split = {"row_wise": world, "table_row_wise": local, "grid_shard": local}.get(sharding_type, 1)
    ids /= split
    rows = sum(min(1.0, i) * n * b for i, n, b in per_feature) if is_pooled else ids
    seen = 1 if sharding_type == "data_parallel" else world  # ranks whose samples come here
    sizes = []
    for size in shards:
        columns = dim if sharding_type in ("data_parallel", "table_wise") else size[1]
        pair = (math.ceil(ids * seen * in_bytes), math.ceil(rows * seen * columns * out_bytes))
        sizes.append(pair if split == 1 or prod(size) else (0, 0))
    return sizes


def _state_share(tensor: torch.Tensor) -> float:
    """Return the bytes of optimizer state a byte of weights."""
    classes = getattr(tensor, "_optimizer_classes", None)
    if not classes or classes[0] is None:
        return 0.0
    shares = {"SGD": 0.0, "Adam": 2.0, "RowWiseAdagrad": 1 / tensor.shape[-1]}
    return shares.get(classes[0].__name__, 1.0)


def calculate_shard_storages(
    sharder_data: Any,
    sharding_type: str,
    tensor: torch.Tensor,
    compute_device: str,
    compute_kernel: str,
    shard_sizes: list[list[int]],
    batch_sizes: list[int],
    world_size: int,
    local_world_size: int,
    input_lengths: list[float],
    num_poolings: list[float],
    caching_ratio: float,
    is_pooled: bool,
    input_data_type_size: float = BIGINT_DTYPE,
    output_data_type_size: float = 4,
    pipeline_type: PipelineType = PipelineType.NONE,
    count_ephemeral_storage_cost: bool = False,
    is_inference: bool = False,
    multipass_prefetch_max_pass: int | None = None,
    key_value_params: Any = None,
    kv_cache_load_factor: float = KV_CACHING_RATIO,
    use_virtual_table: bool = False,
) -> list[Storage]:
    """Return the bytes of each shard by the published formulas; the planner itself asks the engine.

    `sharder_data` is a sharder, or SharderData of one.
    """
    if hasattr(sharder_data, "storage_usage"):
        usage = sharder_data.storage_usage(tensor, compute_device, compute_kernel)
    else:
        usage = sharder_data.usage(tensor, compute_device, compute_kernel)
    in_hbm, in_ddr = usage.get("hbm", 0), usage.get("ddr", 0)
    is_cached = "uvm_caching" in compute_kernel
    if is_cached:
        in_hbm = round(in_ddr * caching_ratio)
    state = 0.0 if is_inference else _state_share(tensor)

    def held(whole: int, size: list[int], slots: float | None) -> int:
        weights = whole
        if sharding_type != "data_parallel":
            weights = math.ceil(whole * prod(size) / max(1, tensor.numel()))
        # Rows on the device know their slot: four bytes a row, sixteen a slot.
        marks = math.ceil(size[0] * (4 + slots * 16)) if slots is not None and not is_inference else 0
        return weights + math.ceil(weights * state) + marks

    io = _io_sizes(
        sharding_type, batch_sizes, world_size, local_world_size, input_lengths, tensor.shape[1],
        shard_sizes, input_data_type_size, output_data_type_size, num_poolings, is_pooled,
    )  # fmt: skip
    storages = []
    for size, (entering, leaving) in zip(shard_sizes, io, strict=True):
        moving = calculate_pipeline_io_cost(
            entering, leaving, entering if is_cached else 0, pipeline_type, multipass_prefetch_max_pass,
            count_ephemeral_storage_cost, is_inference,
        )  # fmt: skip
        hbm = held(in_hbm, size, caching_ratio if is_cached else None) if in_hbm else 0
        ddr = held(in_ddr, size, None) if in_ddr else 0
        ssd = 0
        if "key_value" in compute_kernel or use_virtual_table:
            # Rows lie on the disk; the device has a cache of so many MiB, or of a share of the table.
            ssd = hbm + ddr if "key_value" in compute_kernel else 0
            most = (getattr(key_value_params, "max_l1_cache_size", None) or 0) * 1024**2
            share = math.ceil(tensor.numel() * tensor.element_size() * kv_cache_load_factor)
            hbm, ddr = min(most, share), 0
        if compute_device == "cpu":
            ddr += 0 if is_inference else entering + leaving
        else:
            hbm += moving
        storages.append(Storage(hbm if compute_device != "cpu" else 0, ddr, ssd))
    return storages


class EmbeddingOffloadStats(CacheStatistics):
    """Say how a table's ids would use a cache, from a histogram of the hits that sizes of it would have.

    Bin i of n has the lookups that a cache of (i + 1) / n of the table serves and a smaller one does not.
    """

    def __init__(
        self, cacheability: float, expected_lookups: int, mrc_hist_counts: torch.Tensor, height: int
    ) -> None:
        if mrc_hist_counts.dim() != 1 or mrc_hist_counts.numel() == 0:
            raise ValueError(
                f"EmbeddingOffloadStats: mrc_hist_counts has shape {list(mrc_hist_counts.shape)}; expected "
                "one dimension and at least one bin."
            )
        self._cacheability, self._expected_lookups = cacheability, expected_lookups
        self.height = height
        self.hist = mrc_hist_counts
        self.bins = torch.linspace(0, height, len(mrc_hist_counts) + 1)

    @property
    def expected_lookups(self) -> int:
        """Return the number of different ids of a step, over all ranks."""
        return self._expected_lookups

    @property
    def cacheability(self) -> float:
        """Return how hard the ids are to cache whatever the size: 0 easy, 1 hard."""
        return self._cacheability

    def expected_miss_rate(self, clf: float) -> float:
        """Return the share of lookups that miss a cache of `clf` times the table."""
        return self.estimate_cache_miss_rate(torch.tensor(clf * self.height), self.hist, self.bins).item()

    @staticmethod
    def estimate_cache_miss_rate(
        cache_sizes: torch.Tensor, hist: torch.Tensor, bins: torch.Tensor
    ) -> torch.Tensor:
        """Return the share of lookups that miss caches of so many rows."""
        served = hist.cumsum(0)
        if served[-1] == 0:
            return torch.zeros_like(cache_sizes, dtype=torch.float32)
        missed = torch.cat((torch.ones(1), 1 - served / served[-1]))
        # A cache of k rows serves what is at most k - 1 other rows away.
        return missed[torch.bucketize(cache_sizes - 1, bins, right=True).clamp(max=len(missed) - 1)]
