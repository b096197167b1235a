"""`tessera trace`: ranks on one clock, sums with known answers, and files that cannot be used."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))


def trace(*words):
    return subprocess.run([TESSERA, "trace", *map(str, words)], capture_output=True, text=True, timeout=60)


def span(name, begin, end, phase=None, process=0, thread=0, **args):
    event = {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": begin, "dur": end - begin}
    if phase is not None:
        event["cat"] = phase
    return event | ({"args": args} if args else {})


def written(path, events, **more):
    path.write_text(json.dumps({"traceEvents": events, **more}))
    return path


def merged(tmp_path, *words):
    result = trace("merge", "--to", tmp_path / "all.json", *words)
    assert result.returncode == 0, result.stderr
    return json.loads((tmp_path / "all.json").read_text())["traceEvents"]


def names_of(events):
    return {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}


@pytest.fixture
def two_ranks(tmp_path):
    """Steps of 100: rank 0 computes 60 and waits 30 inside of it, rank 1 computes 80, nothing for 20."""
    a = [
        span("forward", 0, 90, "dense", step=1, wait=False),
        span("all_reduce", 50, 80, "dense", step=1, wait=True),
        span("step", 95, 100, "optimizer", step=1, wait=False),
        span("copy", 0, 10, "data", thread=1, step=1, wait=False),
    ]
    b = [
        span("forward", 0, 80, "dense", step=1, wait=False),
        span("step", 100, 110, "optimizer", step=2, wait=False),
    ]
    return written(tmp_path / "rank0.json", a), written(tmp_path / "rank1.json", b)


def test_a_trace_that_is_merged_is_not_written(two_ranks, tmp_path):
    (tmp_path / "link.json").symlink_to("rank1.json")
    (tmp_path / "run").mkdir()
    shutil.copy(two_ranks[0], tmp_path / "run/trace.json")
    before = [pathlib.Path(path).read_bytes() for path in two_ranks]
    for out in ("rank0.json", "link.json", "run/trace.json"):
        done = trace("merge", "--to", tmp_path / out, *two_ranks, tmp_path / "run")
        assert done.returncode == 65 and f"{out}: is read and cannot be written too." in done.stderr
    assert [pathlib.Path(path).read_bytes() for path in two_ranks] == before


def test_sums_with_known_answers(two_ranks):
    result = trace("summary", "--json", *two_ranks)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["slowest_rank"] == 1
    first, second = answer["ranks"]
    assert (first["time"], first["busy"], first["waited"], first["idle"]) == (100, 65, 30, 5)
    assert (second["time"], second["busy"], second["waited"], second["idle"]) == (110, 90, 0, 20)
    assert first["groups"] == {
        "dense": {"count": 2, "total": 90, "waited": 30},
        "optimizer": {"count": 1, "total": 5, "waited": 0},
    }
    groups = {group.pop("name"): group for group in answer["groups"]}
    assert groups["dense"] == {
        "count": 3, "total": 170, "mean": 85, "waited": 30, "share": pytest.approx(170 / 210),
    }  # fmt: skip
    assert groups["idle"]["total"] == 25
    assert sum(group["share"] for group in groups.values()) == pytest.approx(1)


def test_by_name_a_span_is_without_those_inside(two_ranks):
    answer = json.loads(trace("summary", "--json", "--by", "name", two_ranks[0]).stdout)
    assert answer["ranks"][0]["groups"] == {
        "forward": {"count": 1, "total": 60, "waited": 0},
        "all_reduce": {"count": 1, "total": 30, "waited": 30},
        "step": {"count": 1, "total": 5, "waited": 0},
    }


def test_table_for_people(two_ranks):
    lines = trace("summary", *two_ranks).stdout.splitlines()
    assert lines[0] == "trace    2 ranks, 1 steps, 0.1 ms"
    assert lines[2].split() == ["phase", "spans", "total", "ms", "ms/step", "share", "waited"]
    assert lines[3].split() == ["dense", "3", "0.170", "0.085", "81.0", "%", "14.3", "%"]
    assert lines[5].split()[0] == "idle"
    assert lines[-1] == "slowest  rank 1: busy for 0.090 ms, 16.1 % longer than the mean"
    assert max(map(len, lines)) <= 100
    short = trace("summary", "--top", "1", *two_ranks).stdout
    assert "dense" in short and "optimizer" not in short and "idle" in short


def test_clocks_begin_where_the_files_say(tmp_path):
    a = written(
        tmp_path / "a.json", [span("x", 5, 6)], baseTimeNanoseconds=10_000, distributedInfo={"rank": 3}
    )
    b = written(
        tmp_path / "b.json", [span("x", 1, 2)], baseTimeNanoseconds=2_000, distributedInfo={"rank": 1}
    )
    events = merged(tmp_path, a, b)
    assert names_of(events) == {1: "rank 1", 3: "rank 3"}
    assert {e["pid"]: e["ts"] for e in events if e["ph"] == "X"} == {1: 0, 3: 12}


def test_align_moves_clocks_so_that_a_collective_ends_at_once(tmp_path):
    a = written(tmp_path / "rank_0.json", [span("x", 0, 4), span("sum", 4, 10), span("sum", 20, 21)])
    b = written(tmp_path / "rank_1.json", [span("x", 1000, 1008), span("sum", 1008, 1010)])
    events = merged(tmp_path, "--align", "sum", a, b)
    ends = {(e["pid"], e["name"]): e["ts"] + e["dur"] for e in reversed(events) if e["ph"] == "X"}
    assert ends[0, "sum"] == ends[1, "sum"] == 10
    assert ends[1, "x"] == 8


def test_rows_arrows_and_further_processes(tmp_path):
    events = [
        {"ph": "M", "name": "process_name", "pid": 77, "args": {"name": "python"}},
        {"ph": "M", "name": "process_name", "pid": "GPU", "args": {"name": "device 0"}},
        {"ph": "M", "name": "thread_name", "pid": 77, "tid": 5, "args": {"name": "main"}},
        span("work", 0, 10, process=77, thread=5),
        span("kernel", 0, 2, process="GPU", thread=7),
        {"ph": "s", "name": "arrow", "id": 4, "pid": 77, "tid": 5, "ts": 1},
    ]
    files = [written(tmp_path / f"rank{rank}.json", events) for rank in range(2)]
    both = merged(tmp_path, *files)
    names = names_of(both)
    assert [names[0], names[1]] == ["rank 0", "rank 1"]
    assert sorted(names.values()) == ["rank 0", "rank 0: device 0", "rank 1", "rank 1: device 0"]
    assert {e["id"] for e in both if e["ph"] == "s"} == {"0:4", "1:4"}
    assert [e["pid"] for e in both if e.get("name") == "thread_name"] == [0, 1]
    # What was merged is read again, rank by rank.
    again = json.loads(trace("summary", "--json", tmp_path / "all.json").stdout)
    assert [rank["rank"] for rank in again["ranks"]] == [0, 1]
    assert [rank["time"] for rank in again["ranks"]] == [10, 10]


def test_a_folder(tmp_path, two_ranks):
    answer = json.loads(trace("summary", "--json", tmp_path).stdout)
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]
    written(tmp_path / "trace.json", [span("only", 0, 3)])
    assert json.loads(trace("summary", "--json", tmp_path).stdout)["groups"][0]["total"] == 3


PROFILED = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, record_function
torch.set_num_threads(1)
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    for _ in range(3):
        with record_function("mine"):
            torch.ones(50, 50) @ torch.ones(50, 50)
profiler.export_chrome_trace(sys.argv[1])
"""


def test_what_torch_exports(tmp_path):
    path = tmp_path / "exported.json"
    subprocess.run([sys.executable, "-c", PROFILED, path], check=True, timeout=60, capture_output=True)
    answer = json.loads(trace("summary", "--json", "--by", "name", path).stdout)
    assert answer["ranks"][0]["groups"]["mine"]["count"] == 3
    assert answer["ranks"][0]["groups"]["aten::mm"]["count"] == 3
    assert names_of(merged(tmp_path, path))[0] == "rank 0"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.json", "{", "is no trace"),
        ("x.json", '{"steps": []}', "is no trace"),
        ("x.json", '{"traceEvents": {}}', "is no trace: traceEvents is no list"),
        ("x.json", '{"traceEvents": [3]}', "has an event that makes no sense: 3"),
        ("x.json", '{"traceEvents": [{"ph": "X", "ts": "now"}]}', "has an event that makes no sense"),
        ("x.json", '{"traceEvents": []}', "holds no events"),
        ("x.json", '{"traceEvents": [{"ph": "i", "ts": 1}]}', "rank 0 has no spans"),
        ("x.json", "\x1f\x8b", "is compressed; unpack it with gunzip"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    result = trace("summary", path)
    assert result.returncode == 65
    assert result.stderr.startswith("error: trace: ")
    assert message in result.stderr.splitlines()[0]
    assert len(result.stderr.splitlines()) == 3


def test_ranks_and_spans_that_do_not_fit(tmp_path, two_ranks):
    twice = written(tmp_path / "also_rank1.json", [span("x", 0, 1)])
    result = trace("merge", "--to", tmp_path / "all.json", *two_ranks, twice)
    assert (result.returncode, "are both of rank 1." in result.stderr) == (65, True)
    result = trace("merge", "--align", "all_reduce", "--to", tmp_path / "all.json", *two_ranks)
    assert result.returncode == 65
    assert "rank 1 has no span called 'all_reduce'" in result.stderr
    assert not (tmp_path / "all.json").exists()
    assert "is not there" in trace("summary", tmp_path / "none").stderr
    (tmp_path / "empty").mkdir()
    assert "holds no .json file" in trace("summary", tmp_path / "empty").stderr
    result = trace("merge", "--to", tmp_path / "no" / "all.json", *two_ranks)
    assert (result.returncode, "cannot write" in result.stderr) == (65, True)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "error: trace: say what to do, as in tessera trace summary FILE"),
        (["sumary", "x"], "error: trace: there is no 'sumary': did you mean summary?"),
        (["summary"], "error: trace: name files or folders, as in tessera trace summary FILE"),
        (["merge", "x"], "error: trace: merge needs --to PATH"),
        (["summary", "x", "--to", "y"], "error: trace: --to is for merge"),
        (["summary", "x", "--align", "y"], "error: trace: --align is for merge"),
        (["summary", "x", "--by", "rank"], "error: trace: --by is phase or name, not 'rank'"),
        (["summary", "x", "--top", "0"], "error: trace: --top is 1 or more"),
        (["summary", "x", "--jsom"], "error: trace: unknown flag --jsom: did you mean --json?"),
    ],
)
def test_wrong_words_get_one_line(words, text):
    result = trace(*words)
    assert (result.returncode, result.stderr.strip()) == (2, text)


def test_help_fits_a_screen_and_names_every_flag():
    text = trace("--help").stdout
    lines = text.splitlines()
    assert 10 < len(lines) <= 40
    assert max(map(len, lines)) <= 100
    completion = subprocess.run([TESSERA, "completion", "fish"], capture_output=True, text=True, timeout=30)
    lines = [line for line in completion.stdout.splitlines() if "from trace'" in line]
    flags = [line.split(" -l ")[1].split()[0] for line in lines if " -l " in line]
    assert sorted(set(flags)) == ["align", "by", "help", "json", "to", "top"]
    assert all(f"--{flag}" in text for flag in flags if flag != "help")
