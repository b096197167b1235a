"""`tessera plan graph`: partitioners side by side, and files that cannot be used."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))


def plan(*words):
    return subprocess.run([TESSERA, "plan", *map(str, words)], capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def cube(tmp_path_factory):
    generator = random.Random(1)
    side = 10.0
    lines = ["1000", f'Lattice="{side} 0 0 0 {side} 0 0 0 {side}" pbc="T T T"']
    lines += ["Ar " + " ".join(f"{generator.uniform(0, side):.6f}" for _ in range(3)) for _ in range(1000)]
    path = tmp_path_factory.mktemp("plan") / "cube.xyz"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_table(cube):
    result = plan("graph", "--ranks", "8", cube)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == (
        "graph 1000 nodes, 20000 edges, 8 ranks, rows of 128 x 4 bytes; an all-gather brings 875 rows"
    )
    assert lines[1].split() == [
        "partitioner", "owned", "halo", "largest", "interior", "boundary", "bytes/layer", "imbalance",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[2:6]] == ["contiguous", "morton", "hilbert", "bisection"]
    assert max(map(len, lines)) <= 100
    halos = {line.split()[0]: float(line.split()[2]) for line in lines[2:]}
    assert halos["bisection"] < halos["contiguous"] / 1.5


def test_json_adds_up(cube):
    result = plan("graph", cube, "--ranks", "4", "--cutoff", "1.5", "--json", "--weigh-edges")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    for row in answer["partitioners"]:
        assert sum(part["owned"] for part in row["parts"]) == 1000
        assert sum(part["interior"] + part["boundary"] for part in row["parts"]) == answer["edges"]
        assert sum(part["halo"] for part in row["parts"]) == sum(part["sent"] for part in row["parts"])
        assert row["largest_halo"] == max(part["halo"] for part in row["parts"])


def test_an_edge_list(tmp_path):
    path = tmp_path / "ring.txt"
    path.write_text("".join(f"{i} {(i + 1) % 12}\n" for i in range(12)))
    result = plan("graph", "--ranks", "3", path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[2].split()[:4] == ["contiguous", "4", "1", "1"]


def test_a_file_that_cannot_be_used(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_text("0 1\n2 two\n")
    result = plan("graph", path)
    assert result.returncode == 65
    assert result.stderr.splitlines()[0] == (
        f"error: plan: gnn.graph_file: {path}, line 2: an edge is two node numbers, not '2 two'."
    )
    assert plan("graph", tmp_path / "none").returncode == 65


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "error: plan: name a subject, as in tessera plan graph FILE"),
        (["grap"], "error: plan: there is no subject 'grap': did you mean graph?"),
        (["graph"], "error: plan: name one file, as in tessera plan graph FILE"),
        (["graph", "--rank", "2", "x"], "error: plan: unknown flag --rank: did you mean --ranks?"),
    ],
)
def test_wrong_words_get_one_line(words, text):
    result = plan(*words)
    assert (result.returncode, result.stderr.strip()) == (2, text)


def test_help_fits_a_screen():
    lines = plan("graph", "--help").stdout.splitlines()
    assert 10 < len(lines) <= 40
    assert max(map(len, lines)) <= 100
