"""Run all benchmarks one after another, keep the rows, and write the tables of docs/performance.md.

    .venv/bin/python bench/run.py [NAME ...] [--quick] [--no-document]
    .venv/bin/python bench/run.py NAME ... --print-only [--json]
    .venv/bin/python bench/run.py --list

Builds nothing. NAME is one of the benchmarks below; without one, all run. Rows go to
bench/results/<name>.json, one line each; with --print-only nowhere, and what is not installed or
not built is left out with a line that says so.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

import rows as row_files

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "build/release/bin"
RESULTS = ROOT / "bench/results"
DOCUMENT = ROOT / "docs/performance.md"
BEGIN = "<!-- bench: begin -->"
END = "<!-- bench: end -->"
PEERS_PYTHON = str(ROOT / ".venv-peers/bin/python")
EXIT_CONFIGURATION = 78

BENCHMARKS = {
    "comm_collectives": [[str(PROGRAMS / "collectives_bench")]],
    "python_collectives": [[sys.executable, str(ROOT / "bench/compare/torch_collectives.py")]],
    "launchers": [[sys.executable, str(ROOT / "bench/compare/launchers.py")]],
    "kernels_reduce": [[str(PROGRAMS / "reduce_bench")]],
    "ddp_hooks": [[str(PROGRAMS / "hooks_bench")]],
    "graph_layer": [[str(PROGRAMS / "layer_bench")]],
    "graph_gather": [[sys.executable, str(ROOT / "bench/compare/graph_gather.py")]],
    "vocab_cross_entropy": [
        [str(PROGRAMS / "cross_entropy_bench")],
        # The peer once more, with huge pages for LibTorch's allocator.
        ["env", "THP_MEM_ALLOC_ENABLE=1", str(PROGRAMS / "cross_entropy_bench")],
    ],
    "vocab_logprob": [[sys.executable, str(ROOT / "bench/compare/vocab_logprob.py")]],
    "checkpoint": [[sys.executable, str(ROOT / "bench/checkpoint/checkpoint_bench.py")]],
    "data_parallel_step": [[sys.executable, str(ROOT / "bench/compare/ddp_step.py")]],
    "data_convert": [[PEERS_PYTHON, str(ROOT / "bench/compare/data_convert.py")]],
    "dlrm_parts": [[str(PROGRAMS / "dlrm_bench")]],
    "dlrm_step": [[PEERS_PYTHON, str(ROOT / "bench/compare/torchrec_dlrm.py")]],
    "embedding": [
        [str(PROGRAMS / "table_bench")],
        [PEERS_PYTHON, str(ROOT / "bench/compare/fbgemm_tables.py")],
    ],
    "sharding_step": [
        [str(PROGRAMS / "step_bench")],
        [PEERS_PYTHON, str(ROOT / "bench/compare/torchrec_sharded.py")],
    ],
    "planner": [[str(PROGRAMS / "planner_bench")]],
    "collision": [
        [str(PROGRAMS / "id_table_bench")],
        [PEERS_PYTHON, str(ROOT / "bench/compare/torchrec_collision.py")],
        [PEERS_PYTHON, str(ROOT / "bench/compare/torchrec_collision.py"), "--ids", "10000000"],
    ],
    "growing_step": [[sys.executable, str(ROOT / "bench/compare/growing_step.py")]],
    "serving_lookup": [
        [str(PROGRAMS / "lookup_bench")],
        [PEERS_PYTHON, str(ROOT / "bench/compare/fbgemm_quant.py")],
        ["env", "THP_MEM_ALLOC_ENABLE=1", PEERS_PYTHON, str(ROOT / "bench/compare/fbgemm_quant.py")],
    ],
    "serving": [[sys.executable, str(ROOT / "bench/serving/serve_bench.py")]],
    "jagged": [[PEERS_PYTHON, str(ROOT / "bench/compare/jagged_operators.py")]],
    "faults": [[sys.executable, str(ROOT / "bench/compare/faults.py")]],
}
QUICK = {
    "comm_collectives": ["--seconds", "0.1"],
    "data_convert": ["--rows", "50000", "--repetitions", "2", "--trainings", "2"],
    "dlrm_parts": ["--seconds", "0.2"],
    "dlrm_step": ["--steps", "3", "--rounds", "1"],
    "python_collectives": ["--bytes", "4000", "--bytes", "25000000"],
    "launchers": ["--repetitions", "3"],
    "kernels_reduce": ["--seconds", "0.05"],
    "ddp_hooks": ["--seconds", "0.3"],
    "graph_layer": ["--seconds", "0.5"],
    "graph_gather": [],
    "vocab_cross_entropy": ["--repetitions", "5"],
    "vocab_logprob": [],
    "checkpoint": ["--repetitions", "2", "--bytes", "64000000", "--stall-bytes", "256000000"],
    "data_parallel_step": ["--steps", "0.2"],
    "embedding": ["--seconds", "0.1", "--threads", "1"],
    "sharding_step": ["--seconds", "0.1"],
    "planner": ["--quick"],
    "collision": ["--seconds", "0.2", "--ids", "1000000"],
    "growing_step": ["--steps", "5", "--rounds", "1", "--ranks", "2"],
    "serving_lookup": ["--seconds", "0.1", "--rows", "200000"],
    "serving": ["--seconds", "1", "--rows", "10000"],
    "jagged": ["--seconds", "0.2"],
    "faults": ["--repetitions", "3"],
}
TITLES = {
    "comm_collectives": "Collectives, C++",
    "python_collectives": "Collectives, Python",
    "launchers": "Launchers",
    "kernels_reduce": "Reduction kernels, one thread",
    "ddp_hooks": "Communication hooks on 12.6 million gradients, without backward",
    "graph_layer": "One layer over a split graph, forward and backward",
    "graph_gather": "The same from Python, beside fairchem",
    "vocab_cross_entropy": "Cross entropy, one rank",
    "vocab_logprob": "Log-probabilities, two ranks",
    "checkpoint": "Checkpoints",
    "data_parallel_step": "Training steps under DistributedDataParallel, two ranks",
    "embedding": "Tables on one rank",
    "sharding_step": "Training steps on sharded tables, two ranks",
    "data_convert": "Tables of people's own to click logs, one core",
    "dlrm_parts": "Around the tables of a DLRM, one rank",
    "dlrm_step": "DLRM, 26 tables on two ranks",
    "planner": "Plans of public models, one core",
    "collision": "Any ids onto rows, beside maps and torchrec, one thread",
    "growing_step": "DLRM with tables that grow beside fixed ones, on one log",
    "serving_lookup": "Lookups in rows of few bits, one thread, beside fbgemm",
    "serving": "A server under load, one core each for server and load",
    "jagged": "Operators on jagged batches, beside fbgemm",
    "faults": "From a fault to the last survivor's error",
}

# What changed so much of what benchmarks run that older figures are of other code, and when.
LANDMARKS = {
    "2026-11-17": "one trainer and one table of settings",
    "2026-11-18": "a bucket reducer of our own",
}


def git_hash() -> str:
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or "unknown"


def host_model() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {len(os.sched_getaffinity(0))} cores"
    return f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def load() -> float:
    return os.getloadavg()[0]


def wait_for_quiet(limit: float) -> None:
    """Times taken beside other work are void; give it a while to end, then say so."""
    end = time.monotonic() + limit
    while running_elsewhere() > 0 and time.monotonic() < end:
        time.sleep(0.5)
    if running_elsewhere() > 0:
        print("bench: other programs are running; these times are not to be trusted", file=sys.stderr)


def running_elsewhere() -> int:
    """Count the runnable threads of the machine besides this one."""
    samples = []
    for _ in range(5):
        samples.append(int(pathlib.Path("/proc/loadavg").read_text().split()[3].split("/")[0]) - 1)
        time.sleep(0.02)
    return min(samples)


def missing(command: list[str]) -> str:
    """Say what a command lacks, in a line; nothing if it can run."""
    program = next(word for word in command if "/" in word)
    if os.access(program, os.X_OK):
        return ""
    if program == PEERS_PYTHON:
        return f"the peers' Python, {program}, is not there; make peers installs it"
    return f"{program} is not built; make everything builds it"


def measure(name: str, quick: bool, skips: bool = False) -> list[row_files.Row]:
    """Run a benchmark; `skips` leaves out commands that cannot run, and says so."""
    found = []
    for command in BENCHMARKS[name]:
        lack = missing(command)
        if lack and skips:
            print(f"bench: {name}: {lack}", file=sys.stderr, flush=True)
            continue
        wait_for_quiet(1 if quick else 60)
        before = load()
        result = subprocess.run(
            command + (QUICK[name] if quick else []), stdout=subprocess.PIPE, text=True, check=False
        )
        if result.returncode != 0:
            raise SystemExit(f"bench: {name} failed with exit code {result.returncode}")
        for row in row_files.parse(result.stdout):
            row.update(
                git=git_hash(),
                host=host_model(),
                date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                load=[round(before, 2), round(load(), 2)],
            )
            found.append(row)
    return found


def states(dates: dict[str, str]) -> str:
    """Say which benchmarks, given with the days of their figures, are of code from before a landmark."""
    text = (
        "Every table names the commit it was measured at (`-dirty`: with changes that were not committed); "
        "nothing that came later is in its figures."
    )
    landmarks: dict[tuple[str, ...], list[str]] = {}
    for day, what in sorted(LANDMARKS.items()):
        older = tuple(sorted(name for name, date in dates.items() if date < day))
        landmarks.setdefault(older, []).append(f"{what} ({day})")
    for older, changes in landmarks.items():
        newer = sorted(set(dates) - set(older))
        is_most = len(newer) < len(older)
        named = ", ".join(f"`{name}`" for name in (newer if is_most else older))
        if is_most:
            named = f"all but {named}" if newer else "all"
        if older:
            text += f" Older than {' and '.join(changes)}: {named}."
    return text


def document_section(names: list[str]) -> str:
    found_of = {name: row_files.load(RESULTS / f"{name}.json") for name in names}
    parts = [states({name: found[0]["date"] for name, found in found_of.items()}) + "\n"]
    for name, found in found_of.items():
        first = found[0]
        loads = first.get("load", ["?", "?"])
        parts.append(
            f"### {TITLES[name]}\n\n"
            f"{first['host']}; {first['date']}; {first['git']}; load {loads[0]} before, {loads[1]} "
            f"after;\n`.venv/bin/python bench/run.py {name}`\n\n{row_files.table(found)}"
        )
    return "\n".join(parts)


def kept() -> list[str]:
    """Return the benchmarks whose results are kept."""
    return [name for name in BENCHMARKS if (RESULTS / f"{name}.json").exists()]


def write_document() -> None:
    text = DOCUMENT.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"bench: {DOCUMENT} has no marked section to write to")
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    DOCUMENT.write_text(f"{head}{BEGIN}\n\n{document_section(kept())}\n{END}{tail}")


def list_benchmarks() -> None:
    for name, commands in BENCHMARKS.items():
        lacks = [missing(command) for command in commands]
        mark = "" if not any(lacks) else " (cannot run)" if all(lacks) else " (without the peer)"
        print(f"  {name:<20} {TITLES[name]}{mark}")
    for lack in sorted({missing(command) for commands in BENCHMARKS.values() for command in commands} - {""}):
        print(f"  note: {lack}")


def print_rows(names: list[str], quick: bool, as_json: bool) -> int:
    """Measure and print; keep nothing."""
    measured = {}
    for name in names:
        measured[name] = measure(name, quick, skips=True)
        if measured[name] and not as_json:
            print(f"\n{TITLES[name]}\n\n{row_files.table(measured[name])}", flush=True)
    if not any(measured.values()):
        print(
            f"error: bench: nothing of {', '.join(names)} could be measured\n"
            "  why: the lines above say what is not there\n"
            "  try: make everything peers, in the source tree",
            file=sys.stderr,
        )
        return EXIT_CONFIGURATION
    if as_json:
        print(json.dumps({name: with_peers(found) for name, found in measured.items()}))
    return 0


def with_peers(found: list[row_files.Row]) -> list[row_files.Row]:
    """Give every row its peer's median and the ratio of the two, where there is a peer."""
    index = {row_files.key_of(row): row for row in found}
    told = []
    for row in found:
        peer = row_files.peer_of(row, index)
        more = {}
        if peer is not None:
            value = row_files.value_of(peer, "median")
            more = {"peer": peer["name"], "peer_median": value}
            more["ratio"] = value / row_files.value_of(row, "median")
        told.append({**row, **more})
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; nothing is kept")
    parser.add_argument("--no-document", action="store_true", help="leave docs/performance.md alone")
    parser.add_argument("--list", action="store_true", help="name the benchmarks, and what they lack")
    parser.add_argument("--print-only", action="store_true", help="keep nothing, leave out what cannot run")
    parser.add_argument("--json", action="store_true", help="with --print-only: one JSON object")
    words = parser.parse_args()
    for name in words.names:
        if name not in BENCHMARKS:
            near = difflib.get_close_matches(name, BENCHMARKS, n=1)
            parser.error(
                f"no benchmark '{name}': "
                + (f"did you mean {near[0]}?" if near else f"there are {', '.join(BENCHMARKS)}")
            )
    if words.list:
        list_benchmarks()
        return 0
    if words.print_only:
        return print_rows(words.names or list(BENCHMARKS), words.quick, words.json)
    for name in words.names or BENCHMARKS:
        found = measure(name, words.quick)
        print(f"\n{TITLES[name]}\n\n{row_files.table(found)}", flush=True)
        if found and not words.quick:
            row_files.save(RESULTS / f"{name}.json", found)
    if not words.quick and not words.no_document:
        write_document()
    return 0


if __name__ == "__main__":
    sys.exit(main())
