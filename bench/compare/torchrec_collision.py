"""Time the mapping of ids beside torchrec's; one line of JSON per row.

    .venv-peers/bin/python bench/compare/torchrec_collision.py [--seconds S] [--ids N]

Both hold the same ids in the same slots; batches of 65536 known ids, one thread, taking turns. An
admission brings 65536 new ids into a full table.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))

import tessera.modules.mc_modules as ours
import tessera.sparse.jagged_tensor as our_tensors
import torch
import torchrec.modules.mc_modules as theirs
import torchrec.sparse.jagged_tensor as their_tensors

BATCH = 65536


def make(modules, size: int):
    policy = modules.LFU_EvictionPolicy()
    return modules.MCHManagedCollisionModule(size, torch.device("cpu"), policy, 1)


def call(tensors, module, values):
    return module({"f": tensors.JaggedTensor(values, lengths=torch.tensor([values.numel()]))})["f"].values()


def report(operation: str, variant: str, size: int, times: list[float]) -> None:
    times = sorted(times)
    row = {
        "name": f"collision/{operation}/{variant}/n{size}_b{BATCH}",
        "ranks": 1,
        "threads": 1,
        "isa": "",
        "device": "cpu",
        "state": "",
        "median_us": statistics.median(times) * 1e6,
        "p10_us": times[len(times) // 10] * 1e6,
        "p90_us": times[len(times) * 9 // 10] * 1e6,
        "bytes": BATCH * 8,
        "repetitions": len(times),
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--ids", type=int, default=1_000_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = arguments.ids
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(-(2**62), 2**62, (2 * size,), generator=generator).unique()[: size - 1]
    sides = {
        "tessera_mch": (our_tensors, make(ours, size)),
        "torchrec_mch": (their_tensors, make(theirs, size)),
    }
    for tensors, module in sides.values():
        call(tensors, module, ids)
        module.eval()
    times: dict[str, list[float]] = {name: [] for name in sides}
    end = time.monotonic() + arguments.seconds
    while time.monotonic() < end or len(times["tessera_mch"]) < 5:
        values = ids[torch.randint(0, size - 1, (BATCH,), generator=generator)]
        rows = []
        for name, (tensors, module) in sides.items():
            begin = time.thread_time()
            rows.append(call(tensors, module, values))
            times[name].append(time.thread_time() - begin)
        assert torch.equal(*rows)
    for name, measured in times.items():
        report("remap", name, size, measured)
    for name, (tensors, module) in sides.items():
        module.train()
        measured = []
        for step in range(5):
            fresh = torch.arange(BATCH) + 2**62 + step * BATCH
            begin = time.thread_time()
            call(tensors, module, fresh.repeat(2 + step))  # more often than those there are
            measured.append(time.thread_time() - begin)
        report("admission", name, size, measured)


if __name__ == "__main__":
    main()
