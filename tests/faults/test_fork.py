"""A rank forks: its child owns nothing, and whatever becomes of it is no business of the group."""

import re

import pytest
from fleet import Fleet


@pytest.mark.parametrize("end", ["exit", "return", "destroy", "throw"])
@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_a_child_that_uses_the_group(engine, end):
    with Fleet("forks", f"end={end}", env={"TESSERA_ENGINE": engine}).run(2) as fleet:
        ended = fleet.await_events("child_ended", 1)[0]
        fleet.say("go")
        assert fleet.wait() == [0], fleet.err()
        rank_pid = fleet.by_rank("ready")[0]["pid"]
        said = {event["what"]: event["text"] for event in fleet.events("child_error")}
        (child,) = {event["pid"] for event in fleet.events("child_error")}
        assert sorted(said) == ["all_reduce", "all_reduce_async", "barrier", "send", "wait"]
        for what, text in said.items():
            assert f"belongs to process {rank_pid}" in text and f"this is process {child}" in text, what
        assert re.search(r"group 'world' belongs to process \d+, rank 0 of it", said["barrier"])
        sums = fleet.by_rank("sums")
        assert sorted(sums) == [0, 1]
        assert {event["first"] for event in sums.values()} == {3.0}
        # Doubled 99 times after the first sum.
        assert {event["last"] for event in sums.values()} == {3.0 * 2.0**99}
        assert (ended["status"] == 0) == (end != "throw")
        fleet.assert_nothing_left()
