"""The published cost formulas, with numbers and methods of one's own for a piece of hardware.

A `HardwarePerfConfig` says how fast the hardware is; decorators of `annotations` give it speeds, factors and
whole formulas. `EmbeddingPerfEstimatorFactory` makes an estimator of a registered one.
"""

from tessera.distributed.planner.estimator.annotations import (
    backward_compute,
    bwd_coefficient,
    device_bw,
    forward_compute,
    fwd_coefficient,
    output_write_size,
    prefetch_coefficient,
    ssd_mem_bw,
    supported_sharding_types,
)
from tessera.distributed.planner.estimator.config import EmbeddingPerfEstimatorConfig
from tessera.distributed.planner.estimator.estimator import (
    EmbeddingPerfEstimatorFactory,
    EmbeddingPerfEstimatorV2,
)
from tessera.distributed.planner.estimator.types import (
    EstimatorPerfCoefficients,
    HardwarePerfConfig,
    PerfCoefficient,
    PerfCoefficientConfig,
    PrefetchCoefficients,
    ShardPerfContext,
)

__all__ = [
    "EmbeddingPerfEstimatorConfig",
    "EmbeddingPerfEstimatorFactory",
    "EmbeddingPerfEstimatorV2",
    "EstimatorPerfCoefficients",
    "HardwarePerfConfig",
    "PerfCoefficient",
    "PerfCoefficientConfig",
    "PrefetchCoefficients",
    "ShardPerfContext",
    "backward_compute",
    "bwd_coefficient",
    "device_bw",
    "forward_compute",
    "fwd_coefficient",
    "output_write_size",
    "prefetch_coefficient",
    "ssd_mem_bw",
    "supported_sharding_types",
]
