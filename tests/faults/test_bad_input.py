"""Wrong arguments: a clear error on every rank, and a group that still works."""

import pytest
from fleet import Fleet

SIZE = 3


def expected(engine):
    device = (
        "comm.{}: the tensor is on meta, but group 'world' (engine " + engine + ") has no engine "
        "for that device. Move the tensor, or use another group."
    )
    return {
        "mesh": "comm.mesh: data 2 x model 3 makes 6 places for 3 ranks. The sizes must multiply to 3.",
        "mesh of one rank": "comm.mesh: rank 0 asks for data 3 x model 1, ranks 1 and 2 for data 1 x "
        "model 3. Give every rank the same axes.",
        "device": device.format("all_reduce"),
        "device of output": device.format("all_gather"),
        "uneven reduce_scatter": "comm.reduce_scatter: 4 rows cannot be cut evenly for 3 ranks. Use "
        "reduce_scatter_v with the number of rows per rank.",
        "uneven all_to_all": "comm.all_to_all: 4 rows cannot be cut evenly for 3 ranks. Use "
        "all_to_all_v with the number of rows per rank.",
        "uneven all_gather rows": "comm.all_gather_v: 1 row counts were given for a group of 3.",
        "root": "comm.reduce: root 3 is not a rank of a group of 3 (0 to 2).",
        "undefined": "comm.all_reduce: the tensor is undefined.",
        "average of integers": "comm.all_reduce: the average of Long tensors is not defined.",
        "after abort": "comm: group 'doomed' was aborted by rank 0: the operator pressed stop",
        "after abort, again": "comm: group 'doomed' was aborted by rank 0: the operator pressed stop",
    }


@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_wrong_arguments(engine):
    with Fleet("bad-input", env={"TESSERA_ENGINE": engine}).run(SIZE) as fleet:
        assert fleet.wait() == [0], fleet.err()
        assert fleet.events("passed") == []
        for rank in range(SIZE):
            texts = {e["case"]: e["text"] for e in fleet.events("case") if e["rank"] == rank}
            assert texts == expected(engine)
        fleet.assert_nothing_left()
