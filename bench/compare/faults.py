"""Times how long after a fault the last survivor knows: real processes, one job per sample.

Rank 1 of 3 dies, raises, stops, or calls something else in the middle of a loop of all-reduces; the
others stamp the moment at which their call raised. One line of JSON per row; `max_us` is the worst.
"""

from __future__ import annotations

import argparse
import datetime
import json
import mmap
import multiprocessing
import os
import pathlib
import signal
import statistics
import struct
import sys
import tempfile
import time

SIZE = 3
LIMIT = 2.0  # seconds of a call; what a stall waits for
REPETITIONS = 20
SETTLE = 0.02  # the others are in the next call by then

# Mismatches are measured for ours alone.
ROWS = {
    "kill": ("shm", "gloo"),
    "exception": ("shm", "gloo"),
    "operation": ("shm",),
    "size": ("shm",),
    "dtype": ("shm",),
    "stall": ("shm", "gloo"),
}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "tessera"])


def run_rank(rank: int, fault: str, backend: str, folder: str) -> None:
    import tessera  # noqa: F401
    import torch
    import torch.distributed as dist

    with open(f"{folder}/times", "r+b") as file:
        page = mmap.mmap(file.fileno(), 4096)

    def stamp() -> None:
        struct.pack_into("q", page, 8 * rank, time.monotonic_ns())

    os.close(2)
    os.open(os.devnull, os.O_WRONLY)  # what ranks say of each other's end
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=LIMIT)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=SIZE, timeout=limit
    )
    tensor = torch.ones(1000)
    for _ in range(20):
        dist.all_reduce(tensor)
    if rank == 1:
        time.sleep(SETTLE)
        stamp()
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stall":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "exception":
            raise RuntimeError("a fault")
        try:
            if fault == "operation":
                dist.broadcast(tensor, 0)
            elif fault == "size":
                dist.all_reduce(torch.ones(7))
            else:
                dist.all_reduce(torch.ones(1000, dtype=torch.float64))
        except Exception:
            os._exit(0)
    try:
        dist.all_reduce(tensor)
    except Exception:
        stamp()
    os._exit(0)


def sample(fault: str, backend: str) -> float:
    """Microseconds from the fault to the last survivor's error."""
    with tempfile.TemporaryDirectory(prefix="tessera-bench-") as folder:
        pathlib.Path(folder, "times").write_bytes(bytes(4096))
        ranks = [
            _context.Process(target=run_rank, args=(rank, fault, backend, folder)) for rank in range(SIZE)
        ]
        for process in ranks:
            process.start()
        for rank, process in enumerate(ranks):
            if rank != 1:
                process.join(60)
        ranks[1].kill()  # it may be stopped
        ranks[1].join()
        times = struct.unpack_from("3q", pathlib.Path(folder, "times").read_bytes())
    if 0 in times:
        raise SystemExit(f"faults: {fault} on {backend}: a rank did not notice: {times}")
    return (max(times[0], times[2]) - times[1]) / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--fault", action="append", dest="faults", help=", ".join(ROWS))
    words = parser.parse_args()
    for fault in words.faults or ROWS:
        for backend in ROWS[fault]:
            sample(fault, backend)  # warm-up
            times = [sample(fault, backend) for _ in range(words.repetitions)]
            cut = statistics.quantiles(times, n=10, method="inclusive")
            row = {
                "name": f"faults/{fault}/{'tessera' if backend == 'shm' else 'torch gloo'}/p{SIZE}",
                "ranks": SIZE,
                "median_us": round(statistics.median(times), 1),
                "p10_us": round(cut[0], 1),
                "p90_us": round(cut[8], 1),
                "max_us": round(max(times), 1),
                "repetitions": len(times),
            }
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
