"""Measure how well the planner foretells a step: python bench/planner/prediction.py FOLDER [--seconds N].

For each load and number of ranks it measures the machine (`tessera doctor --profile`), since a virtual one
changes by tenths within minutes; then it trains DLRM with different plans on logs of its own, whose ids were
counted (`tessera data stats`), and compares the predicted step with the median of the measured ones. Says how
many of the 40 cases are within 10 %, the worst, whether two plans of one load that differ by more than 5 %
come in the predicted order, and how the plan that was searched for compares with the best uniform one. For a
machine that does nothing else. Ends with 1 if a case is off by more than 25 %.
A run that is cut short goes on where it was: FOLDER keeps profiles, logs and cases.jsonl.
--against N compares the plan that was searched for with the uniform ones only: N rounds in which each trains
once on two ranks, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
WORST = 0.25  # a prediction that is farther off is a fault
LOADS = [  # batch, tables, rows, dim, bag
    (512, 26, 100_000, 32, 1),
    (2048, 26, 100_000, 32, 4),
    (1024, 8, 500_000, 64, 20),
    (4096, 12, 200_000, 16, 8),
    (256, 16, 50_000, 64, 10),
    (1024, 40, 20_000, 16, 2),
]
UNIFORM = ["balanced", "row_wise", "column_wise", "data_parallel"]
CASES = [
    *((2, load, sharding) for load in LOADS for sharding in ["auto", *UNIFORM]),
    *((1, load, sharding) for load in LOADS[:5] for sharding in ["auto", "data_parallel"]),
]


def run(*words: object) -> str:
    return subprocess.run([TESSERA, *map(str, words)], capture_output=True, text=True, check=True).stdout


def log_of(folder: pathlib.Path, load) -> tuple[pathlib.Path, pathlib.Path]:
    """Return a log of the load's tables, and what was counted in it."""
    _, tables, rows, _, bag = load
    log, stats = (folder / f"{tables}_{rows}_{bag}.{end}" for end in ("click", "json"))
    if not stats.exists():
        run("data", "synth", log, "--samples", 100_000, "--features", tables, "--rows", rows, "--bag", bag)
        run("data", "stats", log, "--write", stats)
    return log, stats


def profile_of(folder: pathlib.Path, ranks: int, load) -> pathlib.Path:
    path = folder / f"machine_{ranks}_{LOADS.index(load)}.json"
    if not path.exists():
        run("doctor", "--profile", "--ranks", ranks, "--out", path)
    return path


def measure(folder: pathlib.Path, ranks: int, load, sharding: str, steps: int) -> dict:
    """Train once; return what was predicted and what was measured, in seconds, by part."""
    batch, _, _, dim, _ = load
    log, stats = log_of(folder, load)
    out = run(
        "train", "dlrm", "--json", "-n", ranks, "--sharding", sharding, "--batch", batch, "--data", log,
        "--dim", dim, "--bottom", f"64,{dim}", "--steps", steps, "--eval-every", 0, "--eval-samples", 1024,
        "--keep-model", "none", "--profile", profile_of(folder, ranks, load), "--stats", stats,
        "--runs", folder / "runs",
    )  # fmt: skip
    kept = pathlib.Path(json.loads(out)["report"]).parent
    lines = [json.loads(line) for line in (kept / "metrics.jsonl").read_text().splitlines()]
    (plan,) = [line for line in lines if line["kind"] == "plan"]
    times = [line["seconds"] for line in lines if line["kind"] == "step"]
    parts: dict[str, float] = {}
    for line in lines:
        if line["kind"] == "breakdown":
            for name, part in line["phases"].items():
                parts[name] = parts.get(name, 0) + part["seconds"] / line["steps"] / ranks
    return {
        "ranks": ranks,
        "load": load,
        "sharding": sharding,
        "predicted": plan["predicted"]["total"],
        "measured": statistics.median(times[len(times) // 4 :]),
        "predicted_parts": plan["predicted"],
        "measured_parts": parts,
    }


def error_of(case: dict) -> float:
    return abs(case["predicted"] / case["measured"] - 1)


def judge(found: list[dict]) -> None:
    """Say how close predictions were, and whether plans came in the predicted order."""
    errors = [error_of(case) for case in found]
    near = sum(error <= 0.1 for error in errors)
    pairs = right = 0
    for a, b in itertools.combinations(found, 2):
        same = (a["ranks"], a["load"]) == (b["ranks"], b["load"])
        if same and abs(a["measured"] / b["measured"] - 1) > 0.05:
            pairs += 1
            right += (a["predicted"] < b["predicted"]) == (a["measured"] < b["measured"])
    print(
        f"within 10 %: {near} of {len(found)}; within 25 %: {sum(e <= WORST for e in errors)}; "
        f"worst {100 * max(errors):.0f} %; order {right} of {pairs}"
    )
    for ranks, load in itertools.product((2,), LOADS):
        times = {c["sharding"]: c["measured"] for c in found if (c["ranks"], c["load"]) == (ranks, [*load])}
        if "auto" in times and len(times) > 1:
            best = min(value for sharding, value in times.items() if sharding != "auto")
            print(f"{ranks} ranks, batch {load[0]}: auto takes {times['auto'] / best:.3f} of the time "
                  "of the best uniform plan")  # fmt: skip


def compare_with_uniform(folder: pathlib.Path, rounds: int, loads, steps: int) -> None:
    """Train with the searched plan and every uniform one in turn; say how their medians compare."""
    for load in loads:
        times: dict[str, list[float]] = {sharding: [] for sharding in ["auto", *UNIFORM]}
        for _, sharding in itertools.product(range(rounds), times):
            times[sharding].append(measure(folder, 2, load, sharding, steps)["measured"])
        medians = {sharding: statistics.median(found) for sharding, found in times.items()}
        auto = medians.pop("auto")
        best = min(medians, key=medians.__getitem__)
        pairs = sorted(a / b for a, b in zip(times["auto"], times[best], strict=True))
        print(
            f"batch {load[0]}, {load[1]} tables: auto takes {auto / medians[best]:.3f} of the time of {best} "
            f"({pairs[0]:.3f} to {pairs[-1]:.3f} in {rounds} rounds)",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--every", type=int, default=1, help="only each so-manieth case")
    parser.add_argument("--seconds", type=float, default=240, help="no case begins after so many")
    parser.add_argument(
        "--against", type=int, default=0, help="rounds of the searched plan beside uniform ones"
    )
    parser.add_argument("--loads", type=int, default=len(LOADS), help="of --against: the first so many")
    given = parser.parse_args()
    begin = time.monotonic()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.against:
        compare_with_uniform(given.folder, given.against, LOADS[: given.loads], given.steps)
        return 0
    kept = given.folder / "cases.jsonl"
    found = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(case["ranks"], tuple(case["load"]), case["sharding"]) for case in found}
    left = [case for case in CASES[:: given.every] if case not in done]
    for load in dict.fromkeys(load for _, load, _ in left):
        log_of(given.folder, load)
    for ranks, load, sharding in left:
        if time.monotonic() - begin > given.seconds:
            print(f"time is up after {len(found)} cases; the same command goes on")
            break
        case = json.loads(json.dumps(measure(given.folder, ranks, load, sharding, given.steps)))
        found.append(case)
        with kept.open("a") as file:
            file.write(json.dumps(case) + "\n")
        print(
            f"{ranks} ranks {sharding:13} batch {load[0]:5} predicted {case['predicted'] * 1e3:8.2f} ms "
            f"measured {case['measured'] * 1e3:8.2f} ms "
            f"{100 * (case['predicted'] / case['measured'] - 1):+6.1f} %",
            flush=True,
        )
    if found:
        judge(found)
    wrong = [case for case in found if error_of(case) > WORST]
    for case in wrong:
        print(
            f"off by {100 * error_of(case):.0f} %: {case['ranks']} ranks, {case['sharding']}, "
            f"batch {case['load'][0]}, {case['load'][1]} tables"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
