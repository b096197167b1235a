"""`tessera train lm`: the same losses for every number of ranks, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
LIMIT = 120.0  # seconds; for a loaded machine, not a figure
SMALL = ["--steps", "12", "--batch", "4", "--length", "32", "--layers", "2", "--width", "32"]


def train(*flags):
    return subprocess.run([TESSERA, "train", "lm", *flags], capture_output=True, text=True, timeout=LIMIT)


def loss_of(*flags):
    result = train(*SMALL, "--json", *flags)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(result.stdout)["loss"]


@pytest.fixture(scope="module")
def loss_of_one_rank():
    return loss_of()


@pytest.mark.parametrize(
    "flags",
    [
        ["--ranks", "2"],
        ["--ranks", "3"],
        ["--ranks", "4"],
        ["--ranks", "2", "--data-ranks", "2"],
        ["--ranks", "4", "--vocab-ranks", "2"],
    ],
    ids=lambda flags: "_".join(flags).replace("--", ""),
)
def test_loss_is_the_same_for_every_mesh(loss_of_one_rank, flags):
    assert loss_of(*flags) == pytest.approx(loss_of_one_rank, rel=1e-4)


def test_training_learns_and_shows_progress():
    result = train(*SMALL, "--steps", "40", "--lr", "0.01")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("step ")]
    assert lines[-1].startswith("step 40/40 | loss ")
    assert "tokens/s | " in lines[-1]
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    assert losses[-1] < losses[0] - 1


def test_a_file_is_read(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("ab" * 400)
    result = train(*SMALL, "--steps", "60", "--lr", "0.01", "--json", "--file", str(text))
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout)["loss"] < 0.5


def test_mistakes_are_named(tmp_path):
    result = train("--ranks", "4", "--data-ranks", "3")
    assert result.returncode == 78
    assert "4 ranks cannot form a mesh of 3 data and 0 vocabulary ranks" in result.stderr
    result = train("--file", str(tmp_path / "none.txt"), "--steps", "1")
    assert result.returncode == 1
    assert f"lm: the file '{tmp_path}/none.txt' cannot be read." in result.stderr
    result = train("--file", str(tmp_path), "--steps", "1")
    assert f"lm: the file '{tmp_path}' cannot be read." in result.stderr
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    result = train("--file", str(empty), "--steps", "1", "--length", "8")
    assert "lm: a text of 0 bytes holds no sequence of 9." in result.stderr
    for flag, word in (("--lr", "nan"), ("--lr", "inf"), ("--seed", "-1")):
        result = train(flag, word)
        assert result.returncode == 2
        assert result.stderr == f"error: train: {flag}: '{word}' is not a number from 0 on\n"
    result = train("--width", "30", "--steps", "1")
    assert "lm: a width of 30 cannot be divided into 4 heads." in result.stderr
    result = subprocess.run([TESSERA, "train", "ml"], capture_output=True, text=True, timeout=LIMIT)
    assert result.returncode == 2
    assert "train: there is no workload 'ml'" in result.stderr
    assert "did you mean lm?" in result.stderr


def test_help_fits_a_screen():
    result = train("--help")
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) <= 40
