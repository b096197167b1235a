"""Tables as a schema says, each for itself: their columns, their pooling, and whether they grow."""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import subprocess

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
SMALL = ["--dim", 8, "--bottom", "16,8", "--top", "16,1", "--batch", 64, "--epochs", 6]
SMALL += ["--optimizer", "adam", "--lr", 0.01, "--table-lr", 0.3]
NUM_SAMPLES = 12000
SCHEMA = """
[label]
column = "clicked"
[[dense]]
column = "price"
[[feature]]
column = "user"
{user}
[[feature]]
column = "item"
kind = "integer"
rows = 50
dim = 12
[[feature]]
column = "tags"
rows = 40
separator = "|"
pooling = "mean"
"""
FIXED = "rows = 300\ndim = 4"
GROWING = "growing = true\ndim = 4"


def run(*words, code=0):
    result = subprocess.run([TESSERA, *map(str, words)], capture_output=True, text=True, timeout=110)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout if code == 0 else result.stderr


def write(folder: pathlib.Path, user: str) -> None:
    """Users like items of their own kind, so that there is something to learn."""
    draw = random.Random(3)
    (folder / "log.toml").write_text(SCHEMA.format(user=user))
    with (folder / "log.csv").open("w") as file:
        file.write("clicked,price,user,item,tags\n")
        for _ in range(NUM_SAMPLES):
            user_number, item = draw.randrange(200), draw.randrange(50)
            clicked = int(draw.random() < (0.8 if user_number % 5 == item % 5 else 0.1))
            tags = "|".join(draw.choice(["new", "sale", "red", "used"]) for _ in range(draw.randrange(4)))
            file.write(f"{clicked},{draw.random():.3f},u-{user_number},{item},{tags}\n")
    run("data", "convert", "--schema", folder / "log.toml", folder / "log.csv", "--out", folder / "log.click")


@pytest.fixture(scope="module")
def fixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fixed")
    write(folder, FIXED)
    run("train", "dlrm", "--data", folder / "log.click", *SMALL, "--ranks", 2, "--save", folder / "run")
    return folder


@pytest.fixture(scope="module")
def growing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("growing")
    write(folder, GROWING)
    run("train", "dlrm", "--data", folder / "log.click", *SMALL, "--ranks", 2, "--save", folder / "run")
    return folder


def judged(folder) -> dict:
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "eval"][-1]


def test_a_log_says_what_each_table_is(growing):
    told = json.loads(run("data", "show", growing / "log.click", "--json"))
    assert told["version"] == 3
    user, item, tags = told["features"]
    assert user == {"name": "user", "rows": 0, "bag_size": 1, "pooling": "sum", "dim": 4, "growing": True}
    assert item["rows"] == 50 and item["dim"] == 12
    assert tags["pooling"] == "mean" and "dim" not in tags
    text = run("data", "show", growing / "log.click")
    assert "growing, 1 ids per sample, 4 columns" in text and "50 rows, 1 ids per sample, 12 columns" in text
    run("data", "check", growing / "log.click")


def test_tables_of_several_widths_learn(fixed):
    tables = {
        line["name"]: line
        for line in map(json.loads, (fixed / "run/metrics.jsonl").read_text().splitlines())
        if line["kind"] == "table"
    }
    assert {name: table["columns"] for name, table in tables.items()} == {"user": 4, "item": 12, "tags": 8}
    # Far more than chance, 1,200 samples judged: the layers between narrow and wide tables are trained too.
    assert judged(fixed)["auc"] > 0.6
    names = run("ckpt", "show", fixed / "run")
    assert "model.projection_0.weight" in names and "model.projection_1.weight" in names
    assert "model.projection_2.weight" not in names


@pytest.mark.parametrize("has_stats", [False, True])
def test_traffic_of_bags_that_vary_is_by_their_mean_length(fixed, tmp_path, has_stats):
    """As statistics have it, here those of another log; without, as the first samples do: 0 to 3 tags."""
    words = [
        "--data",
        fixed / "log.click",
        *SMALL[:8],
        "--steps",
        2,
        "--ranks",
        2,
        "--save",
        tmp_path / "run",
    ]
    mean = 1.5
    if has_stats:
        told = json.loads(run("data", "stats", fixed / "log.click", "--json"))
        lengths = told["features"][2]["ids_per_sample"]
        assert lengths["mean"] == pytest.approx(mean, rel=0.05)
        lengths["mean"] = mean = 5.0
        (tmp_path / "stats.json").write_text(json.dumps(told))
        words += ["--stats", tmp_path / "stats.json"]
    run("train", "dlrm", *words)
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    traffic = {
        line["name"]: sum(shard["traffic"] for shard in line["shards"])
        for line in lines
        if line["kind"] == "table"
    }
    # Two ranks, 64 samples each, rows of 4, 12 and 8 numbers of 4 bytes.
    assert traffic["user"] == 128 * 4 * 4 and traffic["item"] == 128 * 12 * 4
    assert traffic["tags"] / (128 * 8 * 4) == pytest.approx(mean, rel=1e-9 if has_stats else 0.05)


def test_predictions_and_packages_are_the_trainers(fixed, tmp_path):
    """A package holds rows as wide as the model, and averages what the schema averages."""
    answer = json.loads(run("eval", fixed / "run", "--json"))
    words = ["--dtype", "fp32", "--eval", fixed / "log.click", "--eval-samples", NUM_SAMPLES, "--json"]
    exported = json.loads(run("export", fixed / "run", "--out", tmp_path / "package", *words))
    assert exported["judged"]["samples"] == answer["samples"]
    assert exported["judged"]["auc_after"] == pytest.approx(answer["auc"], abs=2e-6)
    assert exported["judged"]["log_loss_after"] == pytest.approx(answer["log_loss"], abs=1e-6)
    model = json.loads((tmp_path / "package/model.json").read_text())
    assert [feature["pooling"] for feature in model["features"]] == ["sum", "sum", "mean"]


def test_another_log_is_judged_whole_and_the_runs_own_where_it_was_not_trained(fixed, tmp_path):
    """A package is judged on the samples that `tessera eval` takes, whichever log is named."""

    def judged_on(log, *words):
        out = ["--out", tmp_path / "package", "--dtype", "fp32", "--eval", log, "--json", *words]
        return json.loads(run("export", fixed / "run", *out))["judged"]

    other = tmp_path / "other.click"
    shutil.copy(fixed / "log.click", other)  # the same samples, as far as anybody knows of others
    whole = json.loads(run("eval", fixed / "run", "--data", other, "--json"))
    judged = judged_on(other)
    assert judged["samples"] == whole["samples"] == NUM_SAMPLES
    assert judged["auc_after"] == pytest.approx(whole["auc"], abs=2e-6)
    assert judged["log_loss_after"] == pytest.approx(whole["log_loss"], abs=1e-6)
    assert judged_on(other, "--eval-samples", 5000)["samples"] == 5000
    own = json.loads(run("eval", fixed / "run", "--json"))
    (tmp_path / "link.click").symlink_to(fixed / "log.click")
    for name in (fixed / "log.click", tmp_path / "link.click"):
        judged = judged_on(name)
        assert judged["samples"] == own["samples"] == NUM_SAMPLES // 10
        assert judged["auc_after"] == pytest.approx(own["auc"], abs=2e-6)
    assert judged_on(fixed / "log.click", "--eval-samples", 100)["samples"] == 100


@pytest.mark.parametrize("way", ["file of several", "converted", "cannot be looked at"])
def test_the_runs_own_log_is_known_by_other_names(fixed, tmp_path, way, monkeypatch):
    """What was trained on is not judged on, however it was named then."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    table, schema = fixed / "log.csv", fixed / "log.toml"
    name = tmp_path / "own.csv"
    shutil.copy(table, name)
    told = ["--data", name, "--schema", schema]
    if way == "file of several":
        told[1] = f"{name},{table}"
    run("train", "dlrm", *told, *SMALL, "--steps", 2, "--epochs", 0, "--save", tmp_path / "run")
    (log,) = (tmp_path / "cache").rglob("*.click")
    if way == "cannot be looked at":
        name.unlink()
    out = ["--out", tmp_path / "package", "--dtype", "fp32", "--json", "--eval", log]
    judged = json.loads(run("export", tmp_path / "run", *out))["judged"]
    assert judged["samples"] == NUM_SAMPLES * (2 if way == "file of several" else 1) // 10


def test_a_log_that_was_trained_on_whole_is_judged_whole(fixed, tmp_path):
    """And of one whose end was kept, no more than was kept."""
    for words, samples in (
        (["--eval-data", fixed / "log.click"], NUM_SAMPLES),
        (["--eval-samples", 300], 300),
    ):
        folder = tmp_path / f"run-{samples}"
        run("train", "dlrm", "--data", fixed / "log.click", *SMALL, "--steps", 2, "--epochs", 0, *words,
            "--save", folder)  # fmt: skip
        told = run("export", folder, tmp_path / "package", "--eval", fixed / "log.click", "--json")
        assert json.loads(told)["judged"]["samples"] == samples


def test_the_plan_knows_the_widths(fixed):
    plan = json.loads(
        run("plan", "tables", "--data", fixed / "log.click", "--ranks", 2, "--dim", 8, "--json")
    )
    assert {table["name"]: table["dim"] for table in plan["tables"]} == {"user": 4, "item": 12, "tags": 8}


def test_one_table_grows_beside_fixed_ones(growing):
    lines = list(map(json.loads, (growing / "run/metrics.jsonl").read_text().splitlines()))
    (grown,) = [line for line in lines if line["kind"] == "growth"][-1:]
    ids = {table["name"]: table["ids"] for table in grown["tables"]}
    assert ids["user"] == 200 and ids["item"] == 50 and ids["tags"] <= 4
    assert judged(growing)["auc"] > 0.6
    answer = json.loads(run("eval", growing / "run", "--json"))
    assert answer["auc"] == pytest.approx(judged(growing)["auc"], abs=1e-6)


def test_a_table_is_predicted_on_by_the_schema_of_the_run(growing, tmp_path):
    for name in ("log.csv", "log.click"):
        run("predict", growing / "run", "--data", growing / name, "--out", tmp_path / f"{name}.scores.csv")
    one, other = (np.loadtxt(tmp_path / f"{name}.scores.csv", delimiter=",", skiprows=1) for name in
                  ("log.csv", "log.click"))  # fmt: skip
    assert len(one) == NUM_SAMPLES and np.array_equal(one, other)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--publish", "there"], "growing = true (feature 'user') does not go with --publish"),
        (["--sharding", "column_wise"], "does not go with --sharding column_wise"),
        (["--device", "cuda"], "does not go with --device cuda"),
    ],
)
def test_what_growing_tables_cannot_is_refused_before_anything_starts(growing, flags, says):
    assert says in run("train", "dlrm", "--data", growing / "log.click", *SMALL, *flags, code=78)


def test_widths_of_their_own_are_not_published(fixed, tmp_path):
    words = ["--data", fixed / "log.csv", "--schema", fixed / "log.toml", "--publish", tmp_path / "there"]
    text = run("train", "dlrm", *SMALL, *words, code=78)
    assert "--publish does not go with the 4 columns of feature 'user'" in text
