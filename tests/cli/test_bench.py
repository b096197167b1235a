"""`tessera bench`: what it lists, what it runs, what it says of missing things, and its table."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
sys.path.insert(0, str(ROOT / "bench"))

import run as runner  # noqa: E402


def bench(*words, code=0, program=TESSERA, limit=120, **environment):
    result = subprocess.run(
        [program, "bench", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=limit,
        env={**os.environ, **environment},
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


@pytest.fixture
def tree(tmp_path):
    """A source tree whose runner says what it was asked."""
    script(tmp_path / "bench/run.py", "import sys; print('asked', *sys.argv[1:])")
    script(tmp_path / ".venv/bin/python", f"import os, sys; os.execv({sys.executable!r}, sys.argv)")
    return tmp_path


@pytest.fixture
def installed(tmp_path):
    """The program where no source tree is around it."""
    return shutil.copy(TESSERA, tmp_path / "tessera")


def row(name, median, **more):
    numbers = {
        "median_us": median,
        "p10_us": median - 1,
        "p90_us": median + 1,
        "bytes": 4000,
        "repetitions": 10,
    }
    return json.dumps({"name": name, "state": "near", **numbers, **more})


@pytest.fixture
def measured(tmp_path):
    """A worker's folder whose collectives_bench prints four rows."""
    rows = [
        row("comm/all_reduce/shm/n4000_p2", 10.0),
        row("comm/all_reduce/gloo/n4000_p2", 250.0),
        row("comm/all_reduce/gloo/n4000_p2", 900.0, state="far"),
        row("comm/broadcast/shm/n50000000_p2", 20_000.0, bytes=50_000_000, floor_us=15_000.0, others=0.2),
    ]
    text = f"import sys\nprint('\\n'.join({rows!r}))\nprint('asked', *sys.argv[1:], file=sys.stderr)"
    script(tmp_path / "collectives_bench", text)
    return {"TESSERA_WORKER": str(script(tmp_path / "tessera-worker", ""))}


def test_the_list_names_every_benchmark_of_the_tree():
    lines = bench("--source", ROOT).stdout.splitlines()
    assert lines[0] == "a program of its own" and lines[1].split()[0] == "collectives"
    assert lines[2].split()[0] == "serve"
    assert lines[3] == f"of the source tree in {ROOT}"
    told = [line.split(maxsplit=1) for line in lines[4:] if not line.startswith("  note: ")]
    assert [name for name, _ in told] == list(runner.BENCHMARKS)
    for name, title in told:
        assert title.startswith(runner.TITLES[name])


def test_the_tree_is_asked_for_what_was_named(tree):
    told = bench("embedding", "--source", tree, "jagged", "--quick", "--json").stdout
    assert told == "asked embedding jagged --print-only --quick --json\n"
    assert bench("--source", tree).stdout.endswith("asked --list\n")


def test_an_installed_program_lists_what_is_its_own(installed, measured):
    lines = bench(program=installed, **measured).stdout.splitlines()
    assert lines == [
        "a program of its own",
        "  collectives          Collectives over shared memory, beside Gloo",
        "  serve                Requests to a server, at times of their own",
        "of the source tree: there is none around this program; --source names one",
    ]


def test_what_is_missing_gets_three_lines(tmp_path, tree, installed):
    nowhere = {"TESSERA_WORKER": str(script(tmp_path / "other/tessera-worker", ""))}
    shutil.rmtree(tree / ".venv")
    empty = tmp_path / "empty"
    empty.mkdir()
    inner = shutil.copy(installed, tmp_path.parent / f"{tmp_path.name}_alone")
    for words, program, first in (
        (["embedding"], inner, "error: bench: there is no source tree to measure embedding in"),
        (["embedding", "--source", empty], TESSERA, f"error: bench: {empty} is not Tessera's source tree"),
        (
            ["embedding", "--source", tree],
            TESSERA,
            f"error: bench: there is no Python to run {tree}/bench/run.py",
        ),
        (["collectives"], TESSERA, "error: bench: there is no collectives_bench program"),
    ):
        lines = bench(*words, program=program, code=78, **nowhere).stderr.splitlines()
        assert lines[0] == first
        assert [line[:7] for line in lines[1:]] == ["  why: ", "  try: "]


def test_the_table_has_ours_and_the_peer(measured):
    result = bench("collectives", "--op", "all_reduce", "--ranks", "4", "--quick", **measured)
    assert result.stderr == "asked --ranks 4 --seconds 0.02 --op all_reduce\n"
    lines = result.stdout.splitlines()
    assert lines[0] == "4 ranks; bytes are those of one rank"
    assert " ".join(lines[1].split()) == "operation engine cores bytes median p10 p90 gloo x gloo floor"
    assert " ".join(lines[2].split()) == "all_reduce shm near 4000 10.0 us 9.00 us 11.0 us 250.0 us 25.0"
    assert " ".join(lines[3].split()) == "broadcast shm near! 50000000 20.0 ms 20.0 ms 20.0 ms 75 %"
    assert len(lines) == 4 and max(map(len, lines)) <= 100
    told = json.loads(bench("collectives", "--json", **measured).stdout)
    assert (told["benchmark"], told["ranks"], len(told["rows"])) == ("collectives", 2, 4)
    assert told["rows"][0]["peer_us"] == 250.0 and told["rows"][0]["ratio"] == 25.0
    assert "ratio" not in told["rows"][1] and told["rows"][3]["floor_share"] == 0.75


def test_a_benchmark_that_fails_is_no_table(tmp_path):
    script(tmp_path / "collectives_bench", "import sys; sys.exit('wrong values')")
    worker = str(script(tmp_path / "tessera-worker", ""))
    lines = bench("collectives", code=70, TESSERA_WORKER=worker).stderr.splitlines()
    assert lines[0] == "wrong values"
    assert lines[1] == "error: bench: collectives_bench gave no whole answer"
    assert lines[2] == "  why: it failed; see above"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--json"], "bench: --json needs the name of a benchmark"),
        (["collectives", "embedding"], "bench: collectives is measured by itself"),
        (
            ["embedding", "--op", "broadcast"],
            "bench: --ranks and --op are for collectives, not for embedding",
        ),
        (["collectives", "--ranks", "1"], "--ranks"),
        (["collectives", "--opp", "x"], "did you mean --op?"),
    ],
)
def test_wrong_words_get_one_line(words, text):
    told = bench(*words, code=2).stderr
    assert text in told and len(told.splitlines()) == 1


@pytest.mark.skipif(
    not (pathlib.Path(TESSERA).parent / "collectives_bench").exists(), reason="the benchmarks are not built"
)
def test_the_real_one_has_rows_for_every_size():
    told = json.loads(bench("collectives", "--op", "broadcast", "--quick", "--json").stdout)
    sizes = {row["bytes"] for row in told["rows"] if "/shm/" in row["name"]}
    assert sizes == {4, 4_000, 64_000, 1_000_000, 25_000_000, 100_000_000}
    assert all(row["ratio"] > 0 for row in told["rows"] if "/shm/" in row["name"])


@pytest.mark.skipif(
    not (ROOT / "build/release/bin/table_bench").exists(), reason="the benchmarks are not built"
)
@pytest.mark.timeout(250)
def test_benchmarks_of_the_tree_run():
    """The command of docs/bench.md; --quick makes minutes of it seconds, --json lets it be read."""
    page = (ROOT / "docs/bench.md").read_text()
    names = re.search(r"^tessera bench (embedding(?: \w+)+) +#", page, re.MULTILINE)[1].split()
    told = json.loads(bench(*names, "--quick", "--json", "--source", ROOT, limit=240).stdout)
    assert list(told) == names == ["embedding", "sharding_step"]
    for name, prefix in zip(names, ("embedding/", "sharding/"), strict=True):
        ours = [row for row in told[name] if row["name"].startswith(prefix) and "repetitions" in row]
        assert ours and all(row["median_us"] > 0 for row in ours)
        if os.access(runner.PEERS_PYTHON, os.X_OK):
            assert any(row.get("ratio", 0) > 0 for row in ours), name


@pytest.mark.skipif(not os.access(runner.PEERS_PYTHON, os.X_OK), reason="the peers are not installed")
def test_conversions_are_measured_beside_pandas_and_the_floor():
    ((python, program),) = runner.BENCHMARKS["data_convert"]
    words = ["--rows", "3000", "--repetitions", "2", "--trainings", "0"]
    result = subprocess.run([python, program, *words], capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    told = {row["name"]: row for row in runner.with_peers(runner.row_files.parse(result.stdout))}
    whos = ("tessera", "pyarrow_reads", "pandas_reads", "pandas")
    names = {f"data/convert_{kind}/{who}/3000" for kind in ("csv", "parquet") for who in whos}
    assert set(told) == names
    for kind in ("csv", "parquet"):
        ours, theirs = (told[f"data/convert_{kind}/{who}/3000"] for who in ("tessera", "pandas"))
        assert ours["peer"] == theirs["name"] and ours["ratio"] > 0
        assert 0 < ours["floor_us"] == theirs["floor_us"]


def test_what_cannot_run_is_left_out_and_named(monkeypatch, capsys, tmp_path):
    program = script(tmp_path / "own_bench", f"print({row('embedding/lookup/tessera/n1', 5.0)!r})")
    monkeypatch.setattr(runner, "BENCHMARKS", {"embedding": [[str(program)], [runner.PEERS_PYTHON, "x.py"]]})
    monkeypatch.setattr(runner, "PEERS_PYTHON", str(tmp_path / "no/python"))
    runner.BENCHMARKS["embedding"][1][0] = runner.PEERS_PYTHON
    monkeypatch.setattr(runner, "wait_for_quiet", lambda limit: None)
    assert runner.print_rows(["embedding"], quick=False, as_json=True) == 0
    told = capsys.readouterr()
    assert told.err == (
        f"bench: embedding: the peers' Python, {runner.PEERS_PYTHON}, is not there; make peers installs it\n"
    )
    assert [row["median_us"] for row in json.loads(told.out)["embedding"]] == [5.0]
    program.unlink()
    assert runner.print_rows(["embedding"], quick=False, as_json=False) == 78
    assert f"{program} is not built; make everything builds it" in capsys.readouterr().err


def test_rows_are_given_their_peers():
    ours, peer = (
        json.loads(row("embedding/lookup/tessera/n1", 5.0)),
        json.loads(row("embedding/lookup/fbgemm/n1", 8.0)),
    )
    told = runner.with_peers([ours, peer])
    assert (told[0]["peer"], told[0]["peer_median"], told[0]["ratio"]) == (peer["name"], 8.0, 1.6)
    assert "peer" not in told[1]


def test_the_page_says_of_which_state_its_tables_are(monkeypatch):
    page = (ROOT / "docs/performance.md").read_text()
    section = runner.document_section(runner.kept())
    assert page.split(runner.BEGIN)[1].split(runner.END)[0].strip() == section.strip()
    monkeypatch.setattr(runner, "LANDMARKS", {"2026-02-01": "a new loop", "2026-03-01": "a new reducer"})
    days = {"slow": "2026-01-31", "quick": "2026-02-01", "late": "2026-03-01"}
    assert runner.states(days).endswith(
        "Older than a new loop (2026-02-01): `slow`. Older than a new reducer (2026-03-01): all but `late`."
    )
    both = "Older than a new loop (2026-02-01) and a new reducer (2026-03-01): "
    assert runner.states({"slow": "2026-01-31"}).endswith(both + "all.")
    assert "Older" not in runner.states({"late": "2026-03-01"})
