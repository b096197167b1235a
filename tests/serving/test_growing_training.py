"""A training of any ids, followed by a server: what is appended to a log is in the answers soon."""

from __future__ import annotations

import json
import pathlib
import random
import re
import signal
import subprocess
import time

import pytest
from conftest import TESSERA
from publications import INFER, export, steps_in

LIMIT = 120.0  # seconds; for a loaded machine, not a figure
SCHEMA = """
[label]
column = "clicked"

[[dense]]
column = "price"

[[feature]]
column = "user"
kind = "integer"
rows = 1

[[feature]]
column = "words"
kind = "hash"
rows = 1
separator = " "
"""
LATE_USER, LATE_WORD = -(2**62) - 1, "späť"


def lines(count, user=None, word=None):
    draw = random.Random(count)
    for _ in range(count):
        who = user if user is not None else draw.randrange(2**63)
        yield f"{int(draw.random() < 0.3)},{draw.random():.3f},{who},{word or draw.choice(['red', 'blue'])}\n"


def request_for(user: int, word: str) -> dict:
    one = {"shape": [1], "datatype": "INT32", "data": [1]}
    return {
        "inputs": [
            {"name": "dense", "shape": [1, 1], "datatype": "FP32", "data": [0.5]},
            {"name": "user.values", "shape": [1], "datatype": "INT64", "data": [user]},
            {"name": "user.lengths", **one},
            {"name": "words.values", "shape": [1], "datatype": "BYTES", "data": [word]},
            {"name": "words.lengths", **one},
        ]
    }


def answer(server, user, word) -> tuple[int, float]:
    code, headers, body = server.ask(INFER, json.dumps(request_for(user, word)))
    assert code == 200, body
    return int(headers["Tessera-Version"]), json.loads(body)["outputs"][0]["data"][0]


def unknown(server) -> int:
    return int(re.search(r"^tessera_unknown_ids_total (\d+)$", server.ask("/metrics")[2].decode(), re.M)[1])


@pytest.mark.parametrize("processes", [1, 2])
def test_an_id_that_appears_in_the_log_gets_a_row_in_the_server(serve, tmp_path, processes):
    log, live = tmp_path / "log.csv", tmp_path / "live"
    (tmp_path / "log.toml").write_text(SCHEMA)
    log.write_text("clicked,price,user,words\n" + "".join(lines(1000)))
    training = subprocess.Popen(
        [
            TESSERA, "train", "dlrm", "--data", log, "--schema", tmp_path / "log.toml", "--ids", "unlimited",
            "--follow", "--epochs", "1", "--ranks", "2", "--batch", "25", "--dim", "8", "--bottom", "16,8",
            "--top", "16,1", "--lr", "0.5", "--publish", live, "--publish-every", "0.1", "--runs",
            tmp_path / "runs",
        ],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip

    def until(is_there):
        deadline = time.monotonic() + LIMIT
        while not is_there():
            assert training.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)

    try:
        until(lambda: steps_in(live))
        package = None
        while package is None:  # the training removes old publications
            try:
                package = export(live, steps_in(live)[-1], tmp_path / "pkg", "--dtype", "fp32")
            except AssertionError:
                until(lambda: steps_in(live))
        server = serve(package, "--watch", live, "--processes", processes)
        _, before = answer(server, LATE_USER, LATE_WORD)
        assert unknown(server) == 2  # the user and the word

        def is_known():
            before = unknown(server)
            answer(server, LATE_USER, LATE_WORD)
            return unknown(server) == before

        # Two steps of samples and then silence: what was learned of them is published all the same.
        with log.open("a") as file:
            file.writelines(lines(100, LATE_USER, LATE_WORD))

        until(is_known)
        _, after = answer(server, LATE_USER, LATE_WORD)
        assert after != before
    finally:
        training.send_signal(signal.SIGTERM)
        assert training.wait(LIMIT) == 0
    # What is served at the end is an export of the last step, to the bit.
    last = steps_in(live)[-1]
    deadline = time.monotonic() + LIMIT
    while answer(server, LATE_USER, LATE_WORD)[0] != last:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    own = serve(export(pathlib.Path(live), last, tmp_path / "last", "--dtype", "fp32"))
    for user in (LATE_USER, 5):
        assert answer(server, user, "red") == answer(own, user, "red")
    assert own.stop() == 0
    assert server.stop() == 0
