"""torchrec's own tests on docs/compatibility.md: run, judged by torchrec itself, and written down."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import subprocess
from collections.abc import Sequence

HERE = pathlib.Path(__file__).resolve().parent
RUNS = {  # file of results: (what the tests import, engine)
    "torchrec_on_gloo": ("tessera", "gloo"),
    "torchrec_on_shm": ("tessera", "shm"),
    "torchrec_itself": ("torchrec", "gloo"),
}
OURS = [name for name, (root, _) in RUNS.items() if root == "tessera"]
KINDS = ("passed", "deviates", "not applicable", "unexplained")
# Part of a test's name, and the first cell of the row of docs/deviations.md that says why it fails.
EXPLAINED = {
    "test_initialize_torch_state_error": "`_initialize_torch_state` of a sharded collection",
    "test_load_state_dict_cw_multiple_shards": "`ParameterConstraints(min_partition=)` of columns",
    "test_no_sparse": "`EmbeddingBagCollection` without tables",
    "test_sharding_ebc_validate_input_only_once": "what is wrong with the keys of a batch",
}


def explanation_of(name: str) -> str | None:
    """The row of docs/deviations.md that says why this test ends differently."""
    return next((row for part, row in EXPLAINED.items() if part in name), None)


def run(folder: pathlib.Path, python: str, names: Sequence[str]) -> None:
    """Run every test as these of RUNS say: on an engine, or with torchrec itself."""
    for name in names:
        root, engine = RUNS[name]
        print(f"torchrec's own tests, imports of {root}, on {engine}", flush=True)
        suite = [python, "-W", "ignore", str(HERE / "torchrec_suite.py"), "--root", root, "--engine", engine]
        environment = {"TESSERA_SUITE_LIMIT": "180", **os.environ}
        subprocess.run([*suite, "--json", f"{folder}/{name}.json"], env=environment, check=True)


def judge(folder: pathlib.Path, rows: set[str]) -> dict[str, dict[str, dict[str, str]]]:
    """Sort the tests of each engine into KINDS, each with its row or reason."""
    found = {name: json.loads((folder / f"{name}.json").read_text())["tests"] for name in RUNS}
    judged = {}
    for name in OURS:
        kinds: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
        for test, how in found[name].items():
            row = explanation_of(test)
            if how["outcome"] == "passed":
                kinds["passed"][test] = ""
            elif how["outcome"] == "skipped":
                kinds["not applicable"][test] = how["why"]
            elif row and row not in rows:
                raise SystemExit(f"docs/deviations.md has no row {row!r}, which explains {test}")
            elif row:
                kinds["deviates"][test] = row
            elif found["torchrec_itself"][test]["outcome"] == "failed":
                kinds["not applicable"][test] = "torchrec itself does not hold it without a GPU either"
            else:
                kinds["unexplained"][test] = ""
        judged[name] = kinds
    return judged


def lines(folder: pathlib.Path, judged: dict[str, dict[str, dict[str, str]]], version: str) -> list[str]:
    """Return the part of the page."""
    missing = json.loads((folder / f"{OURS[0]}.json").read_text())["missing"]
    itself = json.loads((folder / "torchrec_itself.json").read_text())["tests"]
    outcomes = collections.Counter(how["outcome"] for how in itself.values())
    page = [
        f"## torchrec {version}: its own tests",
        "",
        "What its package carries, with `tessera` wherever the files say `torchrec`: the tests of "
        "`test_model_parallel` and `test_model_parallel_base` in `distributed.test_utils`, and those of "
        "`models.experimental`; each on Gloo and on `shm`, with the examples that Hypothesis takes without "
        "randomness. What asks for GPUs is tried on the CPU. torchrec itself, on Gloo, passes "
        f"{outcomes['passed']} of the {len(itself)}, fails {outcomes['failed']} and skips "
        f"{outcomes['skipped']}. `make test` runs all on `shm`. Left out is `schema.test_schema_utils`: it "
        "tests a tool that compares signatures, and nothing of Tessera occurs in it.",
        "",
        "| imports, engine | tests | " + " | ".join(KINDS) + " |",
        "|---|---|" + "---|" * len(KINDS),
    ]
    for name, kinds in judged.items():
        counts = [len(kinds[kind]) for kind in KINDS]
        page.append(f"| {', '.join(RUNS[name])} | {sum(counts)} | " + " | ".join(map(str, counts)) + " |")
    if any(kinds["deviates"] for kinds in judged.values()):
        page += [
            "",
            "| test that deviates | engine | row of [deviations.md](deviations.md) |",
            "|---|---|---|",
        ]
        for name, kinds in judged.items():
            page += [
                f"| `{test}` | {RUNS[name][1]} | {row} |" for test, row in sorted(kinds["deviates"].items())
            ]
    page += ["", "| test that is not applicable | engine | reason |", "|---|---|---|"]
    for name, kinds in judged.items():
        for test, why in sorted(kinds["not applicable"].items()):
            page.append(f"| `{test}` | {RUNS[name][1]} | {' '.join(why.split())} |")
    names = ", ".join(f"`{name.removeprefix('tessera.')}`" for name in missing)
    return [
        *page,
        "",
        f"Names that these files import and Tessera has not, none of which a test used: {names}.",
    ]


def unexplained(judged: dict[str, dict[str, dict[str, str]]]) -> set[str]:
    """Return what makes the program fail."""
    return {f"{name}: {test}" for name, kinds in judged.items() for test in kinds["unexplained"]}
