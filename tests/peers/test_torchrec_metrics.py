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


# Module, class, options; the state that is ours alone or theirs alone is named where it differs.
FURTHER = [
    ("accuracy", "AccuracyMetric", {}),
    ("accuracy", "AccuracyMetric", {"threshold": 0.2}),
    ("precision", "PrecisionMetric", {}),
    ("recall", "RecallMetric", {"threshold": 0.7}),
    ("mae", "MAEMetric", {}),
    ("nmse", "NMSEMetric", {}),
    ("average", "AverageMetric", {}),
    ("weighted_avg", "WeightedAvgMetric", {}),
    ("sum_weights", "SumWeightsMetric", {}),
    ("num_positive_samples", "NumPositiveSamplesMetric", {}),
    ("num_missing_labels", "NumMissingLabelsMetric", {}),
    ("weighted_sum_predictions", "WeightedSumPredictionsMetric", {}),
    ("xauc", "XAUCMetric", {}),
    ("unweighted_ne", "UnweightedNEMetric", {}),
    ("ne", "NEMetric", {"include_logloss": True}),
    ("ne_positive", "NEPositiveMetric", {}),
    ("cali_free_ne", "CaliFreeNEMetric", {}),
    ("ne_with_recalibration", "RecalibratedNEMetric", {"recalibration_coefficient": 2.5}),
    ("calibration_with_recalibration", "RecalibratedCalibrationMetric", {"recalibration_coefficient": 0.3}),
    ("serving_ne", "ServingNEMetric", {}),
    ("serving_calibration", "ServingCalibrationMetric", {}),
    ("multi_label_precision", "MultiLabelPrecisionMetric", {"num_labels": 3}),
    ("multiclass_recall", "MulticlassRecallMetric", {"number_of_classes": 5}),
    ("segmented_ne", "SegmentedNEMetric", {"num_groups": 2}),
    ("segmented_ne", "SegmentedNEMetric", {"grouping_keys": ["grouping_keys", "session_id"], "num_groups": 3,
                                           "include_logloss": True}),
    ("ndcg", "NDCGMetric", {}),
    ("ndcg", "NDCGMetric", {"exponential_gain": True, "remove_single_length_sessions": True, "k": 2}),
    ("ndcg", "NDCGMetric", {"report_ndcg_as_decreasing_curve": False, "scale_by_weights_tensor": True}),
    ("tensor_weighted_avg", "TensorWeightedAvgMetric", {}),
    ("recall_session", "RecallSessionMetric", {}),
    ("precision_session", "PrecisionSessionMetric", {}),
    ("rauc", "RAUCMetric", {}),
    ("auprc", "AUPRCMetric", {}),
    ("scalar", "ScalarMetric", {}),
    ("output", "OutputMetric", {}),
    ("hindsight_target_pr", "HindsightTargetPRMetric", {"target_precision": 0.6}),
    ("hindsight_target_pr", "HindsightTargetPRMetric", {"target_precision": 1.0}),
    ("tower_qps", "TowerQPSMetric", {"warmup_steps": 2}),
]  # fmt: skip


def further_batch(seed, module, count=4):
    given = batch(seed, count)
    generator = torch.Generator().manual_seed(seed + 77)
    if module == "multiclass_recall":
        given["predictions"] = {name: torch.rand(count, 5, generator=generator) for name in "TU"}
        given["labels"] = {name: torch.randint(0, 5, (count,), generator=generator) for name in "TU"}
    if module == "multi_label_precision":
        for kind in ("predictions", "labels"):
            given[kind] = {name: torch.randint(0, 8, (count,), generator=generator) for name in "TU"}
    if module == "rauc":
        given["labels"] = {name: torch.rand(count, generator=generator) for name in "TU"}
    if module == "num_missing_labels":
        given["labels"]["T"][1] = torch.nan
    given["required_inputs"] = {
        "grouping_keys": torch.randint(0, 2, (count,), generator=generator),
        "session_id": torch.tensor([0, 1, 0, 2])[:count],
        "extra": torch.rand(count, generator=generator),
        "latest_imp": torch.rand(count, generator=generator),
        "total_latest_imp": torch.rand(count, generator=generator),
    }
    return given


def further_metric(side, module, name, options, rank, world, window):
    config = side("metrics.metrics_config")
    session = config.SessionMetricDef("session_id", top_threshold=1)
    tasks = [
        config.RecTaskInfo(
            task, "l", "p", "w", session_metric_def=session, tensor_name="extra", weighted=task == "T"
        )
        for task in "TU"
    ]
    if module == "tensor_weighted_avg":
        tasks = tasks[:1]
    return getattr(side(f"metrics.{module}"), name)(
        world_size=world, my_rank=rank, batch_size=4, tasks=tasks, window_size=window, **options
    )


def compare_further(rank, world):
    for module, name, options in FURTHER:
        found = []
        for side in SIDES:
            # A window that always holds all: torchrec's counts batches of some metrics as samples.
            metric = further_metric(side, module, name, options, rank, world, 1000)
            for step in range(5):
                metric.update(**further_batch(10 * step + rank, module))
            numbers = {key: value.double() for key, value in metric.compute().items()}
            found.append((numbers, sorted(metric.state_dict())))
        (ours, our_state), (theirs, their_state) = found
        # Ours is of the window alone: a mean over the calls of compute is no metric of samples.
        if module == "auprc":
            theirs = {key: value for key, value in theirs.items() if "lifetime" not in key}
        assert sorted(ours) == sorted(theirs), (module, options)
        if module == "hindsight_target_pr":  # theirs is memory that nobody has set, as long as the place
            for key in [key for key in theirs if key.endswith("_target_pr")]:
                assert len(theirs.pop(key)) == ours.pop(key)
        if module == "tower_qps":  # by the clock
            for key in [key for key in theirs if key.endswith("_qps")]:
                assert theirs.pop(key) > 0 and ours.pop(key) > 0
        assert bool(ours) == (rank == 0), module
        assert our_state == their_state, (module, options)
        for key, value in ours.items():
            torch.testing.assert_close(
                value.reshape(-1),
                theirs[key].reshape(-1),
                rtol=1e-5,
                atol=1e-6,
                equal_nan=True,
                msg=lambda t, k=key: f"{k}: {t}",
            )


def test_further_metrics_on_one_rank():
    compare_further(0, 1)


def test_further_metrics_on_two_ranks():
    # Ranks import both projects after they met; beside a build one may come seconds after the other.
    run_ranks(2, compare_further, 2, backend="gloo", env={"LIMIT": "60"}, limit=120)


def test_every_metric_of_the_config_is_made():
    """A config that names a metric by torchrec's enum finds ours."""
    made = OURS("metrics.metric_module").REC_METRICS_MAPPING
    theirs = SIDES[1]("metrics.metrics_config").RecMetricEnum
    missing = {one.name for one in theirs} - {one.name for one in made}
    assert missing == {
        "LOG_LOSS", "SERVING_AE_LOSS",  # torchrec has no metric for these either
    }  # fmt: skip


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
                [*due, sorted(key for key, _ in module.local_compute().items())],
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


@pytest.mark.parametrize("is_constant", [False, True])
def test_explained_variance(is_constant):
    found = []
    for side in SIDES:
        task = side("metrics.metrics_config").RecTaskInfo
        metric = side("metrics.mse").MSEMetric(
            1, 0, 4, [task("T", "l", "p", "w")], window_size=8, include_r_squared=True
        )
        for step in range(5):
            given = batch(step)
            if is_constant:
                given["labels"] = {name: torch.ones_like(value) for name, value in given["labels"].items()}
            metric.update(**given)
        found.append(({key: value.double() for key, value in metric.compute().items()}, state_of(metric)))
    assert len(found[0][0]) == 6 and len(found[0][1]) == 4
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-9)


def state_of(metric):
    return {name: value.clone() for name, value in metric.state_dict().items()}


def compare_synced(rank, world):
    for module, name in KINDS:
        found = []
        for side in SIDES:
            task = side("metrics.metrics_config").RecTaskInfo
            metric = getattr(side(f"metrics.{module}"), name)(
                world_size=world,
                my_rank=rank,
                batch_size=4,
                tasks=[task("T", "l", "p", "w")],
                window_size=1000,
            )
            for step in range(3 + rank):
                metric.update(**batch(10 * step + rank))
            before, alone = state_of(metric), metric.local_compute()
            whole = side("metrics.rec_metric").RecMetricList([metric])
            whole.sync()
            synced, together = state_of(metric), metric.local_compute()
            if side is OURS and rank == 0:  # torchrec's raises
                assert {key: v.tolist() for key, v in metric.compute().items()} == {
                    key.replace("local_", ""): v.tolist() for key, v in together.items()
                }
            whole.unsync()
            whole.unsync()  # a second time does nothing
            assert {name: value.tolist() for name, value in state_of(metric).items()} == {
                name: value.tolist() for name, value in before.items()
            }
            assert [value.tolist() for value in metric.local_compute().values()] == [
                value.tolist() for value in alone.values()
            ]
            found.append((synced, together))
        for own, other in zip(*found, strict=True):
            assert sorted(own) == sorted(other), (module, sorted(own), sorted(other))
            for key, value in own.items():
                torch.testing.assert_close(
                    value.double(),
                    other[key].double(),
                    rtol=1e-5,
                    atol=1e-6,
                    msg=lambda t, k=key: f"{k}: {t}",
                )


def test_states_of_all_ranks():
    run_ranks(2, compare_synced, 2, backend="gloo", env={"LIMIT": "60"}, limit=120)


def refuse_between(rank):
    wrong = OURS("metrics.rec_metric").RecMetricException
    for module, name in (("ne", "NEMetric"), ("auc", "AUCMetric"), ("tower_qps", "TowerQPSMetric")):
        metric = getattr(OURS(f"metrics.{module}"), name)(
            2, rank, 4, [OURS("metrics.metrics_config").RecTaskInfo("T", weighted=False)]
        )
        given = batch(rank)
        metric.update(**given)
        metric.sync()
        with pytest.raises(wrong, match=r"sync was called twice\. Call unsync"):
            metric.sync()
        with pytest.raises(wrong, match="a batch came between sync and unsync and would be lost"):
            metric.update(**given)
        metric.unsync()
        with pytest.raises(wrong, match="unsync was called without a sync"):
            metric._metrics_computations[0].unsync()
        metric.sync()
        metric.reset()  # forgets that, too
        metric.update(**given)
    module = OURS("metrics.metric_module").RecMetricModule(4, 2, rec_metrics=None)
    module.sync()
    module.unsync()


def test_a_synced_metric_takes_no_batch():
    run_ranks(2, refuse_between)


def test_batches_of_several_sizes():
    found = []
    for side in SIDES:
        stage = side("metrics.metrics_config").BatchSizeStage
        stages = [stage(4, 2), stage(8, 5), stage(16, None)]
        made = [
            side("metrics.throughput").ThroughputMetric(
                batch_size=2, world_size=3, window_seconds=10, warmup_steps=2, batch_size_stages=stages
            )
            for _ in range(2)
        ]
        for _ in range(7):
            made[0].update()
        state = {key: value.clone() for key, value in made[0].state_dict().items()}
        made[1].load_state_dict(made[0].state_dict())
        made[1].update()
        later = side("metrics.throughput").ThroughputMetric(
            batch_size=2, world_size=3, window_seconds=10, batch_size_stages=stages
        )
        later.set_num_batch(2)
        later.update()
        plain = side("metrics.throughput").ThroughputMetric(batch_size=2, world_size=3, window_seconds=10)
        plain.load_state_dict(made[0].state_dict())  # the number of steps is left out
        state.pop("time_lapse_after_warmup")
        counts = [
            {key: value.item() for key, value in metric.compute().items() if "_throughput" not in key}
            for metric in (*made, later, plain)
        ]
        found.append(({key: value.item() for key, value in state.items()}, counts))
        validate = side("metrics.metrics_config").validate_batch_size_stages
        validate(None), validate([]), validate(stages)
        with pytest.raises(ValueError):
            validate(stages[:2])
    assert found[0] == found[1]
    assert found[0][0]["total_examples"] == 3 * (2 * 4 + 3 * 8 + 2 * 16)


def test_numbers_of_the_trainings_parts():
    found = []
    for side in SIDES:
        metrics, configs = side("metrics.metric_module"), side("metrics.metrics_config")

        class Rates(metrics.StateMetric):
            def get_metrics(self):
                return {"lr": torch.tensor(0.5)}

        module = metrics.generate_metric_module(
            metrics.RecMetricModule,
            configs.MetricsConfig(state_metrics=[configs.StateMetricEnum.OPTIMIZERS]),
            batch_size=4,
            world_size=1,
            my_rank=0,
            state_metrics_mapping={configs.StateMetricEnum.OPTIMIZERS: Rates()},
            device=torch.device("cpu"),
        )
        nothing = side("metrics.noop_metric_module").NoOpMetricModule()
        nothing.update({})
        assert not nothing.should_compute() and dict(nothing.compute().items()) == {}
        names = side("metrics.metrics_namespace")
        found.append(
            (
                {key: value.item() for key, value in module.compute().items()},
                names.compose_customized_metric_key("a", "b", "c"),
                names.task_wildcard_metrics_pattern(
                    names.MetricNamespace.NE, names.MetricName.NE, names.MetricPrefix.WINDOW
                ),
                [(one.name, str(one)) for one in configs.StateMetricEnum],
                str(configs.RecMetricEnum.NE),
            )
        )
    assert found[0] == found[1]


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


def one(module, name, task=None, **options):
    tasks = [OURS("metrics.metrics_config").RecTaskInfo("T", **(task or {}))]
    return getattr(OURS(f"metrics.{module}"), name)(1, 0, 2, tasks, **options)


def test_further_metrics_say_what_is_wrong():
    wrong = OURS("metrics.rec_metric").RecMetricException
    two = {"predictions": torch.ones(2), "labels": torch.ones(2), "weights": None}
    with pytest.raises(wrong, match="'T' needs 'session_id' among required_inputs"):
        one("ndcg", "NDCGMetric").update(**two)
    with pytest.raises(wrong, match="'T' has no session_metric_def"):
        one("recall_session", "RecallSessionMetric")
    with pytest.raises(wrong, match="'T' has no tensor_name"):
        one("tensor_weighted_avg", "TensorWeightedAvgMetric")
    with pytest.raises(wrong, match="2 predictions for 2 labels and 3 classes"):
        one("multiclass_recall", "MulticlassRecallMetric", number_of_classes=3).update(**two)
    with pytest.raises(wrong, match="'grouping_keys' has group 5; there are 2"):
        metric = one("segmented_ne", "SegmentedNEMetric", num_groups=2)
        metric.update(**two, required_inputs={"grouping_keys": torch.tensor([0, 5])})
    with pytest.raises(wrong, match=r"'grouping_keys' is torch\.float32; integers"):
        metric.update(**two, required_inputs={"grouping_keys": torch.tensor([0.0, 1.0])})
    with pytest.raises(wrong, match="2 names for 3 labels"):
        one("multi_label_precision", "MultiLabelPrecisionMetric", num_labels=3, label_names=["a", "b"])


def test_groups_of_samples():
    """The mean over groups of the area of each."""
    for module, name, option in (
        ("auc", "AUCMetric", "grouped_auc"),
        ("auprc", "AUPRCMetric", "grouped_auprc"),
        ("rauc", "RAUCMetric", "grouped_rauc"),
    ):
        metric = one(module, name, window_size=100, **{option: True})
        given = {
            "predictions": torch.tensor([0.1, 0.9, 0.8, 0.3]),
            "labels": torch.tensor([0.0, 1.0, 0.0, 1.0]),
            "weights": None,
            "required_inputs": {"grouping_keys": torch.tensor([4, 4, 9, 9])},
        }
        metric.update(**given)
        numbers = metric.compute()
        # The first group is in the right order, the second in the wrong one.
        expected = {"auc": 0.5, "auprc": 0.75, "rauc": 0.5}[module]
        assert numbers[f"{module}-T|window_grouped_{module}"].item() == pytest.approx(expected)
