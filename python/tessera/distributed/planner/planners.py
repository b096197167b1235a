"""The planner: tables of a model, constraints and ranks in; a plan and its proof out."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tessera import _C
from tessera.distributed.collective_utils import invoke_on_rank_and_broadcast_result
from tessera.distributed.comm import get_local_size
from tessera.distributed.planner._certified import PlanResult, lists_of, options_of, problem_of, solve
from tessera.distributed.planner._plan_checks import (
    extract_plan,
    to_sharding_plan,
    validate_compute_kernels,
    validate_modules_inclusion_in_sharding_plan,
    validate_rank_assignment,
)
from tessera.distributed.planner._profile import Measured, alike, measured_here
from tessera.distributed.planner._search import narrower_options, search_plan
from tessera.distributed.planner._tables import tables_of
from tessera.distributed.planner.constants import BATCH_SIZE
from tessera.distributed.planner.enumerators import EmbeddingEnumerator
from tessera.distributed.planner.partitioners import GreedyPerfPartitioner
from tessera.distributed.planner.perf_models import NoopPerfModel
from tessera.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from tessera.distributed.planner.stats import EmbeddingStats
from tessera.distributed.planner.storage_reservations import HeuristicalStorageReservation
from tessera.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
    PlanDebugStats,
    PlanLoader,
    PlannerError,
    PlannerErrorType,
    Proposer,
    ShardingOption,
    Stats,
    Storage,
    StorageReservation,
    Topology,
    hash_planner_context_inputs,
    hash_planner_context_inputs_str,
)
from tessera.distributed.planner.utils import reset_shard_rank, storage_repr_in_gb
from tessera.distributed.sharding_plan import get_default_sharders
from tessera.distributed.types import ModuleSharder, ShardingPlan, ShardingPlanner

__all__ = [
    "EmbeddingPlannerBase",
    "EmbeddingShardingPlanner",
    "PlanResult",
    "default_planner",
    "extract_plan",
    "to_sharding_plan",
    "validate_compute_kernels",
    "validate_modules_inclusion_in_sharding_plan",
    "validate_rank_assignment",
]

logger = logging.getLogger(__name__)


def _measured_here(topology: Topology, pg: dist.ProcessGroup | None = None) -> Measured:
    """Return what was measured on this machine, for ranks that work on its processors."""
    if topology.compute_device != "cpu":
        return Measured()
    # Between hosts there are other engines than the one that was measured inside one.
    is_on_host = pg is not None and 1 < pg.size() == topology.local_world_size
    return measured_here(topology.local_world_size, _C.engine(pg) if is_on_host else "")


class EmbeddingPlannerBase(ShardingPlanner):
    """Hold what planners are given."""

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        timeout_seconds: int | None = None,
    ) -> None:
        if topology is None:
            is_joined = dist.is_available() and dist.is_initialized()
            world_size = dist.get_world_size() if is_joined else 1
            topology = Topology(
                world_size=world_size,
                compute_device="cuda" if torch.cuda.is_available() else "cpu",
                local_world_size=get_local_size(world_size),
            )
        self._topology = topology
        self._batch_size = batch_size or BATCH_SIZE
        self._constraints = constraints
        self._enumerator = enumerator or EmbeddingEnumerator(
            topology=topology, batch_size=self._batch_size, constraints=constraints
        )
        self._storage_reservation = storage_reservation or HeuristicalStorageReservation(percentage=0.15)
        self._stats = stats if isinstance(stats, list) else [stats or EmbeddingStats()]
        self._debug = debug
        self._callbacks = callbacks or []
        self._timeout_seconds = timeout_seconds

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Return rank 0's plan on all ranks. Collective.

        What the ranks were given is compared first: a rank that was given something else is the same
        PlannerError on all of them.
        """
        if pg is None:
            if not (dist.is_available() and dist.is_initialized()):
                raise ValueError(
                    "collective_plan: there is no process group. Call torch.distributed.init_process_group "
                    "first, or plan(), which needs none."
                )
            pg = dist.group.WORLD
        sharders = get_default_sharders() if sharders is None else sharders
        self._check_agreement(module, sharders, pg)
        return invoke_on_rank_and_broadcast_result(pg, 0, self.plan, module, sharders)

    def hash_planner_context_inputs(self) -> int:
        """Return a hash of what the last plan was made for."""
        return hash_planner_context_inputs(
            self._topology, self._batch_size, self._enumerator, self._storage_reservation, self._constraints
        )

    def hash_planner_context_inputs_str(self) -> str:
        """Return the same in hexadecimal digits."""
        return hash_planner_context_inputs_str(
            self._topology, self._batch_size, self._enumerator, self._storage_reservation, self._constraints
        )

    def _inputs(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> dict[str, str]:
        raise NotImplementedError

    def _check_agreement(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]], pg: dist.ProcessGroup
    ) -> None:
        own = {
            part: hashlib.sha256(text.encode()).hexdigest()
            for part, text in self._inputs(module, sharders).items()
        }
        gathered: list[Any] = [None] * pg.size()
        dist.all_gather_object(gathered, (own, _measured_here(self._topology)), group=pg)
        # Ranks on machines that are not alike are ranks of different kinds.
        if pg.size() == self._topology.world_size:
            self._topology.use_measured(alike([measured for _, measured in gathered]))
        if pg.rank() == 0:
            for caution in dict.fromkeys(measured.caution for _, measured in gathered):
                if caution:
                    logger.warning("plan: %s", caution)
        given = [parts for parts, _ in gathered]
        for rank, other in enumerate(given):
            parts = [part for part in given[0] if other.get(part) != given[0][part]]
            if parts:
                raise PlannerError(
                    f"collective_plan: rank {rank} was given other {' and '.join(parts)} than rank 0. "
                    "Give all ranks the same.",
                    PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH,
                )


class EmbeddingShardingPlanner(EmbeddingPlannerBase):
    """Find a plan, and prove how far it is at most from the best one.

    Constraints are by the name of the table. With a proposer, partitioner, performance model, enumerator or
    plan loader of one's own, proposals are laid and rated by those: there is no proof, and `last_result` is
    None. What is left out of them is as in torchrec: a grid search, two greedy ones and uniform plans, laid
    by GreedyPerfPartitioner, rated by the slowest rank. With an enumerator alone, whose estimator says what
    shards cost, a search by those costs comes first, and `tries` of the proposals after it.

    `apart` and `together` are lists of tables, by name: those of one list never meet on a rank; those of one
    lie whole on the same one.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: PlanLoader | None = None,
        *,
        objective: str = "sum",
        effort: str = "normal",
        apart: Sequence[Sequence[str]] = (),
        together: Sequence[Sequence[str]] = (),
    ) -> None:
        super().__init__(
            topology, batch_size, enumerator, storage_reservation, stats, constraints, debug, callbacks,
            timeout_seconds,
        )  # fmt: skip
        parts = (enumerator, proposer, partitioner, performance_model, plan_loader)
        self._is_certified = all(part is None for part in parts)
        # Costs of one's own, and nothing else: a search by those costs comes before the proposals.
        self._is_searched = enumerator is not None and all(part is None for part in parts[1:])
        if proposer is None:
            proposer = [GridSearchProposer(), GreedyProposer(), GreedyProposer(False), UniformProposer()]
        self._proposers = list(proposer) if isinstance(proposer, list) else [proposer]
        self._partitioner = partitioner or GreedyPerfPartitioner()
        self._perf_model = performance_model or NoopPerfModel(self._topology)
        self.plan_loader = plan_loader
        self._num_proposals = self._num_plans = 0
        efforts = {"low": 8, "normal": 64, "high": 4096}
        if objective not in ("sum", "phases") or effort not in efforts:
            raise ValueError(
                f"EmbeddingShardingPlanner: objective is {objective!r}, not sum or phases, or effort is "
                f"{effort!r}, not low, normal or high."
            )
        self._objective, self._tries = objective, efforts[effort]
        self._lists = {"apart": [[*one] for one in apart], "together": [[*one] for one in together]}
        if any(self._lists.values()) and not self._is_certified:
            raise ValueError(
                "EmbeddingShardingPlanner: apart and together are the engine's; leave out the enumerator, "
                "proposer, partitioner, performance model and plan loader."
            )
        self.last_result: PlanResult | None = None

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]] | None = None) -> ShardingPlan:
        """Return a plan for all tables that the sharders take. Not collective."""
        begin = time.perf_counter()
        sharders = get_default_sharders() if sharders is None else sharders
        if not any(True for _ in tables_of(module, sharders)):
            return ShardingPlan({})
        if self._topology._measured is None:
            measured = _measured_here(self._topology)
            self._topology.use_measured([measured.speeds] * self._topology.world_size)
            if measured.caution:
                logger.warning("plan: %s", measured.caution)
        left = self._storage_reservation.reserve(
            topology=self._topology,
            batch_size=self._batch_size,
            module=module,
            sharders=sharders,
            constraints=self._constraints,
        )
        self._num_proposals = self._num_plans = 0
        find = self._find_certified if self._is_certified else self._find_proposed
        options = find(module, sharders, left)
        for callback in self._callbacks:
            options = callback(options)
        plan = to_sharding_plan(options, self._topology)
        validate_modules_inclusion_in_sharding_plan(plan, module, sharders)
        validate_rank_assignment(plan, self._topology)
        validate_compute_kernels(options)
        if self._debug:
            self._tell(plan, options, sharders, time.perf_counter() - begin)
        return plan

    def _tell(
        self,
        plan: ShardingPlan,
        options: list[ShardingOption],
        sharders: list[ModuleSharder[nn.Module]],
        run_time: float,
    ) -> None:
        for stats in self._stats:
            stats.log(
                sharding_plan=plan,
                topology=self._topology,
                batch_size=self._batch_size,
                storage_reservation=self._storage_reservation,
                num_proposals=self._num_proposals,
                num_plans=self._num_plans,
                run_time=run_time,
                best_plan=options,
                constraints=self._constraints,
                sharders=sharders,
                enumerator=self._enumerator,
                debug=self._debug,
                debug_stats=PlanDebugStats(type(self).__name__, self._timeout_seconds, self.last_result),
            )

    def _find_certified(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]], left: Topology
    ) -> list[ShardingOption]:
        tables = list(tables_of(module, sharders))
        problem = problem_of(tables, self._constraints, left, self._batch_size, self._objective, self._tries)
        problem |= lists_of(tables, self._lists)
        result, self.last_result = solve(problem, self._timeout_seconds or 0)
        if self.last_result.is_cut_short:
            logger.warning("plan: cut short after %s s", self._timeout_seconds)
        self._num_proposals, self._num_plans = result["tries"], 1
        return options_of(tables, result, self._constraints, self._topology, self._batch_size)

    def _find_proposed(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]], left: Topology
    ) -> list[ShardingOption]:
        space = self._enumerator.enumerate(module=module, sharders=sharders)
        if self.plan_loader is not None and (kept := self._load_plan(space)):
            return kept
        for proposer in self._proposers:
            proposer.load(search_space=space, enumerator=self._enumerator)
        begin = time.monotonic()
        best: list[ShardingOption] | None = None
        best_rating = float("inf")
        leanest: Storage | None = None
        last_error: PlannerError | None = None
        seen: dict[tuple[int, ...], tuple[bool, list[ShardingOption], float | None]] = {}

        def is_late() -> bool:
            return bool(self._timeout_seconds) and time.monotonic() - begin > self._timeout_seconds

        if self._is_searched:
            more = narrower_options(space, self._enumerator)
            if (best := search_plan([*space, *more], left, self._tries, is_late)) is not None:
                best_rating = self._perf_model.rate(plan=best)
                self._num_plans += 1
        for proposer in self._proposers:
            while proposal := proposer.propose():
                if self._is_searched and best is not None and len(seen) >= self._tries:
                    break  # what was found first has seen far more
                if is_late():
                    logger.warning("plan: cut short after %s s", self._timeout_seconds)
                    break
                key = tuple(sorted(map(hash, proposal)))
                if key not in seen:
                    self._num_proposals += 1
                    try:
                        laid = self._partitioner.partition(proposal=proposal, storage_constraint=left)
                        rating = self._perf_model.rate(plan=laid)
                        self._num_plans += 1
                        seen[key] = (True, laid, rating)
                        if rating < best_rating:
                            best, best_rating = copy.deepcopy(laid), rating
                    except PlannerError as error:
                        last_error = error
                        asked = sum((option.total_storage for option in proposal), Storage(0, 0))
                        leanest = asked if leanest is None else min(leanest, asked)
                        seen[key] = (False, proposal, None)
                fits, laid, rating = seen[key]
                proposer.feedback(partitionable=fits, plan=laid, perf_rating=rating, storage_constraint=left)
                reset_shard_rank(proposal)
        if best is None:
            raise self._no_plan(left, leanest, last_error)
        return best

    def _load_plan(self, space: list[ShardingOption]) -> list[ShardingOption]:
        """Return the options of the plan that was kept, nothing if there is none."""
        assert self.plan_loader is not None
        kept_for = self.plan_loader.plan_context_hash()
        if kept_for is not None and kept_for != self.hash_planner_context_inputs_str():
            raise PlannerError(
                "plan: the plan that was kept was made for other tables, ranks, batches or constraints "
                f"({kept_for} is not {self.hash_planner_context_inputs_str()}).",
                PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH,
            )
        loaded = self.plan_loader.load()
        return copy.deepcopy(extract_plan(space, loaded)) if loaded else []

    def _no_plan(self, left: Topology, leanest: Storage | None, last: PlannerError | None) -> PlannerError:
        room = sum((device.storage for device in left.devices), Storage(0, 0))
        if leanest is None:
            return PlannerError("plan: nothing was proposed.", PlannerErrorType.OTHER)
        is_short = not leanest.fits_in(room)
        kind = PlannerErrorType.INSUFFICIENT_STORAGE if is_short else PlannerErrorType.STRICT_CONSTRAINTS
        return PlannerError(
            f"plan: none of {self._num_proposals} proposals fits. The leanest needs "
            f"{storage_repr_in_gb(leanest)}; {left.world_size} ranks have {storage_repr_in_gb(room)} for "
            f"tables.\nThe last error: {last}\ntry: more ranks, smaller batches than {self._batch_size}, "
            "fewer constraints, or no parts of one's own: the planner then computes what would help",
            kind,
        )

    def _inputs(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> dict[str, str]:
        topology = copy.deepcopy(self._topology)
        topology._measured = None  # hosts may be different machines
        left = self._storage_reservation.reserve(
            topology=topology, batch_size=self._batch_size, module=module, sharders=sharders,
            constraints=self._constraints,
        )  # fmt: skip
        problem = problem_of(
            list(tables_of(module, sharders)), self._constraints, left, self._batch_size, self._objective,
            self._tries,
        )  # fmt: skip
        return {
            "tables": json.dumps(problem["tables"]),
            "constraints": json.dumps([problem["rules"], self._lists]),
            "topology": json.dumps([problem["ranks"], problem["ranks_per_host"]]),
            "batch size": json.dumps(problem["batch"]),
            "options": json.dumps([problem["objective"], problem["tries"], self._is_certified]),
        }


def default_planner(world_size: int, local_size: int, device: torch.device) -> EmbeddingShardingPlanner:
    """Return the planner of a model without a plan: this machine's memory, and its speeds if measured.

    Ranks that have different memory plan for different machines, and hear of it in `collective_plan`; so
    memory is counted in whole GiB.
    """
    if device.type == "cuda":
        memory = {"hbm_cap": torch.cuda.get_device_properties(device).total_memory // 1024**3 * 1024**3}
    else:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory = {"ddr_cap": max(1, pages // local_size // 1024**3) * 1024**3}
    topology = Topology(
        world_size=world_size,
        compute_device="cuda" if device.type == "cuda" else "cpu",
        local_world_size=local_size,
        **memory,
    )
    if device.type != "cuda":
        # Not as given speeds: ranks whose machines were measured have the same topology as the others.
        topology._assumed = {"memory_speed": 51e9, "host_speed": 25e9, "network_speed": 12.5e9}
    logger.info(
        "DistributedModelParallel: no plan was given; speeds of this machine are %s",
        "measured" if _measured_here(topology).speeds else "assumed (tessera doctor --profile measures them)",
    )
    return EmbeddingShardingPlanner(topology=topology, debug=False)
