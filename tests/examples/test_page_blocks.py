"""What pages show in other languages than shells', Python and C++ is read by what it is meant for."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# test_page_commands.py, test_page_snippets.py and test_pages.py read these; without a language stand
# commands and what they print.
READ_BY_OTHERS = {"", "sh", "python", "cpp"}


def tessera(*words, code=0) -> str:
    result = subprocess.run(
        [TESSERA, *map(str, words)], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "TESSERA_PROFILE": "assume"},
    )  # fmt: skip
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout


def a_list_of_tables(block, folder):
    (folder / "tables.json").write_text(block)
    words = ["--table-list", folder / "tables.json", "--ranks", 2, "--batch", 512]
    planned = json.loads(tessera("plan", "tables", *words, "--json"))["tables"]
    for given, table in zip(json.loads(block)["tables"], planned, strict=True):
        wanted = {"dtype": "FP32", "pooling": "SUM", "ids": 1} | given  # as the table below the block says
        assert {key: table[key] for key in wanted.keys() - {"rows", "dim"}} == {
            key: wanted[key] for key in wanted.keys() - {"rows", "dim"}
        }
        held = sum(shard["rows"] * shard["columns"] for shard in table["shards"])
        assert held == given["rows"] * given["dim"]


def a_problem(block, folder):
    from tessera import _C

    def planned(text):
        kind, answer = _C.planner.plan(text)
        assert kind == "", answer
        assert _C.planner.check(text, answer) == ("", "")
        return json.loads(answer)

    problem = json.loads(block)
    result = planned(block)
    ranks = {table["name"]: [shard[4] for shard in table["shards"]] for table in result["tables"]}
    assert set(ranks) == {table["name"] for table in problem["tables"]}
    for name, rules in problem["rules"].items():
        assert set(ranks[name]) <= set(rules["ranks"])
    for some in problem["apart"]:
        assert len({rank for name in some for rank in ranks[name]}) == sum(len(ranks[name]) for name in some)
    for some in problem["together"]:
        assert len({rank for name in some for rank in ranks[name]}) == 1
    least = {"tables": [{key: table[key] for key in ("name", "rows", "dim")} for table in problem["tables"]]}
    least |= {key: problem[key] for key in ("batch", "ranks")}
    assert planned(json.dumps(least))["version"] == result["version"] == 2


def a_section_of_the_configuration(block, folder):
    """It says what the flags of the table above it say."""
    (folder / "job.toml").write_text(block)
    keys = tomllib.loads(block)
    assert set(keys) == {"ids"}
    flags = {"kind": "--ids", "strings": "--strings"}
    words = [word for key, value in keys["ids"].items() for word in (flags.get(key, f"--id-{key}"), value)]
    printed = tessera("train", "dlrm", "--config", folder / "job.toml", "--print-config")
    assert printed == tessera("train", "dlrm", *words, "--print-config")
    assert printed != tessera("train", "dlrm", "--print-config")
    (folder / "job.toml").write_text(block.replace("eviction", "evictoin"))
    tessera("train", "dlrm", "--config", folder / "job.toml", "--print-config", code=78)


ONE_FAILS = """
import os, torch, torch.distributed as dist, tessera
os.environ["TORCHELASTIC_ERROR_FILE"] = f"error-{os.environ['RANK']}.json"
tessera.comm.init(timeout=60)
dist.barrier()
if dist.get_rank() == 1:
    raise ArithmeticError("loss is nan")
dist.all_reduce(torch.ones(4))
"""


def an_error_file(block, folder):
    """The file of a rank that raised, and that of the one it leaves alone."""
    (folder / "job.py").write_text(ONE_FAILS)
    words = [TESSERA, "run", "-n", "2", "--", sys.executable, "job.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    subprocess.run(words, cwd=folder, env=environment, timeout=100, capture_output=True, check=False)
    shown = json.loads(block)["message"]
    survivor, failed = (json.loads((folder / f"error-{rank}.json").read_text()) for rank in (0, 1))
    assert set(survivor) == set(failed) == {"message"}
    for real in (survivor["message"], failed["message"]):
        assert set(real) == set(shown)
        assert {type(value) for value in real["extraInfo"].values()} == {str}
        seconds, nanoseconds = (real["extraInfo"][key] for key in ("timestamp", "timestamp_ns"))
        assert seconds == nanoseconds[:-9]
        assert re.fullmatch(r"[\w.]+: .+", real["message"], re.DOTALL)
    assert set(survivor["message"]["extraInfo"]) == set(shown["extraInfo"])
    assert survivor["message"]["extraInfo"]["secondary"] == shown["extraInfo"]["secondary"]
    assert set(failed["message"]["extraInfo"]) == set(shown["extraInfo"]) - {"secondary"}
    assert shown["extraInfo"]["timestamp"] == shown["extraInfo"]["timestamp_ns"][:-9]


def lines_of_cmake(file):
    """These are the lines of a project that tests/package configures, builds and runs."""

    def check(block, _):
        built = (ROOT / file).read_text().splitlines()
        lines = [line.split("#")[0].rstrip() for line in block.splitlines()]
        assert lines and [line for line in lines if line not in built] == []
        assert pathlib.Path(file).parent.name in (ROOT / "tests/package/test_cmake_package.py").read_text()

    return check


CHECKS = {
    ("planning.md", "json"): a_list_of_tables,
    ("planner.md", "json"): a_problem,
    ("collision.md", "toml"): a_section_of_the_configuration,
    ("launch.md", "json"): an_error_file,
    ("building.md", "cmake"): lines_of_cmake("tests/package/consumer/CMakeLists.txt"),
    ("train_your_own.md", "cmake"): lines_of_cmake("examples/own_workload/CMakeLists.txt"),
}


def other_blocks():
    """Page, language and text of each block that no other test reads."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        found += [(page.name, *block) for block in BLOCK.findall(text) if block[0] not in READ_BY_OTHERS]
        assert text.count("\n```") == 2 * len(BLOCK.findall(text)), f"{page}: a block that is none"
    return found


def test_every_block_has_a_check():
    assert sorted((page, language) for page, language, _ in other_blocks()) == sorted(CHECKS)


@pytest.mark.parametrize(("page", "language"), CHECKS)
def test_the_block_is_what_it_is_meant_for(page, language, tmp_path):
    (block,) = (text for of, written, text in other_blocks() if (of, written) == (page, language))
    CHECKS[page, language](block, tmp_path)
