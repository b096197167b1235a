"""What the metrics of sessions share: the first predictions of a session count as positive answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from tessera.metrics._summed import SummedComputation
from tessera.metrics.metrics_config import RecTaskInfo, SessionMetricDef
from tessera.metrics.metrics_namespace import MetricNameBase
from tessera.metrics.rec_metric import RecMetric, RecMetricException

__all__ = ["SessionComputation", "SessionMetric", "ranking_within_session"]


def ranking_within_session(predictions: torch.Tensor, session: torch.Tensor) -> torch.Tensor:
    """Return how many of a sample's session score higher.

    >>> ranking_within_session(torch.tensor([0.9, 0.1, 0.5]), torch.tensor([7, 7, 8])).tolist()
    [0, 1, 0]
    """
    scores, sessions = predictions.reshape(-1), session.reshape(-1)
    higher = scores.unsqueeze(0) > scores.unsqueeze(1)
    return (higher & (sessions.unsqueeze(0) == sessions.unsqueeze(1))).sum(-1)


class SessionComputation(SummedComputation):
    """Add up right and wrong answers."""

    NAME: ClassVar[MetricNameBase]

    def __init__(self, *args: Any, session_metric_def: SessionMetricDef) -> None:
        super().__init__(*args)
        self._def = session_metric_def

    def _wrong(self, labels: torch.Tensor, says_so: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _sums(self, predictions, labels, weights) -> Mapping[str, torch.Tensor]:
        raise RecMetricException(f"metrics.{self.NAME}: samples come with {self._def.session_var_name!r}.")

    def _sums_with(self, predictions, labels, weights, inputs) -> Mapping[str, torch.Tensor]:
        session = inputs[self._def.session_var_name]
        says_so = (ranking_within_session(predictions, session) < self._def.top_threshold).double()
        if self._def.run_ranking_of_labels:
            labels = (ranking_within_session(labels, session) < self._def.top_threshold).double()
        right, wrong = weights * labels * says_so, weights * self._wrong(labels, says_so)
        return dict(zip(self.SUMS, (right.sum(-1), wrong.sum(-1)), strict=True))

    def _numbers(self, sums) -> dict[MetricNameBase, torch.Tensor]:
        right, wrong = sums.values()
        return {self.NAME: right / (right + wrong)}


class SessionMetric(RecMetric):
    """Compute a number of answers within sessions, as the tasks' `session_metric_def` says."""

    def _get_task_kwargs(self, task_config: RecTaskInfo) -> dict[str, Any]:
        found = task_config.session_metric_def
        if found is None or found.top_threshold is None:
            missing = "session_metric_def" if found is None else "top_threshold"
            raise RecMetricException(
                f"metrics.{self._namespace}: task {task_config.name!r} has no {missing}."
            )
        return {"session_metric_def": found}

    def get_required_inputs(self) -> set[str]:
        """Return the names of the sessions' tensors."""
        return {task.session_metric_def.session_var_name for task in self._tasks}
