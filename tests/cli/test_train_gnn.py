"""`tessera train gnn`: what it prints, what it learns, and what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pty
import re
import shutil
import subprocess
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
LIMIT = 120.0  # seconds; for a loaded machine, not a figure
RUNS = pathlib.Path(tempfile.mkdtemp(prefix="tessera-runs-"))
SMALL = ["--atoms", "27", "--structures", "4", "--features", "8", "--cutoff", "1.7", "--precision", "float64"]


@pytest.fixture(autouse=True, scope="module")
def no_runs_are_left():
    yield
    shutil.rmtree(RUNS, ignore_errors=True)


def train(*flags):
    command = [TESSERA, "train", *flags]
    if flags[:1] in (("gnn",), ("lm",)):
        command += ["--runs", str(RUNS)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)


def test_prints_progress_and_errors():
    result = train("gnn", "--ranks", "2", "--steps", "150", "--batch", "2", "--lr", "0.01", *SMALL)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "structures 4 of 27 atoms | data 1 x graph 2 | bisection"
    step = r"step +\d+/150 \| loss [\d.e+-]+ \| [\d.]+[kM]? atoms/s \| [\d.]+ ms"
    step += r" \(exposed comm [\d.]+\) \| mem \d+ MB \| eta \d+s"
    assert re.fullmatch(step, lines[1]) and re.fullmatch(step, lines[-4])
    end = re.fullmatch(
        r"energy error ([\d.]+) per atom, was ([\d.]+) \| force error ([\d.]+), was ([\d.]+)", lines[-3]
    )
    assert float(end[3]) < float(end[4])
    assert re.fullmatch(
        r"model    .*/checkpoints/step-000000000150(, the best of step \d+ in .*/best)?", lines[-2]
    )
    assert re.fullmatch(r"report   (\S+/report\.html)", lines[-1])


def on_a_terminal(*words):
    """What a terminal receives, byte by byte."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [TESSERA, "train", *words, "--runs", str(RUNS)], stdout=theirs, stderr=theirs, stdin=theirs
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(ours, 65536):
            seen += piece
    os.close(ours)
    assert process.wait(LIMIT) == 0, seen.decode()
    return seen.decode()


@pytest.mark.parametrize("workload", ["gnn", "lm"])
def test_progress_rewrites_itself_on_a_terminal(workload):
    small = (
        SMALL if workload == "gnn" else ["--batch", "2", "--length", "16", "--layers", "1", "--width", "16"]
    )
    flags = [workload, "--ranks", "2", "--steps", "60", *small]
    seen = on_a_terminal(*flags)
    step = r"step +\d+/60 \| loss "
    lines = [line for line in seen.split("\r\n") if re.search(step, line)]
    assert len(lines) == 1, seen  # one line, written again and again
    versions = lines[0].split("\r")
    assert re.match(step.replace(r"\d+", "1"), versions[1]) and re.match(
        step.replace(r"\d+", "60"), versions[-1]
    )
    assert all(version.endswith("\x1b[K") for version in versions[1:])
    piped = train(*flags).stdout
    assert "\r" not in piped and "\x1b" not in piped
    assert len(re.findall(step, piped)) >= 2


def test_the_arrangement_of_ranks_does_not_matter():
    answers = []
    for flags in (["--ranks", "1"], ["--ranks", "2"], ["--ranks", "3", "--partition", "hilbert"]):
        result = train("gnn", "--json", "--steps", "10", "--optimizer", "sgd", *flags, *SMALL)
        assert result.returncode == 0, result.stderr
        answers.append(json.loads(result.stdout))
    for answer in answers[1:]:
        for key in ("energy_error", "force_error", "parameters"):
            assert answer[key] == pytest.approx(answers[0][key], rel=1e-9)


def test_data_times_graph():
    result = train("gnn", "--ranks", "4", "--graph-parallel", "2", "--steps", "3", *SMALL)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("structures 4 of 27 atoms | data 2 x graph 2 | bisection\n")


def test_groups_that_do_not_divide_are_refused():
    result = train("gnn", "--ranks", "4", "--graph-parallel", "3")
    assert result.returncode == 78
    assert result.stderr.splitlines() == [
        "error: train: 4 ranks cannot be divided into groups of 3",
        "  why: every graph is shared by the same number of ranks",
        "  try: choose --graph-parallel so that it divides --ranks",
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "error: train: name a workload, as in tessera train lm"),
        (["gmn"], "error: train: there is no workload 'gmn': did you mean gnn?"),
        (["gnn", "--atom", "3"], "error: train: unknown flag --atom: did you mean --atoms?"),
        (["gnn", "extra"], "error: train: takes flags only, not 'extra'"),
    ],
)
def test_wrong_words_get_one_line(words, text):
    result = train(*words)
    assert (result.returncode, result.stderr.strip()) == (2, text)


def test_help_fits_a_screen():
    result = train("--help")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert train("gnn", "--print-config").stdout.count("=") > 10
