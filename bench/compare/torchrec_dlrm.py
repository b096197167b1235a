"""Times training steps of one DLRM: `tessera train dlrm` beside torchrec over Gloo, on two ranks.

26 tables of 100,000 rows and 32 columns, 10 ids per bag, 13 dense numbers, bottom 128-32, top
128-64-1, 2048 samples per rank, SGD. Runs under the peers' Python. The two take turns, one whole run
each; the time of a step is the slower rank's for torchrec, rank 0's for ours, whose steps end with a
collective. torchrec gets batches that are made beforehand, and runs without its
pipeline; ours makes its own batches, with Zipf-distributed ids, inside the step.
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
TESSERA = ROOT / "build/release/bin/tessera"
SHAPE = "t26_r100000_d32_l10_b2048_p2"
TABLES, DIM, BAG, DENSE = 26, 32, 10, 13
WARM_UPS = 5


def run_rank(rank: int, world: int, folder: str, args) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.types import ShardingEnv
    from torchrec.models.dlrm import DLRM, DLRMTrain
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.manual_seed(1)
    device = torch.device("cpu")
    keys = [f"cat_{i}" for i in range(TABLES)]
    configs = [
        EmbeddingBagConfig(name=key, num_embeddings=args.rows, embedding_dim=DIM, feature_names=[key])
        for key in keys
    ]
    tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.01})
    model = DLRMTrain(DLRM(tables, DENSE, [128, DIM], [128, 64, 1], dense_device=device))
    sharders = [EmbeddingBagCollectionSharder()]
    topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
    plan = EmbeddingShardingPlanner(topology=topology).collective_plan(model, sharders, dist.group.WORLD)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    model = DistributedModelParallel(model, env, device, plan=plan, sharders=sharders)
    dense = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
    optimizer = torch.optim.SGD(dense, lr=0.01)

    class Batch:
        def __init__(self, seed):
            generator = torch.Generator().manual_seed(seed)
            self.dense_features = torch.randn(args.batch, DENSE, generator=generator)
            ids = torch.randint(args.rows, (TABLES * args.batch * BAG,), generator=generator)
            lengths = torch.full((TABLES * args.batch,), BAG, dtype=torch.int32)
            self.sparse_features = KeyedJaggedTensor.from_lengths_sync(keys, ids, lengths)
            self.labels = torch.randint(2, (args.batch,), generator=generator)

    batches = [Batch(100 * rank + i) for i in range(4)]
    times = []
    assert isinstance(model, nn.Module)
    for step in range(args.steps + WARM_UPS):
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss, _ = model(batches[step % len(batches)])
        loss.backward()
        optimizer.step()
        taken = torch.tensor([time.perf_counter() - begin], dtype=torch.double)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if step >= WARM_UPS:
            times.append(taken.item())
    if rank == 0:
        pathlib.Path(folder, "times.json").write_text(json.dumps(times))
    dist.destroy_process_group()


def time_torchrec(args) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-W",
            "ignore",
            __file__,
            "--rows",
            str(args.rows),
            "--batch",
            str(args.batch),
        ]
        command += ["--steps", str(args.steps), "--folder", folder, "--rank"]
        environment = {**os.environ, "LOCAL_WORLD_SIZE": "2"}
        ranks = [
            subprocess.Popen([*command, str(r)], env=environment, stderr=subprocess.DEVNULL) for r in (0, 1)
        ]
        if any([rank.wait() for rank in ranks]):
            raise SystemExit("torchrec's ranks failed")
        return json.loads(pathlib.Path(folder, "times.json").read_text())


def time_tessera(args) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--ranks", 2, "--tables", TABLES, "--rows", args.rows, "--dim", DIM, "--bag", BAG]
        flags += ["--batch", args.batch, "--steps", args.steps + WARM_UPS, "--optimizer", "sgd"]
        flags += ["--table-optimizer", "sgd", "--lr", 0.01, "--table-lr", 0.01, "--eval-every", 0]
        flags += ["--eval-samples", 4096, "--runs", folder, "--json"]
        command = [str(TESSERA), "train", "dlrm", *map(str, flags)]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        metrics = pathlib.Path(json.loads(result.stdout)["report"]).with_name("metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        return [line["seconds"] for line in lines if line["kind"] == "step"][WARM_UPS:]


def print_row(variant: str, times: list[float]) -> None:
    cuts = statistics.quantiles(times, n=10)
    row = {"name": f"dlrm/step/{variant}/{SHAPE}", "ranks": 2, "median_us": 1e6 * statistics.median(times)}
    row |= {"p10_us": 1e6 * cuts[0], "p90_us": 1e6 * cuts[8], "repetitions": len(times), "bytes": 0}
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", default="")
    parser.add_argument("--rank", type=int, default=-1)
    args = parser.parse_args()
    if args.rank >= 0:
        run_rank(args.rank, 2, args.folder, args)
        return
    ours, theirs = [], []
    for _ in range(args.rounds):
        ours += time_tessera(args)
        theirs += time_torchrec(args)
    print_row("tessera", ours)
    print_row("torchrec", theirs)


if __name__ == "__main__":
    main()
