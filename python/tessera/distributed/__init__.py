"""The module paths of torchrec.distributed, on Tessera's engine.

>>> from tessera.distributed import DistributedModelParallel, TrainPipelineSparseDist
>>> DistributedModelParallel.__module__
'tessera.distributed.model_parallel'
"""

import importlib

from tessera._lazy import submodule

# Names that are also found here; loaded when they are asked for.
_PLACES = {
    "Awaitable": "types",
    "DataLoadingThread": "train_pipeline",
    "DistributedModelParallel": "model_parallel",
    "EvalPipelineSparseDist": "train_pipeline",
    "ModuleSharder": "types",
    "NoWait": "types",
    "ParameterSharding": "types",
    "PrefetchTrainPipelineSparseDist": "train_pipeline",
    "ShardedModule": "types",
    "ShardingEnv": "types",
    "ShardingPlanner": "types",
    "TrainPipeline": "train_pipeline",
    "TrainPipelineBase": "train_pipeline",
    "TrainPipelineSparseDist": "train_pipeline",
    "get_local_rank": "comm",
    "get_local_size": "comm",
    "get_unsharded_module_names": "utils",
    "sharded_model_copy": "utils",
}

__all__ = [*_PLACES, "ShardedTensor"]


def __getattr__(name: str):
    if name == "ShardedTensor":  # torch's own, which states of sharded tables are made of
        return importlib.import_module("torch.distributed._shard.sharded_tensor").ShardedTensor
    if name in _PLACES:
        return getattr(importlib.import_module(f"tessera.distributed.{_PLACES[name]}"), name)
    return submodule(__name__, name)
