"""Check a plan and its proof from the problem alone: python check_certificate.py PROBLEM.json RESULT.json.

It shares no code with the planner. The proof: give every second and every byte of a rank a price. In a plan
of T seconds each table uses an option whose shards all fit into T and a rank's memory; together they cost
at most what all ranks have to give. If the cheapest such options cost more, no plan reaches T.
"""

import itertools
import json
import math
import sys

import numpy as np

INF = math.inf
TABLE = {"element_bytes": 4, "pooled": True, "state_bytes_per_row": 4, "state_bytes_per_element": 0}
RANK = {"memory": None, "memory_speed": 51e9, "host_speed": 25e9, "network_speed": 12.5e9, "step_speed": 0}
PARTS = ("row", "id", "part", "sent", "cut", "bag", "merge", "merge_byte")
RANK |= {of + "_seconds": 0 for of in PARTS}


class Checker:
    def __init__(self, problem):
        self.rules, self.batch = problem.get("rules", {}), problem["batch"]
        self.given = self.rules
        self.phases = problem.get("objective") == "phases"
        self.tables = {t["name"]: {**TABLE, **t} for t in problem["tables"]}
        for t in self.tables.values():
            t["features"] = [{"ids": 1, **f} for f in t.get("features", [{}])]
            t["outputs"] = sum(1 if t["pooled"] else f["ids"] for f in t["features"])
        self.all = self.tables
        self.apart = {name for names in problem.get("apart", []) for name in names}
        self.meetings = [(names, False) for names in problem.get("apart", [])]
        self.join(problem.get("together", []), self.tables)
        own = sum(2 * self.batch * t["outputs"] * t["dim"] * 4 for t in self.all.values())
        kept, held = 1 - problem.get("reserved_percent", 15) / 100, problem.get("reserved_bytes", 0)
        self.ranks = []
        for r in ({**RANK, **r} for r in problem["ranks"]):
            r["room"] = INF if r["memory"] is None else r["memory"] * kept - held - own
            self.ranks += [r] * r.pop("count", 1)
        self.world = len(self.ranks)
        self.local = problem.get("ranks_per_host", self.world)
        self.kinds = [r for i, r in enumerate(self.ranks) if r not in self.ranks[:i]]

    def join(self, lists, tables):
        """Make tables that lie together one, which is whole and lies where all of them may."""
        self.rules, self.tables = {**self.rules}, {**tables}
        for names in (sorted(names) for names in lists):
            self.meetings.append((names, True))
            ranks = [{*self.rules[name]["ranks"]} for name in names if self.rules.get(name, {}).get("ranks")]
            rule = {"cuts": ["table_wise"], **({"ranks": sorted(set.intersection(*ranks))} if ranks else {})}
            self.rules[names[0]] = rule
            self.tables[names[0]] = {**tables[names[0]], "with": [self.tables.pop(n) for n in names[1:]]}
            self.apart |= {names[0]} if self.apart & {*names} else set()

    @staticmethod
    def even(rows, ids):
        """Return the share of the rows that so many even ids touch."""
        miss = math.log1p(-1 / rows) if rows > 1 else -INF
        return -math.expm1(math.floor(ids) * miss) if ids >= 1 else 0

    @staticmethod
    def touched(t, samples):
        """Return the share of a table's rows that the ids of so many samples touch."""
        even = found = 0.0
        for f in t["features"]:
            n, seen = samples * f["ids"], 0
            even += 0 if f.get("distinct") else n
            for (x, y), (x2, y2) in itertools.pairwise([(0, 0), *f.get("distinct", [])]):
                if x < n:
                    seen = y + (y2 - y) / (x2 - x) * (n - x)
            found += min(n, seen)
        return min(1.0, Checker.even(t["rows"], even) + found / t["rows"])

    @staticmethod
    def below(t, row):
        """Return the share of the ids that are of rows below one."""
        points = [(0, 0), *t["ids_below"]]
        return float(np.interp(row, [x for x, _ in points], [y for _, y in points]))

    def cost(self, t, cut, kernel, place, columns, rank):
        """Return seconds on links, seconds in memory, and bytes of one shard: a row, and rows from it on."""
        row, rows = place
        if "with" in t:
            alone = [{key: one[key] for key in one if key != "with"} for one in (t, *t["with"])]
            each = [self.cost(one, cut, kernel, (0, one["rows"]), one["dim"], rank) for one in alone]
            return [sum(one) for one in zip(*each, strict=True)]
        fast, w, far = rank["memory_speed"], self.world, self.world - self.local
        spread = ((self.local - 1) / rank["host_speed"] + far / rank["network_speed"]) / w
        in_host = ((self.local - 1) / rank["host_speed"] + far / w / rank["network_speed"]) / self.local
        samples, size = self.batch * w, columns * t["element_bytes"]
        ids = samples * sum(f["ids"] for f in t["features"])
        id_bytes = samples * sum(f["ids"] * (12 if f.get("weighted") else 8) for f in t["features"])
        lengths = samples * 4 * len(t["features"])
        state = t["state_bytes_per_row"] + t["state_bytes_per_element"] * columns
        share, dense, replica = rows / t["rows"], kernel == "dense", cut == "data_parallel"
        uneven = t.get("ids_below") and share < 1
        if uneven:
            share = self.below(t, row + rows) - self.below(t, row)
        held = rows * (size + state) + (3 * rows * columns * 4 if dense else 16 * ids * share)
        stepped = rows * (1 if dense else self.touched(t, samples))
        if uneven:  # at most as many as even ids would touch, and as of the whole table
            stepped = min(rows * self.even(rows, ids * share), t["rows"] * self.touched(t, samples))
        here = ids / w if replica else ids * share
        bags = samples * t["outputs"] * (1 / w if replica else 1 if t["pooled"] else share)
        local = here * (max(size, 64) / fast + rank["row_seconds"]) + bags * rank["bag_seconds"]
        local += (ids * share * columns * 4 + 2 * stepped * (size + state)) / (rank["step_speed"] or fast)
        local += rank["part_seconds"] + (0 if dense else ids * share * rank["id_seconds"])
        if not dense and (replica or (t.get("exact_norms") and columns < t["dim"])):
            local += stepped * (rank["merge_seconds"] + columns * 4 * rank["merge_byte_seconds"])
        links = here * (rank["sent_seconds"] + (rank["cut_seconds"] if rows < t["rows"] else 0))
        if replica:
            sent = rows * self.touched(t, self.batch) * (8 + columns * 4)
            slow = rank["network_speed"] if far else rank["host_speed"]
            links += rows * columns * 4 * 2 * (w - 1) / w / slow if dense else sent * w * spread
            return links, local, held + 2 * (id_bytes + lengths) / w + (0 if dense else w * sent)
        out = bags * columns * 4
        sums = t["pooled"] and cut in ("table_row_wise", "grid_shard")
        links += (id_bytes * share + lengths) * spread + 2 * out * (in_host if sums else spread)
        return links, local, held + 2 * (id_bytes * share + lengths) + 2 * out

    def price(self, t, cut, kernel, place, columns, kinds):
        """Return the price of one shard where it is cheapest, among the kinds of rank it fits."""
        best = INF if place[1] else 0
        for kind, p in zip(self.kinds, self.prices, strict=True) if place[1] else ():
            links, local, held = self.cost(t, cut, kernel, place, columns, kind)
            fits = local + (0 if self.by_phase else links) <= self.limit and held <= kind["room"]
            if kind in kinds and fits:
                best = min(best, p["links"] * links + p["local"] * local + p["byte"] * held)
        return best

    def ways(self, t, rule):
        """Return (cut, kernel, most parts of columns, kinds of groups of ranks), and the width of a unit."""
        cuts, kernels, dim, w = rule.get("cuts"), rule.get("kernels"), t["dim"], self.world
        group = rule.get("ranks") or range(w)
        unit = next((u for u in range(rule.get("min_columns") or 4, dim) if dim % u == 0), dim)

        def allowed(cut, kernel="fused"):
            return (not cuts or cut in cuts) and (not kernels or kernel in kernels)

        found = []
        if any(allowed(cut) for cut in ("table_wise", "column_wise", "table_column_wise")):
            limit = min(self.local, len(group)) if allowed("table_column_wise") else 1
            limit = len(group) if allowed("column_wise") else limit
            found.append(("column_wise", "fused", limit, [[kind] for kind in self.kinds]))
        hosts = [range(h, h + self.local) for h in range(0, w, self.local)]
        hosts = [[self.ranks[r] for r in h] for h in hosts if {*h} <= {*group}]
        if hosts and (allowed("table_row_wise") or allowed("grid_shard")):
            limit = len(hosts) if allowed("grid_shard") else 1
            some = [h for i, h in enumerate(hosts) if h not in hosts[:i]]
            found.append(("grid_shard", "fused", limit, some))
        for cut, kernel in (("row_wise", "fused"), ("data_parallel", "fused"), ("data_parallel", "dense")):
            if len(group) == w and allowed(cut, kernel) and t["name"] not in self.apart:
                found.append((cut, kernel, 1, [self.ranks]))
                if cut == "row_wise" and t.get("ids_below"):
                    found.append(("row_wise by ids", kernel, 1, [self.ranks]))
        return found, unit

    @staticmethod
    def heights(t, cut, ranks):
        """Return the first row and the number of rows of every rank."""
        count, rows = len(ranks), t["rows"]
        if cut == "data_parallel":
            return [(0, rows)] * count
        ends = [min(rows, (i + 1) * -(-rows // count)) for i in range(count)]
        if cut == "row_wise by ids":  # the row where the ids below it are enough
            for i in range(count - 1):
                (x, y), (x2, y2) = next(
                    pair for pair in itertools.pairwise([(0, 0), *t["ids_below"]])
                    if pair[1][1] >= (i + 1) / count
                )  # fmt: skip
                ends[i] = int(x + (x2 - x) * (((i + 1) / count - y) / (y2 - y)) + 0.5)
        return [(begin, end - begin) for begin, end in itertools.pairwise([0, *ends])]

    def cheapest(self, t, rule):
        """Return the price of the cheapest allowed way to lay a table."""
        found, unit = self.ways(t, rule)
        units, best = t["dim"] // unit, INF
        for cut, kernel, limit, places in found:

            def price_of(columns, cut=cut, kernel=kernel, places=places):
                sums = []
                for ranks in places:
                    rows = self.heights(t, cut, ranks)
                    both = zip(rows, ranks, strict=True)
                    sums.append(sum(self.price(t, cut, kernel, h, columns, [r]) for h, r in both))
                return min(sums)

            single = [price_of(u * unit) if limit > 1 or u == units else INF for u in range(units + 1)]
            if limit == 1 or single[-(-units // min(limit, units))] == INF:  # one part is at least so wide
                best = min(best, single[units])
                continue
            sums = [0.0]
            for u in range(1, units + 1):
                sums.append(min(sums[u - p] + single[p] for p in range(1, u + 1)))
            best = min(best, sums[units])
        return best

    def shards(self, t, rule, seconds):
        """Yield share of the table, part of its fewest parts, seconds, bytes, is on all ranks."""
        found, unit = self.ways(t, rule)
        for cut, kernel, limit, places in found:
            rows = self.heights(t, cut, places[0])

            def cost(place, columns, cut=cut, kernel=kernel):
                links, local, held = self.cost(t, cut, kernel, place, columns, self.kinds[0])
                fits = links + local <= seconds and held <= self.kinds[0]["room"]
                return (links + local, held) if fits else None

            widths = range(unit, t["dim"] + 1, unit) if limit > 1 else [t["dim"]]
            rows = [
                *{place if t.get("ids_below") else place[1]: place for place in rows if place[1]}.values()
            ]
            fitting = (c for c in widths if c < t["dim"] and all(cost(place, c) for place in rows))
            widest = max(fitting, default=unit)
            for columns, place in itertools.product(widths, rows):
                if cost(place, columns):
                    share = 1 / self.world if cut == "data_parallel" else place[1] / t["rows"]
                    part = share if columns == t["dim"] else share / -(-t["dim"] // widest)
                    uniform = cut.startswith("row_wise") or cut == "data_parallel"
                    yield share * columns / t["dim"], part, *cost(place, columns), uniform

    def pays_refute(self, pays, seconds):
        """Return whether tables are paid more than ranks can earn: the best set of shards, a knapsack."""
        if (
            len(self.kinds) > 1
            or pays["byte"] < 0
            or any(min(p["share"], p["part"]) < 0 for p in pays["tables"])
        ):
            return False
        given, groups = {p["table"]: p for p in pays["tables"]}, {}
        for name, t in self.tables.items():
            key = name if name in self.apart else self.key(name, t)
            groups.setdefault(key, []).append(name)
        cells, fluid, endless, paid = 2**15, 0.0, [], 0.0
        best, steps = np.zeros(cells + 1), np.arange(cells + 1)

        def with_one(best, items):
            return np.max(
                [best, *(np.r_[best[:c], best[: max(0, cells + 1 - c)] + e] for c, e in items)], axis=0
            )

        for names in groups.values():
            pay, items = next((given[name] for name in names if name in given), None), []
            if pay is None:
                return False
            paid += (pay["share"] + pay["part"]) * len(names)
            for share, part, time, held, on_all in self.shards(
                self.tables[names[0]], self.rules.get(names[0], {}), seconds
            ):
                earned = pay["share"] * share + pay["part"] * part - pays["byte"] * held
                size, left = time / seconds * cells * (1 - 1e-9), len(names) if on_all else 0
                if earned > 0 and on_all and len(names) > 8:  # one of each table at most: 1, 2, 4 … at once
                    for count in (2**i for i in range(left.bit_length())):
                        some, left = min(count, left), left - min(count, left)
                        best = with_one(best, [(min(int(size * some), cells + 1), earned * some)])
                elif earned > 0 and time * 1024 >= seconds:
                    items.append((int(size), earned))  # rounded down
                elif earned > 0:
                    fluid = max(fluid, earned / (time / seconds * cells))
            if len(names) > 8:
                endless += items
            for _ in range(len(names) if len(names) <= 8 and items else 0):
                best = with_one(best, items)
        for c, e in endless:  # any number of each
            for k in range(c, cells + 1, c):
                best[k : k + c] = np.maximum(best[k : k + c], best[k - c : k][: len(best[k : k + c])] + e)
        most = (np.maximum.accumulate(best - fluid * steps) + fluid * steps)[-1] + fluid
        memory = pays["byte"] * self.kinds[0]["room"] if pays["byte"] else 0
        return paid > (most + memory) * self.world * (1 - 1e-9)

    def key(self, name, t):
        return json.dumps([{**t, "name": ""}, self.rules.get(name)], sort_keys=True)

    def total(self, prices, limit, by_phase):
        """Return the least that all tables cost, less the price of all memory; and that of each table."""
        self.prices, self.limit, self.by_phase, memo, each = prices, limit, by_phase, {}, {}
        for name, t in self.tables.items():
            key = self.key(name, t) + name * (name in self.apart)
            each[name] = memo[key] = memo.get(key) or self.cheapest(t, self.rules.get(name, {}))
        both = zip(prices, self.kinds, strict=True)
        memory = sum(p["byte"] * self.ranks.count(k) * k["room"] for p, k in both if p["byte"])
        return math.fsum(each.values()) - memory, each

    def proves(self, certificate):
        """Return whether no plan is faster than the certificate says."""
        seconds = certificate["seconds"] * (1 - 1e-9)
        prices = [{**p, "links": p["second"], "local": p["second"]} for p in certificate["prices"]]
        if [p["ranks"] for p in prices] != [self.ranks.count(k) for k in self.kinds]:
            return False
        for p, kind in zip(prices, self.kinds, strict=True):
            room = INF if p["capacity"] is None else p["capacity"]
            if p["second"] < 0 or p["byte"] < 0 or not math.isclose(room, kind["room"], abs_tol=1):
                return False
        if "pays" in certificate:
            return not certificate["table"] and self.pays_refute(certificate["pays"], seconds)
        if "phases" in certificate:
            return not certificate["table"] and self.refutes(certificate["phases"], seconds)
        total, each = self.total(prices, seconds, False)
        if certificate["table"]:
            return each.get(certificate["table"]) == INF
        given = sum(p["second"] * p["ranks"] for p in prices)
        return given > 0 and total > seconds * given * (1 - 1e-9)

    def refutes(self, pieces, seconds):
        """Return whether no plan is faster, whatever its slowest memory takes: a piece for every case."""
        reached = 0.0 if self.phases and len(self.kinds) == 1 else -INF
        for p in pieces:
            if p["from"] > reached or p["links"] <= 0 or p["local"] < 0 or p["byte"] < 0:
                return False
            reached, (total, _) = max(reached, p["to"]), self.total([p], p["to"], True)
            for memory in (p["from"], min(p["to"], seconds)):  # linear between them
                given = self.world * (p["links"] * (seconds - memory) + p["local"] * memory)
                if p["from"] < seconds and not total > given - 1e-9 * abs(total):
                    return False
        return reached >= seconds

    def check_shards(self, p):
        """Check that shards cover a table once, in the way of its type, and as its rules allow."""
        name, kind, shards = p["name"], p["type"], p["shards"]
        t, rule, every = self.all[name], self.given.get(name, {}), range(self.world)
        for key, one in (("cuts", kind), ("kernels", p["kernel"])):
            assert one in (rule.get(key) or [one]), f"{name}: its rules exclude {one}"
        assert kind == "data_parallel" or p["kernel"] == "fused", f"{name}: a dense kernel of {kind}"
        assert {s[4] for s in shards} <= {*every} & {*(rule.get("ranks") or every)}, f"{name}: a wrong rank"
        unit = self.ways(t, rule)[1]
        assert all(s[3] > 0 and s[3] % unit == 0 for s in shards), f"{name}: a part is no multiple of {unit}"
        if kind == "data_parallel":
            assert sorted(shards, key=lambda s: s[4]) == [[0, 0, t["rows"], t["dim"], r] for r in every], name
            return
        strips = {}
        for row, column, rows, columns, rank in shards:
            strips.setdefault((column, columns), []).append((row, rows, rank))

        def follow(pieces, whole):
            ends = [0, *itertools.accumulate(size for _, size in sorted(pieces))]
            return [begin for begin, _ in sorted(pieces)] == ends[:-1] and ends[-1] == whole

        rows_follow = (follow([piece[:2] for piece in strip], t["rows"]) for strip in strips.values())
        assert follow(strips, t["dim"]) and all(rows_follow), f"{name}: shards overlap or leave something out"
        groups = [[rank for *_, rank in sorted(strip)] for strip in strips.values()]
        hosts = [[*range(h, h + self.local)] for h in range(0, self.world, self.local)]
        is_column, is_rows = all(len(group) == 1 for group in groups), all(g in hosts for g in groups)
        shapes = {
            "table_wise": len(shards) == 1,
            "column_wise": is_column,
            "table_column_wise": is_column and len({group[0] // self.local for group in groups}) == 1,
            "row_wise": groups == [[*every]],
            "table_row_wise": is_rows and len(groups) == 1,
            "grid_shard": is_rows,
        }
        assert shapes.get(kind), f"{name}: its shards do not lie as {kind}"

    def seconds(self, plan):
        """Return the time of the plan's step, after checking that it covers every table and fits."""
        sums = [[0.0, 0.0, 0.0] for _ in self.ranks]
        assert sorted(self.all) == sorted(p["name"] for p in plan), "not the same tables"
        for p in plan:
            t = self.all[p["name"]]
            self.check_shards(p)
            for row, _, rows, columns, r in (s for s in p["shards"] if s[2]):
                one = self.cost(t, p["type"], p["kernel"], (row, rows), columns, self.ranks[r])
                sums[r] = [a + b for a, b in zip(sums[r], one, strict=True)]
        on = {p["name"]: {s[4] for s in p["shards"] if s[2]} for p in plan}
        for names, meet in self.meetings:
            both = [on[a] & on[b] for a, b in itertools.combinations(names, 2)]
            assert all(len(one) == 1 for one in [*both, *map(on.get, names)]) if meet else not any(both), (
                names
            )
        both = zip(sums, self.ranks, strict=True)
        assert all(s[2] == 0 or s[2] <= r["room"] * (1 + 1e-9) for s, r in both), "a rank holds too much"
        by_phase = max(s[0] for s in sums) + max(s[1] for s in sums)
        return by_phase if self.phases else max(s[0] + s[1] for s in sums)


def check(problem, result):
    checker = Checker(problem)
    seconds = checker.seconds(result["tables"])
    assert math.isclose(seconds, result["plan_seconds"], rel_tol=1e-6), (seconds, result["plan_seconds"])
    assert checker.proves(result["certificate"]), "the certificate proves nothing"
    assert result["bound_seconds"] == result["certificate"]["seconds"] <= seconds * (1 + 1e-9)


if __name__ == "__main__":
    with open(sys.argv[1]) as one, open(sys.argv[2]) as other:
        check(json.load(one), json.load(other))
