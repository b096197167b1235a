"""The newcomer: the commands of docs/your_data.md, as they stand there, from a table to predictions."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
PAGE = ROOT / "docs/your_data.md"
LIMIT = 180.0  # seconds; for a loaded machine, not a figure


def commands():
    page = PAGE.read_text()
    part = page[page.index("## From a table") : page.index("## The schema")]
    blocks = re.findall(r"```sh\n(.*?)```", part, re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """What each command printed, in a folder that holds nothing but the examples."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "examples").symlink_to(ROOT / "examples")
    programs = {"tessera": TESSERA, "python": sys.executable}
    printed = {}
    for command in commands():
        words = shlex.split(command)
        words[0] = programs.get(words[0], words[0])
        result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
        assert result.returncode == 0, command + "\n" + result.stdout + result.stderr
        printed[command] = result.stdout
    return folder, printed


def said(printed, beginning):
    (found,) = [text for command, text in printed.items() if command.startswith(beginning)]
    return found


def test_the_page_shows_what_is_printed(played):
    _, printed = played
    head = said(printed, "head")
    assert head in PAGE.read_text()


def test_the_schema_is_guessed_and_the_log_remembers_it(played):
    folder, printed = played
    schema = (folder / "shop.toml").read_text()
    kinds = re.findall(r'^\[+(\w+)\]+\ncolumn = "(\w+)"', schema, re.MULTILINE)
    assert kinds[:6] == [
        ("label", "clicked"),
        ("feature", "user"),
        ("feature", "item_id"),
        ("dense", "price"),
        ("dense", "visits"),
        ("feature", "tags"),
    ]
    shown = said(printed, "tessera data show")
    assert shown.startswith("samples  20000 in 1 blocks") and "tags" in shown and "mean" in shown


def test_the_model_has_learned(played):
    folder, printed = played
    judged = re.search(r"judged   log loss ([\d.]+) \| auc ([\d.]+)", said(printed, "tessera train"))
    # The label's noise allows about 0.8; users and items alone are worth 0.75.
    assert float(judged[2]) > 0.7
    assert (folder / "shop-run/checkpoints/step-000000000120").is_dir()
