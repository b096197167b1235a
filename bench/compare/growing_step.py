"""Times training steps of `tessera train dlrm` with tables that grow beside fixed ones, on one log.

26 features of one id each out of 100,000, 32 columns, 2048 samples per rank and step, row-wise Adagrad; on
one rank and on two. Fixed tables lie as the planner says (`planned`), cut by rows (`row_wise`) and whole
(`table_wise`); growing ones by rows, or whole if the name says so. Of these, the first half of the steps, in
which most ids are new, and the second half are told apart (`growing`, `grown`). All take turns, one whole
run each, whose first ten steps do not
count; the time of a step is from its end to that of the step before, on rank 0.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = ROOT / "build/release/bin/tessera"
TABLES, ROWS, BATCH = 26, 100_000, 2048
WARM_UPS = 10
EVALUATED = 4096
VARIANTS = {
    "planned": [],
    "row_wise": ["--sharding", "row_wise"],
    "table_wise": ["--sharding", "table_wise"],
    "growing": ["--ids", "unlimited"],
    "growing_table_wise": ["--ids", "unlimited", "--sharding", "table_wise"],
}
ALL_KNOWN = {"growing": "grown", "growing_table_wise": "grown_table_wise"}


def train(folder: str, *flags: object) -> pathlib.Path:
    command = [str(TESSERA), "train", "dlrm", "--runs", folder, "--json", *map(str, flags)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return pathlib.Path(json.loads(answer)["report"]).parent


def step_times(run: pathlib.Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    steps = [line["seconds"] for line in lines if line["kind"] == "step"]
    return [1e6 * seconds for seconds in steps[WARM_UPS:]]


def print_row(variant: str, ranks: int, times: list[float]) -> None:
    cuts = statistics.quantiles(times, n=10) if len(times) > 1 else times * 9
    row = {
        "name": f"dlrm/growing_step/{variant}/t{TABLES}_r{ROWS}_d32_l1_b{BATCH}_p{ranks}",
        "ranks": ranks,
        "median_us": statistics.median(times),
        "p10_us": cuts[0],
        "p90_us": cuts[8],
        "repetitions": len(times),
        "bytes": 0,
    }
    print(json.dumps(row), flush=True)


def measure(data: str, ranks: int, steps: int, rounds: int) -> None:
    flags = ["--ranks", ranks, "--data", data, "--batch", BATCH, "--eval-every", 0]
    flags += ["--eval-samples", EVALUATED]
    flags += ["--steps", 2 * steps + WARM_UPS, "--keep-model", "none"]
    times: dict[str, list[float]] = {name: [] for name in [*VARIANTS, *ALL_KNOWN.values()]}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name, more in VARIANTS.items():
                measured = step_times(train(folder, *flags, *more))
                if name in ALL_KNOWN:
                    times[ALL_KNOWN[name]] += measured[steps:]
                    measured = measured[:steps]
                times[name] += measured
    for name, measured in times.items():
        print_row(name, ranks, measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, action="append")
    args = parser.parse_args()
    ranks = args.ranks or [1, 2]
    with tempfile.TemporaryDirectory() as folder:
        data = str(pathlib.Path(folder, "clicks.click"))
        samples = (2 * args.steps + WARM_UPS) * max(ranks) * BATCH + EVALUATED
        command = [str(TESSERA), "data", "synth", data, "--samples", str(samples)]
        command += ["--features", str(TABLES), "--rows", str(ROWS), "--bag", "1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for count in ranks:
            measure(data, count, args.steps, args.rounds)


if __name__ == "__main__":
    main()
