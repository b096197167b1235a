"""Times training steps of one DLRM: `tessera train dlrm` beside torchrec over Gloo, on two ranks.

26 tables of 100,000 rows and 32 columns, 10 ids per bag, 13 dense numbers, bottom 128-32, top
128-64-1, 2048 samples per rank, SGD. Runs under the peers' Python. Both train on one binary click log:
ours reads its batches from the file inside the steps, torchrec has its first batches in memory before
the first step. The three (ours, torchrec, torchrec under its TrainPipelineSparseDist) take turns, one
whole run each, whose first ten steps do not count. The time of a step is from its end to that of the
step before, on rank 0; steps end with collectives. Exposed communication is every rank's own; `data` is
what the steps of both ranks spend on their batches, `cold` when the log is not in memory at first.
`dense` is forward, backward and step of torchrec's dense layers alone, on both ranks at once; ours is in
dlrm_bench. Memory is what the two ranks have to themselves and share, files not counted, at its most:
looked up often in runs that are not timed.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import mmap
import os
import pathlib
import statistics
import struct
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESSERA = ROOT / "build/release/bin/tessera"
SHAPE = "t26_r100000_d32_l10_b2048_p2"
TABLES, DIM, BAG, DENSE = 26, 32, 10, 13
WARM_UPS = 10
ROTATION = 4  # batches that torchrec has in memory
RANKS = 2
EVALUATED = 4096


def read_samples(path: str, first: int, count: int):
    """Return labels, dense numbers and ids [feature, sample, bag] of a log with bags of one size."""
    import numpy as np

    raw = np.memmap(path, np.uint8, "r")
    _, _, flags, _, _, _, per_block, blocks, directory, size = struct.unpack_from("<8sIIQIIIIQQ", raw)
    assert flags == 0, "dense numbers are float32"
    entries = raw[directory : directory + size].tobytes()[-24 * blocks :]
    number, begin = divmod(first, per_block)
    place, _, samples, _ = struct.unpack_from("<QQII", entries, 24 * number)
    assert begin + count <= samples, "a batch lies in one block"

    def take(dtype, length):
        nonlocal place
        part = raw[place : place + length * np.dtype(dtype).itemsize].view(dtype)
        place += -(-part.nbytes // 8) * 8
        return part.reshape(samples, -1)[begin : begin + count]

    labels = take(np.uint8, samples)
    dense = take(np.float32, samples * DENSE)
    ids = [take(np.uint32, samples * BAG) for _ in range(TABLES)]
    return labels.ravel(), dense, np.stack(ids)


def run_rank(rank: int, folder: str, args) -> None:
    import torch
    import torch.distributed as dist
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.distributed.types import ShardingEnv
    from torchrec.models.dlrm import DLRM, DenseArch, DLRMTrain, InteractionArch, OverArch
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.streamable import Pipelineable

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(1)
    device = torch.device("cpu")
    keys = [f"cat_{i}" for i in range(TABLES)]
    configs = [
        EmbeddingBagConfig(name=key, num_embeddings=args.rows, embedding_dim=DIM, feature_names=[key])
        for key in keys
    ]
    tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.01})
    model = DLRMTrain(DLRM(tables, DENSE, [128, DIM], [128, 64, 1], dense_device=device))
    sharders = [EmbeddingBagCollectionSharder()]
    topology = Topology(world_size=RANKS, local_world_size=RANKS, compute_device="cpu")
    plan = EmbeddingShardingPlanner(topology=topology).collective_plan(model, sharders, dist.group.WORLD)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    model = DistributedModelParallel(model, env, device, plan=plan, sharders=sharders)
    dense = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
    optimizer = torch.optim.SGD(dense, lr=0.01)

    class Batch(Pipelineable):
        def __init__(self, dense_features, sparse_features, labels):
            self.dense_features = dense_features
            self.sparse_features = sparse_features
            self.labels = labels

        def to(self, device, non_blocking=False):
            return self

        def record_stream(self, stream):
            pass

        def pin_memory(self):
            return self

    def batch_of(step: int) -> Batch:
        labels, numbers, ids = read_samples(args.data, (RANKS * step + rank) * args.batch, args.batch)
        values = torch.from_numpy(ids.astype("int64").ravel())
        lengths = torch.full((TABLES * args.batch,), BAG, dtype=torch.int32)
        sparse = KeyedJaggedTensor.from_lengths_sync(keys, values, lengths)
        return Batch(torch.tensor(numbers), sparse, torch.tensor(labels, dtype=torch.int32))

    def dense_times() -> list[float]:
        """Time the dense layers with rows that are there already."""
        bottom = DenseArch(DENSE, [128, DIM])
        between = InteractionArch(TABLES)
        top = OverArch(DIM + TABLES * (TABLES + 1) // 2, [128, 64, 1])
        layers = torch.nn.ModuleList([bottom, between, top])
        step = torch.optim.SGD(layers.parameters(), lr=0.01)
        rows = torch.randn(args.batch, TABLES, DIM, requires_grad=True)
        batch = batches[0]
        times = []
        for _ in range(args.steps + WARM_UPS):
            begin = time.perf_counter()
            step.zero_grad()
            logits = top(between(bottom(batch.dense_features), rows)).squeeze(-1)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float()).backward()
            step.step()
            times.append(time.perf_counter() - begin)
        return times[WARM_UPS:]

    batches = [batch_of(step) for step in range(ROTATION)]
    steps = args.steps + WARM_UPS
    ends = []
    if args.pipeline:
        pipeline = TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
        source = itertools.islice(itertools.cycle(batches), steps)
        for _ in range(steps):
            pipeline.progress(source)
            ends.append(time.perf_counter())
    else:
        for step in range(steps):
            optimizer.zero_grad()
            loss, _ = model(batches[step % len(batches)])
            loss.backward()
            optimizer.step()
            ends.append(time.perf_counter())
    times = [after - before for before, after in itertools.pairwise(ends)][WARM_UPS - 1 :]
    dist.barrier()
    found = {"step": times, "dense": dense_times()}
    if rank == 0:
        pathlib.Path(folder, "times.json").write_text(json.dumps(found))
    dist.destroy_process_group()


class PeakMemory:
    """The most that processes have to themselves and share among them, looked up again and again."""

    def __init__(self):
        self.bytes = 0

    def look(self, pids: list[int]) -> None:
        total = 0
        for pid in pids:
            try:
                text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:  # it has ended
                continue
            for line in text.splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += 1024 * int(line.split()[1])
        self.bytes = max(self.bytes, total)


def children_of(pid: int) -> list[int]:
    try:
        found = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in found]


def wait_for(process: subprocess.Popen, pids, memory: PeakMemory | None) -> int:
    while memory is not None and process.poll() is None:
        memory.look(pids())
        time.sleep(0.02)
    return process.wait()


def time_torchrec(args, pipeline: bool, memory: PeakMemory | None = None) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, "--rows", args.rows, "--batch", args.batch]
        command += ["--steps", args.steps, "--data", args.data, "--folder", folder]
        command += ["--pipeline"] if pipeline else []
        environment = {**os.environ, "LOCAL_WORLD_SIZE": str(RANKS)}
        with open(pathlib.Path(folder, "errors.txt"), "w") as errors:
            ranks = [
                subprocess.Popen([*map(str, command), "--rank", str(r)], env=environment, stderr=errors)
                for r in range(RANKS)
            ]
            codes = [wait_for(rank, lambda: [r.pid for r in ranks], memory) for rank in ranks]
        if any(codes):
            raise SystemExit("torchrec's ranks failed:\n" + pathlib.Path(folder, "errors.txt").read_text())
        return json.loads(pathlib.Path(folder, "times.json").read_text())


def time_tessera(args, memory: PeakMemory | None = None) -> tuple[list[dict], list[dict]]:
    """The steps of rank 0, and what every rank says of its own, without warm-ups."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--ranks", RANKS, "--data", args.data, "--dim", DIM, "--batch", args.batch]
        flags += ["--steps", args.steps + WARM_UPS, "--optimizer", "sgd", "--table-optimizer", "sgd"]
        flags += ["--lr", 0.01, "--table-lr", 0.01, "--eval-every", 0, "--eval-samples", EVALUATED]
        flags += ["--runs", folder, "--json"]
        command = [str(TESSERA), "train", "dlrm", *map(str, flags)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if wait_for(process, lambda: children_of(process.pid), memory) != 0:
            raise SystemExit("tessera train dlrm failed")
        report = pathlib.Path(json.loads(process.stdout.read())["report"])
        lines = [json.loads(line) for line in report.with_name("metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if line["kind"] == "step"][WARM_UPS:]
        ranks = [line for line in lines if line["kind"] == "breakdown"]
        for rank in ranks:
            rank["exposed_comm_us"] = rank["exposed_comm_us"][WARM_UPS:]
            rank["data_us"] = rank["data_us"][WARM_UPS:]
        return steps, ranks


def forget(path: str) -> None:
    """Make the system forget what it holds of a file, and see to it that it did."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    libc = ctypes.CDLL(None, use_errno=True)
    size = os.fstat(file).st_size
    with mmap.mmap(file, size, mmap.MAP_PRIVATE) as mapped:  # writable, which ctypes asks for
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), pages)
        del first
    os.close(file)
    assert not failed and not any(page & 1 for page in pages), "the log is still in memory"


def print_row(operation: str, variant: str, values: list[float], unit: str = "us") -> None:
    row = {"name": f"dlrm/{operation}/{variant}/{SHAPE}", "ranks": RANKS}
    cuts = statistics.quantiles(values, n=10) if len(values) > 1 else values * 9
    row |= {f"median_{unit}": statistics.median(values), f"p10_{unit}": cuts[0], f"p90_{unit}": cuts[8]}
    print(json.dumps(row | {"repetitions": len(values), "bytes": 0}), flush=True)


def measure(args) -> None:
    ours, cold, waits, reads, theirs, pipelined, dense = [], [], {}, {}, [], [], []
    for _ in range(args.rounds):
        for is_cold in (False, True):
            if is_cold:
                forget(args.data)
            steps, ranks = time_tessera(args)
            (cold if is_cold else ours).extend(steps)
            for rank in ranks:
                reads.setdefault("tessera_cold" if is_cold else "tessera", []).extend(rank["data_us"])
                if not is_cold:
                    waits.setdefault(rank["rank"], []).extend(rank["exposed_comm_us"])
        plain = time_torchrec(args, pipeline=False)
        theirs += plain["step"]
        dense += plain["dense"]
        pipelined += time_torchrec(args, pipeline=True)["step"]
    print_row("step", "tessera", [1e6 * step["seconds"] for step in ours])
    print_row("step", "tessera_cold", [1e6 * step["seconds"] for step in cold])
    print_row("step", "torchrec", [1e6 * seconds for seconds in theirs])
    print_row("step", "torchrec_pipeline", [1e6 * seconds for seconds in pipelined])
    for variant, times in reads.items():
        print_row("data", variant, times)
        print_row("data", f"{variant}_mean", [statistics.mean(times)])
    for rank, waited in waits.items():
        print_row("exposed_communication", f"tessera_rank_{rank}", waited)
        print_row("exposed_communication", f"tessera_mean_of_rank_{rank}", [statistics.mean(waited)])
    print_row("dense", "torchrec", [1e6 * seconds for seconds in dense])
    for variant, run in (
        ("tessera", lambda memory: time_tessera(args, memory)),
        ("torchrec", lambda memory: time_torchrec(args, pipeline=False, memory=memory)),
        ("torchrec_pipeline", lambda memory: time_torchrec(args, pipeline=True, memory=memory)),
    ):
        memory = PeakMemory()
        run(memory)
        print_row("peak_memory", variant, [memory.bytes], "bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    # Of a rank of torchrec, which this program starts.
    parser.add_argument("--data", default="")
    parser.add_argument("--folder", default="")
    parser.add_argument("--pipeline", action="store_true")
    parser.add_argument("--rank", type=int, default=-1)
    args = parser.parse_args()
    if args.rank >= 0:
        run_rank(args.rank, args.folder, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        args.data = str(pathlib.Path(folder, "clicks.click"))
        samples = (args.steps + WARM_UPS) * RANKS * args.batch + EVALUATED
        command = [str(TESSERA), "data", "synth", args.data, "--samples", str(samples)]
        command += ["--features", str(TABLES), "--rows", str(args.rows), "--bag", str(BAG)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        measure(args)


if __name__ == "__main__":
    main()
