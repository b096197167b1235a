"""Times torch.distributed from Python: backend "shm" of Tessera beside "gloo", in one run.

Starts itself once per rank. Prints one line of JSON per row. The time of a repetition is the slower
rank's; each begins with a barrier that is not part of either backend.
"""

from __future__ import annotations

import sys
import time

from rank_page import Page, print_row, rank_parser, start_ranks

SIZES = (4_000, 64_000, 1_000_000, 25_000_000, 100_000_000)
BATCH = {4_000: 20, 64_000: 20, 1_000_000: 4}
REPETITIONS = {4_000: 200, 64_000: 100, 1_000_000: 50}
FEW_REPETITIONS = 12
WARM_UPS = 3


def calls(dist, torch, group, size: int, bytes_: int):
    count = (bytes_ // 4 + size - 1) // size * size
    tensor = torch.zeros(count)
    gathered = torch.zeros(count * size)
    swapped = torch.zeros(count)
    share = torch.zeros(count // size)
    yield "all_reduce", lambda: dist.all_reduce(tensor, group=group)
    yield "all_gather", lambda: dist.all_gather_into_tensor(gathered, tensor, group=group)
    yield "reduce_scatter", lambda: dist.reduce_scatter_tensor(share, tensor, group=group)
    yield "all_to_all", lambda: dist.all_to_all_single(swapped, tensor, group=group)
    yield "broadcast", lambda: dist.broadcast(tensor, 0, group=group)


def check(dist, torch, group, rank: int, size: int) -> None:
    """A wrong backend has no speed."""
    tensor = torch.full((300_000,), float(rank + 1))
    dist.all_reduce(tensor, group=group)
    expected = size * (size + 1) / 2
    if not bool((tensor == expected).all()):
        raise SystemExit("wrong values")


def run_rank(path: str, rank: int, size: int, sizes: list[int]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backends = ["gloo"]
    try:
        import tessera  # noqa: F401  registers "shm"

        backends.insert(0, "shm")
    except ImportError:
        if rank == 0:
            print("tessera cannot be imported: gloo alone", file=sys.stderr)
    page = Page(path, rank, size)
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=size)
    groups = {name: dist.new_group(backend=name) for name in backends}
    for group in groups.values():
        check(dist, torch, group, rank, size)
    for bytes_ in sizes:
        batch = BATCH.get(bytes_, 1)
        made = {name: dict(calls(dist, torch, group, size, bytes_)) for name, group in groups.items()}
        for operation in made["gloo"]:
            for backend, operations in made.items():
                call = operations[operation]
                for _ in range(WARM_UPS):
                    call()
                times = []
                for _ in range(REPETITIONS.get(bytes_, FEW_REPETITIONS)):
                    page.meet()
                    begin = time.perf_counter()
                    for _ in range(batch):
                        call()
                    times.append(page.slowest((time.perf_counter() - begin) / batch * 1e6))
                if rank == 0:
                    print_row(f"python/{operation}/{backend}/n{bytes_}_p{size}", size, bytes_, times)
    page.meet()
    dist.destroy_process_group()


def main() -> int:
    parser = rank_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, action="append")
    words = parser.parse_args()
    sizes = words.bytes or list(SIZES)
    if words.as_rank is not None:
        run_rank(words.page, words.as_rank, words.ranks, sizes)
        return 0
    flags = [flag for bytes_ in sizes for flag in ("--bytes", bytes_)]
    return start_ranks(words.ranks, "--ranks", words.ranks, *flags)


if __name__ == "__main__":
    sys.exit(main())
