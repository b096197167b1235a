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


def test_errors_name_their_place():
    (result,) = plans([{"tables": [{"name": "a", "rows": -1, "dim": 4}], "batch": 1, "ranks": [{}]}])
    assert result["error"].startswith("plan: /tables/0/rows is -1")
