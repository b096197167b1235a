"""Times log-probabilities over two ranks: Tessera's beside separate torch operators on Gloo.

The peer computes as NeMo-RL's DistributedLogprob is documented to: a float32 copy, three all-reduces,
the softmax kept for backward. Starts itself once per rank. Prints one line of JSON per row; the time of
a repetition is the slower rank's.
"""

from __future__ import annotations

import sys
import time

from rank_page import Page, print_row, rank_parser, start_ranks

ROWS, VOCAB = 2048, 32000
REPETITIONS = 9
WARM_UPS = 2


def separate_operators(torch, dist, group):
    """Log-probability by the documented steps, each a torch operator of its own."""

    class SeparateOperators(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, target, start, end):
            is_other = (target < start) | (target >= end)
            local = (target - start).masked_fill(is_other, 0)
            x = logits.to(torch.float32)
            largest = x.amax(dim=-1, keepdim=True)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            x = x - largest
            total = x.exp().sum(dim=-1, keepdim=True)
            dist.all_reduce(total, group=group)
            log_p = x - total.log()
            out = log_p.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(is_other, 0.0)
            dist.all_reduce(out, group=group)
            ctx.save_for_backward(log_p.exp(), is_other, local)
            return out

        @staticmethod
        def backward(ctx, grad_output):
            softmax, is_other, local = ctx.saved_tensors
            gradient = softmax.neg().mul_(grad_output.unsqueeze(-1))
            own = grad_output.masked_fill(is_other, 0.0).unsqueeze(-1)
            return gradient.scatter_add_(-1, local.unsqueeze(-1), own), None, None, None

    return SeparateOperators.apply


def run_rank(path: str, rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist
    from tessera import vocab_parallel
    from tessera.distributed.model_utils import DistributedLogprob

    torch.set_num_threads(1)
    page = Page(path, rank, size)
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=size)
    shm, gloo = dist.new_group(backend="shm"), dist.new_group(backend="gloo")
    share = VOCAB // size
    start, end = rank * share, (rank + 1) * share
    torch.manual_seed(3)
    whole = torch.randn(1, ROWS, VOCAB) * 2
    target = torch.randint(VOCAB, (1, ROWS))
    source = whole[..., start:end].contiguous()
    expected = torch.log_softmax(whole, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    logits = source.clone().requires_grad_(True)
    peer = separate_operators(torch, dist, gloo)

    def overwriting(group):
        return vocab_parallel.log_probabilities(
            logits, target, group, columns=(start, end), overwrite="backward"
        )

    ways = {
        "tessera_shm": lambda: DistributedLogprob.apply(logits, target, start, end, shm),
        "tessera_shm_overwrite": lambda: overwriting(shm),
        "tessera_gloo": lambda: DistributedLogprob.apply(logits, target, start, end, gloo),
        "operators_gloo": lambda: peer(logits, target, start, end),
    }
    for name, way in ways.items():
        with torch.no_grad():
            logits.copy_(source)
        torch.testing.assert_close(way().detach(), expected, rtol=1e-4, atol=1e-4)
        for backward in (False, True):
            times = []
            for i in range(WARM_UPS + REPETITIONS):
                with torch.no_grad():
                    logits.copy_(source)
                logits.grad = None
                page.meet()
                begin = time.perf_counter()
                if backward:
                    torch.autograd.grad(way().sum(), logits)
                else:
                    with torch.no_grad():
                        way()
                slowest = page.slowest((time.perf_counter() - begin) * 1e6)
                if i >= WARM_UPS:
                    times.append(slowest)
            if rank == 0:
                operation = "logprob_backward" if backward else "logprob"
                row = f"vocab/{operation}/{name}/f32_n{ROWS}_v{VOCAB}_p{size}"
                print_row(row, size, source.numel() * 4, times)
    page.meet()
    dist.destroy_process_group()


def main() -> int:
    parser = rank_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    words = parser.parse_args()
    if words.as_rank is not None:
        run_rank(words.page, words.as_rank, words.ranks)
        return 0
    return start_ranks(words.ranks, "--ranks", words.ranks)


if __name__ == "__main__":
    sys.exit(main())
