"""What a served model shows: normalised entropy, and how many samples it is of."""

from __future__ import annotations

from tessera.metrics._counted import CountedSamples
from tessera.metrics.metrics_namespace import MetricNamespace
from tessera.metrics.ne import NEMetricComputation
from tessera.metrics.rec_metric import RecMetric

__all__ = ["ServingNEMetric", "ServingNEMetricComputation"]


class ServingNEMetricComputation(CountedSamples, NEMetricComputation):
    """Add up as in training, and count the samples."""


class ServingNEMetric(RecMetric):
    """Compute the normalised entropy and the number of samples."""

    _namespace = MetricNamespace.SERVING_NE
    _computation_class = ServingNEMetricComputation
