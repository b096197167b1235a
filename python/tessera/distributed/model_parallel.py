"""A whole model over ranks: its tables as a plan says, the rest as replicas.

model = DistributedModelParallel(Model(), plan=ShardingPlan({"ebc": tables}))
optimizer = torch.optim.Adam(dense_parameters(model))
loss = model(batch)
loss.backward()
optimizer.step()
"""

from __future__ import annotations

import abc
import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from tessera import _C, comm
from tessera.comm._group import make_subgroup
from tessera.distributed._model_join import Calls, ModelJoinHook
from tessera.distributed.algorithms.ddp_comm_hooks import default_hooks
from tessera.distributed.comm import get_local_size
from tessera.distributed.sharding_plan import construct_module_sharding_plan, get_default_sharders, table_wise
from tessera.distributed.types import (
    DMPCollectionConfig,
    ModuleSharder,
    ShardedModule,
    ShardingEnv,
    ShardingPlan,
    ShardingStrategy,
    get_tensor_size_bytes,
)
from tessera.distributed.utils import append_prefix, init_parameters, sharded_model_copy
from tessera.nn.parallel import DistributedDataParallel
from tessera.optim.fused import FusedOptimizerModule
from tessera.optim.keyed import CombinedOptimizer

__all__ = [
    "DMPCollection",
    "DataParallelWrapper",
    "DefaultDataParallelWrapper",
    "DistributedModelParallel",
    "dense_parameters",
    "get_module",
    "get_unwrapped_module",
]


def get_module(module: nn.Module) -> nn.Module:
    """Return the module inside DistributedModelParallel, still under data parallelism."""
    while isinstance(module, DistributedModelParallel):
        module = module._dmp_wrapped_module
    return module


def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """Return the module without any wrapper."""
    wrappers = (DistributedModelParallel, DistributedDataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(module, wrappers):
        is_ours = isinstance(module, DistributedModelParallel)
        module = module._dmp_wrapped_module if is_ours else module.module
    return module


def dense_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that an optimizer of one's own has to step: not those that backward steps."""
    return [
        parameter
        for parameter in module.parameters()
        if parameter.requires_grad and not hasattr(parameter, "_in_backward_optimizers")
    ]


class DataParallelWrapper(abc.ABC):
    """Make replicas of what is not sharded."""

    @abc.abstractmethod
    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wrap `dmp._dmp_wrapped_module`, in place. Collective."""


class DefaultDataParallelWrapper(DataParallelWrapper):
    """Wrap in Tessera's DistributedDataParallel; nothing if there is nothing left to average.

    `allreduce_comm_precision` is None, ``"fp16"`` or ``"bf16"``. Parameters of the model that
    `params_to_ignore` names are not averaged. `ddp_kwargs` are further arguments of the wrapper. Forwards
    leave each rank's buffers alone, unless they say `forward_sync_buffers=True`.
    """

    def __init__(
        self,
        bucket_cap_mb: int = 25,
        static_graph: bool = True,
        find_unused_parameters: bool = False,
        allreduce_comm_precision: str | None = None,
        params_to_ignore: Sequence[str] | None = None,
        ddp_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        if allreduce_comm_precision is not None and allreduce_comm_precision not in hooks:
            raise ValueError(
                f"DefaultDataParallelWrapper: {allreduce_comm_precision!r} is not one of {', '.join(hooks)}."
            )
        self._bucket_cap_mb = bucket_cap_mb
        self._static_graph = static_graph
        self._find_unused_parameters = find_unused_parameters
        self._hook = hooks.get(allreduce_comm_precision)
        self._ignored = set(params_to_ignore or ())
        self._ddp_kwargs = {"forward_sync_buffers": False, **(ddp_kwargs or {})}

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wrap the module unless it is wrapped, or all of it is sharded."""
        module = dmp._dmp_wrapped_module
        if isinstance(module, (DistributedDataParallel, nn.parallel.DistributedDataParallel)):
            return
        if env.process_group is None:
            raise ValueError("DefaultDataParallelWrapper: the environment has no process group.")
        unknown = self._ignored - {name for name, _ in _own_parameters(module)}
        if unknown:
            raise ValueError(
                f"DefaultDataParallelWrapper: params_to_ignore names '{min(unknown)}', which is no parameter "
                "of the model."
            )
        left_out = self._ignored.union(_sharded_parameter_names(module))
        if not any(p.requires_grad for name, p in _own_parameters(module) if name not in left_out):
            return
        if self._ignored:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sorted(self._ignored))
        wrapped = DistributedDataParallel(
            module,
            device_ids=None if device.type == "cpu" else [device],
            # A group of its own: a rank that has run out of batches answers tables and buckets in any order.
            process_group=_dense_group(env.process_group),
            gradient_as_bucket_view=True,
            bucket_cap_mb=self._bucket_cap_mb,
            static_graph=self._static_graph,
            find_unused_parameters=self._find_unused_parameters,
            **self._ddp_kwargs,
        )
        if self._hook is not None:
            wrapped.register_comm_hook(wrapped.process_group, self._hook)
        dmp._dmp_wrapped_module = wrapped


# The group beside each group, for everything that is replicated over it.
_dense_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def _dense_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a second group of the same ranks, always the same one. Collective over the group."""
    if group not in _dense_groups:
        ranks = list(range(group.size()))
        _dense_groups[group] = make_subgroup(group, ranks, f"dense of {group.group_name}", "dense")
    return _dense_groups[group]


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return every parameter by the path of the module that registers it."""
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield append_prefix(path, name), parameter


def _sharded_modules(module: nn.Module) -> list[tuple[str, ShardedModule]]:
    found: list[tuple[str, ShardedModule]] = []

    def walk(part: nn.Module, path: str) -> None:
        if isinstance(part, ShardedModule):
            found.append((path, part))
            return
        for name, child in part.named_children():
            walk(child, append_prefix(path, name))

    walk(module, "")
    return found


def _sharded_parameter_names(module: nn.Module) -> list[str]:
    return [
        name for path, sharded in _sharded_modules(module) for name in sharded.sharded_parameter_names(path)
    ]


def _greedy_plan(
    module: nn.Module, sharders: dict[type[nn.Module], ModuleSharder], env: ShardingEnv, device: torch.device
) -> ShardingPlan:
    """Return whole tables on ranks, largest first, each on the rank that has least. The same on all ranks."""
    found: list[tuple[str, nn.Module, ModuleSharder]] = []

    def walk(part: nn.Module, path: str) -> None:
        if type(part) in sharders:
            found.append((path, part, sharders[type(part)]))
            return
        for name, child in part.named_children():
            walk(child, append_prefix(path, name))

    walk(module, "")
    tables = [
        (get_tensor_size_bytes(tensor), path, name)
        for path, part, sharder in found
        for name, tensor in sharder.shardable_parameters(part).items()
    ]
    loads = [0] * env.world_size
    places: dict[tuple[str, str], int] = {}
    for size, path, name in sorted(tables, key=lambda table: (-table[0], table[1], table[2])):
        places[path, name] = loads.index(min(loads))
        loads[places[path, name]] += size
    local_size = get_local_size(env.world_size)
    return ShardingPlan(
        {
            path: construct_module_sharding_plan(
                part,
                {name: table_wise(places[path, name]) for name in sharder.shardable_parameters(part)},
                sharder,
                local_size,
                env.world_size,
                device.type,
            )
            for path, part, sharder in found
        }
    )


def _default_plan(
    module: nn.Module, sharders: list[ModuleSharder[nn.Module]], env: ShardingEnv, device: torch.device
) -> tuple[ShardingPlan, dict[str, Any] | None]:
    """Return the planner's plan and rank 0's proof of it; the same plan on all ranks. Collective."""
    if not hasattr(_C, "planner"):  # the library was built without it
        kinds = {sharder.module_type: sharder for sharder in sharders}
        return _greedy_plan(module, kinds, env, device), None
    from tessera.distributed.planner import default_planner

    planner = default_planner(env.world_size, get_local_size(env.world_size), device)
    pg = env.process_group
    plan = planner.plan(module, sharders) if pg is None else planner.collective_plan(module, sharders, pg)
    return plan, planner.last_result.certificate if planner.last_result else None


def _shard_parts(
    module: nn.Module,
    path: str,
    plan: ShardingPlan,
    sharders: dict[type[nn.Module], ModuleSharder],
    env: ShardingEnv,
    device: torch.device,
) -> nn.Module:
    """Put sharded modules in the places that a plan names; return the module, or what replaces it."""
    tables = plan.get_plan_for_module(path)
    if tables is not None:
        return sharders[type(module)].shard(module, tables, env, device)
    for name, child in module.named_children():
        replaced = _shard_parts(child, append_prefix(path, name), plan, sharders, env, device)
        if replaced is not child:
            module._modules[name] = replaced
    return module


def _check_plan(
    operation: str, module: nn.Module, plan: ShardingPlan, sharders: dict[type[nn.Module], ModuleSharder]
) -> None:
    paths = dict(module.named_modules())
    for path in plan.plan:
        if path not in paths:
            raise ValueError(f"{operation}: the plan has a module {path!r} that is not there.")
        if type(paths[path]) not in sharders:
            kind = type(paths[path]).__name__
            raise ValueError(f"{operation}: there is no sharder for {path!r}, a {kind}.")


class DistributedModelParallel(nn.Module, Joinable, FusedOptimizerModule):
    """Shard the collections of a model by a plan, and average the gradients of everything else.

    Collective: construction, forward, backward, copies, loading from another sharding. `env` is the world
    if left out. Without a plan, `tessera.distributed.planner` makes one. Meta parameters are filled by
    their modules' `reset_parameters`, tables by their `init_fn`, part by part. Names of parameters and of
    the state are those of the model before.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        model_tracker_configs: Any = None,
    ) -> None:
        if model_tracker_configs is not None:
            raise ValueError(
                "DistributedModelParallel: there is no tracker of changed rows; leave model_tracker_configs "
                "out. A checkpoint with a `base` writes the rows that changed."
            )
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self.init_parameters = init_parameters
        self._env = env or ShardingEnv.from_process_group(dist.group.WORLD)
        self.device = torch.device(device or "cpu")
        if sharders is None:
            sharders = get_default_sharders()
        self._sharder_map = {sharder.module_type: sharder for sharder in sharders}
        self._data_parallel_wrapper = data_parallel_wrapper or DefaultDataParallelWrapper()
        self._plan_certificate: dict[str, Any] | None = None
        if plan is None:
            plan, self._plan_certificate = _default_plan(module, sharders, self._env, self.device)
        self._plan = plan
        self._ddp_wrapped = False
        _check_plan("DistributedModelParallel", module, plan, self._sharder_map)
        self._dmp_wrapped_module = _shard_parts(module, "", plan, self._sharder_map, self._env, self.device)
        self._watch_calls()
        if init_parameters:
            self._init_parameters()
        if init_data_parallel:
            self.init_data_parallel()

    def _init_parameters(self) -> None:
        init_parameters(self.module, self.device)

    def _dense_env(self) -> ShardingEnv:
        """Return the ranks that hold replicas of what is not sharded."""
        return self._env

    def init_data_parallel(self) -> None:
        """Make replicas of what is not sharded, once; later calls do nothing. Collective."""
        if not self._ddp_wrapped:
            if self.init_parameters:
                self._init_parameters()
            self._data_parallel_wrapper.wrap(self, self._dense_env(), self.device)
            self._ddp_wrapped = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's batch."""
        wrapped = self._dmp_wrapped_module
        Join.notify_join_context(self)
        if isinstance(wrapped, DistributedDataParallel):
            # It joins with this one, which tells the others.
            wrapped._join_config = self._join_config._replace(is_first_joinable=False)
        with self._calls.recorded(waits=self._join_config.enable):
            return wrapped(*args, **kwargs)

    # ---- ranks with different numbers of batches ----

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may have different numbers of batches.

        A rank that has run out takes part with empty batches. Gradients are divided by the number of all
        ranks. All ranks enter it; each runs forward, backward and steps inside. Rows of sharded modules
        are waited for at once: they do not travel while the model computes.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what a rank without batches does; for torch's Join."""
        divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        if not divides_by_all and _sharded_modules(self.module):
            raise ValueError(
                "DistributedModelParallel: gradients of sharded tables are divided by the number of all "
                "ranks; join with divide_by_initial_world_size."
            )
        for path, sharded in _sharded_modules(self.module):
            left = sharded._tables_for_others() if hasattr(sharded, "_tables_for_others") else []
            if left:
                raise ValueError(
                    f"DistributedModelParallel: table {append_prefix(path, left[0])!r} is dense, and a rank "
                    "without batches steps no optimizer. Join with tables that backward steps."
                )
        wrapped = self._dmp_wrapped_module
        is_wrapped = isinstance(wrapped, DistributedDataParallel)
        dense = wrapped.join_hook(divide_by_initial_world_size=divides_by_all) if is_wrapped else None
        return ModelJoinHook(self._shadow_tables, dense)

    @property
    def join_device(self) -> torch.device:
        """Return the device of the messages that Join sends."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Return the group whose ranks join."""
        return self._env.process_group

    def _watch_calls(self) -> None:
        self._calls = Calls()
        for _, sharded in _sharded_modules(self.module):
            self._calls.watch(sharded)

    def _shadow_tables(self) -> None:
        modules = self._calls.last or [module for _, module in _sharded_modules(self.module)]
        with torch.enable_grad():
            total = torch.zeros((), requires_grad=True)
            for module in modules:
                total = total + module._empty_pass()
            total.backward()

    @property
    def module(self) -> nn.Module:
        """Return the model itself, with its sharded modules."""
        return get_unwrapped_module(self)

    @module.setter
    def module(self, value: nn.Module) -> None:
        if isinstance(self.module, nn.Module) and value is not self.module:
            raise RuntimeError("DistributedModelParallel: module cannot be set.")

    @property
    def plan(self) -> ShardingPlan:
        """Return the plan."""
        return self._plan

    @property
    def plan_certificate(self) -> dict[str, Any] | None:
        """Return, on rank 0, the proof of how fast no plan can be, if no plan was given."""
        return self._plan_certificate

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """Return the optimizers of all sharded modules, by their paths."""
        return CombinedOptimizer(
            [
                (path, sharded.fused_optimizer)
                for path, sharded in _sharded_modules(self.module)
                if hasattr(sharded, "fused_optimizer")
            ]
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, gradients of replicas are not averaged; tables that backward steps are stepped."""
        wrapped = self._dmp_wrapped_module
        is_wrapped = isinstance(wrapped, DistributedDataParallel)
        with wrapped.no_sync() if is_wrapped else contextlib.nullcontext():
            yield

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients, of replicas and of tables, to this 2-norm; return what it was. Collective.

        Tables must leave their gradients: `fused_params={"gradients": "sparse"}`.
        """
        sharded = _sharded_modules(self.module)
        names = set(_sharded_parameter_names(self.module))
        dense = [
            parameter.grad
            for name, parameter in _own_parameters(self.module)
            if name not in names and parameter.grad is not None
        ]
        norms = [module.clip_grad_norm(float("inf")) for _, module in sharded]
        replicas = [p.grad for _, module in sharded for p in _replica_tables(module) if p.grad is not None]
        own = [grad for grad in dense if not any(grad is other for other in replicas)]
        total = torch.nn.utils.get_total_norm(own).item() if own else 0.0
        total = (total**2 + sum(norm**2 for norm in norms)) ** 0.5
        if total > max_norm:
            torch._foreach_mul_(own, max_norm / total)
            for (_, module), norm in zip(sharded, norms, strict=True):
                module.clip_grad_norm(norm * max_norm / total)
        return total

    # ---- names and state: those of the model, without wrappers ----

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the state of the model; tables are sharded tensors."""
        if destination is None:
            return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)
        return self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "", strict: bool = True):
        """Load whole tensors, or sharded ones of any sharding; return what is missing and too much."""
        state = {name[len(prefix) :]: value for name, value in state_dict.items() if name.startswith(prefix)}
        return self.module.load_state_dict(state, strict=strict)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of the model by name."""
        seen: set[int] = set()
        for name, parameter in self._all_parameters(self.module, prefix):
            if not remove_duplicate or id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def _all_parameters(self, module: nn.Module, path: str) -> Iterator[tuple[str, nn.Parameter]]:
        if isinstance(module, ShardedModule):
            yield from module.named_parameters(path)
            return
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield append_prefix(path, name), parameter
        for name, child in module.named_children():
            yield from self._all_parameters(child, append_prefix(path, name))

    def bare_named_parameters(
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters of the model by name, each once."""
        yield from self.named_parameters(prefix, recurse)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the buffers of the model by name."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def sparse_grad_parameter_names(
        self, destination: list[str] | None = None, prefix: str = ""
    ) -> list[str]:
        """Return the parameters whose gradients are sparse tensors."""
        names = [] if destination is None else destination
        for path, part in self.module.named_modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
                names.append(prefix + append_prefix(path, "weight"))
        return names

    def copy(self, device: torch.device) -> DistributedModelParallel:
        """Return a copy: tables sharded alike, with their optimizers, the rest on `device`. Collective."""
        with sharded_model_copy(device):
            module = copy.deepcopy(self.module)
        other = DistributedModelParallel.__new__(DistributedModelParallel)
        nn.Module.__init__(other)
        Joinable.__init__(other)
        for name in (
            "init_parameters",
            "_env",
            "_sharder_map",
            "_data_parallel_wrapper",
            "_plan",
            "_plan_certificate",
        ):
            setattr(other, name, getattr(self, name))
        other.device = torch.device(device)
        other._ddp_wrapped = False
        other._dmp_wrapped_module = module
        other._watch_calls()
        if self._ddp_wrapped:
            other.init_data_parallel()
        other.train(self.training)
        return other


# The groups of sharded models and of their replicas, by the ranks they have; made once.
_groups_of_ranks: dict[tuple[dist.ProcessGroup, tuple[int, ...], str], dist.ProcessGroup] = {}


def _group_of_ranks(whole: dist.ProcessGroup, ranks: list[int], kind: str) -> dist.ProcessGroup:
    """Return the group of some ranks of another, always the same one. Collective over these ranks."""
    key = (whole, tuple(ranks), kind)
    if key not in _groups_of_ranks:
        name = f"{kind} {'-'.join(map(str, ranks))} of {whole.group_name}"
        _groups_of_ranks[key] = make_subgroup(whole, ranks, name, kind)
    return _groups_of_ranks[key]


class DMPCollection(DistributedModelParallel):
    """Shard a model over groups of `sharding_group_size` ranks; each group has a replica of it.

    With G groups, group g has the ranks g, g + G, g + 2 G, …, or with `use_inter_host_allreduce` ranks that
    follow each other. The plan is made for one group. Everything that is not sharded is averaged over all
    ranks of `global_pg` in every step; `sync`, called after a step, averages the tables over the groups.
    With rules that are linear in the gradient (SGD) that is what one process with all samples gives.

    Collective: construction, forward, backward, `sync`. `custom_all_reduce` is given the tables' parts, or
    what is kept beside them, and averages them in place of `sync`.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        plan: ShardingPlan,
        world_size: int,
        sharding_group_size: int,
        global_pg: dist.ProcessGroup,
        sharding_strategy: ShardingStrategy = ShardingStrategy.DEFAULT,
        node_group_size: int | None = None,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        use_inter_host_allreduce: bool = False,
        custom_all_reduce: Callable[[list[torch.Tensor]], None] | None = None,
        submodule_configs: list[DMPCollectionConfig] | None = None,
        rs_awaitable_hook_module: str | None = None,
        use_sharded_relay: bool = False,
    ) -> None:
        if world_size != global_pg.size() or world_size % sharding_group_size:
            raise ValueError(
                f"DMPCollection: {world_size} ranks, in a group of {global_pg.size()}, cannot be dealt to "
                f"groups of {sharding_group_size}."
            )
        if sharding_strategy != ShardingStrategy.DEFAULT or node_group_size is not None:
            raise ValueError("DMPCollection: there is only the strategy DEFAULT, without node_group_size.")
        if submodule_configs or rs_awaitable_hook_module is not None or use_sharded_relay:
            raise ValueError(
                "DMPCollection: all modules are replicated alike, by an all-reduce in `sync`. Leave out "
                "submodule_configs, rs_awaitable_hook_module and use_sharded_relay."
            )
        groups, rank = world_size // sharding_group_size, global_pg.rank()
        if use_inter_host_allreduce:
            own, place = divmod(rank, sharding_group_size)
            shard_ranks = [own * sharding_group_size + r for r in range(sharding_group_size)]
            replicas = [g * sharding_group_size + place for g in range(groups)]
        else:
            place, own = divmod(rank, groups)
            shard_ranks = [r * groups + own for r in range(sharding_group_size)]
            replicas = [place * groups + g for g in range(groups)]
        sharding_pg = _group_of_ranks(global_pg, shard_ranks, "sharding")
        self._replica_pg = _group_of_ranks(global_pg, replicas, "replica")
        self._global_env = ShardingEnv.from_process_group(global_pg)
        self._reduce_hook = custom_all_reduce
        super().__init__(
            module,
            ShardingEnv.from_process_group(sharding_pg),
            device,
            plan,
            sharders,
            False,
            init_parameters,
            data_parallel_wrapper,
        )
        for tensor in self._table_tensors(False):  # replicas begin alike
            comm.broadcast_(tensor, 0, self._replica_pg)
        if init_data_parallel:
            self.init_data_parallel()

    def _dense_env(self) -> ShardingEnv:
        return self._global_env

    def _table_tensors(self, is_state: bool) -> list[torch.Tensor]:
        """Return this rank's parts of tables, or what is kept beside them."""
        found: list[torch.Tensor] = []
        for _, sharded in _sharded_modules(self.module):
            for part in sharded.modules():
                for engine in getattr(part, "_engines", []):
                    for shard in engine.local_shards():
                        found += shard.state.values() if is_state else [shard.weight.detach()]
        return [tensor for tensor in found if tensor.numel()]

    def sync(self, include_optimizer_state: bool = True) -> None:
        """Average the tables over the groups, and what is kept beside them. Collective."""
        for tensors in (
            self._table_tensors(False),
            self._table_tensors(True) if include_optimizer_state else [],
        ):
            if self._reduce_hook is not None:
                self._reduce_hook(tensors)
                continue
            for tensor in tensors:
                comm.all_reduce_(tensor, self._replica_pg).div_(self._replica_pg.size())

    def set_all_reduce_hook(self, reduce_hook: Callable[[list[torch.Tensor]], None]) -> None:
        """Let a function average in place of `sync`."""
        self._reduce_hook = reduce_hook

    def copy(self, device: torch.device) -> DistributedModelParallel:
        """Raise NotImplementedError."""
        raise NotImplementedError("DMPCollection: it cannot be copied; make another of the same model.")


def _replica_tables(module: ShardedModule) -> list[nn.Parameter]:
    """Return the whole tables that leave a gradient; their norm is the module's."""
    names = getattr(module, "_replica_parameters", set)()
    return [parameter for name, parameter in module.named_parameters() if name in names]
