"""One option for every table, again and again."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable

from tessera.distributed.planner._cache_scaleup import EmbeddingOffloadScaleupProposer
from tessera.distributed.planner.types import Enumerator, Proposer, ShardingOption, Topology
from tessera.distributed.planner.utils import option_score, options_by_table, prod

__all__ = [
    "CertifiedProposer",
    "DynamicProgrammingProposer",
    "EmbeddingOffloadScaleupProposer",
    "GreedyProposer",
    "GridSearchProposer",
    "UniformProposer",
    "proposers_to_proposals_list",
]

logger = logging.getLogger(__name__)

MAX_PROPOSALS = 10_000


class GreedyProposer(Proposer):
    """Begin with every table's fastest option; then, again and again, the next of the table with most bytes.

    With a `threshold` it ends after more than so many proposals in a row that were no better.
    """

    def __init__(self, use_depth: bool = True, threshold: int | None = None) -> None:
        self._use_depth, self._threshold = use_depth, threshold or None
        self._tables: dict[str, list[ShardingOption]] = {}
        self._chosen: dict[str, int] = {}
        self._best, self._worse = math.inf, 0

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Take the options."""
        self._tables = options_by_table(search_space)
        for options in self._tables.values():
            options.sort(key=lambda option: option_score(option, self._use_depth))
        self._chosen = dict.fromkeys(self._tables, 0)
        self._best, self._worse = math.inf, 0

    def propose(self) -> list[ShardingOption] | None:
        """Return the next proposal, None at the end."""
        return [self._tables[fqn][i] for fqn, i in self._chosen.items()] or None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Go on, whatever the rating, unless there is a threshold."""
        if self._threshold and perf_rating:
            self._worse = 0 if perf_rating < self._best else self._worse + 1
            self._best = min(self._best, perf_rating)
            if self._worse > self._threshold:
                self._chosen = {}
                return

        def held(fqn: str) -> tuple[int, ...]:
            storages = [shard.storage for shard in self._tables[fqn][self._chosen[fqn]].shards]
            hbm, ddr = [s.hbm for s in storages], [s.ddr for s in storages]
            return max(hbm), sum(hbm), max(ddr), sum(ddr)

        left = [fqn for fqn, i in self._chosen.items() if i + 1 < len(self._tables[fqn])]
        largest = max(left, key=held, default=None)
        if largest is None or held(largest) <= (0, 0, 0, 0):
            self._chosen = {}
        else:
            self._chosen[largest] += 1


class _ListedProposer(Proposer):
    """Go through proposals that are known from the start."""

    def __init__(self) -> None:
        self._proposals: list[list[ShardingOption]] = []
        self._next = 0

    def propose(self) -> list[ShardingOption] | None:
        """Return the next proposal, None at the end."""
        return self._proposals[self._next] if self._next < len(self._proposals) else None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Go on, whatever the rating."""
        self._next += 1


class UniformProposer(_ListedProposer):
    """Propose one type of sharding for all tables, for every type that all of them allow."""

    def __init__(self, use_depth: bool = True) -> None:
        super().__init__()
        self._use_depth = use_depth

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Take the options."""
        names = list(options_by_table(search_space))
        self._proposals, self._next = [], 0
        for cut in dict.fromkeys(option.sharding_type for option in search_space):
            tables = options_by_table(option for option in search_space if option.sharding_type == cut)
            if list(tables) == names:
                self._proposals.append(
                    [
                        min(options, key=lambda o: option_score(o, self._use_depth))
                        for options in tables.values()
                    ]
                )


class GridSearchProposer(Proposer):
    """Propose every combination of options, or none if there are more than `max_proposals`."""

    def __init__(self, max_proposals: int = MAX_PROPOSALS) -> None:
        self._max_proposals = max_proposals
        self._combinations: Iterable[tuple[ShardingOption, ...]] = iter(())
        self._now: list[ShardingOption] | None = None

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Take the options."""
        tables = [sorted(options, key=option_score) for options in options_by_table(search_space).values()]
        count = prod(map(len, tables))
        if count > self._max_proposals:
            logger.info("grid search: %.3g proposals are more than %d", count, self._max_proposals)
            tables = []
        self._combinations = itertools.product(*tables) if tables else iter(())
        self._advance()

    def _advance(self) -> None:
        found = next(iter(self._combinations), None)
        self._now = None if found is None else list(found)

    def propose(self) -> list[ShardingOption] | None:
        """Return the next proposal, None at the end."""
        return self._now

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Go on, whatever the rating."""
        self._advance()


class DynamicProgrammingProposer(Proposer):
    """Propose, for every total of memory, the options that are fastest together.

    All ranks' memory is cut into `hbm_bins_per_device` bins a rank. The first proposal is every table's
    leanest option; the others come once a topology is known, those with most memory first. Memory is that
    of the device, or, on ranks without one, of the host.
    """

    def __init__(self, hbm_bins_per_device: int = 100) -> None:
        self._bins = max(hbm_bins_per_device, 1)
        self._tables: list[list[ShardingOption]] = []
        self._proposals: list[list[int]] | None = None
        self._next = 0

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Take the options."""
        lean = sorted(search_space, key=lambda o: (o.total_storage.hbm, o.total_storage.ddr))
        self._tables = list(options_by_table(lean).values())
        self._proposals, self._next = None, 0

    def propose(self) -> list[ShardingOption] | None:
        """Return the next proposal, None at the end."""
        if self._proposals is None:
            return [options[0] for options in self._tables] or None
        if self._next >= len(self._proposals):
            return None
        chosen = self._proposals[self._next]
        return [options[i] for options, i in zip(self._tables, chosen, strict=True)]

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Make the list after the first proposal; then go through it."""
        if self._proposals is not None:
            self._next += 1
            return
        assert storage_constraint is not None, "the memory of the ranks has to be known"
        self._proposals = self._combine(storage_constraint)

    def _combine(self, topology: Topology) -> list[list[int]]:
        total = sum((device.storage for device in topology.devices[1:]), topology.devices[0].storage)
        on_device = total.hbm > 0
        num_bins = self._bins * len(topology.devices)
        size = (total.hbm if on_device else total.ddr) / num_bins
        # By bins of memory: (milliseconds, memory in bins, option of every table so far as a chain).
        best: dict[int, tuple[float, float, tuple | None]] = {0: (0.0, 0.0, None)}
        for options in self._tables:
            asked = [
                ((o.total_storage.hbm if on_device else o.total_storage.ddr) / size, o.total_perf)
                for o in options
            ]
            reached: dict[int, tuple[float, float, tuple | None]] = {}
            for time, held, chain in best.values():
                for i, (more, longer) in enumerate(asked):
                    if held + more >= num_bins:
                        continue
                    key, sum_ = int(held + more), time + longer
                    if key not in reached or sum_ < reached[key][0]:
                        reached[key] = (sum_, held + more, (chain, i))
            best = reached
        proposals = []
        for key in sorted(best, reverse=True):
            chain, chosen = best[key][2], []
            while chain is not None:
                chain, i = chain
                chosen.append(i)
            proposals.append(chosen[::-1])
        return proposals


class CertifiedProposer(_ListedProposer):
    """Propose once: the engine's plan. A partitioner may lay its shards elsewhere; the proof is then void."""

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Take the options; the enumerator says for which ranks and batches."""
        from tessera.distributed.planner._certified import options_of, problem_of, solve
        from tessera.distributed.planner._tables import tables_of_options

        self._proposals, self._next = [], 0
        if not search_space or enumerator is None:
            return
        topology, constraints = enumerator._topology, enumerator._constraints
        batch = search_space[0].batch_size
        tables = tables_of_options(search_space, enumerator.sharder_map)
        result, _ = solve(problem_of(tables, constraints, topology, batch))
        self._proposals = [options_of(tables, result, constraints, topology, batch)]


def proposers_to_proposals_list(
    proposers_list: list[Proposer], search_space: list[ShardingOption]
) -> list[list[ShardingOption]]:
    """Return all proposals of proposers that do not mind how the last one did, each once."""
    for proposer in proposers_list:
        proposer.load(search_space=search_space)
    proposals, seen = [], set()
    for proposer in proposers_list:
        while proposal := proposer.propose():
            key = tuple(sorted(map(hash, proposal)))
            proposer.feedback(partitionable=True)
            if key not in seen:
                seen.add(key)
                proposals.append(proposal)
    return proposals
