"""A search by any estimator's costs: options of tables and their ranks, changed while the slowest rank gains.

It needs costs of shards only, so it serves estimators that users bring. It proves nothing. What it tries is
counted and bounded, so that it ends: for many tables on many ranks before nothing more would help.
"""

from __future__ import annotations

import copy
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Sequence

from tessera.distributed.planner.types import Enumerator, Shard, ShardingOption, Topology

__all__ = ["narrower_options", "search_plan"]

logger = logging.getLogger(__name__)

_NARROWEST = 4  # columns
_WORSE = (float("inf"), float("inf"))
_WORK_PER_TRY = 200_000  # ranks looked at for an option, or pairs of shards


def narrower_options(space: Sequence[ShardingOption], enumerator: Enumerator) -> list[ShardingOption]:
    """Return column cuts with twice, four times … as many parts, where no constraint says how wide they are.

    Their costs are the enumerator's.
    """
    constraints = getattr(enumerator, "_constraints", None) or {}
    world = enumerator._topology.world_size
    found = []
    for option in space:
        own = constraints.get(option.name)
        if option.sharding_type != "column_wise" or (own and own.min_partition):
            continue
        rows, columns = option.tensor.shape
        count = 2 * len(option.shards)
        while count <= world and columns % count == 0 and columns // count >= _NARROWEST:
            other = copy.copy(option)
            width = columns // count
            other.shards = [Shard([rows, width], [0, i * width]) for i in range(count)]
            found.append(other)
            count *= 2
    if found:
        enumerator.populate_estimates(found)
    return found


def _worth_trying(space: Sequence[ShardingOption]) -> dict[str, list[ShardingOption]]:
    """Return the options of each table: of every way to cut it the fastest kernel, and the leanest on HBM."""
    ways: dict[str, dict[tuple[str, int], list[ShardingOption]]] = defaultdict(lambda: defaultdict(list))
    for option in space:
        ways[option.fqn][option.sharding_type, len(option.shards)].append(option)
    found = {}
    for name, by_way in ways.items():
        found[name] = []
        for alike in by_way.values():
            fast = min(alike, key=lambda one: (one.total_perf, one.total_storage.hbm))
            lean = min(alike, key=lambda one: (one.total_storage.hbm, one.total_perf))
            found[name] += [fast] if lean is fast else [fast, lean]
    return found


def _costs_of(options: Sequence[ShardingOption]) -> tuple:
    """Return what decides where a table goes: equal for tables that are alike."""
    return tuple(
        (
            option.sharding_type,
            option.partition_by,
            option.compute_kernel,
            tuple((shard.perf.total, shard.storage.hbm, shard.storage.ddr) for shard in option.shards),
        )
        for option in options
    )


class _Work:
    """What may still be done: it is counted, so that the same input gives the same plan."""

    def __init__(self, left: float, is_late: Callable[[], bool] | None) -> None:
        self.left, self._is_late = left, is_late

    def is_over(self) -> bool:
        return self.left <= 0 or (self._is_late is not None and self._is_late())


class _Search:
    def __init__(self, space: Sequence[ShardingOption], topology: Topology, work: _Work) -> None:
        self.work = work
        self.options = _worth_trying(space)
        self.names = sorted(self.options)
        kinds: dict[tuple, int] = {}
        self.kind = {name: kinds.setdefault(_costs_of(self.options[name]), len(kinds)) for name in self.names}
        self.world, self.local = topology.world_size, topology.intra_group_size
        self.hosts = [range(h, h + self.local) for h in range(0, self.world, self.local)]
        self.room = [[device.storage.hbm, device.storage.ddr] for device in topology.devices]
        self.load = [0.0] * self.world
        self.chosen: dict[str, tuple[ShardingOption, list[int]]] = {}

    def change(self, option: ShardingOption, ranks: Sequence[int], sign: int) -> None:
        for shard, rank in zip(option.shards, ranks, strict=True):
            self.load[rank] += sign * shard.perf.total
            self.room[rank][0] -= sign * shard.storage.hbm
            self.room[rank][1] -= sign * shard.storage.ddr

    def take(self, name: str) -> tuple[ShardingOption, list[int]]:
        laid = self.chosen.pop(name)
        self.change(*laid, -1)
        return laid

    def put(self, name: str, option: ShardingOption, ranks: list[int]) -> None:
        self.chosen[name] = (option, ranks)
        self.change(option, ranks, 1)

    def holds(self, rank: int) -> bool:
        return self.room[rank][0] >= 0 and self.room[rank][1] >= 0

    def place(self, option: ShardingOption) -> list[int] | None:
        """Return ranks for the shards of an option, the least loaded ones that have room."""
        shards, kind = option.shards, option.partition_by
        if kind == "uniform":
            groups = [list(range(self.world))]
        elif kind == "host" and len(shards) == self.local:
            groups = [list(host) for host in sorted(self.hosts, key=lambda h: max(self.load[r] for r in h))]
        elif kind == "multi_host":
            hosts = sorted(self.hosts, key=lambda h: max(self.load[r] for r in h))
            groups = [[rank for host in hosts[: len(shards) // self.local] for rank in host]]
        else:
            among = self.hosts if kind == "host" else [range(self.world)]
            return next((ranks for group in among if (ranks := self._spread(shards, group))), None)
        for ranks in groups:
            if len(ranks) != len(shards):
                continue
            self.change(option, ranks, 1)
            fits = all(self.holds(rank) for rank in ranks)
            self.change(option, ranks, -1)
            if fits:
                return ranks
        return None

    def _spread(self, shards: Sequence[Shard], group: Sequence[int]) -> list[int] | None:
        added: dict[int, list[float]] = defaultdict(lambda: [0.0, 0, 0])
        ranks = [-1] * len(shards)
        for i in sorted(range(len(shards)), key=lambda i: -shards[i].perf.total):
            storage = shards[i].storage
            free = [
                rank
                for rank in group
                if self.room[rank][0] >= added[rank][1] + storage.hbm
                and self.room[rank][1] >= added[rank][2] + storage.ddr
            ]
            if not free:
                return None
            best = min(free, key=lambda rank: (self.load[rank] + added[rank][0], rank))
            ranks[i] = best
            for k, value in enumerate((shards[i].perf.total, storage.hbm, storage.ddr)):
                added[best][k] += value
        return ranks

    def value(self) -> tuple[float, float]:
        return max(self.load), sum(load * load for load in self.load)

    def lay_all(self, price: float) -> bool:
        """Lay every table: the option that is cheapest with bytes at a price, the largest tables first."""

        def cost(option: ShardingOption) -> float:
            size = option.total_storage
            widest = max(shard.storage.hbm + shard.storage.ddr for shard in option.shards)
            return option.total_perf + price * (size.hbm + size.ddr + widest * self.world)

        best = {name: sorted(self.options[name], key=cost) for name in self.names}
        for name in sorted(self.names, key=lambda name: (-cost(best[name][0]), name)):
            for option in best[name]:
                if (ranks := self.place(option)) is not None:
                    self.put(name, option, ranks)
                    break
            else:
                return False
        return True

    def best_way(self, name: str) -> tuple[tuple[float, float], ShardingOption, list[int]] | None:
        """Return the best option and ranks of a table that is not laid."""
        best = None
        self.work.left -= self.world * len(self.options[name])
        for option in self.options[name]:
            ranks = self.place(option)
            if ranks is None:
                continue
            self.change(option, ranks, 1)
            value = self.value()
            self.change(option, ranks, -1)
            if best is None or value < best[0]:
                best = (value, option, ranks)
        return best

    def improve(self) -> None:
        """Lay tables of the slowest rank anew, or exchange shards with it, while that helps and work is left.

        Of several slowest ranks one is helped at a time: the largest load stays, the sum of squares falls.
        """
        for _ in range(8 * (self.world + len(self.names))):
            if self.work.is_over():
                return
            now = self.value()
            slowest = max(range(self.world), key=lambda rank: (self.load[rank], -rank))
            # Of tables that are alike and lie alike, one.
            alike = {}
            for name in self.names:
                option, ranks = self.chosen[name]
                if slowest in ranks:
                    way = (option.sharding_type, option.compute_kernel, tuple(ranks))
                    alike.setdefault((self.kind[name], *way), name)
            names = [*alike.values()]
            found = (_WORSE, None)
            for name in names:
                if self.work.is_over():
                    break
                option, ranks = self.take(name)
                way = self.best_way(name)
                self.put(name, option, ranks)
                if way is not None and way[0] < found[0]:
                    found = (way[0], [(name, way[1], way[2])])
            swap = self._best_swap(slowest)
            if swap[0] < found[0]:
                found = swap
            slack = 1e-9
            is_faster = found[0][0] < now[0] * (1 - slack)
            is_evener = found[0][0] <= now[0] and found[0][1] < now[1] * (1 - slack)
            if found[1] is None or not (is_faster or is_evener):
                return
            for name, _, _ in found[1]:
                self.take(name)
            for change in found[1]:
                self.put(*change)

    def _best_swap(self, slowest: int):
        """Return the best exchange of a shard of the slowest rank with one of another rank."""
        # Of shards that cost the same, one a rank.
        shards: list[dict[tuple[float, int, int], tuple[str, int]]] = [{} for _ in range(self.world)]
        for name in self.names:
            option, ranks = self.chosen[name]
            if option.partition_by != "device":
                continue
            for i, rank in enumerate(ranks):
                shard = option.shards[i]
                cost = (shard.perf.total, shard.storage.hbm, shard.storage.ddr)
                shards[rank].setdefault(cost, (name, i))
        slow, room = self.load[slowest], self.room
        squares = sum(load * load for load in self.load)
        largest = sorted(range(self.world), key=lambda rank: -self.load[rank])[:3]
        found, pair = _WORSE, None
        for rank in range(self.world):
            load = self.load[rank]
            if rank == slowest:
                continue
            self.work.left -= len(shards[slowest]) * len(shards[rank])
            rest = max((self.load[other] for other in largest if other not in (rank, slowest)), default=0.0)
            for own, mine in shards[slowest].items():
                for other, theirs in shards[rank].items():
                    gain = own[0] - other[0]
                    if gain <= 0 or load + gain >= slow or mine[0] == theirs[0]:
                        continue
                    most = max(rest, slow - gain, load + gain)
                    if most > found[0]:
                        continue
                    value = (
                        most,
                        squares - slow * slow - load * load + (slow - gain) ** 2 + (load + gain) ** 2,
                    )
                    if value >= found:
                        continue
                    fits = all(
                        room[rank][k] + other[k + 1] - own[k + 1] >= 0
                        and room[slowest][k] + own[k + 1] - other[k + 1] >= 0
                        for k in range(2)
                    )
                    if fits:
                        found, pair = value, (mine, theirs, rank)
        if pair is None:
            return found, None
        (name, i), (other_name, k), rank = pair
        own_option, own_ranks = self.chosen[name]
        other_option, other_ranks = self.chosen[other_name]
        first = [rank if n == i else r for n, r in enumerate(own_ranks)]
        second = [slowest if n == k else r for n, r in enumerate(other_ranks)]
        return found, [(name, own_option, first), (other_name, other_option, second)]


def search_plan(
    space: Sequence[ShardingOption],
    topology: Topology,
    tries: int = 64,
    is_late: Callable[[], bool] | None = None,
) -> list[ShardingOption] | None:
    """Return options with ranks, one a table, whose slowest rank is fast by the options' own costs.

    The same for the same input: it counts what it tries, not seconds, unless `is_late` ends it. None if
    nothing was found that fits.
    """
    work = _Work(tries * _WORK_PER_TRY, is_late)
    totals = [option.total_perf / max(1, option.total_storage.hbm + option.total_storage.ddr)
              for option in space]  # fmt: skip
    middle = sorted(totals)[len(totals) // 2] if totals else 0.0
    best: tuple[float, dict[str, tuple[ShardingOption, list[int]]]] | None = None
    for price in (0.0, 0.1 * middle, middle, 10 * middle):
        if best is not None and work.is_over():
            break
        state = _Search(space, topology, work)
        if not state.lay_all(price):
            continue
        state.improve()
        if best is None or state.value()[0] < best[0]:
            best = (state.value()[0], dict(state.chosen))
    if best is None:
        return None
    pick = random.Random(0)
    state = _Search(space, topology, work)
    for name, (option, ranks) in best[1].items():
        state.put(name, option, ranks)
    # As much work for many tables as for a few.
    rounds = min(tries, max(1, tries * 32 // max(1, len(state.names))))
    for _ in range(rounds if len(state.names) > 1 else 0):
        if work.is_over():
            break
        # A few tables are taken out and laid again in another order.
        some = pick.sample(state.names, min(len(state.names), pick.randint(2, 6)))
        kept = dict(state.chosen)
        for name in some:
            state.take(name)
        is_whole = True
        for name in some:
            way = state.best_way(name)
            if way is None:
                is_whole = False
                break
            state.put(name, way[1], way[2])
        if is_whole:
            state.improve()
            if state.value()[0] < best[0]:
                best = (state.value()[0], dict(state.chosen))
                continue
        for name in list(state.chosen):
            state.take(name)
        for name, laid in kept.items():
            state.put(name, *laid)
    if work.is_over():
        logger.warning("plan: the search by an estimator's costs was cut short; effort='high' tries more")
    plan = []
    for name in state.names:
        option, ranks = best[1][name]
        laid = copy.copy(option)
        laid.shards = copy.deepcopy(option.shards)
        for shard, rank in zip(laid.shards, ranks, strict=True):
            shard.rank = rank
        plan.append(laid)
    return plan
