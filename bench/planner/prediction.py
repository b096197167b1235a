"""Measure how well the planner foretells a step: python bench/planner/prediction.py [--cases N] [--steps N].

For each number of ranks it measures the machine (`tessera doctor --profile`), trains DLRM once and
calibrates the profile with that run; then it trains with other plans and batches, and compares the predicted
step with the median of the measured ones. Says how many of the cases are within 10 %, the worst, whether two
plans of one load that differ by more than 5 % come in the predicted order, and how the plan that was searched
for compares with the best uniform one. For a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
SHARDINGS = ["auto", "balanced", "row_wise", "column_wise", "data_parallel"]
LOADS = [  # batch, tables, rows, dim, bag
    (512, 26, 100_000, 32, 1),
    (2048, 26, 100_000, 32, 4),
    (1024, 8, 500_000, 64, 20),
    (4096, 12, 200_000, 16, 8),
]


def run(*words: object) -> str:
    return subprocess.run([TESSERA, *map(str, words)], capture_output=True, text=True, check=True).stdout


def train(runs: pathlib.Path, profile: pathlib.Path, ranks: int, sharding: str, load, steps: int):
    """Train once; return the run's folder, the predicted and the measured seconds of a step."""
    batch, tables, rows, dim, bag = load
    out = run(
        "train", "dlrm", "--json", "-n", ranks, "--sharding", sharding, "--batch", batch, "--tables", tables,
        "--rows", rows, "--dim", dim, "--bag", bag, "--bottom", f"64,{dim}", "--steps", steps,
        "--eval-every", 0, "--eval-samples", 1024, "--profile", profile, "--runs", runs,
    )  # fmt: skip
    folder = pathlib.Path(json.loads(out)["report"]).parent
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (plan,) = [line for line in lines if line["kind"] == "plan"]
    times = [line["seconds"] for line in lines if line["kind"] == "step"]
    return folder, plan["predicted"]["total"], statistics.median(times[len(times) // 4 :])


def profile_of(folder: pathlib.Path, ranks: int, steps: int) -> pathlib.Path:
    """Measure the machine with so many ranks busy, and calibrate it with one training.

    A rank of one has all cores, of two half of them: a profile holds for its own number of ranks only.
    """
    profile = folder / f"machine_{ranks}.json"
    run("doctor", "--profile", "--ranks", ranks, "--out", profile)
    first, _, _ = train(folder, profile, ranks, "auto", LOADS[1], steps)
    run("plan", "tables", "--profile", profile, "--calibrate", first)
    return profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=420, help="no case begins after so many")
    given = parser.parse_args()
    worlds = [1, 2] if (os.cpu_count() or 1) < 4 else [2, 4]
    # Plans of one load come one after the other, and worlds in turn, so that a run cut short has some of all.
    cases = list(itertools.product(LOADS, worlds, SHARDINGS))[: given.cases]
    found = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        profiles = {ranks: profile_of(folder, ranks, given.steps) for ranks in worlds}
        for load, ranks, sharding in cases:
            if time.monotonic() - begin > given.seconds:
                print(f"time is up after {len(found)} of {len(cases)} cases")
                break
            _, predicted, measured = train(folder, profiles[ranks], ranks, sharding, load, given.steps)
            found.append(((ranks, load), sharding, predicted, measured))
            print(
                f"{ranks} ranks {sharding:13} batch {load[0]:5} predicted {predicted * 1e3:8.2f} ms "
                f"measured {measured * 1e3:8.2f} ms {100 * (predicted / measured - 1):+6.1f} %",
                flush=True,
            )
    errors = [abs(predicted / measured - 1) for *_, predicted, measured in found]
    near = sum(error <= 0.1 for error in errors)
    pairs = right = 0
    for a, b in itertools.combinations(found, 2):
        if a[0] == b[0] and abs(a[3] / b[3] - 1) > 0.05:
            pairs += 1
            right += (a[2] < b[2]) == (a[3] < b[3])
    print(f"within 10 %: {near} of {len(found)}; worst {100 * max(errors):.0f} %; order {right} of {pairs}")
    # The plan that was searched for beside the best of the uniform ones, as both ran.
    for load in dict.fromkeys(key for key, *_ in found):
        times = {sharding: measured for key, sharding, _, measured in found if key == load}
        if "auto" in times and len(times) > 1:
            best = min(value for sharding, value in times.items() if sharding != "auto")
            print(
                f"{load[0]} ranks, batch {load[1][0]}: auto takes {times['auto'] / best:.3f} of the time "
                "of the best uniform plan"
            )


if __name__ == "__main__":
    main()
