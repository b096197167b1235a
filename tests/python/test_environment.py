"""A test cannot leave its environment to the tests after it."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

from ranks import run_ranks

CONFTEST = pathlib.Path(__file__).resolve().parents[1] / "conftest.py"
LEAKS = """
import os
ENVIRONMENT = {"TESSERA_PROFILE": "assume"}

def test_leaks():
    assert os.environ["TESSERA_PROFILE"] == "assume"
    os.environ["WORLD_SIZE"] = "2"
    del os.environ["TESSERA_PROFILE"]

def test_is_clean():
    assert "WORLD_SIZE" not in os.environ
    assert os.environ["TESSERA_PROFILE"] == "assume"
"""
NEXT = """
import os

def test_is_clean():
    assert "WORLD_SIZE" not in os.environ and "TESSERA_PROFILE" not in os.environ
"""


def run_pytest(folder: pathlib.Path, **files: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(CONFTEST, folder / "conftest.py")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    dropped = ("WORLD_SIZE", "TESSERA_PROFILE")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        str(folder),
    ]
    return subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, check=False)


def test_variables_end_with_their_test(tmp_path):
    ended = run_pytest(tmp_path, test_first=LEAKS, test_second=NEXT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 passed" in ended.stdout


def test_modules_may_not_set_variables(tmp_path):
    ended = run_pytest(tmp_path, test_first='import os\nos.environ["WORLD_SIZE"] = "2"\n' + NEXT)
    assert ended.returncode != 0
    assert "a test module sets WORLD_SIZE where it is imported" in ended.stdout + ended.stderr


def value_of(rank, name):
    return os.environ.get(name)


def test_ranks_have_the_environment_of_their_test(monkeypatch):
    assert run_ranks(1, value_of, "TESSERA_LEFT", backend=None) == [None]
    monkeypatch.setenv("TESSERA_LEFT", "here")
    assert run_ranks(1, value_of, "TESSERA_LEFT", backend=None) == ["here"]
    monkeypatch.delenv("TESSERA_LEFT")
    assert run_ranks(1, value_of, "TESSERA_LEFT", backend=None) == [None]
