"""Every workload stops, goes on and reports in the same way: bits, folders, refusals."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
LIMIT = 180.0  # seconds; for a loaded machine, not a figure

SMALL = {
    "dlrm": [
        "--tables",
        "3",
        "--rows",
        "100",
        "--dim",
        "8",
        "--bottom",
        "16,8",
        "--top",
        "16,1",
        "--batch",
        "16",
        "--eval-samples",
        "200",
        "--optimizer",
        "adam",
        "--table-optimizer",
        "partial_rowwise_adam",
    ],
    "lm": ["--batch", "4", "--length", "16", "--layers", "1", "--width", "32"],
    "gnn": ["--atoms", "27", "--structures", "4", "--features", "8", "--cutoff", "1.7"],
}
# Two ranks with different work, and two that share the samples.
MESH = {
    "dlrm": ["-n", "2"],
    "lm": ["-n", "4", "--vocab-ranks", "2"],
    "gnn": ["-n", "4", "--graph-parallel", "2"],
}
# As long as it takes to stop one in between.
STEPS = {"dlrm": 400, "lm": 200, "gnn": 60}
WORKLOADS = list(SMALL)


def command(workload, *flags):
    return [TESSERA, "train", workload, *map(str, flags)]


def call(workload, *flags, code=0):
    result = subprocess.run(command(workload, *flags), capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def answer(workload, *flags):
    result = json.loads(call(workload, "--json", *flags).stdout)
    return result, pathlib.Path(result["report"]).parent


def metrics(folder, kind):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(folder):
    return [(line["step"], line["loss"]) for line in metrics(folder, "step")]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_run_that_was_told_to_stop_ends_with_the_same_bits(tmp_path, workload):
    steps = STEPS[workload]
    flags = [*SMALL[workload], *MESH[workload], "--steps", str(steps), "--warmup", "20", "--decay", "cosine"]
    flags += ["--eval-every", str(steps // 4)] if workload != "lm" else []
    whole, undisturbed = answer(workload, *flags, "--save", tmp_path / "whole")
    cut = tmp_path / "cut"
    process = subprocess.Popen(
        command(workload, *flags, "--save", cut), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    end = time.monotonic() + LIMIT
    file = cut / "metrics.jsonl"
    while not file.exists() or '"step":10,' not in file.read_text():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    stopped = re.search(
        rf"stopped  at step (\d+); go on with tessera train {workload} --resume (\S+)\n", output
    )
    assert stopped and stopped[2] == str(cut) and 10 <= int(stopped[1]) < steps
    resumed, folder = answer(workload, "--resume", cut)
    assert folder == cut and resumed["first_step"] == int(stopped[1])
    kept = ["fingerprint", "loss", "auc", "log_loss", "energy_error", "force_error"]
    assert {key: resumed.get(key) for key in kept} == {key: whole.get(key) for key in kept}
    assert losses(cut) == losses(undisturbed) and len(losses(cut)) == steps
    for name in ("config.toml", "metrics.jsonl", "trace.json", "report.html"):
        assert (cut / name).stat().st_size > 0
    assert len(metrics(cut, "breakdown")) == len(metrics(undisturbed, "breakdown")) == whole["ranks"]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_what_a_run_goes_on_with_is_written_down(tmp_path, workload):
    run = tmp_path / "run"
    call(workload, *SMALL[workload], "--steps", "2", "--save", run)
    assert "steps=2\n" in (run / "config.toml").read_text()
    noted = call(workload, "--resume", run, "--steps", "4", "--lr", "0.0125").stderr
    assert noted.startswith(f"note: train: {run} goes on with --lr 0.0125 (was ")
    text = (run / "config.toml").read_text()
    assert "steps=4\n" in text and "lr=0.0125\n" in text
    # The next one has them already.
    again = call(workload, "--resume", run, "--json")
    assert again.stderr == "" and json.loads(again.stdout)["first_step"] == 4


@pytest.mark.parametrize(
    ("workload", "flag", "value", "before"),
    [("dlrm", "--dim", "16", "8"), ("lm", "--width", "64", "32"), ("gnn", "--features", "16", "8")],
)
def test_a_run_does_not_go_on_as_another(tmp_path, workload, flag, value, before):
    run = tmp_path / "run"
    call(workload, *SMALL[workload], "--steps", "1", "--save", run)
    more = ["--bottom", "16,16"] if workload == "dlrm" else []
    told = call(workload, "--resume", run, flag, value, *more, code=78).stderr
    assert (
        told.startswith(f"error: train: {run} has {flag} {before}")
        and f"this call has {flag} {value}" in told
    )
    assert "steps=1\n" in (run / "config.toml").read_text()


def test_structures_per_step_stay(tmp_path):
    run = tmp_path / "run"
    call("gnn", *SMALL["gnn"], "--steps", "1", "-n", "2", "--graph-parallel", "1", "--save", run)
    told = call("gnn", "--resume", run, "-n", "1", code=78).stderr
    assert "has 2 samples over all ranks, one of this call 1" in told and "  try: --batch 2\n" in told
    assert (
        json.loads(call("gnn", "--resume", run, "-n", "1", "--batch", "2", "--json").stdout)["first_step"]
        == 1
    )
