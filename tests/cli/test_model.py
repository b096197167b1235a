"""What a finished run leaves: its final checkpoint, its best by evaluation, and what is made of them."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess

import pytest
from report_data import data_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
LIMIT = 180.0  # seconds; for a loaded machine, not a figure
SMALL = ["--tables", "3", "--rows", "50", "--dim", "8", "--bottom", "16,8", "--top", "16,1", "--batch", "32"]
SMALL += ["--eval-samples", "200"]


def tessera(*words, code=0):
    result = subprocess.run([TESSERA, *map(str, words)], capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def steps_in(folder):
    return sorted(int(path.name[5:]) for path in pathlib.Path(folder).glob("step-*"))


def evaluations(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["log_loss"] for line in lines if line["kind"] == "eval"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_finished_run_keeps_its_final_and_its_best_checkpoint(tmp_path, ranks):
    # Rates so large that the first evaluations are not the worst.
    run = tmp_path / "run"
    flags = ["--ranks", ranks, "--steps", 30, "--eval-every", 5, "--lr", "0.3", "--table-lr", "2", *SMALL]
    result = json.loads(tessera("train", "dlrm", *flags, "--json", "--runs", tmp_path).stdout)
    run = pathlib.Path(result["report"]).parent
    judged = evaluations(run)
    best = min(judged, key=judged.get)
    assert max(steps_in(run / "checkpoints")) == 30
    assert steps_in(run / "best") == [best] == [result["best_step"]]
    tessera("ckpt", "verify", run / "best")
    tessera("ckpt", "verify", run / "checkpoints")


def test_no_model_is_kept_if_none_is_wanted(tmp_path):
    flags = ["--steps", 4, "--eval-every", 2, "--keep-model", "none", *SMALL]
    result = json.loads(tessera("train", "dlrm", *flags, "--json", "--runs", tmp_path).stdout)
    run = pathlib.Path(result["report"]).parent
    assert steps_in(run / "checkpoints") == [] and not (run / "best").exists()
    flags[flags.index("none")] = "last"
    result = json.loads(tessera("train", "dlrm", *flags, "--json", "--runs", tmp_path).stdout)
    run = pathlib.Path(result["report"]).parent
    assert steps_in(run / "checkpoints") == [4] and not (run / "best").exists()


def test_patience_ends_a_run_that_gets_no_better(tmp_path):
    run = tmp_path / "run"
    flags = ["--steps", 400, "--eval-every", 2, "--patience", 3, "--lr", "1", "--table-lr", "5", *SMALL]
    text = tessera("train", "dlrm", *flags, "--save", run).stdout
    judged = evaluations(run)
    best = min(judged, key=judged.get)
    last = max(judged)
    assert last == best + 6 < 400
    assert f"after 3 evaluations that were not better than that of step {best}\n" in text
    assert f"model    {run}/checkpoints/step-{last:012}, the best of step {best} in {run}/best\n" in text
    assert steps_in(run / "best") == [best] and max(steps_in(run / "checkpoints")) == last
    told = data_of((run / "report.html").read_text())
    assert told["status"] == "stopped early" and told["best_step"] == best
    assert told["steps"] == last and f"tessera train dlrm --resume {run}" in told["resume"]


def test_resuming_a_finished_run_says_so_and_goes_on_if_asked_to(tmp_path):
    run = tmp_path / "run"
    tessera("train", "dlrm", "--steps", 6, "--eval-every", 3, *SMALL, "--save", run)
    before = (run / "metrics.jsonl").read_bytes()
    text = tessera("train", "dlrm", "--resume", run).stdout
    assert f"finished {run} has done its 6 steps already; tessera train dlrm --resume {run} --steps N" in text
    assert (run / "metrics.jsonl").read_bytes() == before
    tessera("train", "dlrm", "--resume", run, "--steps", 9)
    whole = tmp_path / "whole"
    tessera("train", "dlrm", "--steps", 9, "--eval-every", 3, *SMALL, "--save", whole)
    assert evaluations(run) == evaluations(whole)
    assert steps_in(run / "best") == steps_in(whole / "best")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a log, and another log of the same tables."""
    folder = tmp_path_factory.mktemp("trained")
    for name, seed in (("a", 1), ("b", 2)):
        flags = ["--features", 3, "--rows", 50, "--bag", 0, "--seed", seed, "--samples", 1003]
        tessera("data", "synth", folder / f"{name}.click", *flags)
    flags = ["--data", folder / "a.click", "--ranks", 2, "--steps", 30, "--eval-every", 10, *SMALL[4:]]
    tessera("train", "dlrm", *flags, "--save", folder / "run")
    return folder


def test_eval_finds_what_the_run_found(trained):
    run = trained / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    judged = {line["step"]: line for line in lines if line["kind"] == "eval"}
    best = min(judged, key=lambda step: judged[step]["log_loss"])
    for flags, step in (([], 30), (["--best"], best)):
        found = json.loads(tessera("eval", run, "--json", "-n", 2, *flags).stdout)
        assert found["step"] == step
        for name in ("log_loss", "auc", "calibration", "samples"):
            assert found[name] == judged[step][name]
    # Other ranks and batches differ by rounding alone.
    other = json.loads(tessera("eval", run, "--json", "--batch", 7).stdout)
    assert other["log_loss"] == pytest.approx(judged[30]["log_loss"], rel=1e-6)
    assert "judged   log loss" in tessera("eval", run).stdout


@pytest.mark.parametrize("ranks", [1, 3])
def test_predictions_are_in_the_order_of_the_log(trained, tmp_path, ranks):
    run, log = trained / "run", trained / "b.click"
    out = tmp_path / "scores.csv"
    told = json.loads(tessera("predict", run, "--data", log, "--out", out, "-n", ranks, "--json").stdout)
    lines = out.read_text().splitlines()
    assert lines[0] == "sample,probability" and len(lines) == 1004 == told["samples"] + 1
    assert [int(line.split(",")[0]) for line in lines[1:]] == list(range(1003))
    found = [float(line.split(",")[1]) for line in lines[1:]]
    # One sample at a time by one rank: what belongs to which sample is beyond doubt.
    tessera("predict", run, "--data", log, "--out", tmp_path / "one.csv", "--batch", 1)
    one = [float(line.split(",")[1]) for line in (tmp_path / "one.csv").read_text().splitlines()[1:]]
    assert found == pytest.approx(one, rel=1e-5)
    assert len(set(one)) > 900


def test_runs_and_logs_that_do_not_fit_are_refused(trained, tmp_path):
    out = tmp_path / "scores.csv"
    other = tmp_path / "other.click"
    tessera("data", "synth", other, "--features", 3, "--rows", 51, "--samples", 100)
    failed = tessera("predict", trained / "run", "--data", other, "--out", out, code=65)
    assert "51" in failed.stderr and not out.exists()
    failed = tessera("eval", tmp_path, code=65)
    assert f"eval: there is no run in {tmp_path}" in failed.stderr
    failed = tessera("eval", trained / "run", "--data", tmp_path / "none.click", code=65)
    assert "there is no file" in failed.stderr
    failed = tessera("eval", trained / "run", "--step", 7, code=65)
    tessera("eval", trained / "run", "--step", 7, "--best", code=2)
    tessera("predict", trained / "run", code=2)


def test_what_is_scored_is_not_written(trained, tmp_path):
    """A log, several tables, and what the run is made of; before anything is scored."""
    log = shutil.copy(trained / "b.click", tmp_path / "b.click")
    run = shutil.copytree(trained / "run", tmp_path / "run")
    (tmp_path / "link").symlink_to("b.click")
    (tmp_path / "twin.parquet").hardlink_to(log)
    (tmp_path / "part-1.csv").write_text("1,2\n")
    (tmp_path / "part-2.csv").write_text("3,4\n")
    some = tmp_path / "part-*.csv"
    listed = f"{tmp_path}/part-1.csv,{tmp_path}/part-2.csv"
    tries = [(log, name) for name in ("b.click", "link", "twin.parquet", "run/../b.click")]
    tries += [(some, "part-2.csv"), (listed, "part-1.csv")]
    (tensors,) = (run / "checkpoints/step-000000000030").glob("shard-00001*")
    tries += [(log, f"run/{name}") for name in ("config.toml", "metrics.jsonl", tensors.relative_to(run))]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for names, out in tries:
        words = ["predict", run, "--data", names, "--out", tmp_path / out]
        failed = subprocess.run(
            [TESSERA, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env={**os.environ, "TESSERA_WORKER": "/nowhere"},
        )
        assert failed.returncode == 65, failed.stderr
        assert f"error: predict: {tmp_path}/{out}: is read and cannot be written too." in failed.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    # Beside them it may lie, and be made again.
    for _ in range(2):
        tessera("predict", run, "--data", log, "--out", run / "scores.csv")


def test_epochs_shuffling_and_another_log_to_judge_on(trained, tmp_path):
    flags = ["--data", trained / "a.click", "--eval-data", trained / "b.click", "--epochs", 2, *SMALL[4:]]
    flags += ["--json", "--runs", tmp_path]
    plain = json.loads(tessera("train", "dlrm", *flags).stdout)
    # Nothing is held back: 1003 samples are 31 steps of 32.
    assert (plain["steps"], plain["samples"]) == (62, 1003)
    shuffled = json.loads(tessera("train", "dlrm", *flags, "--shuffle").stdout)
    assert shuffled["steps"] == 62 and shuffled["fingerprint"] != plain["fingerprint"]
    again = json.loads(tessera("train", "dlrm", *flags, "--shuffle", "--checkpoint-every", 40).stdout)
    assert again["fingerprint"] == shuffled["fingerprint"]
    # The order is that of the step, also after an interruption.
    run = pathlib.Path(again["report"]).parent
    for path in (run / "checkpoints").glob("step-*62"):
        shutil.rmtree(path)
    resumed = json.loads(tessera("train", "dlrm", "--resume", run, "--json").stdout)
    assert resumed["first_step"] == 40 and resumed["fingerprint"] == shuffled["fingerprint"]
    said = tessera("train", "dlrm", "--resume", run).stdout
    assert f"--resume {run} --epochs N goes on up to the end of epoch N\n" in said
    assert (
        json.loads(tessera("train", "dlrm", "--resume", run, "--epochs", 3, "--json").stdout)["steps"] == 93
    )
    failed = tessera("train", "dlrm", "--epochs", 1, code=78)
    assert "--epochs and --shuffle are for a log with an end" in failed.stderr
