"""Times `tessera run` beside torchrun: help, an empty job of two ranks, and the end after a death.

Prints one line of JSON per row.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
TORCHRUN = str(pathlib.Path(sys.executable).parent / "torchrun")
REPETITIONS = 10
WARM_UPS = 1

# Rank 1 writes down when it dies; rank 0 would sleep.
DYING = 'if [ "$RANK" = 1 ]; then sleep 0.2; date +%s%N > "$1"; kill -9 $$; else exec sleep 60; fi'


def run(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return (time.perf_counter() - begin) * 1e6


def death_to_end(command: list[str], folder: str) -> float:
    stamp = pathlib.Path(folder) / "died"
    run([*command, "/bin/sh", "-c", DYING, "sh", str(stamp)])
    return (time.time_ns() - int(stamp.read_text())) / 1e3


def print_row(operation: str, launcher: str, ranks: int, times: list[float]) -> None:
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    shape = f"p{ranks}" if ranks else "none"
    row = {
        "name": f"launch/{operation}/{launcher}/{shape}",
        "ranks": ranks,
        "threads": 1,
        "isa": "",
        "device": "cpu",
        "state": "",
        "median_us": round(statistics.median(times), 1),
        "p10_us": round(deciles[0], 1),
        "p90_us": round(deciles[8], 1),
        "bytes": 0,
        "repetitions": len(times),
    }
    print(json.dumps(row), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    words = parser.parse_args()
    launchers = {
        "tessera": ([TESSERA, "run", "--help"], [TESSERA, "run", "-n", "2", "--"]),
        "torchrun": ([TORCHRUN, "--help"], [TORCHRUN, "--nproc-per-node", "2", "--no-python"]),
    }
    with tempfile.TemporaryDirectory() as folder:
        measures = {
            "help": (0, lambda help_, start: run(help_)),
            "empty_job": (2, lambda help_, start: run([*start, "/bin/true"])),
            "death_to_end": (2, lambda help_, start: death_to_end(start, folder)),
        }
        for operation, (ranks, measure) in measures.items():
            for launcher, commands in launchers.items():
                for _ in range(WARM_UPS):
                    measure(*commands)
                times = [measure(*commands) for _ in range(words.repetitions)]
                print_row(operation, launcher, ranks, times)
    return 0


if __name__ == "__main__":
    sys.exit(main())
