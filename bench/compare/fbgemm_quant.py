"""Times fbgemm's lookups in rows of few bits, one thread: the peer's rows of bench/serving/lookup_bench.

Run it as it comes (ordinary pages), and with THP_MEM_ALLOC_ENABLE=1 for huge pages. Prints one line of
JSON per row.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

TABLES, BAG, LISTS = 8, 20, 8
TYPES = {"int8": SparseType.INT8, "int4": SparseType.INT4, "fp16": SparseType.FP16}


def quantile(times: list[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(kind: str, rows: int, dim: int, seconds: float, pages: str) -> None:
    tables = IntNBitTableBatchedEmbeddingBagsCodegen(
        [(f"t{i}", rows, dim, TYPES[kind], EmbeddingLocation.HOST) for i in range(TABLES)],
        device="cpu",
        output_dtype=SparseType.FP32,
        row_alignment=1,
    )
    tables.fill_random_weights()
    for batch in (2048, 64):
        offsets = torch.arange(0, TABLES * batch * BAG + 1, BAG, dtype=torch.int32)
        lists = [torch.randint(0, rows, (TABLES * batch * BAG,), dtype=torch.int32) for _ in range(LISTS)]
        times: list[float] = []
        end = time.perf_counter() + seconds
        turn = 0
        while turn < 12 or time.perf_counter() < end:
            begin = time.perf_counter()
            tables(lists[turn % LISTS], offsets)
            if turn >= 4:
                times.append((time.perf_counter() - begin) * 1e6)
            turn += 1
        row = {
            "name": f"serving/lookup_{kind}/fbgemm/r{rows}_d{dim}_b{batch}",
            "ranks": 1,
            "threads": 1,
            "device": "cpu",
            "state": pages,
            "median_us": quantile(times, 0.5),
            "p10_us": quantile(times, 0.1),
            "p90_us": quantile(times, 0.9),
            "bytes": TABLES * batch * BAG * tables.weights_host.numel() // (TABLES * rows),
            "repetitions": len(times),
        }
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pages = "huge pages" if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1" else "ordinary pages"
    for dim in (64, 128):
        for kind in TYPES:
            measure(kind, options.rows, dim, options.seconds, pages)


if __name__ == "__main__":
    main()
