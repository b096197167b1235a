"""`tessera plan tables --search`: a plan with a proof, in the program itself."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from xml.etree import ElementTree

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENT = {"TESSERA_PROFILE": "assume"}  # a profile of this machine would change the plans
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))


def plan(*words, code=0):
    # No worker: whatever needs LibTorch would fail.
    result = subprocess.run(
        [TESSERA, "plan", "tables", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "TESSERA_WORKER": "/nowhere"},
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result


@pytest.fixture
def listed(tmp_path):
    path = tmp_path / "tables.json"
    tables = [
        {"name": "users", "rows": 40_000_000, "dim": 128, "ids": 100},
        {"name": "items", "rows": 100_000, "dim": 32, "dtype": "BF16", "pooling": "MEAN", "ids": 20},
        {"name": "words", "rows": 5_000, "dim": 16, "pooling": "NONE", "ids": 3.5},
    ]
    path.write_text(json.dumps({"tables": tables}))
    return path


def test_text_is_a_terminal_wide_and_names_plan_bound_and_memory(listed):
    out = plan("--search", "--ranks", 8, "--hosts", 2, "--table-list", listed, "--memory", "16GB").stdout
    lines = out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("tables   3 of 20.5 GB on 8 ranks of 2 hosts")
    assert " a step, no plan can be under " in lines[2]
    assert lines[4].startswith("memory   rank ")
    assert [line.split()[0] for line in lines[7:10]] == ["items", "users", "words"]


def test_a_picture_has_ranks_bound_and_tables(listed, tmp_path):
    file = tmp_path / "plan.svg"
    plan("--ranks", 8, "--hosts", 2, "--table-list", listed, "--memory", "16GB", "--picture", file)
    root = ElementTree.fromstring(file.read_text())
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any(word.startswith("no plan can be under ") for word in words)
    assert any(word.endswith(" for tables") for word in words)
    assert [word for word in words if word in ("items", "users", "words")] == ["items", "users", "words"]
    boxes = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    assert all(float(box.get("height").rstrip("%")) > 0 for box in boxes) and len(boxes) > 3 * 8
    # Of many ranks every one is drawn, of many tables the longest.
    plan("--search", "--ranks", 256, "--tables", 100, "--picture", file)
    root = ElementTree.fromstring(file.read_text())
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "the 64 longest of 100 tables on ranks, by seconds" in words
    bad = plan("--search", "--picture", tmp_path / "no" / "file.svg", code=65)
    assert "no/file.svg" in bad.stderr


def test_json_is_checked_and_the_plan_is_for_training(listed, tmp_path):
    flags = ["--ranks", 4, "--table-list", listed, "--pin", "words=2"]
    result, file = tmp_path / "result.json", tmp_path / "plan.json"
    result.write_text(plan("--search", "--json", "--write", file, *flags).stdout)
    found = json.loads(result.read_text())
    assert found["version"] == 2 and 0 < found["bound_seconds"] <= found["plan_seconds"]
    words = next(t for t in found["tables"] if t["name"] == "words")
    assert [shard[4] for shard in words["shards"]] == [2]
    assert "result.json holds: " in plan("--check", result, *flags).stdout
    modules = json.loads(file.read_text())["modules"]
    assert set(modules["tables"]) == {"users", "items", "words"}
    # The same proof says nothing about another batch, and an altered one nothing at all.
    assert "proves nothing" in plan("--check", result, *flags, "--batch", 64, code=65).stderr
    found["certificate"]["seconds"] *= 1.01
    result.write_text(json.dumps(found))
    assert "proves nothing" in plan("--check", result, *flags, code=65).stderr


@pytest.mark.parametrize("flag", ["--write", "--picture"])
def test_what_a_plan_is_made_of_is_not_written(listed, tmp_path, flag):
    words = ["--ranks", 2, "--table-list", listed]
    plan("--search", *words, "--write", tmp_path / "before.json")
    (tmp_path / "own.toml").write_text("ranks = 2\n")
    (tmp_path / "link").symlink_to("own.toml")
    words += ["--previous", tmp_path / "before.json", "--config", tmp_path / "own.toml"]
    for name in ("tables.json", "before.json", "own.toml", "link"):
        before = (tmp_path / name).read_bytes()
        said = plan(*words, flag, tmp_path / name, code=65).stderr
        assert said.startswith(f"error: plan: {tmp_path}/{name}: is read and cannot be written too.")
        assert said.endswith(f"  why: {flag} names what another flag reads\n  try: another {flag}\n")
        assert (tmp_path / name).read_bytes() == before
    plan(*words, flag, tmp_path / "other")


def test_a_table_is_explained(listed):
    out = plan("--explain", "users", "--ranks", 8, "--hosts", 2, "--table-list", listed).stdout
    assert out.splitlines()[0].startswith("users (40M x 128, 100 ids a sample): ")
    assert " would cost " in out
    assert "no table 'nobody'" in plan("--explain", "nobody", "--table-list", listed, code=65).stderr


def test_tables_lie_apart_and_together(tmp_path):
    flags = ["--ranks", 4, "--tables", 6, "--apart", "cat_0,cat_1", "--together", "cat_2,cat_3", "--json"]
    result = json.loads(plan(*flags).stdout)
    ranks = {one["name"]: {shard[4] for shard in one["shards"]} for one in result["tables"]}
    assert not ranks["cat_0"] & ranks["cat_1"]
    assert ranks["cat_2"] == ranks["cat_3"] and len(ranks["cat_2"]) == 1
    kept = tmp_path / "plan.json"
    kept.write_text(json.dumps(result))
    assert "holds" in plan(*flags[:-1], "--check", kept).stdout


def test_the_impossible_is_78_and_the_advice_helps(listed):
    flags = ["--search", "--table-list", listed, "--memory", "4GB"]
    lines = plan(*flags, "--ranks", 2, code=78).stderr.splitlines()
    assert lines[0] == "error: plan: table 'users' (20.6 GB with state) fits no rank in any allowed way"
    assert lines[1].startswith("  why: its smallest shard is ")
    ranks = int(lines[2].split()[1])
    plan(*flags, "--ranks", ranks, "--hosts", ranks // 2)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--search", "--sharding", "row_wise"], 2, "leave --sharding out"),
        (["--search", "--pin", "users"], 2, "--pin takes TABLE=RANK"),
        (["--search", "--pin", "cat_0=9"], 65, "may lie on rank 9 of 1"),
        (["--search", "--effort", "some"], 2, "--effort"),
        (["--apart", "cat_0"], 2, "--apart takes TABLE,TABLE"),
        (["--together", "cat_0,nobody"], 65, "'nobody' is to lie with or apart from others"),
        (["--apart", "cat_0,cat_1"], 78, "tables 'cat_0', 'cat_1' are to lie apart"),
    ],
)
def test_wrong_words(words, code, text):
    assert text in plan(*words, code=code).stderr


def test_bad_lists_are_named_by_place(tmp_path):
    path = tmp_path / "tables.json"
    path.write_text('{"tables": [{"name": "a", "rows": 0, "dim": 4}]}')
    assert "/tables/0/rows is 0" in plan("--search", "--table-list", path, code=65).stderr
    path.write_text('{"tables": [], "tables": []}')
    assert "twice" in plan("--search", "--table-list", path, code=65).stderr
