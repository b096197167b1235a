"""Times torch.distributed from Python: backend "shm" of Tessera beside "gloo", in one run.

Starts itself once per rank. Prints one line of JSON per row. The time of a repetition is the slower
rank's; each begins with a barrier that is not part of either backend.
"""

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

SIZES = (4_000, 64_000, 1_000_000, 25_000_000, 100_000_000)
BATCH = {4_000: 20, 64_000: 20, 1_000_000: 4}
REPETITIONS = {4_000: 200, 64_000: 100, 1_000_000: 50}
FEW_REPETITIONS = 12
WARM_UPS = 3


class Page:
    """A few words of memory that all ranks share: a barrier and the times."""

    def __init__(self, path: str, rank: int, size: int):
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 8192)
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


def calls(dist, torch, group, size: int, bytes_: int):
    count = (bytes_ // 4 + size - 1) // size * size
    tensor = torch.zeros(count)
    gathered = torch.zeros(count * size)
    swapped = torch.zeros(count)
    share = torch.zeros(count // size)
    yield "all_reduce", lambda: dist.all_reduce(tensor, group=group)
    yield "all_gather", lambda: dist.all_gather_into_tensor(gathered, tensor, group=group)
    yield "reduce_scatter", lambda: dist.reduce_scatter_tensor(share, tensor, group=group)
    yield "all_to_all", lambda: dist.all_to_all_single(swapped, tensor, group=group)
    yield "broadcast", lambda: dist.broadcast(tensor, 0, group=group)


def check(dist, torch, group, rank: int, size: int) -> None:
    """A wrong backend has no speed."""
    tensor = torch.full((300_000,), float(rank + 1))
    dist.all_reduce(tensor, group=group)
    expected = size * (size + 1) / 2
    if not bool((tensor == expected).all()):
        raise SystemExit("wrong values")


def run_rank(path: str, rank: int, size: int, sizes: list[int]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backends = ["gloo"]
    try:
        import tessera  # noqa: F401  registers "shm"

        backends.insert(0, "shm")
    except ImportError:
        if rank == 0:
            print("tessera cannot be imported: gloo alone", file=sys.stderr)
    page = Page(path, rank, size)
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=size)
    groups = {name: dist.new_group(backend=name) for name in backends}
    for group in groups.values():
        check(dist, torch, group, rank, size)
    for bytes_ in sizes:
        batch = BATCH.get(bytes_, 1)
        made = {name: dict(calls(dist, torch, group, size, bytes_)) for name, group in groups.items()}
        for operation in made["gloo"]:
            for backend, operations in made.items():
                call = operations[operation]
                for _ in range(WARM_UPS):
                    call()
                times = []
                for _ in range(REPETITIONS.get(bytes_, FEW_REPETITIONS)):
                    page.meet()
                    begin = time.perf_counter()
                    for _ in range(batch):
                        call()
                    times.append(page.slowest((time.perf_counter() - begin) / batch * 1e6))
                if rank == 0:
                    print_row(f"python/{operation}/{backend}/n{bytes_}_p{size}", size, bytes_, times)
    page.meet()
    dist.destroy_process_group()


def print_row(name: str, size: int, bytes_: int, times: list[float]) -> None:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, action="append")
    parser.add_argument("--as-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--page", help=argparse.SUPPRESS)
    words = parser.parse_args()
    sizes = words.bytes or list(SIZES)
    if words.as_rank is not None:
        run_rank(words.page, words.as_rank, words.ranks, sizes)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "page"
        path.write_bytes(bytes(8192))
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
        command = [sys.executable, __file__, "--ranks", str(words.ranks), "--page", str(path)]
        for bytes_ in sizes:
            command += ["--bytes", str(bytes_)]
        ranks = [
            subprocess.Popen([*command, "--as-rank", str(rank)], env=environment)
            for rank in range(words.ranks)
        ]
        return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
