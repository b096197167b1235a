"""What a served model shows: calibration, and how many samples it is of."""

from __future__ import annotations

from tessera.metrics._counted import CountedSamples
from tessera.metrics.calibration import CalibrationMetricComputation
from tessera.metrics.metrics_namespace import MetricNamespace
from tessera.metrics.rec_metric import RecMetric

__all__ = ["ServingCalibrationMetric", "ServingCalibrationMetricComputation"]


class ServingCalibrationMetricComputation(CountedSamples, CalibrationMetricComputation):
    """Add up as in training, and count the samples."""


class ServingCalibrationMetric(RecMetric):
    """Compute predicted over observed clicks and the number of samples."""

    _namespace = MetricNamespace.SERVING_CALIBRATION
    _computation_class = ServingCalibrationMetricComputation
