"""`tessera train lm`: the same losses for every number of ranks, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
LIMIT = 120.0  # seconds; for a loaded machine, not a figure
RUNS = pathlib.Path(tempfile.mkdtemp(prefix="tessera-runs-"))
SMALL = ["--steps", "12", "--batch", "4", "--length", "32", "--layers", "2", "--width", "32"]


@pytest.fixture(autouse=True, scope="module")
def no_runs_are_left():
    yield
    shutil.rmtree(RUNS, ignore_errors=True)


def train(*flags):
    command = [TESSERA, "train", "lm", *flags, "--runs", str(RUNS)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)


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


def losses(result):
    lines = (pathlib.Path(result["report"]).parent / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if line["kind"] == "step"]


def test_epochs_go_through_the_text_in_order_or_another_each_time(tmp_path):
    """Two letters, one after the other: where the second begins is a step that has not seen it."""
    text = tmp_path / "text.txt"
    text.write_text("a" * 2500 + "b" * 2500)  # of which the last 500 are kept to judge on
    words = ["--batch", "4", "--length", "24", "--layers", "1", "--width", "32", "--lr", "0.01", "--json"]

    def told(*flags):
        result = train(*words, "--file", str(text), *flags)
        assert result.returncode == 0, result.stdout + result.stderr
        return json.loads(result.stdout)

    # 4499 tokens with one behind them are 187 pieces of 24; 46 steps of 4, and one that begins anew.
    one = told("--epochs", "1")
    curve = losses(one)
    assert one["steps"] == len(curve) == 47
    # Piece 104 is the first with a b, in step 27.
    assert curve[25] < 0.3 and curve[26] > 2 and curve[45] < 1 and max(curve[2:26]) < max(curve[:2])
    run = tmp_path / "run"
    two = ["--epochs", "2", "--shuffle"]
    mixed = told(*two, "--checkpoint-every", "60", "--save", str(run))
    assert mixed["steps"] == 94 and max(losses(mixed)[30:]) < 1  # both letters from the beginning
    # The same on every mesh, and after an interruption in the middle of the second epoch.
    meshed = told(*two, "--ranks", "2", "--data-ranks", "2")
    assert losses(meshed) == pytest.approx(losses(mixed), rel=1e-3, abs=1e-4)
    for path in (run / "checkpoints").glob("step-*94"):
        shutil.rmtree(path)
    went_on = json.loads(resumed(run, "--json").stdout)
    assert went_on["first_step"] == 60 and went_on["fingerprint"] == mixed["fingerprint"]
    said = resumed(run).stdout
    assert f"has done its 94 steps already; tessera train lm --resume {run} --epochs N goes on" in said


def test_epochs_that_cannot_be(tmp_path):
    result = train(*SMALL, "--shuffle")
    assert result.returncode == 78
    assert result.stderr.splitlines()[:3] == [
        "error: train: --shuffle is for --epochs",
        "  why: without epochs, sequences are drawn from anywhere in the text",
        "  try: --epochs N, or leave --shuffle out",
    ]
    (tmp_path / "short.txt").write_text("x" * 20)
    result = train(*SMALL, "--epochs", "2", "--file", str(tmp_path / "short.txt"))
    assert result.returncode == 78 and "lm: a text of 20 tokens holds no sequence of 33." in result.stderr


def resumed(folder, *flags, code=0):
    result = train("--resume", str(folder), *flags)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def test_a_resumed_run_is_one_that_was_never_interrupted(tmp_path, loss_of_one_rank):
    folder = tmp_path / "run"
    first = train(*SMALL, "--steps", "5", "--save", str(folder))
    assert first.returncode == 0, first.stderr
    told = json.loads(resumed(folder, "--steps", "12", "--json").stdout)
    assert (told["first_step"], told["steps"], told["loss"]) == (5, 12, loss_of_one_rank)
    # Nothing is left to do: the loss is the one that was saved.
    again = json.loads(resumed(folder, "--steps", "12", "--json").stdout)
    assert (again["first_step"], again["steps"], again["loss"]) == (12, 12, loss_of_one_rank)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["--ranks", "2"], ["--ranks", "1"]),
        (["--ranks", "1"], ["--ranks", "3"]),
        (["--ranks", "4", "--vocab-ranks", "2"], ["--ranks", "2", "--vocab-ranks", "0", "--data-ranks", "2"]),
    ],
    ids=["2 to 1", "1 to 3", "2x2 to 2x1"],
)
def test_it_goes_on_with_any_mesh(tmp_path, loss_of_one_rank, before, after):
    folder = tmp_path / "run"
    first = train(*SMALL, *before, "--steps", "8", "--checkpoint-every", "4", "--save", str(folder))
    assert first.returncode == 0, first.stderr
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == [
        "step-000000000004",
        "step-000000000008",
    ]
    told = json.loads(resumed(folder, *after, "--steps", "12", "--json").stdout)
    assert told["first_step"] == 8
    assert told["loss"] == pytest.approx(loss_of_one_rank, rel=1e-4)


def test_what_a_resumed_run_may_change(tmp_path):
    folder = tmp_path / "run"
    assert train(*SMALL, "--steps", "2", "--save", str(folder)).returncode == 0
    told = resumed(folder, "--width", "64", "--seed", "3", code=78).stderr.splitlines()
    assert told == [
        f"error: train: {folder} has --width 32, --seed 1; this call has --width 64, --seed 3",
        "  why: its checkpoints hold the parameters and the place in the data of that run",
        "  try: leave these flags out, or start a new run without --resume",
    ]
    result = resumed(folder, "--lr", "0.01", "--steps", "3")
    assert result.stderr == f"note: train: {folder} goes on with --lr 0.01 (was 0.001)\n"
    assert result.stdout.splitlines()[1] == "resumed  at step 2"
    # A rate of 0 is the one that is used, not the one that was saved.
    still = [json.loads(resumed(folder, "--lr", "0", "--steps", "5", "--json").stdout) for _ in range(2)]
    assert still[0]["first_step"] == 3 and still[1]["first_step"] == 5
    # The configuration may be changed by hand; then the checkpoint itself refuses.
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("batch=4", "batch=8"))
    told = resumed(folder, "--steps", "6", code=78).stderr
    assert "is of a job with batch 4, length 32 and seed 1; this one has 8, 32 and 1." in told


def test_where_runs_are_saved_is_checked(tmp_path):
    folder = tmp_path / "run"
    assert train(*SMALL, "--steps", "1", "--save", str(folder)).returncode == 0
    for flags, code, text in (
        (["--save", folder], 78, f"error: train: there is a run in {folder} already\n"),
        (["--save", folder, "--resume", folder], 2, "error: train: --save and --resume name two folders"),
        (["--resume", tmp_path], 65, f"error: train: there is no run in {tmp_path}\n"),
    ):
        result = train(*map(str, flags))
        assert (result.returncode, result.stderr[: len(text)]) == (code, text)
    for file in folder.glob("checkpoints/*/*.safetensors"):
        os.truncate(file, 10)
    assert "error: " in resumed(folder, code=65).stderr


def test_mistakes_are_named(tmp_path):
    result = train("--ranks", "4", "--data-ranks", "3")
    assert result.returncode == 78
    assert "4 ranks cannot form a mesh of 3 data and 0 vocabulary ranks" in result.stderr
    result = train("--file", str(tmp_path / "none.txt"), "--steps", "1")
    assert result.returncode == 65
    assert f"train: there is no file {tmp_path}/none.txt\n" in result.stderr
    result = train("--file", str(tmp_path), "--steps", "1")
    assert f"train: there is no file {tmp_path}\n" in result.stderr
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    result = train("--file", str(empty), "--steps", "1", "--length", "8")
    assert "lm: a text of 0 tokens holds no sequence of 9." in result.stderr
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
    assert len(result.stdout.splitlines()) <= 60
