"""Sharded tables over two hosts, played by two network namespaces, with two ranks each."""

import os
import pathlib
import secrets
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "faults"))
import hosts

REASON = hosts.reason_not_possible()
PORT = 29641


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("name", ["SumsInHosts", "SumsSaveBytesBetweenHosts"])
def test_rows_are_summed_inside_hosts(name):
    with hosts.TwoHosts() as two:
        words = ["-n", "2", "--nnodes", "2", "--rdzv-endpoint", f"{two.addresses[0]}:{PORT}"]
        secret = secrets.token_hex(32)
        nodes = [
            subprocess.Popen(
                [
                    *two.inside(node),
                    os.environ["TESSERA_BIN"],
                    "run",
                    *words,
                    f"--node-rank={node}",
                    "--",
                    os.environ["TESSERA_BAG_TEST"],
                    f"--gtest_filter=BagLaunched.{name}",
                ],
                env={**os.environ, "TESSERA_TEST_HOSTS": "2", "TESSERA_JOB_SECRET": secret},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for node in (0, 1)
        ]
        outputs = [node.communicate(timeout=90)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
        assert sum(output.count("[  PASSED  ] 1 test.") for output in outputs) == 4, outputs
