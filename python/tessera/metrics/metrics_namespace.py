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
    NE_POSITIVE = "ne_positive"
    SEGMENTED_NE = "segmented_ne"
    CTR = "ctr"
    CALIBRATION = "calibration"
    MSE = "mse"
    MAE = "mae"
    AUC = "auc"
    AUPRC = "auprc"
    RAUC = "rauc"
    ACCURACY = "accuracy"
    MULTICLASS_RECALL = "multiclass_recall"
    MULTI_LABEL_PRECISION = "multi_label_precision"
    WEIGHTED_AVG = "weighted_avg"
    RECALL_SESSION_LEVEL = "recall_session_level"
    PRECISION_SESSION_LEVEL = "precision_session_level"
    NDCG = "ndcg"
    XAUC = "xauc"
    PRECISION = "precision"
    RECALL = "recall"
    CALI_FREE_NE = "cali_free_ne"
    UNWEIGHTED_NE = "unweighted_ne"
    NMSE = "nmse"
    NUM_POSITIVE_SAMPLES = "num_positive_samples"
    SUM_WEIGHTS = "sum_weights"
    NUM_MISSING_LABELS = "num_missing_labels"
    WEIGHTED_SUM_PREDICTIONS = "weighted_sum_predictions"
    TOWER_QPS = "qps"
    SCALAR = "scalar"
    OUTPUT = "output"
    HINDSIGHT_TARGET_PR = "hindsight_target_pr"
    HINDSIGHT_TARGET_PRECISION = "hindsight_target_precision"
    HINDSIGHT_TARGET_RECALL = "hindsight_target_recall"
    THROUGHPUT = "throughput"
    LOG_LOSS = "logloss"
    RMSE = "rmse"
    NRMSE = "nrmse"
    GROUPED_AUC = "grouped_auc"
    GROUPED_AUPRC = "grouped_auprc"
    GROUPED_RAUC = "grouped_rauc"
    LABEL_AVERAGE = "label_average"
    PREDICTION_AVERAGE = "prediction_average"
    TOTAL_EXAMPLES = "total_examples"
    ATTEMPT_EXAMPLES = "attempt_examples"


class MetricNamespaceBase(Enum):
    """Name a kind of metric."""

    def __str__(self) -> str:
        return self.value


class MetricNamespace(MetricNamespaceBase):
    """Name the kinds of metrics that there are."""

    NE = "ne"
    NE_POSITIVE = "ne_positive"
    SEGMENTED_NE = "segmented_ne"
    RECALIBRATED_NE = "recalibrated_ne"
    RECALIBRATED_CALIBRATION = "recalibrated_calibration"
    CTR = "ctr"
    CALIBRATION = "calibration"
    MSE = "mse"
    MAE = "mae"
    AUC = "auc"
    AUPRC = "auprc"
    RAUC = "rauc"
    ACCURACY = "accuracy"
    MULTICLASS_RECALL = "multiclass_recall"
    MULTI_LABEL_PRECISION = "multi_label_precision"
    WEIGHTED_AVG = "weighted_avg"
    RECALL_SESSION_LEVEL = "recall_session_level"
    PRECISION_SESSION_LEVEL = "precision_session_level"
    NDCG = "ndcg"
    XAUC = "xauc"
    PRECISION = "precision"
    RECALL = "recall"
    SERVING_NE = "serving_ne"
    SERVING_CALIBRATION = "serving_calibration"
    CALI_FREE_NE = "cali_free_ne"
    UNWEIGHTED_NE = "unweighted_ne"
    NMSE = "nmse"
    TOWER_QPS = "qps"
    SCALAR = "scalar"
    OUTPUT = "output"
    HINDSIGHT_TARGET_PR = "hindsight_target_pr"
    AVERAGE = "average"
    NUM_POSITIVE_SAMPLES = "num_positive_samples"
    SUM_WEIGHTS = "sum_weights"
    NUM_MISSING_LABELS = "num_missing_labels"
    WEIGHTED_SUM_PREDICTIONS = "weighted_sum_predictions"
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
