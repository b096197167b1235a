"""TensorBoard's own reader finds the curves of a run, also of one that went on."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import pytest

event_file_loader = pytest.importorskip(
    "tensorboard.backend.event_processing.event_file_loader", reason="tensorboard is not installed"
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
SMALL = ["--batch", "4", "--length", "16", "--layers", "1", "--width", "16", "--heads", "2"]


def train(*words):
    result = subprocess.run(
        [TESSERA, "train", "lm", *map(str, words)], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    return result


def events(path):
    return list(event_file_loader.EventFileLoader(str(path)).Load())


def points(path, tag):
    found = []
    for event in events(path):
        for value in event.summary.value:
            if value.tag == tag:
                number = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
                found.append((event.step, number))
    return found


def test_tensorboard_reads_the_curves(tmp_path):
    folder = tmp_path / "run"
    train(*SMALL, "--steps", 6, "--eval-every", 3, "--save", folder)
    (path,) = folder.glob("events.out.tfevents.*")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]
    judged = [(line["step"], line["validation_loss"]) for line in lines if line["kind"] == "eval"]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6] and [step for step, _ in judged] == [3, 6]
    assert points(path, "train/loss") == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in losses]
    assert points(path, "eval/validation_loss") == [
        (step, pytest.approx(loss, rel=1e-6)) for step, loss in judged
    ]
    assert len(points(path, "train/tokens_per_second")) == 6
    assert events(path)[0].file_version == "brain.Event:2"
    train("--resume", folder, "--steps", 8)
    first, second = sorted(folder.glob("events.out.tfevents.*"))
    assert first == path and [step for step, _ in points(second, "train/loss")] == [7, 8]
    start = events(second)[1]
    assert start.session_log.status == 1 and start.step == 7


def test_a_run_does_without_if_it_is_told_to(tmp_path):
    train(*SMALL, "--steps", 1, "--save", tmp_path / "run", "--no-events")
    assert not list((tmp_path / "run").glob("events*"))
