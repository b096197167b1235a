"""`tessera ckpt reshard --plan`: a checkpoint is cut as a plan lays its tables, with the same values."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENT = {"TESSERA_PROFILE": "assume"}
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
ROWS, DIM = 50, 8


def tessera(*words, code=0):
    done = subprocess.run([TESSERA, *map(str, words)], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "a"
    tessera(
        "train", "dlrm", "--tables", 4, "--rows", ROWS, "--dim", DIM, "--bottom", f"8,{DIM}", "--top", "4,1",
        "--steps", 2, "--batch", 16, "--eval-samples", 64, "--save", folder,
    )  # fmt: skip
    return folder


def entry(kind, *shards):
    return {"type": kind, "kernel": "fused", "ranks": [s[4] for s in shards], "shards": shards}


def plan_file(path, **changes):
    tables = {
        "cat_0": entry("column_wise", (0, 0, ROWS, 4, 1), (0, 4, ROWS, 4, 0)),
        "cat_1": entry("row_wise", (0, 0, 17, DIM, 0), (17, 0, 17, DIM, 1), (34, 0, 16, DIM, 2)),
        "cat_2": entry("table_wise", (0, 0, ROWS, DIM, 2)),
        "cat_3": entry("data_parallel", *[(0, 0, ROWS, DIM, rank) for rank in range(3)]),
        **changes,
    }
    path.write_text(json.dumps({"version": 1, "modules": {"tables": tables}}))
    return path


def manifest(root):
    (folder,) = root.glob("step-*")
    return json.loads((folder / "MANIFEST.json").read_text())


def places(found, name):
    """Return (offsets, lengths, rank) of the parts of a tensor."""
    files = [file["name"] for file in found["files"]]

    def rank_of(part):
        return int(files[part["file"]].split("-")[1]) - 1

    parts = found["tensors"][name]["regions"]
    return sorted((tuple(p["offsets"]), tuple(p["lengths"]), rank_of(p)) for p in parts)


def test_tables_lie_as_planned_and_values_stay(run, tmp_path):
    plan = plan_file(tmp_path / "plan.json")
    out = tessera("ckpt", "reshard", run, "--plan", plan, "--to", tmp_path / "b").stdout
    assert out.startswith("wrote step 2 for 3 ranks, ")
    found = manifest(tmp_path / "b")
    weights = "tables.embedding_bags.{}.weight"
    assert places(found, weights.format("cat_0")) == [
        ((0, 0), (ROWS, 4), 1),
        ((0, 4), (ROWS, 4), 0),
    ]
    assert places(found, weights.format("cat_1")) == [
        ((0, 0), (17, DIM), 0),
        ((17, 0), (17, DIM), 1),
        ((34, 0), (16, DIM), 2),
    ]
    assert places(found, weights.format("cat_2")) == [((0, 0), (ROWS, DIM), 2)]
    assert places(found, weights.format("cat_3")) == [((0, 0), (ROWS, DIM), 0)]
    # What the optimizer keeps of a row lies with the row's first columns.
    states = [n for n, tensor in found["tensors"].items() if "cat_0" in n and tensor["shape"] == [ROWS]]
    assert states and all(places(found, name) == [((0,), (ROWS,), 1)] for name in states)
    tessera("ckpt", "verify", tmp_path / "b")
    for root in ("a", "b"):
        source = run if root == "a" else tmp_path / "b"
        tessera("ckpt", "export", source, "--to", tmp_path / f"{root}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_a_searched_plan_is_applied(run, tmp_path):
    listed = tmp_path / "tables.json"
    names = [f"cat_{i}" for i in range(4)]
    listed.write_text(json.dumps({"tables": [{"name": n, "rows": ROWS, "dim": DIM} for n in names]}))
    tessera(
        "plan", "tables", "--search", "--ranks", 2, "--table-list", listed, "--write", tmp_path / "plan.json"
    )
    tessera("ckpt", "reshard", run, "--plan", tmp_path / "plan.json", "--ranks", 2, "--to", tmp_path / "b")
    files = [file["name"] for file in manifest(tmp_path / "b")["files"]]
    assert sum(name.startswith("shard-") for name in files) == 2
    tessera("ckpt", "verify", tmp_path / "b")


def test_a_plan_made_again_moves_what_it_lists_and_no_value(run, tmp_path):
    listed, before, after = tmp_path / "tables.json", tmp_path / "before.json", tmp_path / "after.json"
    tables = [{"name": f"cat_{i}", "rows": ROWS, "dim": DIM, "ids": 1} for i in range(4)]
    listed.write_text(json.dumps({"tables": tables}))
    words = ["plan", "tables", "--search", "--batch", 16, "--table-list", listed]
    tessera(*words, "--ranks", 3, "--write", before)
    tessera("ckpt", "reshard", run, "--plan", before, "--to", tmp_path / "a")
    tables[1]["ids"] = 40  # asked for far more often; and a rank is gone
    listed.write_text(json.dumps({"tables": tables}))
    again = [*words, "--ranks", 2, "--previous", before, "--max-moved", "50%", "--write", after, "--json"]
    found = json.loads(tessera(*again).stdout)
    assert found["moves"] and found["changed"] == []
    tessera("ckpt", "reshard", tmp_path / "a", "--plan", after, "--to", tmp_path / "b")
    tessera("ckpt", "verify", tmp_path / "b")
    # A row and column is on another rank if, and only if, a move says so.
    moved = set()
    for move in found["moves"]:
        row, column, rows, columns, rank = move["part"]
        cells = ((r, c) for r in range(row, row + rows) for c in range(column, column + columns))
        moved |= {(move["table"], *cell, move["from"], rank) for cell in cells}

    def ranks_of_cells(root):
        weights = {n: f"tables.embedding_bags.{n}.weight" for n in (table["name"] for table in tables)}
        return {
            (name, row, column): rank
            for name, weight in weights.items()
            for (first, left), (rows, columns), rank in places(manifest(root), weight)
            for row in range(first, first + rows)
            for column in range(left, left + columns)
        }

    old, new = ranks_of_cells(tmp_path / "a"), ranks_of_cells(tmp_path / "b")
    assert {(*cell, old[cell], new[cell]) for cell in new if old[cell] != new[cell]} == moved
    for root in ("a", "b"):
        tessera("ckpt", "export", tmp_path / root, "--to", tmp_path / f"{root}.safetensors")
    tessera("ckpt", "export", run, "--to", tmp_path / "run.safetensors")
    contents = {(tmp_path / f"{name}.safetensors").read_bytes() for name in ("a", "b", "run")}
    assert len(contents) == 1


@pytest.mark.parametrize(
    ("changes", "flags", "code", "text"),
    [
        ({"nobody": entry("table_wise", (0, 0, 9, 8, 0))}, [], 65, "has no table nobody of 9 x 8"),
        (
            {"cat_2": entry("table_wise", (0, 0, 49, DIM, 2))},
            [],
            65,
            "the plan's table cat_2 is 49 x 8, and tables.embedding_bags.cat_2.weight is 50 x 8",
        ),
        (
            {"cat_1": entry("row_wise", (0, 0, 17, DIM, 0), (34, 0, 16, DIM, 1))},
            [],
            65,
            " do not cover it once",
        ),
        ({}, ["--ranks", 2], 65, "are for rank 2 of 2"),
        ({}, ["--cut", "whole"], 2, "takes --cut or --plan, not both"),
    ],
)
def test_what_does_not_fit_is_named(run, tmp_path, changes, flags, code, text):
    plan = plan_file(tmp_path / "plan.json", **changes)
    done = tessera("ckpt", "reshard", run, "--plan", plan, "--to", tmp_path / "b", *flags, code=code)
    assert text in done.stderr
    assert not list(tmp_path.glob("b/step-*"))


def test_files_that_are_no_plans(run, tmp_path):
    (tmp_path / "bad.json").write_text("{")
    for name in ("bad.json", "missing.json"):
        done = tessera("ckpt", "reshard", run, "--plan", tmp_path / name, "--to", tmp_path / "b", code=65)
        assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 3
