"""The ranks do not find each other, or find somebody else."""

import re
import signal
import socket
import time

import pytest
from fleet import Fleet
from waiting import free_port

RENDEZVOUS = 69
# The store is LibTorch's own then, as it is under torchrun, which several jobs may share.
NO_SECRET = {"TESSERA_JOB_SECRET": ""}


def errors_with_code(fleet, codes, ranks, kind="rendezvous"):
    assert fleet.wait(60) == codes, fleet.err()
    errors = fleet.by_rank("error")
    assert sorted(errors) == sorted(ranks)
    assert {error["kind"] for error in errors.values()} == {kind}
    return errors


def test_late_rank_is_awaited():
    with Fleet("join") as fleet:
        fleet.bare(3, ranks=[0, 1])
        time.sleep(1.5)
        fleet.bare(3, ranks=[2], port=next(iter(fleet.ports)))
        assert fleet.wait() == [0, 0, 0], fleet.err()
        fleet.assert_nothing_left()


def test_rank_0_may_be_the_late_one():
    with Fleet("join") as fleet:
        fleet.bare(2, ranks=[1])
        time.sleep(1)
        fleet.bare(2, ranks=[0], port=next(iter(fleet.ports)))
        assert fleet.wait() == [0, 0], fleet.err()


def test_missing_rank_is_named():
    with Fleet("join", env={"TESSERA_TIMEOUT": "2"}).bare(4, ranks=[0, 2]) as fleet:
        errors = errors_with_code(fleet, [RENDEZVOUS, RENDEZVOUS], [0, 2])
        for error in errors.values():
            assert error["text"] == (
                "comm.init: ranks 1 and 3 of 4 did not join group 'world' within 2.000 s. Check that "
                "all ranks were started with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
            )
            assert error["ranks"] == [1, 3]
        fleet.assert_nothing_left()


def test_who_gives_up_tells_the_others():
    with Fleet("join") as fleet:
        fleet.bare(3, ranks=[0], TESSERA_TIMEOUT="3")
        fleet.bare(3, ranks=[1], port=next(iter(fleet.ports)), TESSERA_TIMEOUT="300")
        errors = errors_with_code(fleet, [RENDEZVOUS, RENDEZVOUS], [0, 1])
        assert {error["text"] for error in errors.values()} == {
            "comm.init: rank 2 of 3 did not join group 'world' within 3.000 s. Check that all ranks "
            "were started with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        }
        assert [error["ranks"] for error in errors.values()] == [[2], [2]]


def test_missing_rank_0_is_named():
    with Fleet("join", env={"TESSERA_TIMEOUT": "2"}).bare(3, ranks=[1, 2]) as fleet:
        errors = errors_with_code(fleet, [RENDEZVOUS, RENDEZVOUS], [1, 2])
        for rank, error in errors.items():
            assert re.match(
                rf"comm\.init: rank {rank} found no store at MASTER_ADDR 127\.0\.0\.1, "
                r"MASTER_PORT \d+ within 2 s\. Check that rank 0 runs",
                error["text"],
            )


def test_two_processes_with_one_rank():
    with Fleet("join", env={"TESSERA_TIMEOUT": "20"}) as fleet:
        begin = time.monotonic()
        fleet.bare(3, ranks=[0, 1, 1])
        codes = fleet.wait()
        assert codes == [RENDEZVOUS] * 3, (codes, fleet.err())
        errors = fleet.events("error")
        assert len({error["text"] for error in errors}) == 1 and len(errors) == 3, errors
        assert re.match(
            r"comm\.init: two processes claim rank 1: pid \d+ on host \S+ and pid \d+ on "
            r"host \S+\. Give every process its own RANK\.",
            errors[0]["text"],
        )
        assert time.monotonic() - begin < 15  # long before the limit


def test_wrong_world_size():
    with Fleet("join", env={"TESSERA_TIMEOUT": "8"}) as fleet:
        # Rank 0, which hosts the store, comes last, so that the others are there to hear it.
        fleet.bare(3, ranks=[1, 2])
        time.sleep(2)
        fleet.bare(2, ranks=[0], port=next(iter(fleet.ports)))
        assert fleet.wait() == [RENDEZVOUS] * 3, fleet.err()
        errors = fleet.by_rank("error")
        assert errors[0]["text"] == errors[1]["text"]
        disagreement = (
            r"comm\.init: rank \d expects \d ranks, rank \d expects \d\. Give every "
            r"process the same WORLD_SIZE\."
        )
        assert re.match(disagreement, errors[0]["text"])
        # Rank 2 reads the same, unless it comes back to the store only after rank 0 has left.
        assert re.match(rf"{disagreement}|comm\.init: rank 2 found no store", errors[2]["text"])


@pytest.mark.parametrize(
    "variables, text",
    [
        ({"RANK": "one"}, "comm.init: RANK is 'one', not a whole number."),
        ({"WORLD_SIZE": "2.5"}, "comm.init: WORLD_SIZE is '2.5', not a whole number."),
        ({"RANK": "2"}, "comm.init: RANK is 2, but WORLD_SIZE is 2. Ranks run from 0 to 1."),
        ({"RANK": "-1"}, "comm.init: RANK is -1, but WORLD_SIZE is 2. Ranks run from 0 to 1."),
        ({"WORLD_SIZE": "0"}, "comm.init: WORLD_SIZE is 0. A job has at least one rank."),
        (
            {"RANK": ""},
            "comm.init: WORLD_SIZE is set but RANK is not. Start the program with "
            "`tessera run` or torchrun, or set both.",
        ),
        (
            {"MASTER_PORT": ""},
            "comm.init: WORLD_SIZE is 2 but MASTER_PORT is not set. Start the program "
            "with `tessera run` or torchrun, or set MASTER_ADDR and MASTER_PORT.",
        ),
        ({"MASTER_PORT": "70000"}, "comm.init: MASTER_PORT is 70000. Ports run from 1 to 65535."),
        (
            {"TESSERA_TIMEOUT": "soon"},
            "comm.init: TESSERA_TIMEOUT is 'soon', not a positive number of seconds.",
        ),
        ({"TESSERA_ENGINE": "mpi"}, "comm.init: TESSERA_ENGINE is 'mpi'. It may be auto, shm or gloo."),
    ],
)
def test_environment_that_makes_no_sense(variables, text):
    with Fleet("join").bare(2, ranks=[0], **variables) as fleet:
        fleet.wait()
        assert [error["text"] for error in fleet.events("error")] == [text]


def test_port_in_use():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with Fleet("join", env={"TESSERA_TIMEOUT": "3"}).bare(2, port=port) as fleet:
            errors = errors_with_code(fleet, [RENDEZVOUS, RENDEZVOUS], [0, 1])
            assert errors[0]["text"] == (
                f"comm.init: port {port} of 127.0.0.1 is in use, perhaps by "
                "another job. Choose another MASTER_PORT."
            )
            assert (
                f"rank 1 found no store at MASTER_ADDR 127.0.0.1, MASTER_PORT {port}" in (errors[1]["text"])
            )
            fleet.ports.clear()  # it is ours


def test_two_jobs_on_one_port():
    # The second job's rank 0 is refused; its rank 1 meets the first job's store, and must neither
    # join that job nor disturb it.
    with Fleet("loop", "count=1000", "steps=0").bare(2) as first:
        first.warm(2)
        port = next(iter(first.ports))
        with Fleet("join", env={"TESSERA_TIMEOUT": "3"}).bare(2, port=port) as second:
            errors = errors_with_code(second, [RENDEZVOUS, RENDEZVOUS], [0, 1])
            assert "is in use, perhaps by another job" in errors[0]["text"]
            assert "two processes claim rank 1" in errors[1]["text"]
            second.ports.clear()
        assert first.events("error") == []
        assert all(process.poll() is None for process in first.processes)


def test_jobs_with_names_share_a_store_without_meeting():
    with Fleet("join", "linger=1", env=NO_SECRET) as host:
        host.bare(2, TORCHELASTIC_RUN_ID="first")
        host.await_events("done", 2)
        port = next(iter(host.ports))
        # Same store, same ranks, another name: a job of its own.
        with Fleet("join", env=NO_SECRET).bare(
            2, port=port, TORCHELASTIC_RUN_ID="second", TORCHELASTIC_USE_AGENT_STORE="True"
        ) as guest:
            assert guest.wait() == [0, 0], guest.err()
            guest.ports.clear()
            # Same name, another attempt.
            with Fleet("join", env=NO_SECRET).bare(
                2,
                port=port,
                TORCHELASTIC_RUN_ID="first",
                TORCHELASTIC_RESTART_COUNT="1",
                TORCHELASTIC_USE_AGENT_STORE="True",
            ) as again:
                assert again.wait() == [0, 0], again.err()
        host.say("release")
        assert host.wait() == [0, 0]


def test_stale_store_of_an_older_run():
    # The same name and attempt as a run that has ended: its ranks still stand in the store.
    with Fleet("join", "linger=1", env=NO_SECRET) as host:
        host.bare(2, TORCHELASTIC_RUN_ID="first")
        pids = {e["rank"]: e["pid"] for e in host.await_events("done", 2).values()}
        port = next(iter(host.ports))
        with Fleet("join", env={"TESSERA_TIMEOUT": "10", **NO_SECRET}).bare(
            2, port=port, TORCHELASTIC_RUN_ID="first", TORCHELASTIC_USE_AGENT_STORE="True"
        ) as guest:
            assert guest.wait() == [RENDEZVOUS, RENDEZVOUS], guest.err()
            for error in guest.events("error"):
                assert re.match(
                    r"comm\.init: two processes claim rank (\d): pid "
                    rf"({pids[0]}|{pids[1]}) ",
                    error["text"],
                ), error["text"]
            guest.ports.clear()
        host.say("release")
        assert host.wait() == [0, 0]


def test_a_number_reused_by_another_process_counts_as_dead(tmp_path):
    # Rank 1 wrote down who it is and died; its pid now belongs to a process that started later. The
    # start time tells them apart, so rank 0 learns of the death instead of waiting for a stranger.
    # Covered in one process by GroupMonitor.PidOfAnotherProcessCountsAsDead; here for the store.
    store = tmp_path / "store"
    with Fleet("claim", f"store={store}", "rank=0", "size=1") as fleet:
        fleet.start(fleet.mode)
        assert fleet.wait() == [0], fleet.err()
    # The file remains: a new process finds rank 0 taken by somebody who is not itself.
    with Fleet("claim", f"store={store}", "rank=0", "size=1") as fleet:
        fleet.start(fleet.mode)
        assert fleet.wait() == [1]
        assert "two processes claim rank 0" in fleet.events("error")[0]["text"]


def test_missing_host_of_two():
    with Fleet("join") as fleet:
        fleet.run(
            1,
            "--nnodes",
            2,
            "--node-rank",
            0,
            "--rdzv-endpoint",
            f"127.0.0.1:{free_port()}",
            "--rdzv-timeout",
            1,
        )
        assert fleet.wait(20) == [RENDEZVOUS]
        assert "node 1" in fleet.err()


def test_too_few_open_files_are_said_to_be_that():
    with Fleet("join", env={"TESSERA_ENGINE": "gloo", "TESSERA_TIMEOUT": "10"}) as fleet:
        fleet.bare(2, prefix=["prlimit", "--nofile=50:50"])
        errors = errors_with_code(fleet, [78, 78], [0, 1], kind="unavailable")
        assert re.match(
            r"comm\.init: Gloo between 2 ranks needs about 50 more open files, \d+ are open already, "
            r"and 50 is the limit of this process\.",
            errors[0]["text"],
        ), errors[0]["text"]


def test_another_secret_is_refused_and_said():
    with Fleet("join", env={"TESSERA_TIMEOUT": "10"}) as fleet:
        fleet.bare(2, ranks=[0])
        fleet.bare(2, ranks=[1], port=next(iter(fleet.ports)), TESSERA_JOB_SECRET="o" * 32)
        fleet.processes[1].wait(timeout=60)
        text = fleet.by_rank("error")[1]["text"]
        assert re.fullmatch(
            r"comm\.init: the store at 127\.0\.0\.1:\d+ does not accept the secret of rank 1\. Give "
            r"every process of the job the same TESSERA_JOB_SECRET_FILE\.",
            text,
        ), text


def test_a_job_without_a_secret_is_warned_once():
    with Fleet("join", env=NO_SECRET).bare(3) as fleet:
        assert fleet.wait() == [0, 0, 0], fleet.err()
        assert fleet.err().count("asks for no secret") == 1
    with Fleet("join").bare(3) as fleet:
        assert fleet.wait() == [0, 0, 0], fleet.err()
        assert "secret" not in fleet.err()


def test_a_store_that_asks_for_nothing_is_not_used_at_a_public_address():
    env = {**NO_SECRET, "TESSERA_TIMEOUT": "3"}
    with Fleet("join", env=env).bare(2, MASTER_ADDR="192.0.2.7") as fleet:
        fleet.wait()
        for error in fleet.by_rank("error").values():
            assert re.match(
                r"comm\.init: the store of this job at 192\.0\.2\.7:\d+ asks for no secret, and MASTER_ADDR "
                r"is a public address\. Give all ranks a TESSERA_JOB_SECRET_FILE, ",
                error["text"],
            ), error["text"]
        assert sorted(fleet.by_rank("error")) == [0, 1]
    # Asked for, it is tried: 192.0.2.7 is nobody's address.
    with Fleet("join", env={**env, "TESSERA_INSECURE_NO_AUTH": "1"}) as fleet:
        fleet.bare(2, ranks=[0], MASTER_ADDR="192.0.2.7")
        fleet.wait()
        assert "cannot listen on 192.0.2.7" in fleet.by_rank("error")[0]["text"]


def test_under_torchrun_a_job_with_a_secret_meets_on_a_store_of_its_own():
    with Fleet("join").torchrun(3) as fleet:
        assert fleet.wait() == [0], fleet.err()
        assert "asks for no secret" not in fleet.err()
        assert len(fleet.events("done")) == 3


def test_under_torchrun_a_job_without_a_secret_is_warned_once():
    with Fleet("join", env=NO_SECRET).torchrun(3) as fleet:
        assert fleet.wait() == [0], fleet.err()
        assert fleet.err().count("asks for no secret") == 1


def test_interrupted_while_the_ranks_meet():
    with Fleet("join", env={"TESSERA_TIMEOUT": "60"}).bare(2, ranks=[0]) as fleet:
        time.sleep(1)
        fleet.kill(fleet.processes[0].pid, signal.SIGTERM)
        assert fleet.wait(10) == [-signal.SIGTERM]
        fleet.assert_nothing_left()
