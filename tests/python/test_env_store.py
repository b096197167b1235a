"""`init_process_group` with "env://": where the ranks meet, with the job's secret and without."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest
from waiting import free_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SECRETS = ("TESSERA_JOB_SECRET", "TESSERA_JOB_SECRET_FILE", "TESSERA_STORE", "TESSERA_INSECURE_NO_AUTH")
WARNING = "asks for no secret"

# What torchrun's store, or rank 0's at MASTER_ADDR, knows of the job afterwards.
JOB = """
    import datetime, os, sys, torch, torch.distributed as dist, tessera
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    dist.distributed_c10d._get_default_store().set("probe", "x")
    dist.barrier()
    try:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        keys = dist.TCPStore(*place, timeout=datetime.timedelta(seconds=2)).list_keys()
    except dist.DistNetworkError:
        keys = []
    is_open = any(key.endswith("probe") for key in keys)
    # One write, so that the ranks' lines do not mix.
    sys.stdout.write(f"rank {dist.get_rank()}: total {total.item()}, open {is_open}\\n")
    dist.barrier()
"""


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "job.secret"
    path.touch(mode=0o600)
    path.write_text("s" * 40)
    return path


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if k not in VARIABLES + SECRETS}
    return {**kept, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1", **more}


def script(tmp_path, code):
    path = tmp_path / "job.py"
    path.write_text(textwrap.dedent(code))
    return path


def under_torchrun(tmp_path, **more):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, script(tmp_path, JOB)],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=100,
    )


def by_hand(tmp_path, code, each=({}, {}), **more):
    """Two ranks with variables as a script sets them; (exit code, output, errors) of each."""
    port = str(free_port())
    processes = []
    for rank, own in enumerate(each):
        told = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(
            subprocess.Popen(
                [sys.executable, script(tmp_path, code)],
                env=environment(**{**told, **more, **own}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        told = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *words) for process, words in zip(processes, told, strict=True)]


def said(output):
    return sorted(line for line in output.splitlines() if line.startswith("rank "))


def test_under_torchrun_with_a_secret_nothing_of_the_job_is_in_the_open_store(tmp_path, secret):
    result = under_torchrun(tmp_path, TESSERA_JOB_SECRET_FILE=str(secret))
    assert result.returncode == 0, result.stderr
    assert said(result.stdout) == [f"rank {rank}: total 3.0, open False" for rank in (0, 1)]
    assert WARNING not in result.stderr


def test_under_torchrun_without_a_secret_there_is_one_warning(tmp_path):
    result = under_torchrun(tmp_path)
    assert result.returncode == 0, result.stderr
    assert said(result.stdout) == [f"rank {rank}: total 3.0, open True" for rank in (0, 1)]
    assert result.stderr.count(WARNING) == 1


def test_by_hand_with_a_secret(tmp_path, secret):
    results = by_hand(tmp_path, JOB, TESSERA_JOB_SECRET_FILE=str(secret))
    for rank, (code, out, err) in enumerate(results):
        assert code == 0, err
        assert said(out) == [f"rank {rank}: total 3.0, open False"]
        assert WARNING not in err


def test_another_secret_is_refused(tmp_path, secret):
    other = tmp_path / "other.secret"
    other.touch(mode=0o600)
    other.write_text("o" * 40)
    code = """
        import datetime, torch.distributed as dist, tessera
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
    """
    each = [{"TESSERA_JOB_SECRET_FILE": str(path)} for path in (secret, other)]
    results = by_hand(tmp_path, code, each)
    assert all(code != 0 for code, *_ in results)
    assert "does not accept the secret of rank 1" in results[1][2], results[1][2]


# Where rank 0 listens, as the kernel tells it.
LISTENERS = """
    import os, pathlib, time, torch.distributed as dist, tessera
    for turn in range(2):  # and once more in the same process
        dist.init_process_group("gloo")
        dist.barrier()
        port = f"{int(os.environ['MASTER_PORT']):04X}"
        found = set()
        for table in ("tcp", "tcp6"):
            for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and words[1].endswith(":" + port):
                    found.add(words[1].partition(":")[0])
        print(f"rank {dist.get_rank()}: {sorted(found)}", flush=True)
        dist.barrier()
        is_host = dist.get_rank() == 0
        dist.destroy_process_group()
        # Or the other rank would meet the store that is about to go, which torch does not notice.
        left = pathlib.Path(__file__).with_name(f"left_{turn}")
        if is_host:
            left.touch()
        while not left.exists():
            time.sleep(0.01)
"""


def test_by_hand_without_a_secret_the_store_listens_at_its_address_only(tmp_path):
    results = by_hand(tmp_path, LISTENERS)
    for rank, (code, out, err) in enumerate(results):
        assert code == 0, err
        assert said(out) == [f"rank {rank}: ['0100007F']"] * 2  # 127.0.0.1
        assert err.count(WARNING) == (1 if rank == 0 else 0), err


def test_without_a_secret_a_public_address_is_refused_before_anything_is_sent(tmp_path):
    code = """
        import torch.distributed as dist, tessera
        try:
            dist.init_process_group("gloo")
        except ValueError as error:
            print("rank was told:", error)
    """
    for rank, (status, out, err) in enumerate(by_hand(tmp_path, code, MASTER_ADDR="192.0.2.7")):
        assert status == 0, (rank, err)
        assert re.search(
            r"the store of this job at 192\.0\.2\.7:\d+ asks for no secret, "
            r"and MASTER_ADDR is a public address\. "
            r"Give all ranks a TESSERA_JOB_SECRET_FILE, ",
            out,
        ), out
