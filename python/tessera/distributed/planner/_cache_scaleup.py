"""Caches as large as memory allows: tables in managed memory, and how much of each the device keeps."""

from __future__ import annotations

import copy
import logging
import math

import torch

from tessera.distributed.planner.types import Enumerator, Proposer, ShardingOption, Topology
from tessera.distributed.planner.utils import LuusJaakolaSearch, option_score, options_by_table

_CACHED, _WHOLE = "fused_uvm_caching", "fused"

logger = logging.getLogger(__name__)


def _hbm(options: list[ShardingOption]) -> int:
    return sum(option.total_storage.hbm for option in options)


def _keep_whole(option: ShardingOption) -> None:
    assert option.cache_params is not None
    option.cache_params.load_factor = None
    option.compute_kernel = _WHOLE


class EmbeddingOffloadScaleupProposer(Proposer):
    """Propose larger and larger caches for tables whose statistics say that they would help.

    Each table has one option: a cached one if there is one, else its fastest. How much memory the caches get
    in all is searched for; it is given out by how hard the ids are to cache, times how many there are.
    """

    def __init__(self, use_depth: bool = True) -> None:
        self.use_depth = use_depth
        self.enumerator: Enumerator | None = None
        self.starting_proposal: list[ShardingOption] = []
        self.proposal: list[ShardingOption] | None = None
        self.search: LuusJaakolaSearch | None = None
        self.best_perf_rating = math.inf

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Take the options; the enumerator tells what caches of other sizes cost."""
        self.enumerator, self.search, self.best_perf_rating = enumerator, None, math.inf
        chosen = []
        for options in options_by_table(search_space).values():
            ordered = sorted(options, key=lambda option: option_score(option, self.use_depth))
            chosen.append(next((o for o in ordered if o.compute_kernel == _CACHED), ordered[0]))
        self.starting_proposal = copy.deepcopy(chosen)
        self.promote_high_prefetch_overhead_tables(enumerator, self.starting_proposal)
        self.proposal = copy.deepcopy(self.starting_proposal)

    @staticmethod
    def promote_high_prefetch_overhead_tables(
        enumerator: Enumerator | None, proposal: list[ShardingOption]
    ) -> None:
        """Keep whole, in place, what needs less of the device that way than with its cache."""
        cached = [option for option in proposal if option.compute_kernel == _CACHED and option.cache_params]
        if enumerator is None or not cached:
            return
        whole = copy.deepcopy(cached)
        for option in whole:
            _keep_whole(option)
        enumerator.populate_estimates(whole)
        for option, other in zip(cached, whole, strict=True):
            if other.total_storage.hbm < option.total_storage.hbm:
                _keep_whole(option)
        enumerator.populate_estimates(cached)

    @staticmethod
    def get_hbm_ceiling(starting_proposal: list[ShardingOption], enumerator: Enumerator) -> int:
        """Return the bytes of the device if all tables that may grow were kept whole."""
        proposal = copy.deepcopy(starting_proposal)
        growing = EmbeddingOffloadScaleupProposer.get_scalable_sharding_options(proposal)
        for option in growing:
            _keep_whole(option)
        enumerator.populate_estimates(growing)
        return _hbm(proposal)

    def propose(self) -> list[ShardingOption] | None:
        """Return the next proposal, None at the end."""
        return self.proposal

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Give the caches more or less memory, after how the last proposal did."""
        self.proposal, used = None, _hbm(plan or [])
        if self.enumerator is None or plan is None:
            return
        if self.search is None:
            if not partitionable or storage_constraint is None:
                return
            more = self.get_hbm_ceiling(plan, self.enumerator) - used
            budget = min(self.get_budget(plan, storage_constraint), more)
            self.search = LuusJaakolaSearch(0, budget, max_iterations=16, left_cost=perf_rating)
        if perf_rating is not None:
            self.best_perf_rating = min(self.best_perf_rating, perf_rating)
        if not partitionable:
            self.search.shrink_right(used - _hbm(self.starting_proposal))  # larger ones would not fit either
        budget = self.search.next(math.inf if perf_rating is None else perf_rating)
        self.proposal = self.next_plan(
            self.starting_proposal, None if budget is None else int(budget), self.enumerator
        )

    @staticmethod
    def get_budget(proposal: list[ShardingOption], storage_constraint: Topology) -> int:
        """Return the bytes of all devices that the proposal leaves."""
        return sum(device.storage.hbm for device in storage_constraint.devices) - _hbm(proposal)

    @staticmethod
    def get_cacheability(sharding_option: ShardingOption) -> float | None:
        """Return how hard the ids of a table are to cache, None if nobody counted."""
        stats = sharding_option.cache_params.stats if sharding_option.cache_params else None
        return None if stats is None else stats.cacheability

    @staticmethod
    def get_expected_lookups(sharding_option: ShardingOption) -> float | None:
        """Return how many different ids a step has, None if nobody counted."""
        stats = sharding_option.cache_params.stats if sharding_option.cache_params else None
        return None if stats is None else stats.expected_lookups

    @classmethod
    def _priority(cls, option: ShardingOption) -> float:
        return (cls.get_cacheability(option) or 0.0) * (cls.get_expected_lookups(option) or 0.0)

    @staticmethod
    def get_scalable_sharding_options(proposal: list[ShardingOption]) -> list[ShardingOption]:
        """Return the options whose caches may grow."""
        return [
            option
            for option in proposal
            if option.compute_kernel == _CACHED
            and EmbeddingOffloadScaleupProposer._priority(option) * (option.cache_load_factor or 0.0) > 0
        ]

    @classmethod
    def next_plan(
        cls, starting_proposal: list[ShardingOption], budget: int | None, enumerator: Enumerator | None
    ) -> list[ShardingOption] | None:
        """Return the proposal with caches that have `budget` bytes more together; None if none may grow."""
        if budget is None or enumerator is None:
            return None
        proposal = copy.deepcopy(starting_proposal)
        growing = cls.get_scalable_sharding_options(proposal)
        if not growing:
            return None
        model, whole = cls.build_affine_storage_model(growing, enumerator)
        factors = torch.tensor([option.cache_load_factor for option in growing])
        priority = torch.tensor([cls._priority(option) for option in growing])
        for option, factor in zip(
            growing, cls.allocate_budget(model, whole, factors, budget, priority).tolist(), strict=True
        ):
            assert option.cache_params is not None
            option.cache_params.load_factor = factor
            if factor > 0.9999:
                _keep_whole(option)
        enumerator.populate_estimates(growing)
        return proposal

    @staticmethod
    def build_affine_storage_model(
        uvm_caching_sharding_options: list[ShardingOption], enumerator: Enumerator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (bytes a whole load factor, bytes without a cache) of each, and its bytes kept whole."""
        options = copy.deepcopy(uvm_caching_sharding_options)

        def sizes(factor: float | None) -> torch.Tensor:
            for option in options:
                assert option.cache_params is not None
                option.cache_params.load_factor = factor
                if factor is None:
                    option.compute_kernel = _WHOLE
            enumerator.populate_estimates(options)
            return torch.tensor([option.total_storage.hbm for option in options])

        low, high, whole = sizes(0.1), sizes(0.9), sizes(None)
        slope = (high - low) / 0.8
        return torch.stack((slope, low - slope * 0.1), dim=1), whole

    @staticmethod
    def clf_to_bytes(model: torch.Tensor, clfs: float | torch.Tensor) -> torch.Tensor:
        """Return the bytes of tables with such load factors."""
        return (model[:, 0] * clfs + model[:, 1]).to(torch.float64)

    @staticmethod
    def allocate_budget(
        model: torch.Tensor,
        fused_hbm_ceiling: torch.Tensor,
        clfs: torch.Tensor,
        budget: int,
        allocation_priority: torch.Tensor,
    ) -> torch.Tensor:
        """Return larger load factors that use up `budget` bytes, in proportion to the priorities.

        What one table cannot use the others get. A table whose cache would be larger than the table is kept
        whole, and the difference given out again.
        """
        fixed = EmbeddingOffloadScaleupProposer.clf_to_bytes(model, 0.0)
        full = EmbeddingOffloadScaleupProposer.clf_to_bytes(model, 1.0) - fixed
        cache = EmbeddingOffloadScaleupProposer.clf_to_bytes(model, clfs) - fixed
        left = float(budget)
        for _ in range(128):
            is_open = cache < full
            weights = torch.where(is_open, allocation_priority, 0).to(torch.float64)
            if left <= 1 or weights.sum() <= 0:
                break
            grown = torch.minimum(cache + left * weights / weights.sum(), full)
            left -= (grown - cache).sum().item()
            cache = grown
            too_large = is_open & (fixed + cache > fused_hbm_ceiling)
            left += (fixed + cache - fused_hbm_ceiling)[too_large].sum().item()
            cache[too_large] = full[too_large]
        return (cache / full).to(clfs.dtype)
