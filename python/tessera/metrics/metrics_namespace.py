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
    "StrValueMixin",
    "compose_customized_metric_key",
    "compose_metric_key",
    "compose_metric_namespace",
    "task_wildcard_metrics_pattern",
]


class StrValueMixin:
    """Let an enumeration's member be written as its value."""

    def __str__(self) -> str:
        return self.value


class MetricNameBase(StrValueMixin, Enum):
    """Name a number."""


class MetricName(MetricNameBase):
    """Name numbers: those of the metrics that there are, and others that metrics of one's own may have."""

    DEFAULT = ""
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
    BATCH_SIZE = "batch_size"
    R_SQUARED = "r_squared"
    GAUC = "gauc"
    GAUC_NUM_SAMPLES = "gauc_num_samples"
    TOTAL_POSITIVE_EXAMPLES = "total_positive_examples"
    TOTAL_NEGATIVE_EXAMPLES = "total_negative_examples"
    SERVING_NE = "serving_ne"
    SERVING_CALIBRATION = "serving_calibration"
    SERVING_AE_LOSS = "serving_ae_loss"
    TENSOR_WEIGHTED_AVG = "tensor_weighted_avg"
    EFFECTIVE_SAMPLE_RATE = "effective_sample_rate"
    DATA_LABEL_AVERAGE = "data_label_average"


class MetricNamespaceBase(StrValueMixin, Enum):
    """Name a kind of metric."""


class MetricNamespace(MetricNamespaceBase):
    """Name kinds of metrics: those that there are, and others that metrics of one's own may be."""

    DEFAULT = ""
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
    GAUC = "gauc"
    OPTIMIZERS = "optimizers"
    MODEL_CONFIGURATOR = "model_configurator"
    SERVING_AE_LOSS = "serving_ae_loss"
    TENSOR_WEIGHTED_AVG = "tensor_weighted_avg"
    EFFECTIVE_RATE = "effective_rate"


class MetricPrefix(StrValueMixin, Enum):
    """Say over which batches a number is."""

    DEFAULT = ""
    LIFETIME = "lifetime_"
    WINDOW = "window_"
    ATTEMPT = "attempt_"


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
    first = compose_metric_namespace(namespace, task_name)
    return compose_customized_metric_key(first, f"{metric_prefix}{metric_name}", description)


def compose_customized_metric_key(namespace: str, metric_name: str, description: str | None = None) -> str:
    """Return the key of a number whose names are texts.

    >>> compose_customized_metric_key("optimizers-optimizers", "lr")
    'optimizers-optimizers|lr'
    """
    return f"{namespace}|{metric_name}{description or ''}"


def task_wildcard_metrics_pattern(
    namespace: MetricNamespaceBase,
    metric_name: MetricNameBase,
    metric_prefix: MetricPrefix = MetricPrefix.DEFAULT,
) -> str:
    """Return a regular expression of the keys of a number, whatever the task."""
    return rf"{namespace}-.+\|{metric_prefix}{metric_name}"
