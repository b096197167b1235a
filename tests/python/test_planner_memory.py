"""What the planner says a rank's tables need is what they take: resident memory of trainings."""

from __future__ import annotations

import ctypes
import gc
import json
import pathlib
import random

import pytest
import tessera._C
import torch
from ranks import run_ranks
from tessera.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.distributed.model_parallel import DistributedModelParallel
from tessera.modules.embedding_configs import EmbeddingBagConfig
from tessera.modules.embedding_modules import EmbeddingBagCollection
from tessera.sparse.jagged_tensor import KeyedJaggedTensor
from torch import nn

if not hasattr(tessera._C, "planner"):
    pytest.skip("the library was built without the planner", allow_module_level=True)
from tessera.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

ENVIRONMENT = {"TESSERA_PROFILE": "assume"}
CUTS = ["table_wise", "column_wise", "row_wise", "data_parallel"]


def random_problem(seed):
    """Return tables (name, rows, columns, ids of a sample), constraints and a batch size."""
    pick = random.Random(seed)
    tables, constraints = [], {}
    for i in range(pick.randint(2, 6)):
        name, dim = f"t{i}", 4 * pick.randint(2, 32)
        ids = pick.choice([1, 4, 20])
        tables.append((name, pick.randint(4, 30) * 1_000_000 // dim, dim, ids))
        cuts = pick.sample(CUTS, pick.randint(1, 3))
        constraints[name] = ParameterConstraints(sharding_types=cuts, pooling_factors=[float(ids)])
    return tables, constraints, pick.choice([64, 512, 4096])


class Model(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(rows, dim, name, feature_names=[name]) for name, rows, dim, _ in tables],
            device=torch.device("meta"),
        )

    def forward(self, features):
        return self.ebc(features).values()


def batch_of(tables, samples, generator):
    lengths = torch.tensor([ids for *_, ids in tables], dtype=torch.int32).repeat_interleave(samples)
    values = [torch.randint(0, rows, (samples * ids,), generator=generator) for _, rows, _, ids in tables]
    return KeyedJaggedTensor([name for name, *_ in tables], torch.cat(values), lengths=lengths)


def resident(key):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return 1024 * int(line.split()[1])
    raise AssertionError(key)


def peaks(rank, world, seeds):
    """Return predicted bytes of this rank, those of its samples among them, and measured ones, by problem."""
    found = []
    for seed in [1000, *seeds]:  # what is loaded once is not counted
        tables, constraints, samples = random_problem(seed)
        sharders = [EmbeddingBagCollectionSharder({"learning_rate": 0.1})]
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=world, compute_device="cpu", local_world_size=world),
            batch_size=samples,
            constraints=constraints,
            debug=False,
        )
        model = Model(tables)
        plan = planner.collective_plan(model, sharders)
        result = [json.loads(planner.last_result.json) if rank == 0 else None]
        torch.distributed.broadcast_object_list(result)
        predicted = result[0]["per_rank"][rank]["bytes"]["total"]
        around = sum(2 * samples * dim * 4 for _, _, dim, _ in tables)  # rows and gradients of its samples
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = resident("VmRSS")
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        dmp = DistributedModelParallel(model, plan=plan, sharders=sharders)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            model.zero_grad()
            dmp(batch_of(tables, samples, generator)).square().mean().backward()
        found.append((predicted + around, around, resident("VmHWM") - before))
        del dmp, model
    return found[1:]


def test_what_tables_take_is_what_was_predicted():
    for rank, found in enumerate(run_ranks(2, peaks, 2, range(20), limit=120)):
        for seed, (predicted, around, measured) in enumerate(found):
            ratio = f"rank {rank}, seed {seed}: {measured / 1e6:.1f} of {predicted / 1e6:.1f} MB"
            assert measured >= 0.8 * predicted, ratio
            # Buffers of the exchanges and the loss are what the reservation is for.
            assert measured <= predicted + 5 * around, ratio
