"""Log-probabilities and entropies of many tokens and a large vocabulary, forward and backward.

    PYTHONPATH=python python3 bench/vocab_parallel/large_vocabulary.py                        # on a GPU
    PYTHONPATH=python python3 bench/vocab_parallel/large_vocabulary.py --device cpu --features 16

Prints one line of JSON: the time of a call, and the largest memory. On a GPU it is what torch has handed out,
inputs and gradients among it, and what its allocator holds beside it; on the CPU it is the
process's resident memory. Some tokens are computed again from all of their logits, in float64, and compared.
Ends with status 1 if a limit is given and the memory is above it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time

import torch

GB = 1e9


def arguments_of(words):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--vocabulary", type=int, default=248_000)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--dtype", default=None, help="bfloat16 on a GPU, float32 on the CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=None, help="calls: 5 on a GPU, 1 on the CPU")
    parser.add_argument("--limit-gb", type=float, default=None, help="the most memory, in 10^9 bytes")
    arguments = parser.parse_args(words)
    is_cuda = torch.device(arguments.device).type == "cuda"
    arguments.dtype = getattr(torch, arguments.dtype or ("bfloat16" if is_cuda else "float32"))
    arguments.count = arguments.count or (5 if is_cuda else 1)
    return arguments


def made(shape, arguments, generator):
    """A leaf, drawn piece by piece in its own type, so that drawing it needs no room of its own."""
    leaf = torch.empty(shape, dtype=arguments.dtype, device=arguments.device)
    for piece in leaf.split(8192):
        piece.normal_(generator=generator)
    return leaf.div_(shape[1] ** 0.25).requires_grad_(True)


def error_of(log_p, entropy, hidden, weight, labels, arguments):
    """The largest difference of the first and last tokens from their logits in float64."""
    worst = 0.0
    for at in (0, 1, arguments.tokens // 2, arguments.tokens - 1):
        # In pieces: a whole weight in float64 would be larger than everything else.
        pieces = [hidden[at].detach().double() @ piece.double().t() for piece in weight.detach().split(8192)]
        logs = torch.log_softmax(torch.cat(pieces), 0)
        worst = max(worst, abs(float(log_p[at]) - float(logs[labels[at]])))
        worst = max(worst, abs(float(entropy[at]) + float((logs.exp() * logs).sum())))
    return worst


def main(words=None):
    arguments = arguments_of(words)
    from tessera.integrations import verl

    is_cuda = torch.device(arguments.device).type == "cuda"
    generator = torch.Generator(arguments.device).manual_seed(1)
    hidden = made((arguments.tokens, arguments.features), arguments, generator)
    weight = made((arguments.vocabulary, arguments.features), arguments, generator)
    labels = torch.randint(
        arguments.vocabulary, (arguments.tokens,), generator=generator, device=arguments.device
    )
    # What libraries keep for good is not the call's.
    verl.linear_cross_entropy(hidden[:64], weight, labels[:64])[0].sum().backward()
    hidden.grad = weight.grad = None
    seconds, forward_seconds = [], []
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for _ in range(arguments.count):
        hidden.grad = weight.grad = None
        begin = time.perf_counter()
        log_p, entropy = verl.linear_cross_entropy(hidden, weight, labels)
        if is_cuda:
            torch.cuda.synchronize()
        forward_seconds.append(time.perf_counter() - begin)
        (log_p.mean() - 0.1 * entropy.mean()).backward()
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    host_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if is_cuda else host_peak
    with torch.no_grad():
        error = error_of(log_p, entropy, hidden, weight, labels, arguments)
    shape = f"t{arguments.tokens}_v{arguments.vocabulary}_h{arguments.features}"
    row = {
        "name": f"vocab/large_vocabulary/{str(arguments.dtype).removeprefix('torch.')}/{shape}",
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "median_s": round(statistics.median(seconds), 3),
        "forward_median_s": round(statistics.median(forward_seconds), 3),
        "repetitions": len(seconds),
        "peak_gb": round(peak / GB, 3),
        "leaves_and_gradients_gb": round(2 * (hidden.nbytes + weight.nbytes) / GB, 3),
        "logits_would_be_gb": round(arguments.tokens * arguments.vocabulary * hidden.element_size() / GB, 1),
        "max_error": error,
    }
    if is_cuda:
        row["reserved_gb"] = round(torch.cuda.max_memory_reserved() / GB, 3)
    else:
        row["process_before_gb"] = round(before / GB, 3)
    print(json.dumps(row), flush=True)
    return 1 if arguments.limit_gb is not None and peak > arguments.limit_gb * GB else 0


if __name__ == "__main__":
    sys.exit(main())
