"""All metrics of a training, made out of one record and fed with the output of the model."""

from __future__ import annotations

import abc
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tessera.metrics.accuracy import AccuracyMetric
from tessera.metrics.auc import AUCMetric
from tessera.metrics.auprc import AUPRCMetric
from tessera.metrics.average import AverageMetric
from tessera.metrics.cali_free_ne import CaliFreeNEMetric
from tessera.metrics.calibration import CalibrationMetric
from tessera.metrics.calibration_with_recalibration import RecalibratedCalibrationMetric
from tessera.metrics.ctr import CTRMetric
from tessera.metrics.deferrable_metrics import DeferrableMetrics
from tessera.metrics.hindsight_target_pr import HindsightTargetPRMetric
from tessera.metrics.mae import MAEMetric
from tessera.metrics.metrics_config import (
    BatchSizeStage,
    MetricsConfig,
    RecMetricEnum,
    RecTaskInfo,
    StateMetricEnum,
)
from tessera.metrics.metrics_namespace import MetricNamespace, compose_metric_namespace
from tessera.metrics.mse import MSEMetric
from tessera.metrics.multi_label_precision import MultiLabelPrecisionMetric
from tessera.metrics.multiclass_recall import MulticlassRecallMetric
from tessera.metrics.ndcg import NDCGMetric
from tessera.metrics.ne import NEMetric
from tessera.metrics.ne_positive import NEPositiveMetric
from tessera.metrics.ne_with_recalibration import RecalibratedNEMetric
from tessera.metrics.nmse import NMSEMetric
from tessera.metrics.num_missing_labels import NumMissingLabelsMetric
from tessera.metrics.num_positive_samples import NumPositiveSamplesMetric
from tessera.metrics.output import OutputMetric
from tessera.metrics.precision import PrecisionMetric
from tessera.metrics.precision_session import PrecisionSessionMetric
from tessera.metrics.rauc import RAUCMetric
from tessera.metrics.rec_metric import RecMetricException, RecMetricList
from tessera.metrics.recall import RecallMetric
from tessera.metrics.recall_session import RecallSessionMetric
from tessera.metrics.scalar import ScalarMetric
from tessera.metrics.segmented_ne import SegmentedNEMetric
from tessera.metrics.serving_calibration import ServingCalibrationMetric
from tessera.metrics.serving_ne import ServingNEMetric
from tessera.metrics.sum_weights import SumWeightsMetric
from tessera.metrics.tensor_weighted_avg import TensorWeightedAvgMetric
from tessera.metrics.throughput import ThroughputMetric
from tessera.metrics.tower_qps import TowerQPSMetric
from tessera.metrics.unweighted_ne import UnweightedNEMetric
from tessera.metrics.weighted_avg import WeightedAvgMetric
from tessera.metrics.weighted_sum_predictions import WeightedSumPredictionsMetric
from tessera.metrics.xauc import XAUCMetric

__all__ = [
    "REC_METRICS_MAPPING",
    "STATE_METRICS_NAMESPACE_MAPPING",
    "DeferrableMetrics",
    "RecMetricModule",
    "StateMetric",
    "generate_metric_module",
]

REC_METRICS_MAPPING = {
    RecMetricEnum.NE: NEMetric,
    RecMetricEnum.NE_POSITIVE: NEPositiveMetric,
    RecMetricEnum.RECALIBRATED_NE: RecalibratedNEMetric,
    RecMetricEnum.RECALIBRATED_CALIBRATION: RecalibratedCalibrationMetric,
    RecMetricEnum.SEGMENTED_NE: SegmentedNEMetric,
    RecMetricEnum.CTR: CTRMetric,
    RecMetricEnum.AUC: AUCMetric,
    RecMetricEnum.AUPRC: AUPRCMetric,
    RecMetricEnum.RAUC: RAUCMetric,
    RecMetricEnum.CALIBRATION: CalibrationMetric,
    RecMetricEnum.MSE: MSEMetric,
    RecMetricEnum.MAE: MAEMetric,
    RecMetricEnum.MULTICLASS_RECALL: MulticlassRecallMetric,
    RecMetricEnum.RECALL_SESSION_LEVEL: RecallSessionMetric,
    RecMetricEnum.PRECISION_SESSION_LEVEL: PrecisionSessionMetric,
    RecMetricEnum.WEIGHTED_AVG: WeightedAvgMetric,
    RecMetricEnum.ACCURACY: AccuracyMetric,
    RecMetricEnum.NDCG: NDCGMetric,
    RecMetricEnum.XAUC: XAUCMetric,
    RecMetricEnum.PRECISION: PrecisionMetric,
    RecMetricEnum.RECALL: RecallMetric,
    RecMetricEnum.SERVING_NE: ServingNEMetric,
    RecMetricEnum.SERVING_CALIBRATION: ServingCalibrationMetric,
    RecMetricEnum.TENSOR_WEIGHTED_AVG: TensorWeightedAvgMetric,
    RecMetricEnum.CALI_FREE_NE: CaliFreeNEMetric,
    RecMetricEnum.UNWEIGHTED_NE: UnweightedNEMetric,
    RecMetricEnum.NMSE: NMSEMetric,
    RecMetricEnum.AVERAGE: AverageMetric,
    RecMetricEnum.MULTI_LABEL_PRECISION: MultiLabelPrecisionMetric,
    RecMetricEnum.NUM_POSITIVE_SAMPLES: NumPositiveSamplesMetric,
    RecMetricEnum.SUM_WEIGHTS: SumWeightsMetric,
    RecMetricEnum.NUM_MISSING_LABELS: NumMissingLabelsMetric,
    RecMetricEnum.WEIGHTED_SUM_PREDICTIONS: WeightedSumPredictionsMetric,
    RecMetricEnum.TOWER_QPS: TowerQPSMetric,
    RecMetricEnum.SCALAR: ScalarMetric,
    RecMetricEnum.OUTPUT: OutputMetric,
    RecMetricEnum.HINDSIGHT_TARGET_PR: HindsightTargetPRMetric,
}


class StateMetric(abc.ABC):
    """Tell numbers of a part of the training: an optimizer, for example."""

    @abc.abstractmethod
    def get_metrics(self) -> dict[str, Any]:
        """Return the numbers by name."""


STATE_METRICS_NAMESPACE_MAPPING = {
    StateMetricEnum.OPTIMIZERS: MetricNamespace.OPTIMIZERS,
    StateMetricEnum.MODEL_CONFIGURATOR: MetricNamespace.MODEL_CONFIGURATOR,
}


def _state_key(part: Any) -> str:
    """Return the first half of the keys of a part's numbers."""
    namespace = STATE_METRICS_NAMESPACE_MAPPING.get(part)
    return str(part) if namespace is None else compose_metric_namespace(namespace, str(namespace))


class RecMetricModule(nn.Module):
    """Take the output of a model, find the tensors of its tasks by name, and compute all metrics of them."""

    def __init__(
        self,
        batch_size: int,
        world_size: int,
        rec_tasks: list[RecTaskInfo] | None = None,
        rec_metrics: RecMetricList | None = None,
        throughput_metric: ThroughputMetric | None = None,
        state_metrics: dict[str, Any] | None = None,
        compute_interval_steps: int = 100,
        min_compute_interval: float = 0.0,
        max_compute_interval: float = float("inf"),
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.world_size = world_size
        self.rec_tasks = rec_tasks or []
        self.rec_metrics = rec_metrics or RecMetricList([])
        self.throughput_metric = throughput_metric
        self.state_metrics = state_metrics or {}
        self.compute_interval_steps = compute_interval_steps
        self.min_compute_interval = min_compute_interval
        self.max_compute_interval = max_compute_interval
        self.trained_batches = 0
        self._last_compute = time.monotonic()

    def update(self, model_out: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Add a batch. Raise RecMetricException naming a tensor that is missing."""
        labels, predictions, weights = {}, {}, {}
        for task in self.rec_tasks:
            for name in (task.label_name, task.prediction_name):
                if name not in model_out:
                    raise RecMetricException(
                        f"metrics: task {task.name!r} needs {name!r}, which is not in the output."
                    )
            labels[task.name] = model_out[task.label_name]
            predictions[task.name] = model_out[task.prediction_name]
            if task.weighted and task.weight_name in model_out:
                weights[task.name] = model_out[task.weight_name]
        needed = {name: model_out[name] for name in self.get_required_inputs() if name in model_out}
        needed |= kwargs.pop("required_inputs", {})
        self.rec_metrics.update(
            predictions=predictions, labels=labels, weights=weights, required_inputs=needed, **kwargs
        )
        if self.throughput_metric is not None:
            self.throughput_metric.update()
        self.trained_batches += 1

    def should_compute(self) -> bool:
        """Tell whether `compute_interval_steps` batches have gone by."""
        return self.trained_batches % self.compute_interval_steps == 0

    def compute(self) -> DeferrableMetrics:
        """Return all numbers by key; those of samples on rank 0, or on all ranks if asked for. Collective."""
        found = DeferrableMetrics(self.rec_metrics.compute())
        if self.throughput_metric is not None:
            found.update(self.throughput_metric.compute())
        for name, metric in self.state_metrics.items():
            found.update({f"{name}|{key}": value for key, value in metric.get_metrics().items()})
        return found

    def local_compute(self) -> DeferrableMetrics:
        """Return the numbers of this rank's samples by key; those of samples alone."""
        return DeferrableMetrics(self.rec_metrics.local_compute())

    def sync(self) -> None:
        """Let the states of the metrics be those of all ranks' samples, until `unsync`. Collective."""
        self.rec_metrics.sync()

    def unsync(self) -> None:
        """Let the states of the metrics be those of this rank's samples again."""
        self.rec_metrics.unsync()

    def reset(self) -> None:
        """Forget all samples."""
        self.rec_metrics.reset()

    def get_required_inputs(self) -> list[str]:
        """Return the names of further tensors of the output that are needed."""
        return self.rec_metrics.get_required_inputs()


def generate_metric_module(
    metric_class: type[RecMetricModule],
    metrics_config: MetricsConfig,
    batch_size: int,
    world_size: int,
    my_rank: int,
    state_metrics_mapping: dict[Any, Any],
    device: torch.device,
    process_group: dist.ProcessGroup | None = None,
    batch_size_stages: list[BatchSizeStage] | None = None,
    module_kwargs: dict[str, Any] | None = None,
) -> RecMetricModule:
    """Return the metrics that a config speaks of. Raise ValueError for one that does not exist."""
    metrics = []
    for kind, wish in metrics_config.rec_metrics.items():
        found = [
            own for name, own in REC_METRICS_MAPPING.items() if name.value == getattr(kind, "value", kind)
        ]
        if not found:
            known = ", ".join(name.value for name in REC_METRICS_MAPPING)
            raise ValueError(f"metrics: {kind} is not one of {known}.")
        tasks = wish.rec_tasks or [metrics_config.rec_tasks[place] for place in wish.rec_task_indices]
        metrics.append(
            found[0](
                world_size=world_size,
                my_rank=my_rank,
                batch_size=batch_size,
                tasks=tasks,
                window_size=wish.window_size,
                compute_on_all_ranks=metrics_config.compute_on_all_ranks,
                process_group=process_group,
                **(wish.arguments or {}),
            )
        )
    throughput = metrics_config.throughput_metric
    made = metric_class(
        batch_size=batch_size,
        world_size=world_size,
        rec_tasks=metrics_config.rec_tasks,
        rec_metrics=RecMetricList(metrics),
        throughput_metric=None
        if throughput is None
        else ThroughputMetric(
            batch_size=batch_size,
            world_size=world_size,
            window_seconds=throughput.window_size,
            warmup_steps=throughput.warmup_steps,
            batch_size_stages=batch_size_stages,
        ),
        state_metrics={
            _state_key(name): state_metrics_mapping[name] for name in metrics_config.state_metrics
        },
        compute_interval_steps=metrics_config.compute_interval_steps,
        min_compute_interval=metrics_config.min_compute_interval,
        max_compute_interval=metrics_config.max_compute_interval,
        **(module_kwargs or {}),
    )
    return made.to(device)
