"""Loads of several ranks beside a process that saves: one checkpoint on all of them, and the newest."""

from __future__ import annotations

import multiprocessing
import os

import torch
import torch.distributed as dist
from ranks import run_ranks
from tessera import checkpoint
from tessera.checkpoint import Shard

RACES = int(os.environ.get("TESSERA_RACES", 100))  # many more in a longer run
ROWS = 4096


def state_of(rank, size, generation):
    rows = ROWS // size
    table = torch.full((rows, 16), float(generation))
    return {
        "table": Shard(table, (ROWS, 16), (rank * rows, 0)),
        "dense": torch.full((33,), float(generation)),
        "generation": generation,
    }


def save_again_and_again(root):
    generation = 1
    while True:
        checkpoint.save(root, 2, state_of(0, 1, generation), replace=True)
        generation += 1


def load_again_and_again(rank, root, races):
    size = dist.get_world_size()
    wrong, seen = [], set()
    for race in range(races):
        state = state_of(rank, size, -1)
        step = 2 if race % 2 else None
        report = checkpoint.load(root, state, dist.group.WORLD, step=step)
        generation = state["generation"]
        mine = torch.tensor([report.step, generation])
        all_of_them = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(all_of_them, mine)
        whole = torch.cat([state["table"].tensor.flatten(), state["dense"]])
        if report.step != 2 or report.warnings:
            wrong.append(f"load {race}: step {report.step}, {report.warnings}")
        elif not torch.equal(whole, torch.full_like(whole, float(generation))):
            wrong.append(f"load {race}: not all of generation {generation}")
        elif any(not torch.equal(other, mine) for other in all_of_them):
            wrong.append(f"load {race}: ranks have {[other.tolist() for other in all_of_them]}")
        seen.add(generation)
    return wrong, len(seen)


def test_loads_beside_saves_of_the_same_step(tmp_path):
    root = str(tmp_path)
    checkpoint.save(root, 1, state_of(0, 1, 0))
    checkpoint.save(root, 2, state_of(0, 1, 0))
    saver = multiprocessing.get_context("forkserver").Process(target=save_again_and_again, args=(root,))
    saver.start()
    try:
        outcomes = run_ranks(2, load_again_and_again, root, RACES, limit=60 + RACES)
        assert saver.is_alive()
    finally:
        saver.kill()
        saver.join()
    for wrong, num_generations in outcomes:
        assert wrong == []
        assert num_generations > 2  # there was a race at all
