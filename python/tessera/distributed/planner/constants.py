"""Numbers that are assumed where nothing is said. Bandwidths are bytes per millisecond."""

from __future__ import annotations

_GIB = 1024**3

MAX_SIZE = (1 << 63) - 1
INTRA_NODE_BANDWIDTH = 600 * _GIB / 1000
CROSS_NODE_BANDWIDTH = 12.5 * _GIB / 1000
MIN_CW_DIM = 128
POOLING_FACTOR = 1.0
NUM_POOLINGS = 1.0
BIGINT_DTYPE = 8
HBM_CAP = 32 * _GIB
DDR_CAP = 128 * _GIB
SSD_CAP = 2 * 1024 * _GIB
DDR_MEM_BW = 51 * _GIB / 1000
HBM_MEM_BW = 897 * _GIB / 1000
SSD_MEM_BW = 100 * 1024**2 / 1000
HBM_TO_DDR_MEM_BW = 32 * _GIB / 1000
BATCH_SIZE = 512
BWD_COMPUTE_MULTIPLIER = 2
WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER = 1
WEIGHTED_KERNEL_MULTIPLIER = 1.1
BATCHED_COPY_PERF_FACTOR = 2.455
DP_ELEMENTWISE_KERNELS_PERF_FACTOR = 9.22
FULL_BLOCK_EMB_DIM = 128
HALF_BLOCK_PENALTY = 1.15
QUARTER_BLOCK_PENALTY = 1.75
DEFAULT_PERF_ESTIMATOR = "default_estimator"
UVM_CACHING_RATIO = 0.2
KV_CACHING_RATIO = 0.2


def kernel_bw_lookup(
    compute_device: str,
    compute_kernel: str,
    hbm_mem_bw: float,
    ddr_mem_bw: float,
    hbm_to_ddr_mem_bw: float,
    caching_ratio: float | None = None,
    prefetch_pipeline: bool = False,
    ssd_mem_bw: float = SSD_MEM_BW,
) -> float | None:
    """Return how fast a kernel reads rows on a device; None for a kernel that the device does not have.

    >>> kernel_bw_lookup("cpu", "fused", 8.0, 2.0, 4.0), kernel_bw_lookup("cuda", "dense", 8.0, 2.0, 4.0)
    (2.0, 4.0)
    """
    ratio = UVM_CACHING_RATIO if caching_ratio is None else caching_ratio
    own = ddr_mem_bw if compute_device == "cpu" else hbm_mem_bw
    speeds = {"dense": own / 2, "fused": own, "quant": own}
    if compute_device == "cuda":
        managed = hbm_to_ddr_mem_bw / 10
        cached = (ratio * hbm_mem_bw + (1 - ratio) * hbm_to_ddr_mem_bw) / 10
        speeds |= {"fused_uvm": managed, "quant_uvm": managed, "quant_uvm_caching": cached}
        speeds["fused_uvm_caching"] = hbm_mem_bw if prefetch_pipeline else cached
        speeds["key_value"] = ssd_mem_bw
        speeds |= dict.fromkeys(
            ("ssd_virtual_table", "dram_virtual_table", "dram_ssd_virtual_table"), hbm_to_ddr_mem_bw
        )
    return speeds.get(compute_kernel)
