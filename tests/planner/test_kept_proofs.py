"""Proofs of public models, of problems searched by brute force and of plans made again, checked once more.

gaps_test, brute_force_test and replan_test keep problems and results. The checker shares no code with them.
"""

import json
import os
import pathlib

import pytest
from check_certificate import check

KEPT = os.environ.get("TESSERA_KEPT_PROOFS")
pytestmark = pytest.mark.skipif(not KEPT, reason="TESSERA_KEPT_PROOFS is not set: run by ctest")


def kept(name):
    with (pathlib.Path(KEPT) / f"{name}.lines").open() as lines:
        for problem in lines:
            yield json.loads(problem), json.loads(next(lines))


def count(results, proof):
    return sum(proof in result["certificate"] for result in results)


def test_proofs_of_public_models_hold():
    results = []
    for problem, result in kept("gaps"):
        check(problem, result)
        results.append(result)
    # Seven models on four worlds of two machines; links and memory apart; little memory.
    assert len(results) == 7 * 4 * 2 + 4 + 12
    assert sum(result["objective"] == "phases" for result in results) == 4
    assert count(results, "pays") >= 10 and count(results, "phases") >= 2


def test_proofs_of_problems_with_known_optimum_hold():
    results = []
    for problem, result in kept("brute_force"):
        check(problem, result)
        results.append(result)
    assert len(results) > 1000
    assert count(results, "pays") > 10 and count(results, "phases") > 50


def test_plans_that_were_made_again_hold():
    """Their bound is that of all plans, so it may be farther below."""
    results = []
    for problem, result in kept("replan"):
        check(problem, result)
        results.append(result)
    assert len(results) >= 20
