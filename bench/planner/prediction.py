"""Measure how well the planner foretells a step: python bench/planner/prediction.py [--cases N] [--steps N].

Measures the machine (`tessera doctor --profile`), trains DLRM once and calibrates the profile with that
run, then trains with other plans, batches and numbers of ranks, and compares the predicted step with the
median of the measured ones. Says how many of the cases are within 10 %, the worst, and whether two plans
of one load that differ by more than 5 % come in the predicted order. For a machine that does nothing else.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    worlds = [1, 2] if (os.cpu_count() or 1) < 4 else [2, 4]
    cases = list(itertools.product(worlds, LOADS, SHARDINGS))[: given.cases]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        runs, profile = pathlib.Path(folder), pathlib.Path(folder) / "machine.json"
        run("doctor", "--profile", "--out", profile)
        first, _, _ = train(runs, profile, worlds[-1], "auto", LOADS[1], given.steps)
        run("plan", "tables", "--profile", profile, "--calibrate", first)
        for ranks, load, sharding in cases:
            _, predicted, measured = train(runs, profile, ranks, sharding, load, given.steps)
            found.append((ranks, load, sharding, predicted, measured))
            print(
                f"{ranks} ranks {sharding:13} batch {load[0]:5} predicted {predicted * 1e3:8.2f} ms "
                f"measured {measured * 1e3:8.2f} ms {100 * (predicted / measured - 1):+6.1f} %",
                flush=True,
            )
    errors = [abs(predicted / measured - 1) for *_, predicted, measured in found]
    near = sum(error <= 0.1 for error in errors)
    pairs = right = 0
    for a, b in itertools.combinations(found, 2):
        if a[:2] == b[:2] and abs(a[4] / b[4] - 1) > 0.05:
            pairs += 1
            right += (a[3] < b[3]) == (a[4] < b[4])
    print(f"within 10 %: {near} of {len(found)}; worst {100 * max(errors):.0f} %; order {right} of {pairs}")


if __name__ == "__main__":
    main()
