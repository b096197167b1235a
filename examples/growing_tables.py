"""Learn a row for every id of a stream, whatever the ids are; tables grow over the ranks.

tessera run -n 2 -- python examples/growing_tables.py
"""

import tessera  # noqa: F401  (registers the backend "shm")
import torch
import torch.distributed as dist
from tessera.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from tessera.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from tessera.distributed.types import ShardingEnv
from tessera.modules.embedding_configs import EmbeddingBagConfig
from tessera.modules.embedding_modules import EmbeddingBagCollection
from tessera.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from tessera.modules.mc_modules import GrowingManagedCollisionModule, ManagedCollisionCollection
from tessera.sparse.jagged_tensor import KeyedJaggedTensor


def main() -> None:
    dist.init_process_group("shm")
    # No number of rows: ids get one when they are seen twice.
    tables = [EmbeddingBagConfig(None, 8, "user", feature_names=["user"])]
    ids = ManagedCollisionCollection({"user": GrowingManagedCollisionModule(admission="freq:2")}, tables)
    module = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables), ids)

    fused = {"optimizer": "EXACT_ROWWISE_ADAGRAD", "learning_rate": 0.5}
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused))
    plan = construct_module_sharding_plan(module, {"user": row_wise()}, sharder)
    sharded = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD))

    torch.manual_seed(dist.get_rank())
    for _ in range(100):
        users = torch.randint(0, 500, (64,)) * 0x9E3779B97F4A7 - 2**62
        features = KeyedJaggedTensor.from_lengths_sync(["user"], users, torch.ones(64, dtype=torch.int64))
        pooled, _ = sharded(features)
        loss = (pooled.wait()["user"] - 1).pow(2).mean()
        loss.backward()  # steps the rows where they lie
    growth = sharded.growth()[0]  # all ranks call it
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: {growth.ids} ids, loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
