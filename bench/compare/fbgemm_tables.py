"""Time fbgemm's table-batched embeddings on the shapes of table_bench; one line of JSON per row.

    .venv-peers/bin/python bench/compare/fbgemm_tables.py [--seconds S] [--threads N]

Run by bench/run.py with the peers' interpreter.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

TABLES, ROWS, COLUMNS, BAG, ROTATION = 8, 200_000, 64, 20, 8
RULES = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}


def batches(kind: str, batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = np.random.default_rng(1)
    count = TABLES * batch * BAG
    found = []
    for _ in range(ROTATION):
        ids = random.integers(0, ROWS, count) if kind == "uniform" else random.zipf(1.05, count) % ROWS
        found.append((torch.from_numpy(ids.astype(np.int64)), torch.arange(0, count + 1, BAG)))
    return found


def quantile(times: list[float], share: float) -> float:
    return sorted(times)[min(int(share * len(times)), len(times) - 1)]


def make_tables(rule: str) -> SplitTableBatchedEmbeddingBagsCodegen:
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, COLUMNS, EmbeddingLocation.HOST, ComputeDevice.CPU)] * TABLES,
        optimizer=RULES[rule],
        learning_rate=0.01,
        bounds_check_mode=BoundsCheckMode.FATAL,
        device=torch.device("cpu"),
    )
    tables.init_embedding_weights_uniform(-0.01, 0.01)
    return tables


def measure(tables: torch.nn.Module, rule: str, kind: str, batch: int, threads: int, seconds: float) -> None:
    torch.set_num_threads(threads)
    inputs = batches(kind, batch)
    grad = (torch.rand(batch, TABLES * COLUMNS) - 0.5) * 1e-3
    times: dict[str, list[float]] = {"forward": [], "backward": [], "both": []}
    end = time.perf_counter() + seconds
    i = 0
    while i < 12 or time.perf_counter() < end:
        ids, offsets = inputs[i % ROTATION]
        begin = time.perf_counter()
        output = tables(ids, offsets)
        middle = time.perf_counter()
        output.backward(grad)
        last = time.perf_counter()
        if i >= 4:
            times["forward"].append((middle - begin) * 1e6)
            times["backward"].append((last - middle) * 1e6)
            times["both"].append((last - begin) * 1e6)
        i += 1
    for what, found in times.items():
        row = {
            "name": f"embedding/{rule}_{what}/fbgemm/{kind}_b{batch}_t{threads}",
            "ranks": 1,
            "threads": threads,
            "device": "cpu",
            "state": "",
            "median_us": quantile(found, 0.5),
            "p10_us": quantile(found, 0.1),
            "p90_us": quantile(found, 0.9),
            "bytes": TABLES * batch * BAG * COLUMNS * 4,
            "repetitions": len(found),
        }
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--threads", type=int, help="only so many; without it one, then two")
    words = parser.parse_args()
    for threads in (words.threads,) if words.threads else (1, 2):
        for rule in RULES:
            tables = make_tables(rule)
            for kind in ("uniform", "zipf"):
                measure(tables, rule, kind, 2048, threads, words.seconds)
                measure(tables, rule, kind, 64, threads, words.seconds / 4)


if __name__ == "__main__":
    main()
