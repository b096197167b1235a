"""Shared memory that is too small, full, missing, or offered by somebody else."""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile

import pytest
from fleet import PYTHON, Fleet, listens
from waiting import wait_until

CAN_MOUNT = (
    subprocess.run(
        ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"],
        capture_output=True,
        check=False,
    ).returncode
    == 0
)
needs_mount = pytest.mark.skipif(
    not CAN_MOUNT, reason="mounting a small /dev/shm needs root and mount namespaces"
)


def in_namespace(mount):
    """A prefix that runs a command with a /dev/shm of its own. Segments are put there if asked."""
    return ["unshare", "-m", "sh", "-c", mount + ' && exec "$0" "$@"']


TINY = in_namespace("mount -t tmpfs -o size=1m tmpfs /dev/shm")
FULL = in_namespace(
    "mount -t tmpfs -o size=8m tmpfs /dev/shm && dd if=/dev/zero of=/dev/shm/other bs=1M count=8 2>/dev/null"
)
READ_ONLY = in_namespace("mount -t tmpfs -o ro tmpfs /dev/shm")
IN_FOLDER = {"TESSERA_SHM_DIR": "/dev/shm"}


@needs_mount
@pytest.mark.parametrize(
    "prefix, why",
    [
        (TINY, r"cannot reserve [\d.]+ MiB in /dev/shm \(1\.0 MiB free\): No space left on device"),
        (FULL, r"cannot reserve [\d.]+ MiB in /dev/shm \(0\.0 MiB free\): No space left on device"),
        (READ_ONLY, "cannot make a segment in /dev/shm: Read-only file system"),
    ],
    ids=["tiny", "full", "read-only"],
)
def test_falls_back_to_gloo_with_a_warning_and_right_results(prefix, why):
    with Fleet("collectives", "largest=2000", env=IN_FOLDER).run(3, prefix=prefix) as fleet:
        assert fleet.wait() == [0], fleet.err()
        assert {event["engine"] for event in fleet.events("ready")} == {"gloo"}
        results = fleet.by_rank("collectives")
        assert sorted(results) == [0, 1, 2] and all(r["wrong"] == [] for r in results.values())
        warnings = re.findall(
            r"\[tessera\] group 'world' uses Gloo over TCP instead of shared "
            rf"memory, which is slower: comm\.shm: {why}\. ",
            fleet.err(),
        )
        assert len(warnings) == 1, fleet.err()
        fleet.assert_nothing_left()


@needs_mount
@pytest.mark.parametrize("prefix", [TINY, READ_ONLY], ids=["tiny", "read-only"])
def test_engine_shm_is_an_error_on_all_ranks(prefix):
    with Fleet("join", env={"TESSERA_ENGINE": "shm", **IN_FOLDER}).run(3, prefix=prefix) as fleet:
        errors = fleet.errors_of([0, 1, 2])
        assert {error["kind"] for error in errors.values()} == {"unavailable"}
        assert re.match(
            r"comm\.shm: cannot (reserve|make) .* in /dev/shm.*: .*\. (Enlarge it, in a "
            r"container with --shm-size, or set|Set) TESSERA_SHM_DIR",
            errors[1]["text"],
        )
        assert fleet.wait() == [78], fleet.err()
        fleet.assert_nothing_left()


@needs_mount
@pytest.mark.parametrize("env", [{}, IN_FOLDER], ids=["memory", "folder"])
def test_ranks_need_no_folder_in_common(env):
    # One rank has a /dev/shm of its own, with no room; the segment is handed to it all the same.
    with Fleet("collectives", "largest=2000", env=env) as fleet:
        fleet.bare(3, ranks=[0, 1])
        fleet.bare(3, ranks=[2], prefix=TINY, port=next(iter(fleet.ports)))
        assert fleet.wait() == [0, 0, 0], fleet.err()
        assert {event["engine"] for event in fleet.events("ready")} == {"shm"}
        assert all(r["wrong"] == [] for r in fleet.by_rank("collectives").values())
        fleet.assert_nothing_left()


def test_results_are_right_when_there_is_room():
    for engine in ("shm", "gloo"):
        with Fleet("collectives", env={"TESSERA_ENGINE": engine}).run(3) as fleet:
            assert fleet.wait() == [0], fleet.err()
            results = fleet.by_rank("collectives")
            assert all(r["wrong"] == [] and r["checks"] > 200 for r in results.values()), results
            fleet.assert_nothing_left()


def mapped_files(pid):
    """Files that a process maps and other users could find: what lies in a file system, with a name."""
    rows = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = {row.split(maxsplit=5)[5] for row in rows if len(row.split(maxsplit=5)) == 6}
    return {path for path in paths if path.startswith("/dev/shm") and not path.endswith("(deleted)")}


@pytest.mark.parametrize("env", [{}, IN_FOLDER], ids=["memory", "folder"])
def test_a_segment_has_no_name(env):
    with Fleet("loop", "count=1000", env={"TESSERA_ENGINE": "shm", **env}).run(2) as fleet:
        pids = fleet.warm(2)
        assert [mapped_files(pid) for pid in pids.values()] == [set(), set()]
        assert fleet.segments() == []


# Plays another user who knows the store: lists nothing, but watches for the group's record, and
# replaces it by one that names a file of theirs, or a listener of theirs.
INTRUDER = """
import datetime, os, socket, sys, time
import torch.distributed as dist
os.setgid(65534); os.setuid(65534)
port, way, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
limit = datetime.timedelta(seconds=20)
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)
key = sys.argv[4]
if way == "file":
    path = folder + "/bait"
    with open(path, "wb") as file:
        file.truncate(64 << 20)
    os.chmod(path, 0o666)
    record = f"ok 65536 4194304 524288 0 {path}"
else:
    name = "0123456789abcdef" * 2
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\\0tessera-" + name)
    listener.listen()
    record = f"ok {name}"
print("ready", flush=True)
end = time.monotonic() + 20
while time.monotonic() < end:
    store.set(key, record)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize(
    "way, why",
    [
        ("file", "the store's record of the group's segment is not believable: 'ok 65536 4194304 524288 0 /"),
        (
            "listener",
            r"the group's segment is offered by user 65534 \(pid \d+\), not by user 0: not believable",
        ),
    ],
)
def test_a_record_of_another_user_is_refused(way, why):
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o777)
    with Fleet("join", env={"TESSERA_ENGINE": "shm", "TESSERA_TIMEOUT": "20"}) as fleet:
        # Without a secret rank 0 hosts LibTorch's store, which anybody may write; rank 1 comes when the
        # record is forged.
        del fleet.environment["TESSERA_JOB_SECRET"]
        fleet.bare(2, ranks=[0])
        port = next(iter(fleet.ports))
        key = "tessera//0/generation/0/shm/shm/segment"
        wait_until(lambda: listens(port), what="the store")
        intruder = subprocess.Popen(
            [PYTHON, "-c", INTRUDER, str(port), way, folder, key], stdout=subprocess.PIPE, text=True
        )
        try:
            assert intruder.stdout.readline() == "ready\n"
            fleet.bare(2, ranks=[1], port=port)
            errors = fleet.errors_of([0, 1])
            assert re.match(rf"comm\.shm: rank 1: {why}", errors[0]["text"]), errors[0]["text"]
        finally:
            intruder.kill()
            intruder.wait()
            shutil.rmtree(folder)
