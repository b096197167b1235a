"""What a finished run leaves: its final checkpoint, its best by evaluation, and what is made of them."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import pytest

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
