"""Times checkpoints beside the disk itself (dd) and torch.distributed.checkpoint, in one run.

Prints one line of JSON per row. Saves end with everything on the disk (fsync), for all of them;
reads begin with the files out of the page cache. The floor of a row is dd's time for as many bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
NUM_TENSORS = 16
REST = 1.0  # seconds


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def print_row(name: str, times: list[float], num_bytes: int, ranks: int = 1, floor: float = 0.0) -> None:
    row = {
        "name": name,
        "ranks": ranks,
        "threads": 1,
        "device": "cpu",
        "median_us": statistics.median(times) * 1e6,
        "p10_us": quantile(times, 0.1) * 1e6,
        "p90_us": quantile(times, 0.9) * 1e6,
        "bytes": num_bytes,
        "repetitions": len(times),
        "floor_us": floor * 1e6,
    }
    print(json.dumps(row), flush=True)


def forget(place: pathlib.Path) -> None:
    """Take a file, or the files of a folder, out of the page cache."""
    for path in [place, *place.rglob("*")]:
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def timed(action) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def run_dd(*words: str) -> None:
    subprocess.run(["dd", *words, "bs=4M"], check=True, stderr=subprocess.DEVNULL)


def one_rank(folder: pathlib.Path, num_bytes: int, repetitions: int) -> None:
    import torch
    from tessera import checkpoint

    torch.set_num_threads(1)
    count = num_bytes // NUM_TENSORS // 4
    state = {f"t{i}": torch.randn(count) for i in range(NUM_TENSORS)}
    target = {name: torch.zeros(count) for name in state}
    blob = folder / "blob"
    blob.write_bytes(bytes(torch.randn(num_bytes // 4).numpy()))
    times: dict[str, list[float]] = {}

    def add(name: str, action) -> None:
        times.setdefault(name, []).append(timed(action))

    root = folder / "ckpt"
    copy = folder / "copy"
    steps = iter(range(1000))
    writers = [
        ("write/dd", lambda: run_dd(f"if={blob}", f"of={copy}", "conv=fsync")),
        ("save/tessera", lambda: checkpoint.save(root, next(steps), state, keep=1)),
    ]
    readers = [
        ("read/dd", lambda: run_dd(f"if={copy}", "of=/dev/null")),
        ("load/tessera", lambda: checkpoint.load(root, target)),
        ("verify/tessera", lambda: checkpoint.open_checkpoint(root).verify()),
    ]
    for _, action in writers + readers:  # warm-up: memory is touched, files are there
        action()
        blob.read_bytes()  # the source of dd is in the cache, as the tensors are in memory
    assert all(torch.equal(target[name], state[name]) for name in state)
    for repetition in range(repetitions):
        # A virtual disk is fast until its credit is spent, and whoever comes second pays: the order
        # changes, and the disk gets a rest.
        for place in range(len(writers)):
            time.sleep(REST)
            add(*writers[(place + repetition) % len(writers)])
        for place in range(len(readers)):
            forget(folder / "ckpt")
            forget(copy)
            time.sleep(REST)
            add(*readers[(place + repetition) % len(readers)])
    shape = f"n{num_bytes}_p1"
    write, read = (statistics.median(times[name]) for name in ("write/dd", "read/dd"))
    floors = {"save/tessera": write, "load/tessera": read, "verify/tessera": read}
    for name, found in times.items():
        print_row(f"checkpoint/{name}/{shape}", found, num_bytes, floor=floors.get(name, 0.0))


def stall(num_bytes: int, repetitions: int) -> None:
    """How long a step is held up by an asynchronous save, beside one copy into memory in use."""
    import torch
    from tessera import checkpoint

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        state = {f"t{i}": torch.randn(num_bytes // NUM_TENSORS // 4) for i in range(NUM_TENSORS)}
        room = {name: tensor.clone() for name, tensor in state.items()}
        saver = checkpoint.AsyncSaver(folder, keep=1)
        saver.save(0, state)
        saver.wait()
        copies, stalls = [], []
        for step in range(1, repetitions + 1):
            copies.append(timed(lambda: [room[name].copy_(tensor) for name, tensor in state.items()]))
            stalls.append(timed(lambda step=step: saver.save(step, state)))
            saver.wait()
    shape = f"n{num_bytes}_p1"
    print_row(f"checkpoint/stall/copy/{shape}", copies, num_bytes)
    print_row(f"checkpoint/stall/tessera/{shape}", stalls, num_bytes, floor=statistics.median(copies))


def rank_main(rank: int, size: int, folder: str, num_bytes: int, repetitions: int) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from tessera import checkpoint

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.manual_seed(1)  # the same on all ranks, as in data parallelism
    count = num_bytes // NUM_TENSORS // 4
    state = {f"t{i}": torch.randn(count) for i in range(NUM_TENSORS)}
    actions = {
        "tessera": lambda step: checkpoint.save(f"{folder}/ours", step, state, dist.group.WORLD, keep=1),
        "dcp": lambda step: dcp.save(state, checkpoint_id=f"{folder}/theirs-{step}"),
    }
    times: dict[str, list[float]] = {name: [] for name in actions}
    for step in range(repetitions):
        for name in sorted(actions, reverse=step % 2 == 1):
            action = actions[name]
            time.sleep(REST)
            dist.barrier()
            begin = time.perf_counter()
            action(step)
            dist.barrier()
            times[name].append(time.perf_counter() - begin)
            if rank == 0:
                shutil.rmtree(f"{folder}/theirs-{step}", ignore_errors=True)
    if rank == 0:
        for name, found in times.items():
            print_row(f"checkpoint/save/{name}/n{num_bytes}_p{size}", found, num_bytes, size)
    dist.destroy_process_group()


def two_ranks(folder: pathlib.Path, num_bytes: int, repetitions: int) -> None:
    command = [sys.executable, __file__, "--bytes", str(num_bytes), "--repetitions", str(repetitions)]
    ranks = [subprocess.Popen([*command, "--rank", str(rank), "--folder", str(folder)]) for rank in range(2)]
    for rank in ranks:
        if rank.wait() != 0:
            raise SystemExit("checkpoint_bench: a rank failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=512_000_000)
    parser.add_argument("--stall-bytes", type=int, default=1_000_000_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--folder", default=str(ROOT / "build"), help="where the disk is")
    parser.add_argument("--rank", type=int)
    words = parser.parse_args()
    if words.rank is not None:
        rank_main(words.rank, 2, words.folder, words.bytes, words.repetitions)
        return
    with tempfile.TemporaryDirectory(dir=words.folder) as folder:
        one_rank(pathlib.Path(folder), words.bytes, words.repetitions)
    with tempfile.TemporaryDirectory(dir=words.folder) as folder:
        two_ranks(pathlib.Path(folder), words.bytes, words.repetitions)
    stall(words.stall_bytes, max(3, words.repetitions))


if __name__ == "__main__":
    main()
