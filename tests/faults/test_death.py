"""A rank dies: every survivor names it, the operation and its number, at once."""

import json
import os
import re
import signal
import subprocess
import time

import pytest
from fleet import PROMPT, WORKER, Fleet, Times, is_alive
from sanitizers import not_sanitized
from waiting import wait_until

ENGINES = ["shm", "gloo"]


def assert_names_the_dead(text, op, rank, pid):
    assert re.match(
        rf"comm\.{op} #\d+: rank {rank} \(pid {pid}, host \S+\) died before it was done "
        r"\(float32 \[\d+\], group 'world', step \d+\)\.",
        text,
    ), text


@pytest.mark.parametrize("size, victim", [(2, 1), (3, 2), (4, 1)])
@pytest.mark.parametrize("engine", ENGINES)
def test_killed_inside_an_all_reduce(engine, size, victim):
    # 4 MiB per rank: nearly all the time is spent inside the operation.
    with Fleet("loop", "count=1000000", env={"TESSERA_ENGINE": engine}).run(size) as fleet:
        pids = fleet.warm(size)
        assert {e["engine"] for e in fleet.events("ready")} == {engine}
        killed = fleet.kill(pids[victim])
        survivors = [rank for rank in range(size) if rank != victim]
        errors = fleet.errors_of(survivors)
        assert_names_the_dead(errors[survivors[0]]["text"], "all_reduce", victim, pids[victim])
        assert all(error["kind"] == "peer lost" for error in errors.values())
        assert all(error["ranks"] == [victim] for error in errors.values())
        assert Times.add(f"SIGKILL, {engine}, {size} ranks", killed, errors) < PROMPT
        assert fleet.wait() == [128 + signal.SIGKILL]
        # The table: who died first, then those who only lost a peer.
        err = fleet.err()
        assert f"error: rank {victim} failed first: SIGKILL" in err
        table = re.findall(r"^ +(\d+) +\d+  (SIGKILL|exit code \d+)", err, re.M)
        assert table[0] == (str(victim), "SIGKILL"), err
        assert sorted(table[1:]) == [(str(rank), "exit code 75") for rank in survivors], err
        fleet.assert_nothing_left()


@pytest.mark.parametrize("op", ["all_reduce_async", "all_to_all", "all_gather", "broadcast", "ring"])
@pytest.mark.parametrize("engine", ENGINES)
def test_killed_inside_other_operations(engine, op):
    # The victim ends itself between two operations; the others are inside the next one.
    with Fleet(
        "loop", f"op={op}", "count=300000", "victim=1", "action=kill", "at=12", env={"TESSERA_ENGINE": engine}
    ).run(3) as fleet:
        errors = fleet.errors_of([0, 2])
        name = "(recv|send)" if op == "ring" else op.removesuffix("_async")
        pid = fleet.by_rank("injected")[1]["pid"]
        assert_names_the_dead(errors[0]["text"], name, 1, pid)
        killed = fleet.by_rank("injected")[1]["ns"]
        assert Times.add(f"SIGKILL in {op}, {engine}", killed, errors) < PROMPT
        assert fleet.wait() == [128 + signal.SIGKILL]
        fleet.assert_nothing_left()


@pytest.mark.parametrize(
    "action, code", [("exit", 9), ("leave", 9), pytest.param("segfault", 128 + 11, marks=not_sanitized)]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_ended_without_a_word(engine, action, code):
    with Fleet(
        "loop", "count=1000", "victim=2", f"action={action}", "code=9", env={"TESSERA_ENGINE": engine}
    ).run(3) as fleet:
        errors = fleet.errors_of([0, 1])
        assert "rank 2 " in errors[0]["text"] and "all_reduce #30" in errors[0]["text"]
        assert Times.add(f"{action}, {engine}", fleet.by_rank("injected")[2]["ns"], errors) < PROMPT
        assert fleet.wait() == [code]
        assert "error: rank 2 failed first" in fleet.err()
        fleet.assert_nothing_left()


@pytest.mark.parametrize("engine", ENGINES)
def test_rank_0_dies_under_the_launcher(engine):
    # The store lives beside the launcher, so it outlives rank 0.
    with Fleet("loop", "count=100000", env={"TESSERA_ENGINE": engine}).run(3) as fleet:
        pids = fleet.warm(3)
        killed = fleet.kill(pids[0])
        errors = fleet.errors_of([1, 2])
        assert_names_the_dead(errors[1]["text"], "all_reduce", 0, pids[0])
        assert Times.add(f"SIGKILL of rank 0, {engine}", killed, errors) < PROMPT
        assert fleet.wait() == [128 + signal.SIGKILL]
        fleet.assert_nothing_left()


@pytest.mark.parametrize("engine", ENGINES)
def test_rank_0_dies_together_with_its_store(engine):
    # Started by hand, rank 0 hosts the store: both are gone at once.
    with Fleet("loop", "count=100000", env={"TESSERA_ENGINE": engine}).bare(3) as fleet:
        pids = fleet.warm(3)
        killed = fleet.kill(pids[0])
        errors = fleet.errors_of([1, 2])
        assert_names_the_dead(errors[1]["text"], "all_reduce", 0, pids[0])
        assert Times.add(f"SIGKILL of rank 0 and store, {engine}", killed, errors) < PROMPT
        assert fleet.wait() == [-signal.SIGKILL, 75, 75]
        fleet.assert_nothing_left()


@pytest.mark.parametrize("engine", ENGINES)
def test_killed_under_torchrun(engine):
    with Fleet("loop", "count=100000", env={"TESSERA_ENGINE": engine}).torchrun(3) as fleet:
        pids = fleet.warm(3)
        killed = fleet.kill(pids[2])
        errors = fleet.errors_of([0, 1])
        assert_names_the_dead(errors[0]["text"], "all_reduce", 2, pids[2])
        assert Times.add(f"SIGKILL under torchrun, {engine}", killed, errors) < PROMPT
        assert fleet.wait() == [1]
        fleet.assert_nothing_left()


@pytest.mark.parametrize("engine", ENGINES)
def test_all_but_one_die_at_once(engine):
    with Fleet("loop", "count=100000", env={"TESSERA_ENGINE": engine}).bare(4) as fleet:
        pids = fleet.warm(4)
        for rank in (1, 2, 3):
            killed = fleet.kill(pids[rank])
        errors = fleet.errors_of([0])
        assert "died before it was done" in errors[0]["text"]
        assert Times.add(f"SIGKILL of all others, {engine}", killed, errors) < PROMPT
        assert fleet.wait() == [75] + [-signal.SIGKILL] * 3
        fleet.assert_nothing_left()


@pytest.mark.parametrize("engine", ENGINES)
def test_without_descriptors_of_processes(engine):
    # As in some containers: the system call that gives them is refused.
    with Fleet("loop", "count=1000", "pidfds=refused", env={"TESSERA_ENGINE": engine}).bare(3) as fleet:
        pids = fleet.warm(3)
        killed = fleet.kill(pids[1])
        errors = fleet.errors_of([0, 2])
        assert_names_the_dead(errors[0]["text"], "all_reduce", 1, pids[1])
        assert Times.add(f"SIGKILL without pidfds, {engine}", killed, errors) < PROMPT
        fleet.wait()
        fleet.assert_nothing_left()


def assert_kills_are_named(engine, count, *words):
    """Short jobs, one kill in each: the same text on all survivors, at once."""
    command = [WORKER, "kills", f"count={count}", *words]
    env = {**os.environ, "TESSERA_ENGINE": engine, "OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=True).stdout
    kills = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert len(kills) == count
    for kill in kills:
        assert kill["engine"] == engine and kill["named"], kill
        assert len(set(kill["texts"])) == 1, kill
        assert kill["ms"] < PROMPT * 1000, kill


@pytest.mark.parametrize("engine", ENGINES)
def test_children_that_live_on_hide_no_death(engine):
    # They have copies of the rank's connections, and would keep them open.
    assert_kills_are_named(engine, 3, "phase=collective", "children=1")


@pytest.mark.parametrize("engine", ENGINES)
def test_killed_while_groups_are_taken_down(engine):
    assert_kills_are_named(engine, 6, "phase=teardown")


@pytest.mark.parametrize("engine", ENGINES)
def test_killed_in_the_first_meeting(engine):
    # From the moment a rank has said on the store who it is; before, only its launcher knows of it.
    assert_kills_are_named(engine, 8, "phase=meeting")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_large_process(engine):
    # It gives back its memory, page by page, before anything else tells that it has ended.
    with Fleet("loop", "count=1000", "large=1", env={"TESSERA_ENGINE": engine}).bare(2) as fleet:
        pids = fleet.warm(2)
        killed = fleet.kill(pids[1])
        errors = fleet.errors_of([0])
        assert_names_the_dead(errors[0]["text"], "all_reduce", 1, pids[1])
        assert Times.add(f"SIGKILL of 1 GiB, {engine}", killed, errors) < PROMPT
        fleet.wait()


@pytest.mark.parametrize("memory", [0, 1024], ids=["small", "large"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("engine", ENGINES)
def test_killed_while_a_group_is_made(engine, victim, memory):
    for repeat in range(2 if memory else 5):
        with Fleet("groups", f"victim={victim}", f"memory={memory}", env={"TESSERA_ENGINE": engine}) as fleet:
            fleet.run(3)
            pids = fleet.warm(3)
            time.sleep(0.011 * repeat)
            killed = fleet.kill(pids[victim])
            survivors = [rank for rank in range(3) if rank != victim]
            errors = fleet.errors_of(survivors)
            assert re.match(
                rf"comm\.init: rank {victim} \(pid {pids[victim]}, host \S+\) died while the ranks "
                r"made a group\. Look at that rank's own output for the reason\.",
                errors[survivors[0]]["text"],
            ), errors
            assert {error["kind"] for error in errors.values()} == {"peer lost"}
            assert Times.add(f"SIGKILL in creation, {engine}, {memory} MiB", killed, errors) < PROMPT
            assert fleet.wait() == [128 + signal.SIGKILL]
            fleet.assert_nothing_left()


def test_all_ranks_die_and_leave_nothing():
    with Fleet("loop", "count=100000", env={"TESSERA_ENGINE": "shm"}).bare(3) as fleet:
        for pid in fleet.warm(3).values():
            fleet.kill(pid)
        assert fleet.wait() == [-signal.SIGKILL] * 3
        fleet.assert_nothing_left()


def test_launcher_ends_survivors_that_do_not_notice():
    # With the grace of everyday use the job is over at once, whatever the survivors do.
    with Fleet("loop", "count=100000").run(3, "--failure-grace", 0.05) as fleet:
        pids = fleet.warm(3)
        fleet.kill(pids[1])
        assert fleet.wait(10) == [128 + signal.SIGKILL]
        assert "error: rank 1 failed first: SIGKILL" in fleet.err()
        fleet.assert_nothing_left()


def test_killed_while_the_ranks_meet():
    # Rank 1 never reaches the group; the launcher sees it die and ends the others.
    with Fleet("join", env={"TESSERA_TIMEOUT": "60"}).run(3, "--failure-grace", 0.2) as fleet:
        victim = wait_until(lambda: [pid for pid in fleet.members() if is_worker(pid, 1)], what="rank 1")[0]
        fleet.kill(victim)
        assert fleet.wait(20) == [128 + signal.SIGKILL]
        assert "error: rank 1 failed first: SIGKILL" in fleet.err()
        assert not is_alive(victim)
        fleet.assert_nothing_left()


def is_worker(pid, rank):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"RANK={rank}".encode() in file.read().split(b"\0")
    except OSError:
        return False
