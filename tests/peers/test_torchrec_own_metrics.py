"""Metrics that users write for torchrec, with states of their own, by either import."""

from __future__ import annotations

import copy

import pytest
import torch
from two_sides import OURS, SIDES

from ranks import run_ranks  # isort: skip


def ratio(side):
    """Return a metric as its user writes it: the rate of right answers, the largest and all predictions."""
    names, base = side("metrics.metrics_namespace"), side("metrics.rec_metric")

    class Name(names.MetricNameBase):
        RATIO = "ratio"

    class Space(names.MetricNamespaceBase):
        RATIO = "ratio"

    class Computation(base.RecMetricComputation):
        def __init__(self, *args, **kwargs):
            self._limit = kwargs.pop("limit", 0.5)
            super().__init__(*args, **kwargs)
            for name in ("right", "whole"):
                self._add_state(
                    name,
                    torch.zeros(self._n_tasks, dtype=torch.double),
                    add_window_state=True,
                    dist_reduce_fx="sum",
                    persistent=True,
                )
            for name in ("max", "min", "mean"):
                start = torch.full((self._n_tasks,), 0.5)
                self._add_state(name, start, add_window_state=False, dist_reduce_fx=name, persistent=True)
            self._add_state("seen", [], add_window_state=False, dist_reduce_fx="cat", persistent=True)
            self._add_state("parts", [], add_window_state=False, dist_reduce_fx=None)
            self._add_state(
                "spread",
                torch.zeros(self._n_tasks),
                False,
                dist_reduce_fx=lambda states: states.amax(0) - states.amin(0),
            )
            self._add_state("each", torch.zeros(self._n_tasks), False)
            self.prepared = 0

        def pre_compute(self):
            self.prepared += 1

        def update(self, *, predictions, labels, weights, **kwargs):
            extra = kwargs["required_inputs"]["scale"] if "required_inputs" in kwargs else 1.0
            right = (((predictions > self._limit) == (labels > 0.5)) * weights * extra).sum(-1).double()
            for name, value in (("right", right), ("whole", weights.sum(-1).double())):
                state = getattr(self, name)
                state += value
                self._aggregate_window_state(name, value, predictions.shape[-1])
            self.max = torch.maximum(self.max, predictions.amax(-1))
            self.min = torch.minimum(self.min, predictions.amin(-1))
            self.mean = predictions.mean(-1)
            self.spread += predictions.sum(-1)
            self.each += predictions.sum(-1)
            self.seen.append(predictions)
            self.parts.append(predictions.sum(-1))

        def _compute(self):
            def report(value, prefix=names.MetricPrefix.DEFAULT, description=None):
                return base.MetricComputationReport(Name.RATIO, prefix, value, description)

            several = [self.seen] if isinstance(self.seen, torch.Tensor) else self.seen
            none = torch.zeros(())
            count = self._n_tasks
            window = self.get_window_state("right") / self.get_window_state("whole")
            found = [
                report(self.right / self.whole, names.MetricPrefix.LIFETIME),
                report(window, names.MetricPrefix.WINDOW),
                report(sum((t.sum() for t in several), none).repeat(count), description="_seen"),
                report(sum((t.sum() for t in self.parts), none).repeat(count), description="_parts"),
                report(self.each.reshape(-1, count).sum(0), description="_each"),
            ]
            return found + [
                report(getattr(self, name), description=f"_{name}")
                for name in ("max", "min", "mean", "spread")
            ]

    class Ratio(base.RecMetric):
        _namespace = Space.RATIO
        _computation_class = Computation

        def _get_task_kwargs(self, task_config):
            return {"limit": 0.4}

        def _get_task_required_inputs(self, task_config):
            return {"scale"}

    return Ratio


def make(side, world, rank, kind=None, window=24, size=4, **options):
    task = side("metrics.metrics_config").RecTaskInfo
    tasks = [task(f"T{number}", f"l{number}", f"p{number}", f"w{number}") for number in range(2)]
    modes, mode = side("metrics.metrics_config").RecComputeMode, options.pop("mode", "UNFUSED")
    return (kind or ratio(side))(
        world_size=world,
        my_rank=rank,
        batch_size=size,
        tasks=tasks,
        window_size=window,
        compute_mode=getattr(modes, f"{mode}_TASKS_COMPUTATION"),
        **options,
    )


def batch(seed, size=4, weightless=()):
    generator = torch.Generator().manual_seed(seed)

    def drawn():
        return {f"T{number}": torch.rand(size, generator=generator) for number in range(2)}

    labels = {name: value.round() for name, value in drawn().items()}
    weights = {name: value * (name not in weightless) for name, value in drawn().items()}
    return {"predictions": drawn(), "labels": labels, "weights": weights}


def numbers(found):
    return {key: value.double() for key, value in found.items()}


def compare(rank, world, mode, validates, on_all):
    found = []
    for side in SIDES:
        options = {"should_validate_update": validates, "compute_on_all_ranks": on_all}
        metric = make(side, world, rank, mode=mode, **options)
        for step in range(6):
            metric.update(**batch(10 * step + rank, weightless=("T1",)))
        assert metric.get_required_inputs() == {"scale"}
        alone = numbers(metric.local_compute())
        together = numbers(metric.compute())
        saved = metric.state_dict()
        lists = {name: torch.cat([torch.zeros(0, 4), *v]) for name, v in saved.items() if isinstance(v, list)}
        state = {name: lists[name] if name in lists else v.clone() for name, v in saved.items()}
        assert numbers(metric.local_compute()).keys() == alone.keys()  # this rank's states are there again
        computation = metric._metrics_computations[0]
        found.append((alone, together, numbers(state), computation.prepared))
        # Another takes the state, and goes on as this one does.
        other = make(side, world, rank, mode=mode, **options)
        other.load_state_dict(copy.deepcopy(metric.state_dict()))
        metric.update(**batch(99 + rank))
        other.update(**batch(99 + rank))
        own, loaded = numbers(metric.local_compute()), numbers(other.local_compute())
        saved = [key for key in own if key.endswith(("lifetime_ratio", "_seen", "_max", "_min"))]
        assert saved and {key: own[key] for key in saved} == {key: loaded[key] for key in saved}
        metric.reset()
        assert all(
            not torch.as_tensor(value).any() for value in metric.state_dict().values() if len(value) == 0
        )
        metric.update(**batch(7))
        found[-1] += (numbers(metric.local_compute()),)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("on_all", [False, True])
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize("mode", ["UNFUSED", "FUSED"])
def test_values_and_states(mode, validates, on_all):
    run_ranks(2, compare, 2, mode, validates, on_all, backend="gloo", limit=120)


def test_further_tensors_of_a_batch():
    found = []
    for side in SIDES:
        metric = make(side, 1, 0)
        inputs = {"scale": torch.tensor([0.5, 1.0, 2.0, 0.0]), "one": torch.tensor(3.0)}
        metric.update(**batch(3), required_inputs=inputs)
        metric.update(predictions={}, labels={}, weights={})  # nothing of these tasks
        found.append(numbers(metric.compute()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["ratio", "ne"])
def test_windows_hold_a_thousand_batches(name):
    """However few samples those are: of torchrec's metrics, of ours and of users'."""
    found = []
    for side in SIDES:
        kind = ratio(side) if name == "ratio" else side("metrics.ne").NEMetric
        metric = make(side, 1, 0, kind, window=100_000, size=1)
        for step in range(1100):
            metric.update(**batch(step % 1000, size=1))
        found.append({key: value for key, value in numbers(metric.compute()).items() if "window" in key})
    assert found[0]
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)


def refuse(rank):
    base = OURS("metrics.rec_metric")
    metric = make(OURS, 2, rank)
    metric.update(**batch(rank))
    metric.sync()
    with pytest.raises(base.RecMetricException, match=r"sync was called twice\. Call unsync"):
        metric.sync()
    with pytest.raises(base.RecMetricException, match="a batch came between sync and unsync"):
        metric.update(**batch(rank))
    metric.unsync()
    metric.unsync()
    with pytest.raises(base.RecMetricException, match="unsync was called without a sync"):
        metric._metrics_computations[0].unsync()


def test_a_synced_metric_takes_no_batch():
    run_ranks(2, refuse)


def test_states_that_cannot_be():
    computation = ratio(OURS)._computation_class(my_rank=0, batch_size=1, n_tasks=1, window_size=2)
    with pytest.raises(
        ValueError, match=r"there is no dist_reduce_fx 'median'\. Name one of sum, mean, max, min, cat"
    ):
        computation.add_state("x", torch.zeros(1), "median")
    with pytest.raises(ValueError, match="state 'x' begins with a list that is not empty"):
        computation.add_state("x", [torch.zeros(1)])
    with pytest.raises(RuntimeError, match="window_size is 0, so that there are no states of windows"):
        ratio(OURS)._computation_class(my_rank=0, batch_size=1, n_tasks=1, window_size=0)
    with pytest.raises(OURS("metrics.rec_metric").RecMetricException, match="task 'T0' has no labels"):
        make(OURS, 1, 0).update(predictions={"T0": torch.zeros(1)}, labels={}, weights=None)


def test_ranks_without_samples():
    """torchrec's ranks wait for each other, where one has a list without an element."""
    assert run_ranks(2, without_samples) == [{"T": 3.0}, {}]


def without_samples(rank):
    names, base = OURS("metrics.metrics_namespace"), OURS("metrics.rec_metric")

    class Count(base.RecMetricComputation):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._add_state("seen", [], False, dist_reduce_fx="cat")

        def update(self, *, predictions, labels, weights, **kwargs):
            self.seen.append(predictions.reshape(-1))

        def _compute(self):
            count = torch.tensor([float(len(self.seen))])
            return [base.MetricComputationReport(names.MetricName.DEFAULT, names.MetricPrefix.DEFAULT, count)]

    kind = type(
        "Counts", (base.RecMetric,), {"_computation_class": Count, "_namespace": names.MetricNamespace.NE}
    )
    metric = kind(2, rank, 3, [OURS("metrics.metrics_config").RecTaskInfo("T")])
    if rank == 0:
        metric.update(predictions={"T": torch.zeros(3)}, labels={"T": torch.zeros(3)}, weights=None)
    return {key[3:].rstrip("|"): value.item() for key, value in metric.compute().items()}
