"""Groups over two hosts of two ranks each: shared memory inside, Gloo between."""

import re
import signal
import time

import hosts
import pytest
from fleet import PROMPT, Fleet, Times

REASON = hosts.reason_not_possible()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

PORT = 29500  # of a namespace that is ours alone


@pytest.fixture
def network():
    with hosts.TwoHosts() as two:
        yield two


def start_by_launcher(fleet, network, *flags):
    for node in (0, 1):
        fleet.run(
            2,
            "--nnodes",
            2,
            "--node-rank",
            node,
            "--rdzv-endpoint",
            f"{network.addresses[0]}:{PORT}",
            *flags,
            prefix=network.inside(node),
        )
    return fleet


def start_bare(fleet, network, ranks_of=((0, 1), (2, 3))):
    size = sum(len(ranks) for ranks in ranks_of)
    for host, ranks in enumerate(ranks_of):
        fleet.bare(
            size, ranks=ranks, port=PORT, prefix=network.inside(host), MASTER_ADDR=network.addresses[0]
        )
    fleet.ports.clear()  # of another namespace
    return fleet


def assert_everything_is_right(fleet, size=4):
    results = fleet.by_rank("collectives")
    assert sorted(results) == list(range(size))
    for result in results.values():
        assert result["wrong"] == [], result
        assert result["checks"] > 200
    assert len({result["digest"] for result in results.values()}) == 1
    return results[0]["digest"]


def test_every_collective_over_two_hosts(network):
    with start_by_launcher(Fleet("collectives"), network) as fleet:
        assert fleet.wait(120) == [0, 0], fleet.err()
        assert {event["engine"] for event in fleet.events("ready")} == {"shm+gloo"}
        assert_everything_is_right(fleet)


@pytest.mark.parametrize(
    "ranks_of",
    [((0, 2), (1, 3)), ((0,), (1, 2)), ((0, 1, 2), (3,))],
    ids=["interleaved", "one and two", "three and one"],
)
def test_every_collective_on_other_layouts(network, ranks_of):
    with start_bare(Fleet("collectives", "largest=3000"), network, ranks_of) as fleet:
        size = sum(len(ranks) for ranks in ranks_of)
        assert fleet.wait(120) == [0] * size, fleet.err()
        assert {event["engine"] for event in fleet.events("ready")} == {"shm+gloo"}
        assert_everything_is_right(fleet, size)


def test_one_rank_per_host_uses_gloo(network):
    with start_bare(Fleet("collectives", "largest=3000"), network, ((0,), (1,))) as fleet:
        assert fleet.wait(120) == [0, 0], fleet.err()
        assert {event["engine"] for event in fleet.events("ready")} == {"gloo"}
        assert_everything_is_right(fleet, 2)


@pytest.mark.parametrize("victim", [2, 3, 0], ids=["leader of B", "other of B", "leader of A"])
@pytest.mark.parametrize("op", ["all_reduce", "all_to_all"])
def test_killed_rank_is_known_on_both_hosts(network, victim, op):
    fleet = Fleet("loop", f"op={op}", "count=100000")
    with start_by_launcher(fleet, network) as fleet:
        pids = fleet.warm(4)
        killed = fleet.kill(pids[victim])
        survivors = [rank for rank in range(4) if rank != victim]
        errors = fleet.errors_of(survivors)
        text = errors[survivors[0]]["text"]
        assert re.match(
            rf"comm\.{op} #\d+: rank {victim} \(pid {pids[victim]}, host \S+\) died before"
            r" it was done \(float32 \[\d+\], group 'world', step \d+\)\.",
            text,
        ), text
        assert all(error["ranks"] == [victim] for error in errors.values())
        assert Times.add(f"SIGKILL, two hosts, {op}", killed, errors) < PROMPT
        assert fleet.wait() == [128 + signal.SIGKILL] * 2
        assert f"rank {victim} failed first" in fleet.err()
        assert fleet.members() == [] and fleet.segments() == []


def test_mismatch_over_two_hosts(network):
    with start_bare(Fleet("mismatches"), network) as fleet:
        assert fleet.wait(120) == [0] * 4, fleet.err()
        assert fleet.events("passed") == []
        cases = {}
        for event in fleet.events("case"):
            cases.setdefault(event["case"], {})[event["rank"]] = event
        assert len(cases) >= 40
        for name, ranks in cases.items():
            assert sorted(ranks) == [0, 1, 2, 3], name
            assert len({event["text"] for event in ranks.values()}) == 1, (name, ranks)
            assert {event["kind"] for event in ranks.values()} == {"mismatch"}, (name, ranks)
            Times.rows.setdefault("mismatch, two hosts", []).extend(
                event["milliseconds"] / 1e3 for event in ranks.values()
            )
            assert max(event["milliseconds"] for event in ranks.values()) / 1e3 < PROMPT, name
        assert cases["sum or maximum"][0]["text"].startswith(
            "comm.all_reduce #1: rank 3 called all_reduce max of float32 [60], ranks 0, 1, 2 called "
        )


def test_exception_reaches_the_other_host(network):
    with start_bare(Fleet("loop", "count=1000", "victim=3", "action=guarded"), network) as fleet:
        errors = fleet.errors_of([0, 1, 2])
        assert errors[0]["text"].endswith("failed in step 30: batch 17 has no rows")
        injected = fleet.by_rank("injected")[3]["ns"]
        assert Times.add("exception, guarded, two hosts", injected, errors) < PROMPT
        fleet.say("release")
        assert fleet.wait() == [75, 75, 75, 3]


def test_stopped_rank_is_named_on_both_hosts(network):
    fleet = Fleet("loop", "count=1000", env={"TESSERA_TIMEOUT": "8"})
    with start_bare(fleet, network) as fleet:
        pids = fleet.warm(4)
        stopped = fleet.kill(pids[3], signal.SIGSTOP)
        errors = fleet.errors_of([0, 1, 2])
        assert re.match(r"comm\.all_reduce #\d+: no answer from rank 3 in 8", errors[0]["text"])
        assert Times.add("SIGSTOP, limit 8 s, two hosts", stopped, errors) < 10
        warnings = re.findall(
            r"rank (\d): comm\.all_reduce #\d+: still waiting for rank 3 after 5", fleet.err()
        )
        assert sorted(warnings) == ["0", "1", "2"], fleet.err()
        fleet.kill(pids[3])
        assert fleet.wait() == [75, 75, 75, -signal.SIGKILL]


def test_cut_network_ends_both_sides(network):
    fleet = Fleet("loop", "count=1000", env={"TESSERA_TIMEOUT": "8"})
    with start_bare(fleet, network) as fleet:
        fleet.warm(4)
        network.cut()
        cut = time.monotonic_ns()
        errors = fleet.await_events("error", 4, 40)
        # The two sides cannot talk: each side agrees, and each names the other.
        for side, others in (((0, 1), (2, 3)), ((2, 3), (0, 1))):
            texts = {errors[rank]["text"] for rank in side}
            assert len(texts) == 1, texts
            text = texts.pop()
            assert re.match(r"comm\.all_reduce #\d+: ", text), text
            assert any(f"rank {r}" in text.lower() or str(r) in text for r in others), text
        assert {error["kind"] for error in errors.values()} <= {"timeout", "peer lost"}
        assert Times.add("network cut, limit 8 s", cut, errors) < 8 + 3
        assert fleet.wait(30) == [75] * 4, fleet.err()


def test_slow_link_changes_no_bit(network):
    digests = set()
    for slow in (False, True):
        if slow:
            network.slow_down("20mbit")
        with start_bare(Fleet("collectives", "largest=2000"), network) as fleet:
            assert fleet.wait(120) == [0] * 4, fleet.err()
            digests.add(assert_everything_is_right(fleet))
    assert len(digests) == 1
