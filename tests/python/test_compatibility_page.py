"""docs/compatibility.md is of this tree: what its program would write today without running anything."""

from __future__ import annotations

import pathlib
import re
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "peers"))

import compatibility
import torch_suite
import torchrec_names
import torchrec_page

ROOT = compatibility.ROOT
STALE = (
    "docs/compatibility.md is of an older tree: `make compat`, or parts of it (tests/peers/compatibility.py)"
)


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs/compatibility.md").read_text()


@pytest.mark.parametrize("part", [torchrec_names.lines, compatibility.libtorch_lines])
def test_the_page_has_parts_that_need_no_run(page, part):
    assert "\n".join(part()) in page, STALE


def test_the_page_names_what_is_not_run(page):
    rows = "\n".join(f"| {suite} | {why} |" for suite, why in compatibility.NOT_RUN)
    assert f"Not run:\n\n| suite | why |\n|---|---|\n{rows}\n\n" in page, STALE


def test_the_page_names_every_comparison(page):
    # Each with how many programs it has.
    named = re.findall(r"^\| `(test_\w+)` \| [1-9]\d* \|$", page, re.MULTILINE)
    assert named == compatibility.comparisons(), STALE


def test_the_page_has_every_suite_and_peer_in_its_version(page):
    heads = [f"## torchrec {compatibility.version_of('torchrec')}: its own tests"]
    heads += [
        f"| {wrapper}, {engine} |"
        for wrapper, engine in [*compatibility.RUNS.values(), *torchrec_page.RUNS.values()]
        if wrapper == "tessera"
    ]
    for peer, packages in compatibility.PEERS.items():
        # Of torch, the one that the page was made with.
        versions = [
            name if name == "torch" else f"{name} {compatibility.version_of(name)}" for name in packages
        ]
        heads.append(f"| {peer} | {', '.join(versions)}")
    assert [head for head in heads if head not in page] == [], STALE


def test_nothing_on_the_page_is_unexplained(page):
    counts = []
    for table in re.findall(r"^\| .*\n\|---.*\n(?:\| .*\n)+", page, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
        counts += [row[head.index(bad)] for bad in ("unexplained", "differ") if bad in head for row in rows]
    assert len(counts) > 8 and set(counts) == {"0"}


def test_every_explanation_is_a_row_of_the_deviations():
    rows = re.findall(r"^\| (.*?) \| ", (ROOT / "docs/deviations.md").read_text(), re.MULTILINE)
    used = {*torch_suite.EXPLAINED.values(), *torchrec_page.EXPLAINED.values()}
    assert used - set(rows) == set()
