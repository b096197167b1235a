"""What the errors say, and that they reach every rank."""

from __future__ import annotations

import pickle
import re
import time

import pytest
import tessera
import torch
import torch.distributed as dist
from ranks import run_ranks, run_ranks_collecting


def texts(outcomes):
    return [outcome.error for outcome in outcomes]


def raised(function, *args, **kwargs) -> str:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def local_mistakes(rank):
    comm = tessera.comm
    return {
        "device": raised(comm.all_reduce, torch.zeros(3, device="meta")),
        "type": raised(comm.all_reduce, torch.zeros(3, dtype=torch.uint16)),
        "torch type": raised(dist.all_reduce, torch.zeros(3, dtype=torch.uint16)),
        "average": raised(comm.all_reduce, torch.zeros(3, dtype=torch.int32), op=dist.ReduceOp.AVG),
        "bits": raised(comm.all_reduce, torch.zeros(3), op=dist.ReduceOp.BXOR),
        "premul": raised(comm.all_reduce, torch.zeros(3), op=dist.ReduceOp.PREMUL_SUM),
        "root": raised(comm.broadcast_, torch.zeros(3), 2),
        "uneven": raised(comm.reduce_scatter, torch.zeros(3, 2)),
        "rows": raised(comm.reduce_scatter_v, torch.zeros(3, 2), [1, 1]),
        "row counts": raised(comm.all_to_all_v, torch.zeros(3, 2), [1, 1, 1]),
        "outputs": raised(dist.all_gather_into_tensor, torch.zeros(3), torch.zeros(2)),
        "sum": comm.all_reduce(torch.ones(1)).item(),  # the group is as good as new
    }


def test_mistakes_of_the_caller_are_named_before_anything_is_sent():
    for errors in run_ranks(2, local_mistakes):
        assert errors.pop("sum") == 2.0
        expected = {
            "device": r"ValueError: comm\.all_reduce: the tensor is on meta, .*",
            "type": r"TypeError: comm\.all_reduce: .*UInt16.*",
            "torch type": r"TypeError: comm\.all_reduce: .*UInt16.*",
            "average": r"TypeError: comm\.all_reduce: .*",
            "bits": r"TypeError: comm\.all_reduce: .*",
            "premul": r"ValueError: comm: this reduction is not known here\. Use SUM, .*",
            "root": r"ValueError: comm\.broadcast: root 2 is not a rank of a group of 2 \(0 to 1\)\.",
            "uneven": r"ValueError: comm\.reduce_scatter: 3 rows cannot be cut evenly for 2 ranks\. "
            r"Use reduce_scatter_v with the number of rows per rank\.",
            "rows": r"ValueError: comm\.reduce_scatter_v: the row counts add up to 2, the input has "
            r"3 rows\.",
            "row counts": r"ValueError: comm\.all_to_all_v: 3 row counts were given for a group of 2\.",
            "outputs": r"ValueError: comm\.all_gather: the output has 3 elements, but 2 ranks bring "
            r"2 each\.",
        }
        assert errors.keys() == expected.keys()
        for name, pattern in expected.items():
            assert re.fullmatch(pattern, errors[name], re.DOTALL), f"{name}: {errors[name]}"


def mismatch_through_tessera(rank):
    try:
        tessera.comm.all_reduce(torch.zeros(3 + rank))
    except tessera.CommError as error:
        assert isinstance(error, dist.DistBackendError)
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.kind, again.ranks) == (str(error), error.kind, error.ranks)
        return error.kind, str(error)


def test_disagreement_is_the_same_comm_error_on_every_rank():
    first, second = run_ranks(2, mismatch_through_tessera)
    assert first == second
    kind, text = first
    assert kind == "mismatch"
    assert text.startswith("comm.all_reduce #0")
    assert "3" in text
    assert "4" in text


def mismatch_through_torch(rank):
    if rank == 0:
        dist.all_reduce(torch.zeros(3))
    else:
        dist.barrier()


def test_disagreement_seen_by_torch_is_its_own_error_with_the_same_text():
    first, second = texts(run_ranks_collecting(2, mismatch_through_torch))
    assert first == second
    assert first.startswith("DistBackendError: comm.")
    assert "all_reduce" in first
    assert "barrier" in first


def in_a_subgroup(rank):
    group = dist.new_group([1, 2])
    if rank > 0:
        tessera.comm.all_reduce(torch.zeros(3 + rank), group)


def test_errors_name_world_ranks_and_the_group():
    none, first, second = texts(run_ranks_collecting(3, in_a_subgroup))
    assert none == ""
    assert first == second
    assert first.endswith("These are ranks of group 'group 1', world ranks 1 and 2."), first


def failing(rank):
    if rank == 1:
        with tessera.comm.guard():
            tessera.comm.set_step(17)
            raise ArithmeticError("loss is nan")
    dist.all_reduce(torch.zeros(3))


def test_guard_tells_the_peers_at_once():
    begin = time.monotonic()
    first, second = texts(run_ranks_collecting(2, failing, env={"LIMIT": "30"}))
    assert time.monotonic() - begin < 10
    assert second == "ArithmeticError: loss is nan"
    assert first.startswith("DistBackendError: comm: rank 1 (pid ")
    assert first.endswith("failed in step 17: ArithmeticError: loss is nan")


@tessera.comm.guard()
def guarded(rank):
    if rank == 0:
        raise KeyError("field")
    tessera.comm.barrier()


def passed_on(rank):
    # Rank 2 hears of rank 0 only through rank 1, who is in a group with each.
    first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
    if rank == 0:
        with tessera.comm.guard():
            raise KeyError("field")
    if rank == 1:
        with tessera.comm.guard():
            tessera.comm.barrier(first)
    tessera.comm.barrier(second)


def test_guard_decorates_functions():
    first, second = texts(run_ranks_collecting(2, guarded))
    assert first == "KeyError: 'field'"
    assert second.startswith("CommError: comm: rank 0 (pid ")
    assert second.endswith("failed: KeyError: 'field'")


def test_root_cause_survives_being_passed_on():
    _, first, second = texts(run_ranks_collecting(3, passed_on))
    assert first == second
    assert re.match(r"CommError: comm: rank 0 .*failed: KeyError: 'field'", first)


def aborted(rank):
    if rank == 0:
        tessera.comm.abort("the operator said stop")
    return [raised(tessera.comm.barrier), raised(tessera.comm.barrier)]


def test_abort_ends_every_wait_with_its_reason():
    for errors in run_ranks(2, aborted):
        for error in errors:
            assert error == ("CommError: comm: group 'world' was aborted by rank 0: the operator said stop")


def late(rank):
    if rank == 1:
        time.sleep(3)
        return None
    return raised(dist.barrier), tessera._C.last_error()[0]


def test_missing_rank_is_named_at_the_limit():
    text, kind = run_ranks(2, late, env={"LIMIT": "1"})[0]
    assert kind == "timeout"
    assert text.startswith("DistBackendError: comm.barrier #0: no answer from rank 1")


def ends(rank):
    import os

    if rank == 1:
        os._exit(3)
    return raised(tessera.comm.barrier)


def test_death_of_a_peer_is_noticed_at_once():
    begin = time.monotonic()
    first, second = run_ranks_collecting(2, ends, env={"LIMIT": "30"})
    assert time.monotonic() - begin < 10
    assert second.error == "ended with code 3"
    assert first.value.startswith("CommError: comm.barrier #0: rank 1 (pid ")


def missing_member(rank):
    if rank == 1:
        time.sleep(2)
        return ""
    return raised(dist.new_group, backend="shm", timeout=__import__("datetime").timedelta(seconds=1))


def test_rank_that_does_not_come_to_a_new_group_is_named():
    first, _ = run_ranks(2, missing_member)
    assert first.startswith("CommError: comm.init: rank 1 of 2 did not join group 'group 1' within 1.0")


def test_comm_error_keeps_what_it_was_given():
    error = tessera.CommError("text", "peer lost", [1, 2])
    assert str(error) == "text"
    assert error.kind == "peer lost"
    assert error.ranks == [1, 2]
    with pytest.raises(RuntimeError):
        raise error


def no_world(rank):
    return raised(tessera.comm.barrier)


def test_functions_without_a_world_say_what_to_do():
    assert run_ranks(1, no_world, backend=None)[0] == (
        "ValueError: comm: there is no world group yet. Call tessera.comm.init() or "
        "torch.distributed.init_process_group() first."
    )


def bad_environment(rank):
    return raised(tessera.comm.init), raised(tessera.comm.read_environment)


def test_environment_that_makes_no_sense_is_refused():
    env = {"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for text in run_ranks(1, bad_environment, backend=None, env=env)[0]:
        assert text.startswith("ValueError: ")
        assert "RANK" in text
        assert "5" in text


def second_init(rank):
    return raised(tessera.comm.init)


def test_second_init_is_refused():
    assert run_ranks(1, second_init)[0] == (
        "ValueError: comm.init: torch.distributed has a default group already (backend 'shm'). "
        "Use it, or destroy it first."
    )
