"""A rank is late: a warning names it after 5 s, and the limit ends the wait on all ranks alike."""

import contextlib
import re
import signal
import time

import pytest
from fleet import Fleet, Times

LIMIT_S = 8


def start(stack, engine, size, *words, bare=False, limit=LIMIT_S):
    fleet = stack.enter_context(
        Fleet("loop", "count=1000", *words, env={"TESSERA_ENGINE": engine, "TESSERA_TIMEOUT": str(limit)})
    )
    return fleet.bare(size) if bare else fleet.run(size, "--failure-grace", 2)


def assert_stopped_rank_is_named(fleet, engine, size, victim, stopped):
    survivors = [rank for rank in range(size) if rank != victim]
    errors = fleet.errors_of(survivors)
    text = errors[survivors[0]]["text"]
    assert {error["kind"] for error in errors.values()} == {"timeout"}
    assert re.match(rf"comm\.all_reduce #\d+: no answer from rank {victim} in \d", text), text
    assert re.search(rf"Rank {victim} \(pid \d+, host \S+\) is stopped\.", text), text
    delay = Times.add(f"SIGSTOP, limit {LIMIT_S} s, {engine}", stopped, errors)
    assert LIMIT_S - 0.5 < delay < LIMIT_S + 2, delay
    # Each survivor warned after 5 s and named the same rank.
    warnings = re.findall(
        r"\[tessera\] rank (\d): comm\.all_reduce #\d+: still waiting for "
        rf"rank {victim} after ([\d.]+) s .*is stopped\.",
        fleet.err(),
    )
    assert {int(rank) for rank, _ in warnings} == set(survivors), fleet.err()
    assert all(5 <= float(seconds) < 7 for _, seconds in warnings), warnings


def test_stopped_rank_is_named_by_warning_and_error():
    # All at once: they only wait.
    cases = [
        ("shm", 2, 1, False),
        ("shm", 4, 2, False),
        ("gloo", 2, 1, False),
        ("gloo", 4, 2, False),
        ("shm", 3, 0, True),
        ("gloo", 3, 0, True),
    ]
    with contextlib.ExitStack() as stack:
        fleets = [start(stack, engine, size, bare=bare) for engine, size, _, bare in cases]
        pids = [fleet.warm(size) for fleet, (_, size, _, _) in zip(fleets, cases, strict=True)]
        stopped = [
            fleet.kill(pid[victim], signal.SIGSTOP)
            for fleet, pid, (_, _, victim, _) in zip(fleets, pids, cases, strict=True)
        ]
        problems = []
        for fleet, (engine, size, victim, bare), since in zip(fleets, cases, stopped, strict=True):
            try:
                assert_stopped_rank_is_named(fleet, engine, size, victim, since)
            except AssertionError as error:
                problems.append(f"{engine}, {size} ranks, rank {victim}, bare {bare}: {error}")
        assert not problems, "\n".join(problems)
        for fleet, (_, _, victim, bare) in zip(fleets, cases, strict=True):
            if bare:
                fleet.kill(fleet.by_rank("ready")[victim]["pid"], signal.SIGKILL)
                codes = fleet.wait()
                assert codes == [-signal.SIGKILL, 75, 75], codes
            else:
                # The launcher's signal to end wakes nobody who is stopped; its SIGKILL does.
                assert fleet.wait() == [75]
            fleet.assert_nothing_left()


def test_slow_rank_is_warned_about_and_waited_for():
    cases = [("shm", "all_reduce"), ("gloo", "all_reduce"), ("shm", "ring"), ("gloo", "ring")]
    with contextlib.ExitStack() as stack:
        fleets = [
            start(
                stack,
                engine,
                3,
                f"op={op}",
                "victim=1",
                "action=sleep",
                "milliseconds=6500",
                "at=20",
                "steps=40",
                limit=30,
            )
            for engine, op in cases
        ]
        for fleet, (engine, op) in zip(fleets, cases, strict=True):
            assert fleet.wait() == [0], fleet.err()
            name = "(recv|send)" if op == "ring" else op
            warnings = re.findall(
                rf"rank (\d): comm\.{name} #\d+: still waiting for rank 1 after "
                r"5[\d.]* s .*Rank 1 \(pid \d+, host \S+\) is alive, waiting",
                fleet.err(),
            )
            # In the ring only the neighbour behind waits for rank 1 itself.
            ranks = {w[0] if isinstance(w, tuple) else w for w in warnings}
            assert "2" in ranks and (op == "ring" or ranks == {"0", "2"}), (engine, op, fleet.err())
            fleet.assert_nothing_left()


@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_a_stopped_rank_may_come_back_in_time(engine):
    with contextlib.ExitStack() as stack:
        fleet = start(stack, engine, 3, "steps=400", limit=30)
        pids = fleet.warm(3)
        fleet.kill(pids[1], signal.SIGSTOP)
        time.sleep(1)
        fleet.kill(pids[1], signal.SIGCONT)
        assert fleet.wait() == [0], fleet.err()
        fleet.assert_nothing_left()


@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_a_stopped_rank_comes_back_too_late(engine):
    # It finds the group ended and raises what the others raised; nobody crashes over late data.
    with contextlib.ExitStack() as stack:
        fleet = start(stack, engine, 3, "count=100000", limit=2)
        pids = fleet.warm(3)
        fleet.kill(pids[2], signal.SIGSTOP)
        fleet.errors_of([0, 1])
        fleet.kill(pids[2], signal.SIGCONT)
        errors = fleet.errors_of([0, 1, 2])
        assert "no answer from rank 2 in 2 s" in errors[2]["text"]
        assert fleet.wait() == [75], fleet.err()
        assert "SIG" not in fleet.err(), fleet.err()
        fleet.assert_nothing_left()


def test_only_the_late_rank_is_named():
    # Gloo does not say whom it waits for. A limit below the second after which ranks ask each other, and
    # a rank that came late itself and has not waited for long: neither makes the others suspects.
    cases = [(4, "1", ()), (4, "0.5", ("count=10",)), (4, "2", ("slow=1", "slow_milliseconds=1500"))]
    with contextlib.ExitStack() as stack:
        fleets = [
            start(stack, "gloo", size, "victim=2", "action=sleep", "milliseconds=8000", *words, limit=limit)
            for size, limit, words in cases
        ]
        for fleet, (_, limit, words) in zip(fleets, cases, strict=True):
            errors = fleet.errors_of([0, 1, 3])
            texts = {error["text"] for error in errors.values()}
            assert len(texts) == 1, texts
            assert f": no answer from rank 2 in {limit} s " in texts.pop(), (words, errors)
            assert {tuple(error["ranks"]) for error in errors.values()} == {(2,)}


def test_stopped_sender_is_named_by_the_receiver():
    with contextlib.ExitStack() as stack:
        fleets = {
            engine: start(stack, engine, 2, "op=ring", bare=True, limit=6) for engine in ("shm", "gloo")
        }
        for fleet in fleets.values():
            fleet.kill(fleet.warm(2)[1], signal.SIGSTOP)
        for engine, fleet in fleets.items():
            text = fleet.errors_of([0])[0]["text"]
            assert re.match(r"comm\.(recv|send) #\d+: no answer from rank 1 in 6 s", text), (engine, text)
            assert "is stopped" in text
            fleet.kill(fleet.by_rank("ready")[1]["pid"], signal.SIGKILL)
            assert fleet.wait() == [75, -signal.SIGKILL]
