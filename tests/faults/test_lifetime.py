"""Groups come and go, and processes end without taking them down."""

import contextlib

import pytest
from fleet import Fleet
from sanitizers import not_sanitized

ENGINES = ["shm", "gloo"]


@not_sanitized
@pytest.mark.parametrize("engine", ENGINES)
def test_groups_and_steps_leak_nothing(engine):
    steps = 10000 if engine == "shm" else 1500
    # One arena: the allocator's others keep memory of threads that have ended, by chance more or less.
    # LibTorch's own Gloo groups keep 1 to 2 KiB each for good, and it remembers the last 2000 operations
    # of the process, about 0.5 KiB each: few are asked for, so that these are full before the first look.
    env = {"TESSERA_ENGINE": engine, "MALLOC_ARENA_MAX": "1", "TORCH_FR_BUFFER_SIZE": "100"}
    with Fleet("leaks", "groups=200", f"steps={steps}", env=env).run(2) as fleet:
        assert fleet.wait(150) == [0], fleet.err()
        before = fleet.by_rank("before")
        for name in ("after_groups", "after_steps"):
            after = fleet.by_rank(name)
            for rank in (0, 1):
                grown = after[rank]["kib"] - before[rank]["kib"]
                print(
                    f"{engine} {name} rank {rank}: {grown} KiB more, "
                    f"{after[rank]['descriptors']} descriptors, {after[rank]['threads']} threads"
                )
                assert grown < 512, (name, rank, grown)
                assert after[rank]["descriptors"] == before[rank]["descriptors"], (name, after)
                assert after[rank]["threads"] == before[rank]["threads"], (name, after)
        fleet.assert_nothing_left()


def test_exit_with_live_groups_keeps_the_code():
    # 25 runs of two ranks for each variant and engine: 200 runs, 400 processes.
    with contextlib.ExitStack() as stack:
        fleets = []
        for variant in ("return", "exit", "pending", "thread"):
            for engine in ENGINES:
                fleet = stack.enter_context(
                    Fleet(
                        "exits",
                        f"variant={variant}",
                        "runs=25",
                        env={"TESSERA_ENGINE": engine, "TESSERA_TIMEOUT": "20"},
                    )
                )
                fleet.start(fleet.mode)
                fleets.append(fleet)
        for fleet in fleets:
            assert fleet.wait(150) == [0], fleet.err()
            assert fleet.events("bad_exit") == [], (fleet.events("bad_exit"), fleet.err())
            assert fleet.events("done")[0]["runs"] == 25


@pytest.mark.parametrize("variant", ["return", "exit"])
def test_exit_code_under_the_launcher(variant):
    with Fleet("exit", f"variant={variant}").run(2) as fleet:
        assert fleet.wait() == [7]
        fleet.assert_nothing_left()
