"""The rows of benchmarks: reading, comparing, and the tables made of them."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import rows  # noqa: E402


def row(name: str, median: float, spread: float = 2.0, **more) -> dict:
    return {
        "name": name,
        "state": "near",
        "median_us": median,
        "p10_us": median - spread / 2,
        "p90_us": median + spread / 2,
        "bytes": 4000,
        "repetitions": 10,
        **more,
    }


def test_a_difference_below_the_spread_is_same():
    before = row("comm/all_reduce/shm/n4000_p2", 10.0, spread=2.0)
    assert rows.verdict(before, row(before["name"], 11.9)) == "same"
    assert rows.verdict(before, row(before["name"], 12.1)) == "slower"
    assert rows.verdict(before, row(before["name"], 7.9)) == "faster"
    assert rows.verdict(before, row(before["name"], 15.0, spread=6.0)) == "same"


def test_the_peer_is_of_the_same_shape_and_state():
    ours = row("comm/all_reduce/shm/n4000_p2", 10.0)
    gloo = row("comm/all_reduce/gloo/n4000_p2", 500.0)
    far = row("comm/all_reduce/gloo/n4000_p2", 900.0, state="far")
    other = row("comm/all_reduce/gloo/n4000_p4", 700.0)
    index = {rows.key_of(one): one for one in (ours, gloo, far, other)}
    assert rows.peer_of(ours, index) is gloo
    assert rows.peer_of(gloo, index) is None
    del index[rows.key_of(gloo)]
    assert rows.peer_of(ours, index) is far
    assert rows.cells(ours, index)[6] == "90.0*"


def test_other_modules_have_their_own_peers():
    assert rows.peer_name("vocab/cross_entropy/forward_scores/f32_n8") == "torch/cross_entropy/forward/f32_n8"
    assert rows.peer_name("vocab/cross_entropy/new_gradient/s") == "torch/cross_entropy/new_gradient/s"
    assert rows.peer_name("vocab/logprob/tessera_shm/s") == "vocab/logprob/operators_gloo/s"
    assert rows.peer_name("graph/layer/halo/s") == "graph/layer/gather/s"
    assert rows.peer_name("dlrm/step/tessera/s") == "dlrm/step/torchrec/s"
    assert rows.peer_name("dlrm/interaction_forward/tessera/s") == "dlrm/interaction_forward/torch/s"
    assert rows.peer_name("data/convert_csv/tessera/s") == "data/convert_csv/pandas/s"
    assert rows.peer_name("data/train_from/parquet/s") == "data/train_from/log/s"
    assert rows.peer_name("graph/overlap/interior/s") is None
    assert rows.peer_name("torch/cross_entropy/forward/s") is None


def test_void_rows_are_marked():
    assert rows.state_text(row("a/b/c/d", 1.0, others=0.02)) == "near"
    assert rows.state_text(row("a/b/c/d", 1.0, others=0.3)) == "near!"


def test_tables_are_aligned():
    text = rows.table([row("comm/x/shm/n4000_p2", 0.5), row("comm/x/gloo/n4000_p2", 123456.0)])
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "0.50 us" in text
    assert "123 ms" in text


def test_the_worst_case_has_a_column_where_it_was_kept():
    rows_of_one = [row("faults/kill/tessera/p3", 20.0, max_us=31.5), row("faults/kill/torch gloo/p3", 10.0)]
    head, _, first, second = (line.split("|") for line in rows.table(rows_of_one).splitlines())
    place = [word.strip() for word in head].index("max")
    assert [line[place].strip() for line in (first, second)] == ["31.5 us", ""]
    assert "max" not in rows.table([row("comm/x/shm/n4000_p2", 0.5)])


def test_rows_may_be_of_bytes():
    def memory(variant, size):
        values = {f"{which}_bytes": size for which in ("median", "p10", "p90")}
        return {"name": f"dlrm/peak_memory/{variant}/s", "bytes": 0, "repetitions": 1, **values}

    ours, theirs = memory("tessera", 800e6), memory("torchrec", 1.2e9)
    lines = rows.table([ours, theirs]).splitlines()
    assert "800 MB" in lines[2] and "1.5" in lines[2] and "1200 MB" in lines[3]
    assert rows.verdict(ours, theirs) == "slower" and rows.verdict(ours, ours) == "same"


def test_diff_names_what_became_slower(tmp_path):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    rows.save(before, [row("comm/a/shm/n4_p2", 10.0), row("comm/b/shm/n4_p2", 10.0)])
    rows.save(after, [row("comm/a/shm/n4_p2", 20.0), row("comm/b/shm/n4_p2", 10.5)])
    assert [json.loads(line)["name"] for line in after.read_text().splitlines()]
    command = [sys.executable, str(ROOT / "bench/diff.py"), str(before), str(after)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout.splitlines()[0].startswith("slower  comm/a/shm/n4_p2")
    assert "1 same, 0 faster, 1 slower; 0 rows in one file only" in result.stdout
