"""bench/planner/prediction.py: what it says of cases that were measured, without measuring any."""

import json
import os
import pathlib
import runpy
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "bench/planner/prediction.py"


def judged(folder, errors):
    """Return what the program ends with and says of 40 cases that took `errors` longer than predicted."""
    cases = runpy.run_path(str(PROGRAM))["CASES"]
    assert len(cases) == 40
    lines = []
    for number, (ranks, load, sharding) in enumerate(cases):
        case = {"ranks": ranks, "load": load, "sharding": sharding, "predicted": 0.01 * (1 + number)}
        case["measured"] = case["predicted"] / (1 + errors.get(number, 0.05))
        lines.append(json.dumps(case))
    (folder / "cases.jsonl").write_text("\n".join(lines) + "\n")
    environment = {**os.environ, "TESSERA_BIN": "/nowhere"}  # nothing is left to measure
    done = subprocess.run(
        [sys.executable, PROGRAM, folder], capture_output=True, text=True, env=environment, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("errors", "code", "text"),
    [
        ({}, 0, "within 10 %: 40 of 40; within 25 %: 40; worst 5 %; order "),
        ({3: 0.2, 4: -0.24}, 0, "within 10 %: 38 of 40; within 25 %: 40; worst 24 %; order "),
        ({3: 0.2, 39: -0.26}, 1, "\noff by 26 %: 1 ranks, data_parallel, batch 256, 16 tables\n"),
        ({0: 0.5}, 1, "\noff by 50 %: 2 ranks, auto, batch 512, 26 tables\n"),
    ],
)
def test_a_prediction_that_is_far_off_is_a_fault(tmp_path, errors, code, text):
    ended, said = judged(tmp_path, errors)
    assert ended == code, said
    assert text in said
