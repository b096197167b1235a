"""The configuration of hardware that nothing is known about."""

from __future__ import annotations

from tessera.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from tessera.distributed.planner.estimator.estimator import EmbeddingPerfEstimatorFactory
from tessera.distributed.planner.estimator.types import (
    EstimatorPerfCoefficients,
    HardwarePerfConfig,
    PerfCoefficientConfig,
)

__all__ = ["EmbeddingPerfEstimatorConfig"]


@EmbeddingPerfEstimatorFactory.register(DEFAULT_PERF_ESTIMATOR)
class EmbeddingPerfEstimatorConfig(HardwarePerfConfig):
    """Take every byte as one, the way back as twice the way there, and the topology's speeds."""

    coefficients: PerfCoefficientConfig = PerfCoefficientConfig(  # type: ignore[assignment]
        table_wise=EstimatorPerfCoefficients(),
        row_wise=EstimatorPerfCoefficients(),
        table_row_wise=EstimatorPerfCoefficients(),
        data_parallel=EstimatorPerfCoefficients(),
        column_wise=EstimatorPerfCoefficients(),
    )
