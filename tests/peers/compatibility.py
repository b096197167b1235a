"""What of the peers' own tests and programs holds on tessera, written down as docs/compatibility.md.

    make compat        # runs everything below, an hour or more on two cores, and writes the page
    python tests/peers/compatibility.py --only tessera_gloo 'test_torchrec_[a-f]*'    # parts of it, no page
    python tests/peers/compatibility.py --page-only    # the page, from what parts have left in build/compat

torch's suite runs with tessera's wrapper on Gloo and on "shm", and what fails there with torch's own wrapper
on Gloo, which says what can be held on a machine without GPUs at all. A test that torch's wrapper holds and
tessera's does not has to be explained by a row of docs/deviations.md, and every comparison with torchrec
has to agree; anything else is an error. What failed tests said is kept beside the results, in build/compat.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree

import torch_suite
import torchrec_names
import torchrec_page

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNS = {  # name: (wrapper, backend)
    "tessera_gloo": ("tessera", "gloo"),
    "tessera_shm": ("tessera", "shm"),
    "torch_gloo": ("torch", "gloo"),  # of what failed in the others
}
CALLED = ("shm", "tessera_gloo")  # on this engine again what it skips and that run does not
RANKS = (2, 4, 8)  # where a test asks for more than there were, the next
# The comparisons of this folder: names by either import, values held against each other. By the beginning of
# a file's name: the packages that it holds ours against.
PEERS = {
    "torchrec": ("torchrec", "fbgemm-gpu-cpu"),
    "megatron": ("megatron-core",),
    "automodel": ("nemo-automodel",),
    "verl": ("verl",),
    "trl": ("trl",),
    "fairchem": ("fairchem-core",),
    "ddp": ("torch",),
    "nemo": ("torch",),  # NeMo-RL's names beside plain torch
}
# Suites that were held once, by hand, and why no program of ours can run them.
NOT_RUN = (
    (
        "torch's test files that are not installed with it: `DistributedDataParallelTest`; DTensor, tensor "
        "parallel, device mesh, distributed checkpoints, ZeRO, Join, functional collectives",
        "held once by hand: 39 of the 41 of `DistributedDataParallelTest` on Gloo and `shm`, 454 of the "
        "others on `shm`",
    ),
    (
        "NeMo-RL",
        "its package in the registry is empty; a training in its names is above, the formulas are in "
        "`tests/python/test_vocab_*`",
    ),
    (
        "TransformerEngine, Liger, flash-attention, quack, Apple's cut cross entropy",
        "kernels for GPUs alone; formulas as of NeMo-RL",
    ),
    ("Automodel's `te_parallel_ce`", "a kernel for GPUs alone; the same"),
    ("torchrec's `distributed.tests`, Megatron, Automodel, verl, TRL, fairchem", "not in their packages"),
    (
        "`ocpmodels.common.gp_utils`",
        "no package of it in the registry; its names are held against formulas in "
        "`tests/python/test_gp_utils.py`, today's against fairchem above",
    ),
)


def comparisons() -> list[str]:
    """The comparisons of this folder, each file a part of its own."""
    return sorted(file.stem for file in HERE.glob("test_*.py"))


def groups() -> dict[str, list[str]]:
    """Return the parts of a whole run, in their order, by what they are called together."""
    return {"suites": list(RUNS), "torchrec": list(torchrec_page.RUNS), "comparisons": comparisons()}


def parts_of(words: list[str]) -> list[str]:
    """Return the parts that the words name: a part, a group of them, or a pattern of parts."""
    parts = [part for group in groups().values() for part in group]
    asked: set[str] = set()
    for word in words:
        found = groups().get(word) or fnmatch.filter(parts, word)
        if not found:
            raise SystemExit(f"no part is called {word!r}; there are {', '.join([*groups(), *parts])}")
        asked.update(found)
    return [part for part in parts if part in asked]


def run_parts(folder: pathlib.Path, parts: list[str]) -> None:
    """Run these parts; what others have left in the folder stays."""
    folder.mkdir(parents=True, exist_ok=True)
    python = str(ROOT / ".venv-peers/bin/python")
    for name in RUNS:
        if name in parts:
            run_suite_of(name, folder, sys.executable)
    torchrec_page.run(folder, python, [part for part in parts if part in torchrec_page.RUNS])
    run_comparisons(folder, python, [part for part in parts if part in comparisons()])


def results_of(folder: pathlib.Path, part: str) -> dict:
    """Return what a part has left."""
    file = folder / f"{part}.json"
    if not file.exists():
        raise SystemExit(f"{file} is not there: run compatibility.py --only {part}")
    return json.loads(file.read_text())


def run_suite_of(name: str, folder: pathlib.Path, python: str) -> None:
    """Run torch's tests with a wrapper on an engine; only at the end are its results those of this run."""
    wrapper, backend = RUNS[name]
    file = folder / f"{name}.running"
    words = ["test_"]
    if wrapper == "torch":
        words = failed_tests({other: results_of(folder, other) for other in RUNS if other != name})
    theirs = results_of(folder, CALLED[1]) if backend == CALLED[0] else {}
    ended = run_at_ranks(file, python, wrapper, backend, words)
    if backend == CALLED[0]:
        # Tests that only another backend's name keeps from running run again, and are told that name.
        asked = skipped_by_name(ended, theirs)
        again = run_at_ranks(file, python, wrapper, backend, sorted(asked), RUNS[CALLED[1]][1])
        ended |= {test: again[test] for test in asked}
    file.write_text(json.dumps(ended, indent=1))
    file.replace(folder / f"{name}.json")


def failed_tests(results: dict[str, dict[str, dict]]) -> list[str]:
    return sorted({test for ended in results.values() for test, how in ended.items() if has_failed(how)})


def has_failed(how: dict) -> bool:
    return how["outcome"] == "failed"


def skipped_by_name(ended: dict[str, dict], of_the_name: dict[str, dict]) -> set[str]:
    """Return what is skipped here, and runs on the engine whose name tests ask for."""
    return {
        test
        for test, how in ended.items()
        if how["outcome"] == "skipped" and of_the_name[test]["outcome"] != "skipped"
    }


def run_at_ranks(
    file: pathlib.Path, python: str, wrapper: str, backend: str, words: list[str], called: str | None = None
) -> dict[str, dict]:
    """Run the tests with these words in their names, on as many ranks as each asks for."""
    ended: dict[str, dict] = {}
    for ranks in RANKS:
        if words:
            as_name = f' called "{called}"' if called else ""
            print(f"torch's suite, {wrapper}'s wrapper on {backend}{as_name}, {ranks} ranks", flush=True)
            for test, how in run_suite(file, python, wrapper, backend, ranks, words, called).items():
                if test not in ended or ended[test]["outcome"] == "skipped":
                    ended[test] = how
        words = sorted(test for test, how in ended.items() if asks_for_ranks(how))
    return ended


def run_suite(
    file: pathlib.Path,
    python: str,
    wrapper: str,
    backend: str,
    ranks: int,
    words: list[str],
    called: str | None,
) -> dict:
    """Run the tests with these words in their names; return how each ended."""
    environment = {
        **os.environ,
        "BACKEND": backend,
        "WORLD_SIZE": str(ranks),
        "PYTHONPATH": str(ROOT / "python"),
    }
    environment.setdefault("TESSERA_SUITE_LIMIT", "180")
    suite = [python, "-W", "ignore", str(HERE / "torch_suite.py"), *words]
    name = ["--called", called] if called else []
    subprocess.run([*suite, "--wrapper", wrapper, *name, "--json", str(file)], env=environment, check=True)
    return json.loads(file.read_text())


def asks_for_ranks(how: dict) -> bool:
    """Whether a test was skipped because there were not as many ranks as it wants."""
    return how["outcome"] == "skipped" and "world size" in how["why"]


def run_comparisons(folder: pathlib.Path, python: str, names: list[str]) -> None:
    """Run these files of this folder, and put how their tests ended beside what is kept of the others."""
    if not names:
        return
    print(f"comparisons with torchrec and others, {len(names)} files", flush=True)
    written = folder / "comparisons.xml"
    written.unlink(missing_ok=True)
    command = [python, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    subprocess.run([*command, f"--junitxml={written}", *(f"{HERE / name}.py" for name in names)], check=False)
    if not written.exists():
        raise SystemExit("the comparisons did not end; what they had left before is kept")
    file = folder / "comparisons.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(kept | read_comparisons(written, names), indent=1))


def read_comparisons(written: pathlib.Path, names: list[str]) -> dict[str, dict[str, dict[str, str]]]:
    """Return how the tests of these files ended, by file."""
    ended: dict[str, dict[str, dict[str, str]]] = {name: {} for name in names}
    for case in xml.etree.ElementTree.parse(written).iter("testcase"):
        # A file that is skipped as a whole, or cannot be read, has its name in the place of a test's.
        place, name = case.get("classname") or case.get("name") or "", case.get("name") or ""
        said = "".join(found.text or "" for found in case if found.tag in ("failure", "error", "skipped"))
        ended[place.split(".")[-1]][name] = {"outcome": outcome_of(case), "why": said[-6000:]}
    return ended


def row_of(name: str, rows: set[str]) -> str | None:
    row = torch_suite.explanation_of(name)
    if row and row not in rows:
        raise SystemExit(f"docs/deviations.md has no row {row!r}, which explains {name}")
    return row


def judge(ours: dict, theirs: dict, rows: set[str]) -> dict[str, dict[str, str]]:
    """Sort the tests into passed, deviates (with its row), not applicable (why) and unexplained."""
    kinds: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for name, test in ours.items():
        if test["outcome"] == "passed":
            kinds["passed"][name] = ""
        elif test["outcome"] == "skipped":
            kinds["not applicable"][name] = test["why"]
        elif row := row_of(name, rows):
            kinds["deviates"][name] = row
        elif name not in theirs:
            raise SystemExit(f"{name} fails, and torch's own wrapper was not asked: run --only torch_gloo")
        elif theirs[name]["outcome"] == "failed":
            kinds["not applicable"][name] = "torch's own wrapper does not hold it without a GPU either"
        else:
            kinds["unexplained"][name] = ""
    return kinds


def count_of(kinds: dict, kind: str) -> int:
    return len(kinds.get(kind, {}))


def suite_lines(judged: dict[str, dict]) -> list[str]:
    version = version_of("torch")
    lines = [
        f"## torch {version}: its own tests of data parallelism and collectives",
        "",
        "The tests are installed with torch (`torch.testing._internal.distributed.distributed_test`); two "
        "ranks, four or eight where a test asks for them, and what they put on GPUs is put on the CPU. "
        "`make test` runs those of data parallelism and the usual collectives on `shm`, `make compat` all.",
        "",
        "| wrapper and engine | tests | passed | deviates | not applicable | unexplained |",
        "|---|---|---|---|---|---|",
    ]
    kinds = ("passed", "deviates", "not applicable", "unexplained")
    for name, result in judged.items():
        wrapper, backend = RUNS[name]
        numbers = [count_of(result, kind) for kind in kinds]
        lines.append(f"| {wrapper}, {backend} | {sum(numbers)} | " + " | ".join(map(str, numbers)) + " |")
    lines += ["", "What deviates, and the row of [deviations.md](deviations.md) that says why:", ""]
    lines += ["| test | engine | row |", "|---|---|---|"]
    for name, result in judged.items():
        for test, row in sorted(result.get("deviates", {}).items()):
            lines.append(f"| `{test}` | {RUNS[name][1]} | {row} |")
    lines += [
        "",
        "What is not applicable, by torch's own reason:",
        "",
        "| reason | engine | tests |",
        "|---|---|---|",
    ]
    for name, result in judged.items():
        reasons = collections.Counter(result.get("not applicable", {}).values())
        for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
            lines.append(f"| {' '.join(reason.split())} | {RUNS[name][1]} | {count} |")
    return lines


def comparison_results(folder: pathlib.Path) -> dict[str, dict[str, dict[str, str]]]:
    """Return how the tests of every file of this folder ended."""
    results = results_of(folder, "comparisons")
    if left := [name for name in comparisons() if name not in results]:
        raise SystemExit(f"not run yet: {', '.join(left)}. Run compatibility.py --only {' '.join(left)}")
    return {name: results[name] for name in comparisons()}


def failed_comparisons(folder: pathlib.Path) -> set[str]:
    """Return the comparisons that did not agree, and the files without one."""
    results = comparison_results(folder)
    failed = {
        f"{name}::{test}"
        for name, ended in results.items()
        for test, how in ended.items()
        if how["outcome"] == "differs"
    }
    return failed | {f"{name}: no comparison ran" for name, ended in results.items() if not ended}


def peer_of(file: str) -> str:
    """The peer that a file of this folder compares with: the first word of its name that is one."""
    return next(peer for peer in PEERS if file.startswith(f"test_{peer}"))


def outcome_of(case: xml.etree.ElementTree.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    return "differs" if case.find("failure") is not None or case.find("error") is not None else "agrees"


def comparison_lines(folder: pathlib.Path) -> list[str]:
    files = {
        name: collections.Counter(how["outcome"] for how in ended.values())
        for name, ended in comparison_results(folder).items()
    }
    peers: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for file, counts in files.items():
        peers[peer_of(file)].update(counts)
    lines = [
        "## Other projects: one program, two imports",
        "",
        "Programs of ours that run with either import, values and gradients held against each other. Of "
        "Megatron, Automodel, verl, TRL and fairchem the files of these names are read from the package, "
        "with stand-ins for what they import beside torch; Megatron runs as it is, a `GPTModel` included. "
        "torchrec's semi-synchronous, fused and prefetching pipelines ask for a GPU's streams and get "
        "stand-ins that run everything at once. "
        "Whole trainings by either import are a DLRM (`dlrm_program.py`), a classifier of pictures under "
        "DistributedDataParallel (`ddp_program.py`) and a potential of atoms whose graphs lie over the ranks "
        "(`fairchem_program.py`). NeMo-RL has no package to run beside: a policy optimisation in its names, "
        "the layers cut over the ranks (`nemo_program.py`), runs beside plain torch in one process.",
        "",
        "| peer | version | programs | agree | differ | skipped |",
        "|---|---|---|---|---|---|",
    ]
    for peer, packages in PEERS.items():
        counts = peers[peer]
        versions = ", ".join(f"{name} {version_of(name)}" for name in packages)
        numbers = [counts.total(), *(counts[kind] for kind in ("agrees", "differs", "skipped"))]
        lines.append(f"| {peer} | {versions} | " + " | ".join(map(str, numbers)) + " |")
    lines += ["", "| file of `tests/peers` | programs |", "|---|---|"]
    lines += [f"| `{name}` | {counts.total()} |" for name, counts in sorted(files.items())]
    lines += ["", "Not run:", "", "| suite | why |", "|---|---|"]
    return lines + [f"| {suite} | {why} |" for suite, why in NOT_RUN]


def libtorch_lines() -> list[str]:
    return [
        "## LibTorch",
        "",
        "Built and tested with 2.13, on the machine with a GPU with 2.11. With 2.14 and newer the build "
        "stops at `src/comm/gloo/gloo_backend.cpp`: LibTorch's package has no Gloo headers; the declarations "
        "in `src/comm/gloo/include` stand for them, and were compared with the Gloo of 2.11 to 2.13 alone. "
        "The registry has 2.14.1 and 2.15.0; nothing was built or run with them yet. "
        "Against the headers of 2.15 the sources of communication that were tried compile; nothing else was "
        "looked at. Before the assertion may say 2.15, the layouts of the classes that are declared there "
        "have to be compared with that release's Gloo, and the tests run.",
    ]


def version_of(package: str) -> str:
    """The version in the Makefile, which installs exactly that one; of torch, which is here."""
    if package == "torch":
        return importlib.metadata.version(package).split("+")[0]
    return re.search(rf"{package}==(\S+)", (ROOT / "Makefile").read_text()).group(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--results", type=pathlib.Path, default=ROOT / "build/compat", help="where results are kept"
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--only",
        nargs="+",
        metavar="PART",
        help="run these and write no page: suites, torchrec, comparisons, or parts of them, * allowed: "
        f"{', '.join([*RUNS, *torchrec_page.RUNS])}, or a test_* file of this folder without .py",
    )
    either.add_argument("--page-only", action="store_true", help="write the page from results that are there")
    arguments = parser.parse_args()
    folder = arguments.results
    if not arguments.page_only:
        run_parts(folder, parts_of(arguments.only or list(groups())))
    if arguments.only:
        return 0
    results = {name: results_of(folder, name) for name in (*RUNS, *torchrec_page.RUNS)}
    rows = set(re.findall(r"^\| (.*?) \| ", (ROOT / "docs/deviations.md").read_text(), re.MULTILINE))
    ours = [name for name in RUNS if name != "torch_gloo"]
    judged = {name: judge(results[name], results["torch_gloo"], rows) for name in ours}
    torchrec_judged = torchrec_page.judge(folder, rows)
    lines = [
        "# Compatibility",
        "",
        "Made by `make compat`: what of the peers' own tests, and of programs written for them, holds after "
        "changing the import. Where Tessera deviates on purpose, [deviations.md](deviations.md) says why.",
        "",
        *suite_lines(judged),
        "",
        *torchrec_page.lines(folder, torchrec_judged, version_of("torchrec")),
        "",
        *torchrec_names.lines(),
        "",
        *comparison_lines(folder),
        "",
        *libtorch_lines(),
    ]
    (ROOT / "docs/compatibility.md").write_text("\n".join(lines) + "\n")
    unexplained = {f"{name}: {test}" for name in ours for test in judged[name].get("unexplained", {})}
    unexplained |= torchrec_page.unexplained(torchrec_judged)
    unexplained |= {f"comparison: {test}" for test in failed_comparisons(folder)}
    for test in sorted(unexplained):
        print(f"unexplained: {test}")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
