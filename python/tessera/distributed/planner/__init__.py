"""Plans with a proof: which part of which table lies on which rank, and how far from the best at most.

planner = EmbeddingShardingPlanner(Topology(world_size=8, compute_device="cpu"))
plan = planner.collective_plan(model)
planner.last_result.gap  # at most so much slower than the best plan there is

Names and parameters are those of `torchrec.distributed.planner`.
"""

from functools import partial

from tessera._lazy import submodule
from tessera.distributed.planner.planners import (
    EmbeddingPlannerBase,
    EmbeddingShardingPlanner,
    default_planner,
)
from tessera.distributed.planner.types import ParameterConstraints, Topology
from tessera.distributed.planner.utils import bytes_to_gb, sharder_name

__all__ = [
    "EmbeddingPlannerBase",
    "EmbeddingShardingPlanner",
    "ParameterConstraints",
    "Topology",
    "bytes_to_gb",
    "default_planner",
    "sharder_name",
]

__getattr__ = partial(submodule, __name__)
