"""Time the mapping of ids beside torchrec's; one line of JSON per row.

    .venv-peers/bin/python bench/compare/torchrec_collision.py [--seconds S] [--ids N]

All hold the same ids; batches of 65536 known ids, made before, one thread, taking turns: torchrec's table,
ours of the same kind in the same slots, `tessera_growing`, the module of a table that grows, and
`tessera_id_table`, the id table in it without the module around it. An admission brings 65536 new ids into
a full table. With more than 2 * 10^7 ids only torchrec's remap and the growing table are timed, as
the admissions would take minutes.
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
MOST_FOR_ADMISSIONS = 20_000_000


def make(modules, size: int):
    policy = modules.LFU_EvictionPolicy()
    return modules.MCHManagedCollisionModule(size, torch.device("cpu"), policy, 1)


def batch_of(tensors, values):
    return {"f": tensors.JaggedTensor(values, lengths=torch.tensor([values.numel()]))}


def call(tensors, module, values):
    return module(batch_of(tensors, values))["f"].values()


def fill(module, ids: torch.Tensor) -> None:
    """Put ascending ids into the slots, as admissions would have left them, each seen once."""
    module._mch_sorted_raw_ids[: ids.numel()] = ids
    module._mch_counts[: ids.numel()] = 1


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
    ids = torch.randint(-(2**62), 2**62, (size + size // 1000,), generator=generator).unique()[: size - 1]
    sides = {"torchrec_mch": (their_tensors, make(theirs, size))}
    fill(sides["torchrec_mch"][1], ids)
    if size <= MOST_FOR_ADMISSIONS:
        sides["tessera_mch"] = (our_tensors, make(ours, size))
        sides["tessera_mch"][1].load_state_dict(sides["torchrec_mch"][1].state_dict())
    growing = ours.GrowingManagedCollisionModule()
    for part in ids[torch.randperm(ids.numel(), generator=generator)].split(BATCH):
        call(our_tensors, growing, part)
    sides["tessera_growing"] = (our_tensors, growing)
    for _, module in sides.values():
        module.eval()
    times: dict[str, list[float]] = {name: [] for name in [*sides, "tessera_id_table"]}
    end = time.monotonic() + arguments.seconds
    while time.monotonic() < end or len(times["torchrec_mch"]) < 5:
        values = ids[torch.randint(0, size - 1, (BATCH,), generator=generator)]
        rows = {}
        for name, (tensors, module) in sides.items():
            batch = batch_of(tensors, values)
            begin = time.thread_time()
            rows[name] = module(batch)["f"].values()
            times[name].append(time.thread_time() - begin)
        others = ids[torch.randint(0, size - 1, (BATCH,), generator=generator)]  # not read just before
        begin = time.thread_time()
        growing._ids.find(others)
        times["tessera_id_table"].append(time.thread_time() - begin)
        if "tessera_mch" in rows:
            assert torch.equal(rows["torchrec_mch"], rows["tessera_mch"])
        # Other numbers, but one for each id.
        assert rows["tessera_growing"].unique().numel() == values.unique().numel()
    for name, measured in times.items():
        report("remap", name, size, measured)
    if size > MOST_FOR_ADMISSIONS:
        return
    for name in ("torchrec_mch", "tessera_mch"):
        tensors, module = sides[name]
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
