"""What the programs of this folder share: one process per rank, the page they meet in, a row of JSON."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import pathlib
import statistics
import struct
import subprocess
import sys
import tempfile
import time

PAGE_BYTES = 8192


class Page:
    """A few words of memory that all ranks share: a barrier and the times."""

    def __init__(self, path: str, rank: int, size: int):
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), PAGE_BYTES)
        self.rank, self.size, self.round = rank, size, 0

    def meet(self) -> None:
        self.round += 1
        struct.pack_into("q", self.memory, 64 * self.rank, self.round)
        for other in range(self.size):
            looks = 0
            while struct.unpack_from("q", self.memory, 64 * other)[0] < self.round:
                looks += 1
                if looks > 1000:
                    time.sleep(0)

    def slowest(self, mine: float) -> float:
        struct.pack_into("d", self.memory, 4096 + 64 * self.rank, mine)
        self.meet()
        times = [struct.unpack_from("d", self.memory, 4096 + 64 * other)[0] for other in range(self.size)]
        self.meet()
        return max(times)


def rank_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the flags that start_ranks gives; `as_rank` is None in the first process."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--as-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--page", help=argparse.SUPPRESS)
    return parser


def start_ranks(size: int, *words: object) -> int:
    """Start this program once per rank, with `words`, and return the worst exit code.

    The page's folder is new and empty, so that a store may lie beside it.
    """
    with tempfile.TemporaryDirectory(prefix="tessera-bench-") as folder:
        page = pathlib.Path(folder) / "page"
        page.write_bytes(bytes(PAGE_BYTES))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, sys.argv[0], "--page", str(page), *map(str, words)]
        ranks = [
            subprocess.Popen([*command, "--as-rank", str(rank)], env=environment) for rank in range(size)
        ]
        return max(abs(rank.wait()) for rank in ranks)


def print_row(name: str, size: int, bytes_: int, times: list[float]) -> None:
    """Print one row; times are in microseconds."""
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    row = {
        "name": name,
        "ranks": size,
        "threads": 1,
        "isa": "",
        "device": "cpu",
        "state": "",
        "median_us": round(statistics.median(times), 3),
        "p10_us": round(deciles[0], 3),
        "p90_us": round(deciles[8], 3),
        "bytes": bytes_,
        "repetitions": len(times),
    }
    print(json.dumps(row), flush=True)
