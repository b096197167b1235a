"""Time training steps of torchrec's sharded tables on the shapes of step_bench; a line of JSON per row.

    .venv-peers/bin/python bench/compare/torchrec_sharded.py [--seconds S]

Starts itself once per rank, over Gloo, one thread each. The time of a step is the slower rank's. Run by
bench/run.py with the peers' interpreter.
"""

from __future__ import annotations

import sys
import time

from rank_page import print_row, rank_parser, start_ranks

TABLES, ROWS, COLUMNS, BAG, ROTATION, RANKS = 8, 200_000, 64, 20, 8, 2


def make_tables(torch, kind: str):
    import torch.distributed as dist
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(name=f"t{t}", embedding_dim=COLUMNS, num_embeddings=ROWS, feature_names=[f"f{t}"])
        for t in range(TABLES)
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
    wish = {
        "table_wise": lambda t: table_wise(rank=t % RANKS, compute_kernel="fused"),
        "row_wise": lambda t: row_wise(compute_kernel="fused"),
        "column_wise": lambda t: column_wise(ranks=list(range(RANKS)), compute_kernel="fused"),
    }[kind]
    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.01})
    plan = construct_module_sharding_plan(
        collection,
        per_param_sharding={f"t{t}": wish(t) for t in range(TABLES)},
        sharder=sharder,
        local_size=RANKS,
        world_size=RANKS,
        device_type="cpu",
    )
    return sharder.shard(
        collection, plan, ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu")
    )


def run_rank(path: str, rank: int, seconds: float) -> None:
    import torch
    import torch.distributed as dist
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=RANKS)
    generator = torch.Generator().manual_seed(rank + 1)
    for kind in ("table_wise", "row_wise", "column_wise"):
        tables = make_tables(torch, kind)
        for batch in (64, 2048):
            inputs = [
                KeyedJaggedTensor.from_lengths_sync(
                    keys=[f"f{t}" for t in range(TABLES)],
                    values=torch.randint(0, ROWS, (TABLES * batch * BAG,), generator=generator),
                    lengths=torch.full((TABLES * batch,), BAG, dtype=torch.int32),
                )
                for _ in range(ROTATION)
            ]
            gradient = (torch.rand(batch, TABLES * COLUMNS) - 0.5) * 1e-3
            times: list[float] = []
            end = time.perf_counter() + seconds
            step = 0
            going = True
            while going:
                dist.barrier()
                begin = time.perf_counter()
                tables(inputs[step % ROTATION]).values().backward(gradient)
                taken = torch.tensor([time.perf_counter() - begin])
                dist.all_reduce(taken, op=dist.ReduceOp.MAX)
                if step >= 4:
                    times.append(taken.item() * 1e6)
                step += 1
                flag = torch.tensor([1.0 if step < 12 or time.perf_counter() < end else 0.0])
                dist.broadcast(flag, 0)
                going = flag.item() > 0
            if rank == 0:
                name = f"sharding/{kind}_step/torchrec/b{batch}"
                print_row(name, RANKS, TABLES * batch * COLUMNS * 4, times)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = rank_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    words = parser.parse_args()
    if words.as_rank is not None:
        run_rank(words.page, words.as_rank, words.seconds)
        return 0
    return start_ranks(RANKS, "--seconds", words.seconds)


if __name__ == "__main__":
    sys.exit(main())
