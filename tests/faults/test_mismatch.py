"""The ranks call different things: the same text on every rank, before any data move."""

import re

import pytest
from fleet import PROMPT, Fleet, Times

ENGINES = ["shm", "gloo"]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_kind_of_mismatch_is_caught(engine, size):
    with Fleet("mismatches", env={"TESSERA_ENGINE": engine}).run(size) as fleet:
        assert fleet.wait(120) == [0], fleet.err()
        assert fleet.events("passed") == []
        cases = {}
        for event in fleet.events("case"):
            cases.setdefault(event["case"], {})[event["rank"]] = event
        assert len(cases) >= 40 and fleet.events("done")[0]["cases"] == len(cases)
        again = {(e["case"], e["rank"]): e["text"] for e in fleet.events("again")}
        slowest = 0.0
        for name, ranks in cases.items():
            assert sorted(ranks) == list(range(size)), name
            assert len({event["text"] for event in ranks.values()}) == 1, (name, ranks)
            text = ranks[0]["text"]
            assert {event["kind"] for event in ranks.values()} == {"mismatch"}, (name, text)
            # Operation, number, and both sides.
            assert re.match(r"comm\.\w+ #\d+: (rank|ranks) \d", text), (name, text)
            assert all(again[name, rank] == text for rank in range(size)), name
            slowest = max(slowest, *(event["milliseconds"] for event in ranks.values()))
            Times.rows.setdefault(f"mismatch, {engine}, {size} ranks", []).extend(
                event["milliseconds"] / 1e3 for event in ranks.values()
            )
        assert slowest / 1e3 < PROMPT
        assert_texts(cases, size)
        fleet.assert_nothing_left()


def assert_texts(cases, size):
    odd = size - 1
    others = "rank 0" if size == 2 else "ranks 0, 1"
    text = {name: ranks[0]["text"] for name, ranks in cases.items()}
    remedy = ". Make every rank issue the same collectives in the same order."
    expected = {
        "all_reduce or broadcast": (
            "broadcast of float32 [60] from root 0",
            "all_reduce sum of float32 [60]",
        ),
        "all_reduce of 60 or 59": ("all_reduce sum of float32 [59]", "all_reduce sum of float32 [60]"),
        "all_reduce of float32 or int32": ("all_reduce sum of int32 [60]", "all_reduce sum of float32 [60]"),
        "sum or maximum": ("all_reduce max of float32 [60]", "all_reduce sum of float32 [60]"),
    }
    for name, (wrong, usual) in expected.items():
        sides = (f"rank {odd} called {wrong}", f"{others} called {usual}")
        assert all(side in text[name] for side in (*sides, remedy)), text[name]
    splits = text["all_to_all_v expects another split"]
    assert f"gives 4 elements of float32 for rank {odd}, which expects 5" in splits, splits
    for name in ("message of 60 or 61", "message of float32 or int32"):
        assert "rank 0 sent float32 [60]" in text[name], text[name]


@pytest.mark.parametrize("engine", ENGINES)
def test_uncaught_mismatch_is_the_root_cause_of_the_job(engine):
    with Fleet("loop", "count=1000", "victim=1", "action=mismatch", env={"TESSERA_ENGINE": engine}).run(
        3
    ) as fleet:
        errors = fleet.errors_of([0, 1, 2])
        assert errors[0]["text"] == (
            "comm.all_reduce #30: rank 1 called broadcast of float32 [7] from root 0, ranks 0, 2 "
            "called all_reduce sum of float32 [1000]. Make every rank issue the same collectives in "
            "the same order."
        )
        injected = fleet.by_rank("injected")[1]["ns"]
        assert Times.add(f"mismatch, uncaught, {engine}", injected, errors) < PROMPT
        assert fleet.wait() == [75]
        assert "CommError: comm.all_reduce #30: rank 1 called broadcast" in fleet.err()
        fleet.assert_nothing_left()
