"""Times how soon a training ends that is told to stop while it starts.

    .venv/bin/python bench/launch/stop_at_start.py [--repetitions N] [--ranks N]

SIGTERM comes at times spread evenly over a start, from the launcher's first moment to the first
steps, the same times in the same order with every call. Counted is from the signal to the end of
the launcher, which waits for all of its ranks. Prints one line of JSON per row: those told to stop,
and for comparison a whole training of one step. Ends with 1 if one of them took a second.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = os.environ.get("TESSERA_BIN", str(ROOT / "build/release/bin/tessera"))
SMALL = ["--tables", "12", "--rows", "50", "--dim", "8", "--bottom", "16,8", "--top", "16,1", "--batch", "32"]
REPETITIONS = 60
WHOLE = 5  # trainings that are not told to stop
LIMIT = 60.0  # seconds; the launcher kills what is left after 30
SECOND_US = 1e6


def start(ranks: int, folder: pathlib.Path, steps: int) -> subprocess.Popen:
    words = [TESSERA, "train", "dlrm", "--ranks", ranks, "--steps", steps, *SMALL, "--save", folder]
    return subprocess.Popen([*map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def end(process: subprocess.Popen, begin: float, codes: tuple[int, ...]) -> float:
    code = process.wait(timeout=LIMIT)
    if code not in codes:
        raise SystemExit(f"tessera train ended with code {code}, not with {codes}")
    return (time.perf_counter() - begin) * 1e6


def whole(ranks: int, folder: pathlib.Path) -> float:
    begin = time.perf_counter()
    return end(start(ranks, folder, 1), begin, (0,))


def told(ranks: int, folder: pathlib.Path, delay: float) -> float:
    process = start(ranks, folder, 10**9)
    time.sleep(delay)
    begin = time.perf_counter()
    process.terminate()
    # Saved, or ended before there was anything to save; in its first milliseconds by the signal itself,
    # which a shell calls 143 too.
    return end(process, begin, (0, 143, -signal.SIGTERM))


def print_row(variant: str, ranks: int, times: list[float]) -> None:
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    row = {
        "name": f"launch/stop_at_start/{variant}/p{ranks}",
        "ranks": ranks,
        "threads": 1,
        "isa": "",
        "device": "cpu",
        "state": "",
        "median_us": round(statistics.median(times), 1),
        "p10_us": round(deciles[0], 1),
        "p90_us": round(deciles[8], 1),
        "worst_us": round(max(times), 1),
        "bytes": 0,
        "repetitions": len(times),
    }
    print(json.dumps(row), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--ranks", type=int, default=2)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        whole(words.ranks, folder / "warm-up")
        wholes = [whole(words.ranks, folder / f"whole-{i}") for i in range(WHOLE)]
        # The end of a whole training belongs to it too, so the last ones are told while they train.
        longest = statistics.median(wholes) / 1e6
        delays = [longest * (i + 0.5) / words.repetitions for i in range(words.repetitions)]
        random.Random(1).shuffle(delays)
        times = [told(words.ranks, folder / f"told-{i}", delay) for i, delay in enumerate(delays)]
    print_row("whole", words.ranks, wholes)
    print_row("told", words.ranks, times)
    return 0 if max(times) < SECOND_US else 1


if __name__ == "__main__":
    sys.exit(main())
