"""Configuration files of `tessera train`: what wins, what is printed, and mistakes by file and line."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))


def train(*flags, code=0):
    result = subprocess.run([TESSERA, "train", "dlrm", *flags], capture_output=True, text=True, timeout=60)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def test_flags_win_over_the_file_and_the_file_can_be_printed(tmp_path):
    config = tmp_path / "job.toml"
    config.write_text('steps = 7\nbatch = 12\nsharding = "row_wise"\n')
    shown = train("--config", str(config), "--steps", "3", "--print-config").stdout
    assert "steps=3\n" in shown and "batch=12\n" in shown and 'sharding="row_wise"' in shown
    again = tmp_path / "again.toml"
    again.write_text(shown)
    assert train("--config", str(again), "--print-config").stdout == shown
    config.write_text("stepz = 7\n")
    refused = train("--config", str(config), code=78)
    assert "stepz" in refused.stderr


@pytest.mark.parametrize(
    ("text", "line", "what", "why"),
    [
        ("stepz = 3", 1, "there is no key 'stepz'", "no flag has this name; the closest is steps"),
        ("batch = 4\nn = 3", 2, "there is no key 'n'", "no flag has this name"),
        ("[dlrm]\nsteps = 3", 1, "a section [dlrm]", "keys are the names of flags and stand in no section"),
        (
            'resume = "x"',
            1,
            "'resume' cannot be set in a file",
            "--resume is a flag for one call, not a setting",
        ),
        ("# a\n\nwarmup = yes", 3, "warmup cannot be 'yes'", "'yes' is not a number"),
        ('sharding = "diag"  # b', 1, "sharding cannot be 'diag'", "diag not in {auto,balanced,table_wise,"),
        ("lr = nan", 1, "lr cannot be 'nan'", "'nan' is not a number from 0 on"),
        ('bottom = "16,x"', 1, "bottom cannot be '16,x'", "'16,x' is not a list of widths such as 128,64,1"),
        ("bottom = [16, 8]", 1, "bottom has a list or a table", "a value is one number, word or quoted text"),
        ("steps 3", 1, "'steps 3' is not a setting", "a setting is key = value"),
        ("= 3", 1, "'= 3' is not a setting", "a setting is key = value"),
        ("steps =  # none", 1, "steps has no value", "a value is one number, word or quoted text"),
        ("steps = 3 4", 1, "steps has several words", "a value is one number, word or quoted text"),
        ('data = "x', 1, "data has a text without an end", 'the closing " is missing'),
        ('data = "x" y', 1, "data has more after its value: y", "a value is one number, word or quoted text"),
        ("steps = 3\nbatch = 4\nsteps = 5", 3, "steps is set again", "it is set in line 1"),
    ],
)
def test_names_what_is_wrong_in_a_configuration(tmp_path, text, line, what, why):
    config = tmp_path / "a.toml"
    config.write_text(text + "\n")
    lines = train("--config", str(config), code=78).stderr.splitlines()
    assert lines[0] == f"error: train: {config}, line {line}: {what}"
    assert lines[1].startswith(f"  why: {why}") and lines[2].startswith("  try: ") and len(lines) == 3


def test_a_flag_hides_the_value_of_the_file(tmp_path):
    config = tmp_path / "a.toml"
    config.write_text("ranks = 0\nsteps = 3\n")
    shown = train("--config", str(config), "-n", "2", "--print-config").stdout
    assert "ranks=2\n" in shown and "steps=3\n" in shown
    # A mistake in the call is the call's, whatever the file says.
    told = train("--config", str(config), "-n", "2", "--steps", "x", code=2).stderr
    assert told.startswith("error: train: --steps: ")


def test_a_configuration_that_cannot_be_read(tmp_path):
    for path, why in ((tmp_path / "none.toml", "No such file or directory"), (tmp_path, "it is a folder")):
        lines = train("--config", str(path), code=78).stderr.splitlines()
        assert lines[0] == f"error: train: the configuration file {path} cannot be read"
        assert lines[1] == f"  why: {why}"
