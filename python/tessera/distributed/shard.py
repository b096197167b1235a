"""Single modules, or those of a model, over ranks; without data parallelism for the rest.

sharded = shard(ebc, apply_to_all(ebc, row_wise()))
model = shard_modules(model, plan=plan, init_params=True)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from tessera.distributed.comm import get_local_size
from tessera.distributed.model_parallel import _check_plan, _greedy_plan, _shard_parts
from tessera.distributed.sharding_plan import (
    ParameterShardingGenerator,
    apply_to_all,
    construct_module_sharding_plan,
    get_default_sharders,
    get_module_to_default_sharders,
)
from tessera.distributed.types import (
    ModuleSharder,
    ModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
)
from tessera.distributed.utils import init_parameters

__all__ = ["shard", "shard_modules"]

Generator = ParameterShardingGenerator | Callable[..., ParameterSharding]


def _here(device: torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def shard(
    module: nn.Module,
    plan: ModuleShardingPlan | Mapping[str, Generator] | Generator,
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    sharder: ModuleSharder[nn.Module] | None = None,
) -> nn.Module:
    """Return a module over the ranks of `env`, the world if left out. Collective.

    `plan` is the module's plan, wishes by table, or one wish for all tables.
    """
    sharder = sharder or get_module_to_default_sharders().get(type(module))
    if sharder is None:
        raise ValueError(f"sharding.shard: there is no sharder for {type(module).__name__}.")
    env = env or ShardingEnv.from_process_group(dist.group.WORLD)
    device = _here(device)
    if not isinstance(plan, ModuleShardingPlan):
        wishes = apply_to_all(module, plan, sharder) if callable(plan) else plan
        local_size = get_local_size(env.world_size)
        plan = construct_module_sharding_plan(
            module, wishes, sharder, local_size, env.world_size, device.type
        )
    return sharder.shard(module, plan, env, device)


def shard_modules(
    module: nn.Module,
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    plan: ShardingPlan | None = None,
    sharders: list[ModuleSharder[nn.Module]] | None = None,
    init_params: bool = False,
) -> nn.Module:
    """Replace the modules that a plan names, in place, and return the model. Collective.

    Without a plan, tables go whole to ranks, balanced by size. With `init_params` meta parameters get memory
    and are filled by `reset_parameters`.
    """
    env = env or ShardingEnv.from_process_group(dist.group.WORLD)
    device = _here(device)
    known = {sharder.module_type: sharder for sharder in sharders or get_default_sharders()}
    if plan is None:
        plan = _greedy_plan(module, known, env, device)
    _check_plan("sharding.shard_modules", module, plan, known)
    sharded = _shard_parts(module, "", plan, known, env, device)
    if init_params:
        init_parameters(sharded, device)
    return sharded
