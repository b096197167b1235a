"""Names of metrics in reports.

>>> compose_metric_key(MetricNamespace.NE, "task", MetricName.NE, MetricPrefix.WINDOW)
'ne-task|window_ne'
"""

from __future__ import annotations

from enum import Enum

__all__ = [
    "MetricName",
    "MetricNameBase",
    "MetricNamespace",
    "MetricNamespaceBase",
    "MetricPrefix",
    "compose_metric_key",
    "compose_metric_namespace",
]


class MetricNameBase(Enum):
    """Name a number."""

    def __str__(self) -> str:
        return self.value


class MetricName(MetricNameBase):
    """Name the numbers that there are."""

    NE = "ne"
    AUC = "auc"
    CALIBRATION = "calibration"
    CTR = "ctr"
    MSE = "mse"
    RMSE = "rmse"
    THROUGHPUT = "throughput"
    TOTAL_EXAMPLES = "total_examples"
    ATTEMPT_EXAMPLES = "attempt_examples"


class MetricNamespaceBase(Enum):
    """Name a kind of metric."""

    def __str__(self) -> str:
        return self.value


class MetricNamespace(MetricNamespaceBase):
    """Name the kinds of metrics that there are."""

    NE = "ne"
    AUC = "auc"
    CALIBRATION = "calibration"
    CTR = "ctr"
    MSE = "mse"
    THROUGHPUT = "throughput"


class MetricPrefix(Enum):
    """Say over which batches a number is."""

    DEFAULT = ""
    LIFETIME = "lifetime_"
    WINDOW = "window_"
    ATTEMPT = "attempt_"

    def __str__(self) -> str:
        return self.value


def compose_metric_namespace(namespace: MetricNamespaceBase, task_name: str) -> str:
    """Return the first half of a key."""
    return f"{namespace}-{task_name}"


def compose_metric_key(
    namespace: MetricNamespaceBase,
    task_name: str,
    metric_name: MetricNameBase,
    metric_prefix: MetricPrefix = MetricPrefix.DEFAULT,
    description: str | None = None,
) -> str:
    """Return the key of a number in a report."""
    return f"{compose_metric_namespace(namespace, task_name)}|{metric_prefix}{metric_name}{description or ''}"
