"""The store goes away after the ranks have met: groups go on, only new ones cannot be made."""

import os
import pathlib
import re
import signal

import pytest
from fleet import PROMPT, Fleet, Times
from waiting import wait_until

ENGINES = ["shm", "gloo"]


def store_process(fleet):
    def find():
        for pid in fleet.members():
            if pathlib.Path(f"/proc/{pid}/comm").read_text() == "tessera-store\n":
                return pid
        return None

    return wait_until(find, what="the store's process")


@pytest.mark.parametrize("engine", ENGINES)
def test_groups_survive_the_store_and_new_ones_fail_clearly(engine):
    with Fleet("loop", "count=1000", "new_group=1", "steps=300", env={"TESSERA_ENGINE": engine}).run(
        3
    ) as fleet:
        fleet.warm(3)
        fleet.kill(store_process(fleet))
        fleet.say("go")
        errors = fleet.await_events("new_group_error", 3)
        for error in errors.values():
            assert error["kind"] == "rendezvous", error
            assert re.match(
                r"comm\.init: group 'late' cannot be made: the store at /\S+/store\.0 "
                r"does not answer\. ",
                error["text"],
            ), error["text"]
            assert "\n" not in error["text"]
        # 270 more steps on the old group.
        assert fleet.wait() == [0], fleet.err()
        assert sorted(fleet.by_rank("done")) == [0, 1, 2]
        fleet.assert_nothing_left()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_new_group_on_a_store_that_hangs_fails_at_the_limit(engine):
    env = {"TESSERA_ENGINE": engine, "TESSERA_TIMEOUT": "2"}
    with Fleet("loop", "count=1000", "new_group=1", "steps=300", env=env).run(3) as fleet:
        fleet.warm(3)
        store = store_process(fleet)
        stopped = fleet.kill(store, signal.SIGSTOP)
        fleet.say("go")
        errors = fleet.await_events("new_group_error", 3)
        for error in errors.values():
            assert error["kind"] == "rendezvous", error
            assert re.match(
                r"comm\.init: group 'late' cannot be made: the store at \S+ does not", error["text"]
            )
        assert Times.add(f"new group, SIGSTOP of the store, limit 2 s, {engine}", stopped, errors) < 2 + 2
        os.kill(store, signal.SIGCONT)
        assert fleet.wait() == [0], fleet.err()
        fleet.assert_nothing_left()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_death_is_noticed_without_the_store(engine):
    with Fleet("loop", "count=100000", env={"TESSERA_ENGINE": engine}).run(4) as fleet:
        pids = fleet.warm(4)
        os.kill(store_process(fleet), signal.SIGKILL)
        killed = fleet.kill(pids[2])
        errors = fleet.await_events("error", 3)
        # With Gloo nobody can settle on one number any more if some were an operation ahead.
        texts = {re.sub(r"#\d+|step \d+", "", error["text"]) for error in errors.values()}
        assert len(texts) == 1 and f"rank 2 (pid {pids[2]}, host " in texts.pop(), errors
        assert Times.add(f"SIGKILL without a store, {engine}", killed, errors) < PROMPT
        assert fleet.wait() == [128 + signal.SIGKILL]
        fleet.assert_nothing_left()


@pytest.mark.parametrize("engine", ENGINES)
def test_an_exception_is_told_without_the_store(engine):
    with Fleet(
        "loop",
        "count=1000",
        "victim=1",
        "action=guarded",
        "at=12",
        "hold=1",
        env={"TESSERA_ENGINE": engine},
    ).run(3) as fleet:
        fleet.warm(3)
        os.kill(store_process(fleet), signal.SIGKILL)
        fleet.say("go")
        errors = fleet.await_events("error", 2)
        injected = fleet.by_rank("injected")[1]["ns"]
        for error in errors.values():
            assert error["text"].endswith("failed in step 12: batch 17 has no rows"), error
        assert Times.add(f"exception without a store, {engine}", injected, errors) < PROMPT
        fleet.say("release")
        assert fleet.wait() == [3], fleet.err()
        fleet.assert_nothing_left()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_store_that_hangs_holds_nobody_up(engine):
    with Fleet("loop", "count=1000", env={"TESSERA_ENGINE": engine, "TESSERA_TIMEOUT": "6"}).run(
        3, "--failure-grace", 2
    ) as fleet:
        pids = fleet.warm(3)
        store = store_process(fleet)
        os.kill(store, signal.SIGSTOP)
        stopped = fleet.kill(pids[1], signal.SIGSTOP)
        errors = fleet.errors_of([0, 2], limit=30)
        assert "no answer from rank 1 in 6" in errors[0]["text"], errors[0]["text"]
        assert Times.add(f"SIGSTOP of rank and store, limit 6 s, {engine}", stopped, errors) < 6 + 2
        os.kill(store, signal.SIGCONT)
        assert fleet.wait() == [75]
        fleet.assert_nothing_left()
