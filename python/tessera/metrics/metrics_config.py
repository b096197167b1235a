"""Which metrics of which tasks are computed, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tessera.metrics.metrics_namespace import StrValueMixin

__all__ = [
    "BatchSizeStage",
    "DefaultMetricsConfig",
    "DefaultTaskInfo",
    "EmptyMetricsConfig",
    "MetricsConfig",
    "RecComputeMode",
    "RecMetricDef",
    "RecMetricEnum",
    "RecMetricEnumBase",
    "RecTaskInfo",
    "SessionMetricDef",
    "StateMetricEnum",
    "ThroughputDef",
    "validate_batch_size_stages",
]


class RecMetricEnumBase(StrValueMixin, Enum):
    """Name metrics."""


class RecMetricEnum(RecMetricEnumBase):
    """Name the metrics that there are."""

    NE = "ne"
    NE_POSITIVE = "ne_positive"
    RECALIBRATED_NE = "recalibrated_ne"
    RECALIBRATED_CALIBRATION = "recalibrated_calibration"
    SEGMENTED_NE = "segmented_ne"
    CTR = "ctr"
    AUC = "auc"
    AUPRC = "auprc"
    RAUC = "rauc"
    CALIBRATION = "calibration"
    MSE = "mse"
    MAE = "mae"
    MULTICLASS_RECALL = "multiclass_recall"
    RECALL_SESSION_LEVEL = "recall_session_level"
    PRECISION_SESSION_LEVEL = "precision_session_level"
    WEIGHTED_AVG = "weighted_avg"
    ACCURACY = "accuracy"
    NDCG = "ndcg"
    XAUC = "xauc"
    PRECISION = "precision"
    RECALL = "recall"
    SERVING_NE = "serving_ne"
    SERVING_CALIBRATION = "serving_calibration"
    TENSOR_WEIGHTED_AVG = "tensor_weighted_avg"
    CALI_FREE_NE = "cali_free_ne"
    UNWEIGHTED_NE = "unweighted_ne"
    NMSE = "nmse"
    AVERAGE = "average"
    MULTI_LABEL_PRECISION = "multi_label_precision"
    NUM_POSITIVE_SAMPLES = "num_positive_samples"
    SUM_WEIGHTS = "sum_weights"
    NUM_MISSING_LABELS = "num_missing_labels"
    WEIGHTED_SUM_PREDICTIONS = "weighted_sum_predictions"
    TOWER_QPS = "tower_qps"
    SCALAR = "scalar"
    OUTPUT = "output"
    HINDSIGHT_TARGET_PR = "hindsight_target_pr"


class RecComputeMode(Enum):
    """Say whether tasks are computed together; the numbers are the same."""

    FUSED_TASKS_COMPUTATION = 1
    UNFUSED_TASKS_COMPUTATION = 2
    FUSED_TASKS_AND_STATES_COMPUTATION = 3


@dataclass(unsafe_hash=True)
class SessionMetricDef:
    """Say how answers within a session are judged: its `top_threshold` first predictions are positive.

    With `run_ranking_of_labels` its first labels are, too.
    """

    session_var_name: str
    top_threshold: int | None = None
    run_ranking_of_labels: bool = False


@dataclass(unsafe_hash=True)
class RecTaskInfo:
    """Name a task and its tensors in the output of a model. Without `weighted` all samples weigh 1."""

    name: str = "DefaultTask"
    label_name: str = "label"
    prediction_name: str = "prediction"
    weight_name: str = "weight"
    session_metric_def: SessionMetricDef | None = None
    is_negative_task: bool = False
    tensor_name: str | None = None
    weighted: bool = True


DefaultTaskInfo = RecTaskInfo()


@dataclass
class RecMetricDef:
    """Say for which tasks a metric is computed: listed, or by their places among those of the config.

    `window_size` is in samples of all ranks.
    """

    rec_tasks: list[RecTaskInfo] = field(default_factory=list)
    rec_task_indices: list[int] = field(default_factory=list)
    window_size: int = 10_000_000
    arguments: dict[str, Any] | None = None


class StateMetricEnum(StrValueMixin, Enum):
    """Name parts of a training that have numbers of their own."""

    OPTIMIZERS = "optimizers"
    MODEL_CONFIGURATOR = "model_configurator"


@dataclass
class BatchSizeStage:
    """Say how large batches are until step `max_iters`, counted from the start; None: to the end."""

    batch_size: int = 0
    max_iters: int | None = 0


def validate_batch_size_stages(batch_size_stages: list[BatchSizeStage] | None) -> None:
    """Raise ValueError if there are stages and the last one ends."""
    if batch_size_stages and batch_size_stages[-1].max_iters is not None:
        raise ValueError(
            f"metrics: the last of the batch_size_stages ends at step {batch_size_stages[-1].max_iters}. Its "
            "max_iters has to be None: it lasts to the end."
        )


@dataclass
class ThroughputDef:
    """Say over how many seconds throughput is measured, and after how many steps it begins."""

    window_size: int = 100
    warmup_steps: int = 100


@dataclass
class MetricsConfig:
    """Say what is computed. Fields about how it is computed change nothing but that."""

    rec_tasks: list[RecTaskInfo] = field(default_factory=list)
    rec_metrics: dict[RecMetricEnum, RecMetricDef] = field(default_factory=dict)
    throughput_metric: ThroughputDef | None = None
    rec_compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION
    fused_update_limit: int = 0
    state_metrics: list[Any] = field(default_factory=list)
    compute_interval_steps: int = 100
    min_compute_interval: float = 0.0
    max_compute_interval: float = float("inf")
    compute_on_all_ranks: bool = False
    should_validate_update: bool = False
    enable_pt2_compile: bool = False
    should_clone_update_inputs: bool = False
    use_cpu_offloaded_rec_metric_module: bool | None = None


DefaultMetricsConfig = MetricsConfig(
    rec_tasks=[DefaultTaskInfo],
    rec_metrics={RecMetricEnum.NE: RecMetricDef(rec_tasks=[DefaultTaskInfo], window_size=10_000_000)},
    throughput_metric=ThroughputDef(),
)
EmptyMetricsConfig = MetricsConfig()
