"""A training program as users of torchrec write it: DLRM-DCN v2, sharded by a plan, with metrics.

Every import is by `root`, "torchrec" or "tessera"; nothing else differs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os

import torch
import torch.distributed as dist

KEYS = [f"cat_{i}" for i in range(6)]
ROWS = [101, 37, 211, 64, 19, 83]
DIM, DENSE, BATCH = 8, 13, 16


def names(root):
    def get(path, *wanted):
        module = importlib.import_module(f"{root}.{path}" if path else root)
        return [getattr(module, name) for name in wanted]

    return get


def initial(model):
    """Give a model the same parameters on both sides and every rank, whoever drew them."""
    with torch.no_grad():
        for seed, (_, value) in enumerate(sorted(model.state_dict().items())):
            drawn = torch.randn(tuple(value.size()), generator=torch.Generator().manual_seed(seed)) / 8
            if not hasattr(value, "local_shards"):
                value.copy_(drawn)
                continue
            for shard in value.local_shards():
                (row, column), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                shard.tensor.copy_(drawn[row : row + height, column : column + width])


def build(root, device):
    get = names(root)
    EmbeddingBagConfig, EmbeddingBagCollection = get("", "EmbeddingBagConfig", "EmbeddingBagCollection")
    DLRM_DCN, DLRMTrain = get("models.dlrm", "DLRM_DCN", "DLRMTrain")
    (apply_optimizer_in_backward,) = get("optim.apply_optimizer_in_backward", "apply_optimizer_in_backward")
    RowWiseAdagrad, KeyedOptimizerWrapper, CombinedOptimizer = get(
        "optim", "RowWiseAdagrad", "KeyedOptimizerWrapper", "CombinedOptimizer"
    )
    (in_backward_optimizer_filter,) = get("optim.optimizers", "in_backward_optimizer_filter")
    (DistributedModelParallel,) = get("distributed", "DistributedModelParallel")
    (ShardingPlan,) = get("distributed.types", "ShardingPlan")
    (EmbeddingBagCollectionSharder,) = get("distributed.embeddingbag", "EmbeddingBagCollectionSharder")
    plan_names = ("construct_module_sharding_plan", "row_wise", "table_wise", "column_wise", "data_parallel")
    construct, row_wise, table_wise, column_wise, data_parallel = get(
        "distributed.sharding_plan", *plan_names
    )

    world = dist.get_world_size()
    tables = [
        EmbeddingBagConfig(num_embeddings=rows, embedding_dim=DIM, name=f"t_{key}", feature_names=[key])
        for key, rows in zip(KEYS, ROWS, strict=True)
    ]
    ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    model = DLRMTrain(DLRM_DCN(ebc, DENSE, [16, DIM], [16, 1], 2, 4, dense_device=device))
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.05, "eps": 1e-6})
    sharder = EmbeddingBagCollectionSharder()
    wishes = [
        row_wise(),
        table_wise(0),
        column_wise([world - 1, 0]),
        table_wise(world - 1),
        data_parallel(),
        row_wise(),
    ]
    by_table = {table.name: wish for table, wish in zip(tables, wishes, strict=True)}
    tables_plan = construct(ebc, by_table, sharder, world, world, device.type)
    plan = ShardingPlan({"model.sparse_arch.embedding_bag_collection": tables_plan})
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=0.05, eps=1e-6),
    )
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def metrics(root, rank, world, device):
    get = names(root)
    config = ("MetricsConfig", "RecMetricDef", "RecMetricEnum", "RecTaskInfo", "ThroughputDef")
    MetricsConfig, RecMetricDef, RecMetricEnum, RecTaskInfo, ThroughputDef = get(
        "metrics.metrics_config", *config
    )
    generate, RecMetricModule = get("metrics.metric_module", "generate_metric_module", "RecMetricModule")
    task = RecTaskInfo("click", "label", "prediction", "weight")
    kinds = (RecMetricEnum.NE, RecMetricEnum.AUC, RecMetricEnum.CALIBRATION)
    wishes = {kind: RecMetricDef(rec_tasks=[task], window_size=4096) for kind in kinds}
    whole = MetricsConfig(rec_tasks=[task], rec_metrics=wishes, throughput_metric=ThroughputDef(100, 10))
    return generate(RecMetricModule, whole, BATCH, world, rank, {}, device)


def train(root, steps, folder):
    """Train, saving in the middle and going on from there with a new model; return losses and metrics."""
    get = names(root)
    (TrainPipelineSparseDist,) = get("distributed.train_pipeline", "TrainPipelineSparseDist")
    (RandomRecDataset,) = get("datasets.random", "RandomRecDataset")
    import torch.distributed.checkpoint as dcp

    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    data = iter(
        RandomRecDataset(
            KEYS,
            BATCH,
            hash_sizes=ROWS,
            ids_per_features=[1, 2, 3, 1, 4, 2],
            min_ids_per_features=[1, 0, 1, 1, 0, 2],
            num_dense=DENSE,
            manual_seed=100 + rank,
            num_generated_batches=7,
            num_batches=steps,
        )
    )
    judge = metrics(root, rank, world, device)
    losses = []
    model = None
    for _ in range(2):
        saved = None if model is None else {"model": model.state_dict()}
        if saved is not None:
            dcp.save(saved, checkpoint_id=os.path.join(folder, root), no_dist=False)
        state = None if model is None else optimizer.state_dict()  # noqa: F821
        model, optimizer = build(root, device)
        if saved is None:
            initial(model)
        else:
            loaded = {"model": model.state_dict()}
            dcp.load(loaded, checkpoint_id=os.path.join(folder, root))
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(state)
        pipeline = TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
        batches = iter([next(data) for _ in range(steps // 2)])
        while True:
            try:
                loss, logits, labels = pipeline.progress(batches)
            except StopIteration:
                break
            losses.append(loss.item())
            judge.update(
                {"label": labels.float(), "prediction": logits.sigmoid(), "weight": torch.ones_like(logits)}
            )
    found = {key: float(value) for key, value in judge.compute().items() if "throughput" not in key}
    return losses, found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="tessera")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    losses, found = train(options.root, options.steps, options.folder)
    if dist.get_rank() == 0:
        print(json.dumps({"losses": losses, "metrics": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
