"""`tessera train --device`: refused with a reason without a GPU, the losses of the CPU with one."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
SMALL = {
    "dlrm": ["--tables", "4", "--rows", "200", "--batch", "128", "--eval-samples", "512"],
    "lm": ["--layers", "1", "--heads", "2", "--width", "16", "--length", "16", "--batch", "4"],
    "gnn": ["--atoms", "24", "--cutoff", "1.7", "--structures", "4", "--features", "8"],
}


def tessera(*words, **more):
    return subprocess.run([TESSERA, *words], capture_output=True, text=True, timeout=120, **more)


def num_gpus():
    report = json.loads(tessera("doctor", "--quick", "--json").stdout)
    return report["engines"]["cuda"]["devices"]


@pytest.fixture(scope="module")
def gpus():
    return num_gpus()


def train(workload, folder, *words):
    return tessera("train", workload, *SMALL[workload], "--steps", "4", "--runs", str(folder), *words)


@pytest.mark.parametrize("workload", SMALL)
def test_a_gpu_that_is_not_there_is_named(workload, gpus, tmp_path):
    result = train(workload, tmp_path, "--ranks", str(gpus + 1), "--device", "cuda")
    assert result.returncode == 78, result.stderr
    assert "train: --device cuda is not possible on rank 0: " in result.stderr
    reason = "ranks of this host see" if gpus else "is a build for CPUs|finds no GPU"
    assert re.search(reason, result.stderr)
    assert not list(tmp_path.iterdir())  # no run folder of a run that never was


def test_other_words_are_refused(tmp_path):
    result = train("lm", tmp_path, "--device", "tpu")
    assert result.returncode == 2
    assert "--device" in result.stderr


def test_the_device_is_a_setting_of_a_run(tmp_path):
    shown = tessera("train", "gnn", "--device", "cuda", "--print-config").stdout
    assert 'device="cuda"' in shown.replace(" ", "")
    config = tmp_path / "job.toml"
    config.write_text('device = "cpu"\nsteps = 2\n')
    result = train("lm", tmp_path, "--config", str(config))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("workload", SMALL)
def test_a_gpu_trains(workload, gpus, tmp_path):
    if not gpus:
        pytest.skip("there is no GPU here")
    losses = {}
    for device in ("cpu", "cuda"):
        result = train(workload, tmp_path, "--device", device, "--json")
        assert result.returncode == 0, result.stderr
        losses[device] = json.loads(result.stdout)["loss"]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3)


def test_the_timeline_has_a_lane_of_the_gpu(gpus, tmp_path):
    if not gpus:
        pytest.skip("there is no GPU here")
    result = train("dlrm", tmp_path, "--device", "cuda")
    assert result.returncode == 0, result.stderr
    trace = json.loads(next(tmp_path.rglob("trace.json")).read_text())
    lanes = {event["tid"] for event in trace["traceEvents"] if event["args"].get("name") == "GPU"}
    spans = [event for event in trace["traceEvents"] if event.get("tid") in lanes and event["ph"] == "X"]
    assert {"dense", "backward", "optimizer"} <= {event["cat"] for event in spans}
    host = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == 0]
    # The device does it after it was told to, and within the seconds of the run.
    assert min(event["ts"] for event in spans) >= min(event["ts"] for event in host) - 1e3
    assert max(event["ts"] + event["dur"] for event in spans) < 60e6
    assert "· GPU" in next(tmp_path.rglob("report.html")).read_text()


def test_the_progress_line_shows_the_gpu(gpus, tmp_path):
    if not gpus:
        pytest.skip("there is no GPU here")
    result = train("lm", tmp_path, "--device", "cuda")
    assert result.returncode == 0, result.stderr
    assert re.search(r"^device   cuda:0, .+", result.stdout, re.M)
    assert re.search(r"\| mem [\d.]+ MB of [\d.]+ GB \| gpu \d+ % \|", result.stdout)
    run = next(tmp_path.iterdir())
    end = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert end["kind"] == "end" and end["peak_device_bytes"][0] > 0


def test_ranks_share_a_gpu_if_told_to(gpus, tmp_path):
    if not gpus:
        pytest.skip("there is no GPU here")
    ranks = str(gpus + 1)
    result = train("gnn", tmp_path, "--ranks", ranks, "--device", "cuda", "--share-gpus")
    assert result.returncode == 0, result.stderr
    assert "ranks talk through host memory (shm), not over NCCL" in result.stdout


def test_a_run_goes_on_on_another_device(gpus, tmp_path):
    if not gpus:
        pytest.skip("there is no GPU here")
    run = tmp_path / "run"
    result = train("lm", tmp_path, "--device", "cuda", "--save", str(run))
    assert result.returncode == 0, result.stderr
    result = tessera("train", "lm", "--resume", str(run), "--device", "cpu", "--steps", "6")
    assert result.returncode == 0, result.stderr
    assert "goes on with --device cpu (was cuda)" in result.stderr
    assert "resumed  at step 4" in result.stdout


def test_a_gpu_without_memory_is_named_with_what_was_asked_for(gpus, tmp_path):
    if not gpus:
        pytest.skip("there is no GPU here")
    # Half a terabyte of hidden states.
    shape = ["--layers", "1", "--heads", "2", "--width", "1024", "--length", "16384", "--batch", "8192"]
    result = tessera("train", "lm", "--device", "cuda", "--steps", "2", "--runs", str(tmp_path), *shape)
    assert result.returncode == 78
    asked = r"rank 0 has no memory left on cuda:0 \(.*of which it holds .*Tried to allocate .*Use more ranks"
    assert re.search(asked, result.stderr, re.S), result.stderr[-2000:]
