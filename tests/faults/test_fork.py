"""A rank forks: its child owns nothing, and whatever becomes of it is no business of the group."""

import json
import os
import re
import subprocess

import pytest
from fleet import WORKER, Fleet


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


def fork_at_any_moment(engine, *words):
    """Two ranks fork while they work; the worker's exit code, and what it says of them."""
    env = {**os.environ, "TESSERA_ENGINE": engine, "OMP_NUM_THREADS": "1"}
    command = [WORKER, "fork-places", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    (line,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done.returncode, line


@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_forks_at_any_moment_change_nothing(engine):
    code, line = fork_at_any_moment(engine, "count=10")
    assert (code, line["forks"], line["statuses"]) == (0, 20, [0, 0]), line


def test_a_rank_that_does_not_end_after_forks_is_told():
    # What the count of forks is judged by: the other rank ends well, this one is killed at last.
    code, line = fork_at_any_moment("shm", "count=1", "hangs=1", "end_limit=10")
    assert code == 1
    assert (line["unheard"], line["wrong_ends"], line["statuses"]) == (0, 1, [0, 9]), line
