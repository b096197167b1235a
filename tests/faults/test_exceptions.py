"""A rank fails by itself: the others raise its words, not a timeout."""

import signal

import pytest
from fleet import PROMPT, Fleet, Times
from sanitizers import not_sanitized

ENGINES = ["shm", "gloo"]


@pytest.mark.parametrize("engine", ENGINES)
def test_exception_while_the_process_lives_on(engine):
    with Fleet("loop", "count=1000", "victim=1", "action=guarded", env={"TESSERA_ENGINE": engine}).bare(
        3
    ) as fleet:
        errors = fleet.errors_of([0, 2])
        injected = fleet.by_rank("injected")[1]
        assert errors[0]["text"] == (
            f"comm: rank 1 (pid {injected['pid']}, host "
            f"{errors[0]['text'].split('host ')[1].split(')')[0]}) failed "
            "in step 30: batch 17 has no rows"
        )
        assert {error["kind"] for error in errors.values()} == {"peer failed"}
        assert Times.add(f"exception, guarded, {engine}", injected["ns"], errors) < PROMPT
        fleet.say("release")
        assert fleet.wait() == [75, 3, 75]
        assert fleet.by_rank("lived")[1]["released"]
        fleet.assert_nothing_left()


@pytest.mark.parametrize(
    "action, text, code",
    [
        ("throw", "batch 17 has no rows", 128 + signal.SIGABRT),
        pytest.param("allocate", "std::bad_alloc", 128 + signal.SIGABRT, marks=not_sanitized),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_uncaught_exception_reaches_peers_and_launcher(engine, action, text, code):
    with Fleet("loop", "count=1000", "victim=2", f"action={action}", env={"TESSERA_ENGINE": engine}).run(
        3
    ) as fleet:
        errors = fleet.errors_of([0, 1])
        assert errors[0]["text"].startswith("comm: rank 2 (pid ")
        assert errors[0]["text"].endswith(f"failed in step 30: {text}")
        injected = fleet.by_rank("injected")[2]["ns"]
        assert Times.add(f"exception, uncaught, {engine}", injected, errors) < PROMPT
        assert fleet.wait() == [code]
        assert f"error: rank 2 failed first: Exception: {text}" in fleet.err()
        assert fleet.err().count("uncaught Exception") == 1
        fleet.assert_nothing_left()


@pytest.mark.parametrize("engine", ENGINES)
def test_abort_reaches_all_ranks(engine):
    with Fleet("loop", "count=1000", "victim=0", "action=abort", env={"TESSERA_ENGINE": engine}).bare(
        3
    ) as fleet:
        errors = fleet.errors_of([0, 1, 2])
        assert errors[2]["text"] == (
            "comm: group 'world' was aborted by rank 0: the validation loss is not a number"
        )
        assert Times.add(f"abort, {engine}", fleet.by_rank("injected")[0]["ns"], errors) < PROMPT
        assert fleet.wait() == [75, 75, 75]
        fleet.assert_nothing_left()


def test_exception_under_torchrun():
    with Fleet("loop", "count=1000", "victim=1", "action=throw").torchrun(2) as fleet:
        errors = fleet.errors_of([0])
        assert errors[0]["text"].endswith("failed in step 30: batch 17 has no rows")
        assert fleet.wait() == [1]
        # torchrun shows the error file of the rank that failed first.
        assert "batch 17 has no rows" in fleet.err()
        fleet.assert_nothing_left()
