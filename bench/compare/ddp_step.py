"""Times training steps under DistributedDataParallel: ours over shm and Gloo beside torch's over Gloo.

"gloo" is our wrapper on the group that torch's wrapper has, LibTorch's Gloo; "own gloo" is our wrapper on
our Gloo engine, which compares the ranks' calls first.

Starts itself once per rank. A variant's own time is what it adds to the step of the plain model, which
both ranks run at the same time. All variants take turns, step by step, so that a noisy machine hits
them alike. The time of a step is the slower rank's.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time

from rank_page import Page, rank_parser, start_ranks

MODELS = {  # layers, width, batch, steps
    "0.5M": (8, 256, 64, 300),
    "12.6M": (12, 1024, 64, 60),
    "50M": (12, 2048, 32, 32),
}
WARM_UPS = 4
SOLO = (50, 16, 1, 1000)  # one rank, 100 parameters: what the wrapper itself costs


def make_model(torch, layers: int, width: int):
    torch.manual_seed(1)
    parts = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts)


def new_own_gloo():
    import torch.distributed as dist

    before = os.environ.get("TESSERA_ENGINE")
    os.environ["TESSERA_ENGINE"] = "gloo"
    group = dist.new_group(backend="shm")
    del os.environ["TESSERA_ENGINE"]
    if before is not None:
        os.environ["TESSERA_ENGINE"] = before
    return group


def variants(torch, names):
    import torch.distributed as dist
    from tessera.nn.parallel import DistributedDataParallel
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    gloo = dist.new_group(backend="gloo")
    shm = dist.new_group(backend="shm")
    own_gloo = new_own_gloo() if any(name.startswith("own") for name in names) else None
    table = {
        "alone": lambda model: model,
        "shm": lambda model: DistributedDataParallel(model, process_group=shm),
        "shm view": lambda model: DistributedDataParallel(
            model, process_group=shm, gradient_as_bucket_view=True
        ),
        "shm view, thread": lambda model: DistributedDataParallel(
            model, process_group=shm, gradient_as_bucket_view=True, overlap=True
        ),
        "gloo": lambda model: DistributedDataParallel(model, process_group=gloo),
        "gloo view": lambda model: DistributedDataParallel(
            model, process_group=gloo, gradient_as_bucket_view=True
        ),
        "own gloo": lambda model: DistributedDataParallel(model, process_group=own_gloo),
        "own gloo view": lambda model: DistributedDataParallel(
            model, process_group=own_gloo, gradient_as_bucket_view=True
        ),
        "torch": lambda model: TorchDDP(model, process_group=gloo),
        "torch view": lambda model: TorchDDP(model, process_group=gloo, gradient_as_bucket_view=True),
    }
    return {name: table[name] for name in names}


def segment_bytes() -> int:
    """Memory of all segments that this process has open; they have no name any more."""
    files = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            if "tessera-" not in os.readlink(f"/proc/self/fd/{number}"):
                continue
            status = os.stat(f"/proc/self/fd/{number}")
        except OSError:
            continue
        files[status.st_ino] = status.st_blocks * 512
    return sum(files.values())


def print_memory(torch, label: str, layers: int, width: int, batch: int, rank: int, size: int) -> None:
    """Print what the buckets of one rank take of a new segment, and what the gradients have.

    A segment only grows, so what it has in the end is the most it ever had.
    """
    import torch.distributed as dist
    from tessera.nn.parallel import DistributedDataParallel

    group = dist.new_group(backend="shm")
    dist.all_reduce(torch.zeros(1), group=group)  # the segment is there from now on
    model = make_model(torch, layers, width)
    gradients = sum(p.nbytes for p in model.parameters())
    before = segment_bytes()
    wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = None
        wrapped(torch.zeros(batch, width)).square().mean().backward()
    dist.barrier()
    taken = (segment_bytes() - before) // size
    dist.barrier()
    if rank == 0:
        for name, value in (("shm view", taken), ("gradients", gradients)):
            row = {"name": f"data_parallel/bucket_memory/{name}/{label}", "repetitions": 1}
            print(json.dumps(row | {f"{word}_bytes": value for word in ("median", "p10", "p90")}), flush=True)


def run_rank(path: str, rank: int, size: int, models, names, times_steps: float) -> None:
    import tessera  # noqa: F401
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=size)
    page = Page(path, rank, size)
    made = variants(torch, names)
    for label in models:
        layers, width, batch, steps = MODELS[label] if size > 1 else SOLO
        wrapped = {}
        for name, wrap in made.items():
            model = make_model(torch, layers, width)
            wrapped[name] = wrap(model), torch.optim.SGD(model.parameters(), lr=1e-6)
        x = torch.randn(batch, width, generator=torch.Generator().manual_seed(rank))
        times = {name: [] for name in wrapped}
        steps = max(5, int(steps * times_steps))
        for step in range(steps + WARM_UPS):
            # In another order each time: a step meets the caches and the free memory of the one before.
            for name in random.Random(step).sample(list(wrapped), len(wrapped)):
                model, optimizer = wrapped[name]
                page.meet()
                start = time.perf_counter()
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                taken = page.slowest(time.perf_counter() - start)
                if step >= WARM_UPS:
                    times[name].append(taken)
        if rank == 0:
            alone = times.get("alone")
            for name, found in times.items():
                # Against the plain step of the same turn: what the machine did meanwhile cancels.
                own = (
                    found
                    if alone is None or name == "alone"
                    else [a - b for a, b in zip(found, alone, strict=True)]
                )
                cut = statistics.quantiles(own, n=10)
                word = "step" if name == "alone" else "added"
                print(
                    json.dumps(
                        {
                            "name": f"data_parallel/{word}/{name}/{label}",
                            "median_us": round(statistics.median(own) * 1e6, 1),
                            "p10_us": round(cut[0] * 1e6, 1),
                            "p90_us": round(cut[-1] * 1e6, 1),
                            "repetitions": len(own),
                        }
                    ),
                    flush=True,
                )
        del wrapped, model, optimizer
        if "shm view" in names:
            print_memory(torch, label, layers, width, batch, rank, size)
    dist.destroy_process_group()


def main() -> int:
    parser = rank_parser(__doc__)
    parser.add_argument("--model", action="append", dest="models", help=", ".join(MODELS))
    parser.add_argument("--steps", type=float, default=1.0, help="times the usual number of steps")
    parser.add_argument("--variant", action="append", dest="variants")
    parser.add_argument("--ranks", type=int, default=2)
    words = parser.parse_args()
    models = words.models or list(MODELS)
    names = words.variants or [
        "alone",
        "shm view",
        "shm",
        "own gloo view",
        "own gloo",
        "gloo view",
        "gloo",
        "torch view",
        "torch",
    ]
    if words.as_rank is not None:
        run_rank(words.page, words.as_rank, words.ranks, models, names, words.steps)
        return 0
    code = start(words.ranks, models, names, words.steps)
    if code == 0 and words.ranks > 1 and not words.variants:
        code = start(1, ["100 parameters, 1 rank"], ["alone", "shm", "torch"], words.steps)
    return code


def start(size: int, models: list[str], names: list[str], steps: float) -> int:
    flags = [flag for label in models for flag in ("--model", label)]
    flags += [flag for name in names for flag in ("--variant", name)]
    return start_ranks(size, "--ranks", size, "--steps", steps, *flags)


if __name__ == "__main__":
    sys.exit(main())
