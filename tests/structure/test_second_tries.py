"""Tests that pass only at the second try are named, and only these."""

from __future__ import annotations

import pathlib
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).parent.parent / "support" / "second_tries.py"

OUTPUT = """\
    Start 1: good
1/4 Test #1: good .............................   Passed    0.01 sec
    Start 2: shaky
    Test #2: shaky ............................***Failed    0.01 sec
    Start 2: shaky
2/4 Test #2: shaky ............................   Passed    0.02 sec
    Start 3: slow
    Test #3: slow .............................***Timeout   9.01 sec
    Start 3: slow
3/4 Test #3: slow .............................***Timeout   9.01 sec
    Start 4: needs_a_gpu
4/4 Test #4: needs_a_gpu ......................***Skipped   0.01 sec

75% tests passed, 1 tests failed out of 4
"""


def test_second_tries_are_named_before_the_closing_line(tmp_path):
    file = tmp_path / "second_tries.txt"
    result = subprocess.run(
        [sys.executable, PROGRAM, file], input=OUTPUT, capture_output=True, text=True, check=True
    )
    before, closing = result.stdout.split("needed a second try")
    assert before == OUTPUT.split("75%")[0]
    assert closing == f" ({file}): shaky\n75% tests passed, 1 tests failed out of 4\n"
    assert file.read_text() == "shaky\n"


def test_a_run_without_them_says_nothing(tmp_path):
    file = tmp_path / "second_tries.txt"
    lines = [line for line in OUTPUT.splitlines(keepends=True) if "shaky" not in line]
    result = subprocess.run(
        [sys.executable, PROGRAM, file], input="".join(lines), capture_output=True, text=True, check=True
    )
    assert result.stdout == "".join(lines)
    assert file.read_text() == ""


def test_three_runs_in_a_row_are_an_error(tmp_path):
    file = tmp_path / "second_tries.txt"
    good = "".join(line for line in OUTPUT.splitlines(keepends=True) if "shaky" not in line)

    def run(output):
        return subprocess.run([sys.executable, PROGRAM, file], input=output, capture_output=True, text=True)

    codes = [run(output).returncode for output in (OUTPUT, OUTPUT, good, OUTPUT, OUTPUT)]
    assert codes == [0, 0, 0, 0, 0]
    third = run(OUTPUT)
    assert third.returncode == 1
    assert "needed it in three runs in a row, which is an error: shaky\n75% tests passed" in third.stdout
    assert run(good).returncode == 0
