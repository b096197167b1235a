"""Shared memory that is too small, full, missing, or holds what others left behind."""

import os
import pathlib
import random
import re
import subprocess

import pytest
from fleet import Fleet

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
    """A prefix that runs a command with a /dev/shm of its own."""
    return ["unshare", "-m", "sh", "-c", mount + ' && exec "$0" "$@"']


TINY = in_namespace("mount -t tmpfs -o size=1m tmpfs /dev/shm")
FULL = in_namespace(
    "mount -t tmpfs -o size=8m tmpfs /dev/shm && dd if=/dev/zero of=/dev/shm/other bs=1M count=8 2>/dev/null"
)
READ_ONLY = in_namespace("mount -t tmpfs -o ro tmpfs /dev/shm")


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
    with Fleet("collectives", "largest=2000").run(3, prefix=prefix) as fleet:
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
    with Fleet("join", env={"TESSERA_ENGINE": "shm"}).run(3, prefix=prefix) as fleet:
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
def test_one_rank_without_the_others_memory():
    # One rank has a /dev/shm of its own: it cannot open what rank 0 made, so nobody uses it.
    with Fleet("collectives", "largest=2000") as fleet:
        fleet.bare(3, ranks=[0, 1])
        fleet.bare(3, ranks=[2], prefix=TINY, port=next(iter(fleet.ports)))
        assert fleet.wait() == [0, 0, 0], fleet.err()
        assert {event["engine"] for event in fleet.events("ready")} == {"gloo"}
        assert re.search(r"slower: comm\.shm: rank 2 cannot open the segment", fleet.err())
        fleet.assert_nothing_left()


def test_results_are_right_when_there_is_room():
    for engine in ("shm", "gloo"):
        with Fleet("collectives", env={"TESSERA_ENGINE": engine}).run(3) as fleet:
            assert fleet.wait() == [0], fleet.err()
            results = fleet.by_rank("collectives")
            assert all(r["wrong"] == [] and r["checks"] > 200 for r in results.values()), results
            fleet.assert_nothing_left()


def stale_name(pid, start):
    namespace = os.stat("/proc/self/ns/pid").st_ino
    secret = f"{random.getrandbits(128):032x}"
    return f"tessera-gone-{namespace:x}.{pid}.{start}-{secret}"


def start_time(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_segments_of_the_dead_are_removed_and_others_kept(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    me = os.getpid()
    gone = [
        tmp_path / stale_name(dead.pid, 1),
        # The number is taken again, by a process that started later: the maker is gone.
        tmp_path / stale_name(me, start_time(me) - 1),
    ]
    kept = [
        tmp_path / stale_name(me, start_time(me)),
        tmp_path / "tessera-notes.txt",
        tmp_path / "of-somebody-else",
    ]
    for path in gone + kept:
        path.write_bytes(b"\0" * 4096)
    with Fleet("join", env={"TESSERA_ENGINE": "shm", "TESSERA_SHM_DIR": str(tmp_path)}).run(2) as fleet:
        assert fleet.wait() == [0], fleet.err()
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_segment_has_no_name_while_it_is_used():
    with Fleet("loop", "count=1000", env={"TESSERA_ENGINE": "shm"}).run(2) as fleet:
        fleet.warm(2)
        assert fleet.segments() == []
