"""Time operators on jagged batches beside fbgemm's; one line of JSON per row.

    .venv-peers/bin/python bench/compare/jagged_operators.py [--seconds S]

Both take turns, call by call, with the same tensors. Run by bench/run.py with the peers' interpreter.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))

import fbgemm_gpu  # noqa: F401
import torch
from tessera import _C

FEATURES, LONGEST, ROWS, BUCKETS = 26, 20, 100_000, 4


def calls(batch: int):
    torch.manual_seed(1)
    lengths = torch.randint(0, LONGEST + 1, (FEATURES, batch), dtype=torch.int32)
    total = int(lengths.sum())
    values = torch.randint(0, ROWS, (total,))
    weights = torch.rand(total)
    order = torch.randperm(FEATURES, dtype=torch.int32)
    blocks = torch.full((FEATURES,), -(-ROWS // BUCKETS))
    flat = lengths.view(-1)
    ours, peer = _C.jagged, torch.ops.fbgemm
    bags, sizes = [batch] * FEATURES, blocks.tolist()
    return {
        "lengths_to_offsets": (
            lambda: ours.lengths_to_offsets(flat),
            lambda: peer.asynchronous_complete_cumsum(flat),
        ),
        "permute": (
            lambda: ours.permute_2d(order, lengths, values, weights),
            lambda: peer.permute_2D_sparse_data(order, lengths, values, weights, total),
        ),
        "bucketize": (
            lambda: ours.bucketize(
                flat,
                values,
                weights,
                num_buckets=BUCKETS,
                bags_per_feature=bags,
                block_sizes=sizes,
                block_starts=[],
                positions=True,
                unbucketize=True,
            ),
            lambda: peer.block_bucketize_sparse_features(flat, values, True, True, blocks, BUCKETS, weights),
        ),
    }


def as_tensors(result) -> list[torch.Tensor]:
    parts = result if isinstance(result, (list, tuple)) else [result]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def measure(name: str, batch: int, threads: int, pair, seconds: float) -> None:
    torch.set_num_threads(threads)
    for mine, other in zip(as_tensors(pair[0]()), as_tensors(pair[1]()), strict=False):
        assert torch.equal(mine.to(other.dtype).view(-1), other.view(-1)), name
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(times[0]) < 10 or time.perf_counter() < end:
        for call, found in zip(pair, times, strict=True):
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)
    for who, found in zip(("tessera", "fbgemm"), times, strict=True):
        cut = statistics.quantiles(found, n=10)
        print(
            json.dumps(
                {
                    "name": f"jagged/{name}/{who}/b{batch}_t{threads}",
                    "median_us": round(statistics.median(found) * 1e6, 1),
                    "p10_us": round(cut[0] * 1e6, 1),
                    "p90_us": round(cut[-1] * 1e6, 1),
                    "repetitions": len(found),
                }
            ),
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="per row")
    words = parser.parse_args()
    for batch in (64, 2048):
        for name, pair in calls(batch).items():
            for threads in (1, 2):
                measure(name, batch, threads, pair, words.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
