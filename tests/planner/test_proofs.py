"""Every proof of the planner, by a checker that shares no code with it."""

import copy
import json
import os
import random
import subprocess

import pytest
from check_certificate import Checker, check

PLAN_LINES = os.environ.get("TESSERA_PLAN_LINES")
pytestmark = pytest.mark.skipif(not PLAN_LINES, reason="TESSERA_PLAN_LINES is not set: run by ctest")

CUTS = ["table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard", "data_parallel"]


def plans(problems):
    lines = "".join(json.dumps(problem) + "\n" for problem in problems)
    done = subprocess.run([PLAN_LINES], input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def random_problem(seed):
    pick = random.Random(seed)
    tables, rules = [], {}
    for i in range(pick.randint(1, 40)):
        features = [{"ids": pick.choice([0.5, 1, 7, 60])} for _ in range(pick.randint(1, 2))]
        if pick.random() < 0.2:
            features[0]["weighted"] = True
        if pick.random() < 0.2:
            features[0]["distinct"] = [[1000, 700], [100000, 9000]]
        tables.append(
            {
                "name": f"t{i}",
                "rows": pick.choice([1, 9, 5000, 300_000, 20_000_000]),
                "dim": pick.choice([4, 10, 16, 64, 128]),
                "element_bytes": pick.choice([4, 2]),
                "pooled": pick.random() < 0.8,
                "exact_norms": i % 3 == 0,
                "features": features,
                "state_bytes_per_row": pick.choice([0, 4]),
                "state_bytes_per_element": pick.choice([0, 4]),
            }
        )
        if tables[-1]["rows"] > 100 and seed % 3 == 1 and i % 2:
            rows = tables[-1]["rows"]
            points = [(1, 0.2), (2, 0.2), (50, 0.5), (rows // 2, 0.8), (rows, 1)]
            tables[-1]["ids_below"] = points[i % 3 :]
        if pick.random() < 0.1:
            rules[f"t{i}"] = {"cuts": pick.sample(CUTS, 3), "min_columns": pick.choice([0, 8, 32])}
    lists = {}
    if seed % 6 == 0 and len(tables) > 8:
        names = [t["name"] for t in tables if t["name"] not in rules]
        random.Random(seed).shuffle(names)
        lists = {"together": [names[:3]], "apart": [names[2:4]]} if len(names) > 4 else {}
    hosts, local = pick.choice([(1, 1), (1, 4), (2, 4), (4, 2)])
    need = sum(t["rows"] * t["dim"] * 12 for t in tables) + 1e8
    rank = {"memory": pick.choice([None, need, need / (hosts * local) * 1.3])}
    ranks = [{**rank, "count": hosts * local}]
    if pick.random() < 0.3:
        measured = {"step_speed": 2e10, "row_seconds": 4e-9, "id_seconds": 3e-8, "part_seconds": 2e-6}
        measured |= {"sent_seconds": 3e-9, "cut_seconds": 5e-9, "bag_seconds": 9e-9}
        measured |= {"merge_seconds": 9e-8, "merge_byte_seconds": 1e-9}
        ranks = [{**ranks[0], **measured}]
        rank |= measured
    if pick.random() < 0.3 and hosts * local > 1:
        slow = {**rank, "memory_speed": 2e10}
        ranks = [{**rank, "count": 1}, {**slow, "count": hosts * local - 1}]
    return {
        "tables": tables,
        "rules": rules,
        "batch": pick.choice([64, 1024]),
        "ranks": ranks,
        "ranks_per_host": local,
        "objective": pick.choice(["sum", "phases"]),
        "tries": 64 if seed % 10 == 0 else 8,
        **(lists if hosts * local > 1 else {}),
    }


def test_proofs_of_random_problems_hold():
    problems = [random_problem(seed) for seed in range(150)]
    results = plans(problems)
    num_plans = 0
    for problem, result in zip(problems, results, strict=True):
        if "error" in result:
            assert problem["ranks"][0]["memory"] is not None, result
            continue
        check(problem, result)
        num_plans += 1
    assert num_plans > 100
    for proof, least in (("phases", 10), ("pays", 2)):
        assert sum(proof in result.get("certificate", {}) for result in results) >= least, proof
    assert any("together" in problem for problem in problems)
    # Where it is known how ids are spread, rows are cut so that ranks get as many ids.
    uneven = 0
    for problem, result in zip(problems, results, strict=True):
        known = {table["name"] for table in problem["tables"] if "ids_below" in table}
        for table in result.get("tables", ()):
            heights = [shard[2] for shard in table["shards"]]
            is_even = heights == sorted(heights, reverse=True)
            uneven += table["type"] == "row_wise" and table["name"] in known and not is_even
    assert uneven >= 10, uneven


def test_the_checker_refuses_what_was_altered():
    for seed in range(40):
        problem = random_problem(seed)
        (result,) = plans([problem])
        if "error" in result:
            continue
        certificate, checker = result["certificate"], Checker(problem)
        assert checker.proves(certificate)
        changes = [
            ("seconds", certificate["seconds"] * 1.001),
            ("table", "nobody"),
            ("prices", certificate["prices"] * 2),
        ]
        for key, value in changes:
            assert not checker.proves({**certificate, key: value}), (seed, key)
        for key, value in (("ranks", 99), ("capacity", 17), ("second", -1), ("byte", -1)):
            other = copy.deepcopy(certificate)
            other["prices"][0][key] = value
            assert not checker.proves(other), (seed, key)
        if "pays" in certificate:
            pays = certificate["pays"]
            for key, value in (("byte", -1), ("tables", pays["tables"][1:])):
                assert not checker.proves({**certificate, "pays": {**pays, key: value}}), (seed, key)
            for key in ("share", "part"):
                lower = [{**p, key: 0 if p[key] else -1} for p in pays["tables"]]
                assert not checker.proves({**certificate, "pays": {**pays, "tables": lower}}), (seed, key)
        if "phases" not in certificate:
            continue
        first = certificate["phases"][0]
        for change in ({"from": first["to"]}, {"links": 0}, {"local": -1}, {"byte": -1}):
            pieces = [{**first, **change}, *certificate["phases"][1:]]
            assert not checker.proves({**certificate, "phases": pieces}), (seed, change)
        assert not checker.proves({**certificate, "phases": certificate["phases"][1:]}), seed
        assert not checker.proves({**certificate, "phases": certificate["phases"][:1]}), seed


# One table of every type, two hosts of two ranks.
EVERY_TYPE = {
    "tables": [{"name": name, "rows": 1001, "dim": 16} for name in "abcdefgh"],
    "rules": {
        "a": {"cuts": ["table_wise"], "ranks": [2]},
        "b": {"cuts": ["column_wise"], "ranks": [0, 3]},
        "c": {"cuts": ["table_column_wise"], "min_columns": 8},
        "d": {"cuts": ["row_wise"]},
        "e": {"cuts": ["table_row_wise"]},
        "f": {"cuts": ["grid_shard"]},
        "g": {"cuts": ["data_parallel"], "kernels": ["fused"]},
        "h": {"cuts": ["data_parallel"], "kernels": ["dense"]},
    },
    "batch": 64,
    "ranks": [{"count": 4, "memory": 1e6, "host_speed": 1e11}],
    "ranks_per_host": 2,
    "reserved_percent": 0,
}
EVERY_PLAN = {
    "a": [[0, 0, 1001, 16, 2]],
    "b": [[0, 0, 1001, 4, 0], [0, 4, 1001, 12, 3]],
    "c": [[0, 0, 1001, 8, 0], [0, 8, 1001, 8, 1]],
    "d": [[0, 0, 251, 16, 0], [251, 0, 251, 16, 1], [502, 0, 251, 16, 2], [753, 0, 248, 16, 3]],
    "e": [[0, 0, 501, 16, 2], [501, 0, 500, 16, 3]],
    "f": [[0, 0, 501, 8, 0], [501, 0, 500, 8, 1], [0, 8, 501, 8, 2], [501, 8, 500, 8, 3]],
    "g": [[0, 0, 1001, 16, rank] for rank in range(4)],
    "h": [[0, 0, 1001, 16, rank] for rank in range(4)],
}


def every_plan(**changed):
    plan = []
    for name, shards in {
        **EVERY_PLAN,
        **{key: value for key, value in changed.items() if len(key) == 1},
    }.items():
        rule = EVERY_TYPE["rules"].get(name, {"cuts": ["table_wise"]})
        kernel = rule.get("kernels", ["fused"])[0]
        plan.append({"name": name, "type": rule["cuts"][0], "kernel": kernel, "shards": shards})
    return plan


def test_the_checker_takes_plans_of_every_type():
    assert Checker(EVERY_TYPE).seconds(every_plan()) > 0
    (result,) = plans([EVERY_TYPE])
    check(EVERY_TYPE, result)
    assert [table["type"] for table in result["tables"]] == [
        rule["cuts"][0] for rule in EVERY_TYPE["rules"].values()
    ]


@pytest.mark.parametrize(
    ("name", "shards", "why"),
    [
        ("a", [[0, 0, 1001, 16, 1]], "a: a wrong rank"),
        ("a", [[0, 0, 1001, 8, 2], [0, 8, 1001, 8, 2]], "a: its shards do not lie as table_wise"),
        ("b", [[0, 0, 1001, 8, 0], [0, 0, 1001, 8, 3]], "b: shards overlap"),
        ("b", [[0, 0, 1001, 8, 0], [0, 4, 1001, 8, 3]], "b: shards overlap"),
        ("b", [[0, 0, 501, 16, 0], [501, 0, 500, 16, 3]], "b: its shards do not lie as column_wise"),
        ("b", [[0, 0, 1001, 2, 0], [0, 2, 1001, 14, 3]], "b: a part is no multiple of 4"),
        ("b", [[0, 0, 1001, 16, -1]], "b: a wrong rank"),
        ("b", [[0, 0, 1001, 20, 0], [0, 20, 1001, -4, 3]], "b: a part is no multiple of 4"),
        ("c", [[0, 0, 1001, 4, 0], [0, 4, 1001, 12, 1]], "c: a part is no multiple of 8"),
        ("c", [[0, 0, 1001, 8, 0], [0, 8, 1001, 8, 2]], "c: its shards do not lie as table_column_wise"),
        ("d", [[0, 0, 501, 16, 0], [501, 0, 500, 16, 1]], "d: its shards do not lie as row_wise"),
        (
            "d",
            [[0, 0, 251, 16, 0], [251, 0, 251, 16, 0], [502, 0, 251, 16, 2], [753, 0, 248, 16, 3]],
            "d: its shards do not lie as row_wise",
        ),
        (
            "d",
            [[0, 0, 251, 16, 0], [250, 0, 251, 16, 1], [501, 0, 251, 16, 2], [753, 0, 248, 16, 3]],
            "d: shards overlap",
        ),
        ("d", [[0, 0, 251, 16, rank] for rank in range(3)] + [[0, 0, 248, 16, 3]], "d: shards overlap"),
        ("e", [[0, 0, 501, 16, 1], [501, 0, 500, 16, 2]], "e: its shards do not lie as table_row_wise"),
        ("f", [[0, 0, 501, 16, 0], [501, 0, 500, 16, 3]], "f: its shards do not lie as grid_shard"),
        (
            "f",
            [[0, 0, 501, 8, 0], [501, 0, 500, 8, 1], [0, 8, 501, 8, 3], [501, 8, 500, 8, 2]],
            "f: its shards do not lie as grid_shard",
        ),
        ("g", [[0, 0, 1001, 16, rank] for rank in (0, 1, 2, 2)], "g"),
        ("g", [[0, 0, 1001, 16, 0]], "g"),
        ("x", [[0, 0, 1001, 16, 0]], "not the same tables"),
    ],
)
def test_the_checker_refuses_plans_with_faults(name, shards, why):
    with pytest.raises(AssertionError, match=why):
        Checker(EVERY_TYPE).seconds(every_plan(**{name: shards}))


def test_the_checker_refuses_what_rules_exclude():
    for index, change, why in (
        (0, {"type": "column_wise"}, "a: its rules exclude column_wise"),
        (6, {"kernel": "dense"}, "g: its rules exclude dense"),
        (1, {"kernel": "dense"}, "b: a dense kernel of column_wise"),
        (1, {"name": "a"}, "not the same tables"),
    ):
        plan = every_plan()
        plan[index] = {**plan[index], **change}
        with pytest.raises(AssertionError, match=why):
            Checker(EVERY_TYPE).seconds(plan)
    less = {**EVERY_TYPE, "ranks": [{"count": 4, "memory": 4e5, "host_speed": 1e11}]}
    with pytest.raises(AssertionError, match="a rank holds too much"):
        Checker(less).seconds(every_plan())
    for lists in ({"apart": [["a", "e"]]}, {"together": [["a", "b"]]}):
        with pytest.raises(AssertionError):
            Checker({**EVERY_TYPE, **lists}).seconds(every_plan())


def test_errors_name_their_place():
    (result,) = plans([{"tables": [{"name": "a", "rows": -1, "dim": 4}], "batch": 1, "ranks": [{}]}])
    assert result["error"].startswith("plan: /tables/0/rows is -1")
