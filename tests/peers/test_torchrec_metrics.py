"""Metrics of clicks beside torchrec 1.8.0, on one rank and over two."""

from __future__ import annotations

import pytest
import torch
from two_sides import OURS, SIDES

from ranks import run_ranks  # isort: skip

KINDS = [("ne", "NEMetric"), ("auc", "AUCMetric"), ("calibration", "CalibrationMetric"), ("ctr", "CTRMetric"),
         ("mse", "MSEMetric")]  # fmt: skip


def batch(seed, count=4):
    generator = torch.Generator().manual_seed(seed)
    return {
        "predictions": {name: torch.rand(count, generator=generator) for name in "TU"},
        "labels": {name: torch.randint(0, 2, (count,), generator=generator).float() for name in "TU"},
        "weights": {name: torch.rand(count, generator=generator) for name in "TU"},
    }


def compare(rank, world):
    for module, name in KINDS:
        for window in (8 * world, 6 * world, 1000):
            found = []
            for side in SIDES:
                task = side("metrics.metrics_config").RecTaskInfo
                metric = getattr(side(f"metrics.{module}"), name)(
                    world_size=world,
                    my_rank=rank,
                    batch_size=4,
                    tasks=[task("T", "l", "p", "w"), task("U", "l", "p", "w")],
                    window_size=window,
                )
                for step in range(5):
                    metric.update(**batch(10 * step + rank))
                numbers = {key: value.double() for key, value in metric.compute().items()}
                found.append((numbers, sorted(metric.state_dict())))
            (ours, our_state), (theirs, their_state) = found
            assert list(ours) == list(theirs)
            assert bool(ours) == (rank == 0)
            assert our_state == their_state
            for key, value in ours.items():
                torch.testing.assert_close(
                    value, theirs[key], rtol=1e-5, atol=1e-6, msg=lambda t, k=key: f"{k}: {t}"
                )


def test_one_rank():
    compare(0, 1)


def test_two_ranks():
    run_ranks(2, compare, 2, backend="gloo")


def config(side, tasks):
    module = side("metrics.metrics_config")
    wishes = {
        getattr(module.RecMetricEnum, name): module.RecMetricDef(rec_tasks=tasks, window_size=8)
        for name in ("NE", "AUC", "CALIBRATION")
    }
    return module.MetricsConfig(
        rec_tasks=tasks,
        rec_metrics=wishes,
        throughput_metric=module.ThroughputDef(window_size=100, warmup_steps=2),
        compute_interval_steps=2,
    )


def test_a_module_of_all():
    found = []
    for side in SIDES:
        metrics = side("metrics.metric_module")
        task = side("metrics.metrics_config").RecTaskInfo("T", "label", "prediction", "weight")
        module = metrics.generate_metric_module(
            metrics.RecMetricModule,
            config(side, [task]),
            batch_size=4,
            world_size=1,
            my_rank=0,
            state_metrics_mapping={},
            device=torch.device("cpu"),
        )
        due = []
        for step in range(5):
            given = batch(step)
            module.update(
                {
                    "label": given["labels"]["T"],
                    "prediction": given["predictions"]["T"],
                    "weight": given["weights"]["T"],
                }
            )
            due.append(module.should_compute())
        numbers = dict(module.compute().items())
        found.append(
            (
                due,
                {k: v for k, v in numbers.items() if "_throughput" not in k},
                list(numbers),
                module.state_dict(),
            )
        )
    (due, ours, keys, state), (their_due, theirs, their_keys, their_state) = found
    assert due == their_due and keys == their_keys and sorted(state) == sorted(their_state)
    for key, value in ours.items():
        torch.testing.assert_close(value.double(), theirs[key].double(), rtol=1e-5, atol=1e-6)
    for key, value in state.items():
        if "time_lapse" not in key:
            torch.testing.assert_close(value, their_state[key])


def test_equal_scores_count_half():
    """torchrec's AUC goes by the order in which they come; ours is the mean over all orders."""
    auc = OURS("metrics.auc").compute_auc
    for marks in ([0.0, 1.0], [1.0, 0.0]):
        assert auc(1, [torch.tensor([[0.3, 0.3]])], [torch.tensor([marks])], [torch.ones(1, 2)]).item() == 0.5


def test_says_what_is_wrong():
    metrics = OURS("metrics.metric_module")
    task = OURS("metrics.metrics_config").RecTaskInfo("T")
    module = metrics.RecMetricModule(1, 1, [task])
    with pytest.raises(
        OURS("metrics.rec_metric").RecMetricException, match="'T' needs 'label', which is not in"
    ):
        module.update({})
    metric = OURS("metrics.ne").NEMetric(1, 0, 2, [task])
    with pytest.raises(OURS("metrics.rec_metric").RecMetricException, match="2 predictions and 1 labels"):
        metric.update(predictions=torch.ones(2), labels=torch.ones(1), weights=None)
