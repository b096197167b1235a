"""What of the peers' own tests and programs holds on tessera, written down as docs/compatibility.md.

    make compat        # runs everything below, about half an hour, and writes the page

torch's suite runs with tessera's wrapper on Gloo and on "shm", and what fails there with torch's own wrapper
on Gloo, which says what can be held on a machine without GPUs at all. A test that torch's wrapper holds and
tessera's does not has to be explained by a row of docs/deviations.md, and every comparison with torchrec
has to agree; anything else is an error. What failed tests said is kept beside the results, in build/compat.
"""

from __future__ import annotations

import argparse
import collections
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
    ("TransformerEngine, Liger, flash-attention, quack", "kernels for GPUs alone; formulas as of NeMo-RL"),
    ("Automodel's `te_parallel_ce`", "a kernel for GPUs alone; the same"),
    ("torchrec's `distributed.tests`, Megatron, Automodel, verl, TRL, fairchem", "not in their packages"),
)


def run_suites(folder: pathlib.Path, python: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, dict]] = {}
    for name, (wrapper, backend) in RUNS.items():
        file = folder / f"{name}.json"
        words = failed_tests(results) if wrapper == "torch" else ["test_"]
        ended = run_at_ranks(file, python, wrapper, backend, words)
        if backend == CALLED[0]:
            # Tests that only another backend's name keeps from running run again, and are told that name.
            asked = skipped_by_name(ended, results[CALLED[1]])
            again = run_at_ranks(file, python, wrapper, backend, sorted(asked), RUNS[CALLED[1]][1])
            ended |= {test: again[test] for test in asked}
        file.write_text(json.dumps(ended, indent=1))
        results[name] = ended


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


def run_comparisons(folder: pathlib.Path) -> None:
    python = ROOT / ".venv-peers/bin/python"
    print("comparisons with torchrec and others", flush=True)
    command = [str(python), "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    subprocess.run([*command, f"--junitxml={folder}/comparisons.xml", str(HERE)], check=False)


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


def failed_comparisons(folder: pathlib.Path) -> set[str]:
    """Return the comparisons that did not agree, or the one sentence that says that none ran."""
    tree = xml.etree.ElementTree.parse(folder / "comparisons.xml")
    cases = list(tree.iter("testcase"))
    if not cases:
        return {"no comparison ran"}
    bad = (case for case in cases if case.find("failure") is not None or case.find("error") is not None)
    return {f"{case.get('classname')}::{case.get('name')}" for case in bad}


def peer_of(file: str) -> str:
    """The peer that a file of this folder compares with: the first word of its name that is one."""
    return next(peer for peer in PEERS if file.startswith(f"test_{peer}"))


def outcome_of(case: xml.etree.ElementTree.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    return "differs" if case.find("failure") is not None or case.find("error") is not None else "agrees"


def comparison_lines(folder: pathlib.Path) -> list[str]:
    files: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case in xml.etree.ElementTree.parse(folder / "comparisons.xml").iter("testcase"):
        # A file that is skipped as a whole has its name in the place of a test's.
        place = case.get("classname") or case.get("name") or ""
        files[place.split(".")[-1]][outcome_of(case)] += 1
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
        "The registry has 2.14.0; nothing was built or run with it yet. "
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
    parser.add_argument("--page-only", action="store_true", help="write the page from results that are there")
    arguments = parser.parse_args()
    folder = arguments.results
    if not arguments.page_only:
        run_suites(folder, sys.executable)
        torchrec_page.run(folder, str(ROOT / ".venv-peers/bin/python"))
        run_comparisons(folder)
    results = {name: json.loads((folder / f"{name}.json").read_text()) for name in RUNS}
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
