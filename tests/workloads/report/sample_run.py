"""Writes a run folder as a training would, with numbers a test can compare."""

from __future__ import annotations

import json
import math
import pathlib
import random

PHASES = ["data", "input_dist", "lookup", "output_dist", "dense", "backward", "all_reduce", "optimizer"]
SHARES = [0.02, 0.06, 0.22, 0.08, 0.2, 0.3, 0.05, 0.05]


def tables(num_ranks: int) -> list[dict]:
    """Tables of many sizes under every sharding; the names hold what HTML must not believe."""
    lines = []
    for i in range(12):
        rows, columns = int(100_000 / (i + 1) ** 1.4) + 50, 32
        name = f"cat_{i}" if i else "<b>user & 'item'</b>"
        kind = (
            "row_wise"
            if i == 0
            else "column_wise"
            if i == 3
            else "data_parallel"
            if i == 11
            else "table_wise"
        )
        shards = []
        if kind == "table_wise":
            shards.append((i % num_ranks, 0, rows, 0, columns))
        for rank in range(num_ranks if kind != "table_wise" else 0):
            if kind == "row_wise":
                first, last = rows * rank // num_ranks, rows * (rank + 1) // num_ranks
                shards.append((rank, first, last - first, 0, columns))
            elif kind == "column_wise":
                first, last = columns * rank // num_ranks, columns * (rank + 1) // num_ranks
                shards.append((rank, 0, rows, first, last - first))
            else:
                shards.append((rank, 0, rows, 0, columns))
        keys = ["rank", "row", "rows", "column", "columns"]
        lines.append(
            {
                "kind": "table",
                "name": name,
                "rows": rows,
                "columns": columns,
                "bytes": rows * columns * 4,
                "sharding": kind,
                "shards": [
                    dict(
                        zip(keys, s, strict=True),
                        bytes=s[2] * s[4] * 4,
                        traffic=2048 * (1 + i % 4) * s[2] / rows * s[4] * 4,
                    )
                    for s in shards
                ],
            }
        )
    return lines


def trace(num_ranks: int, step_seconds: float) -> dict:
    events = []
    for rank in range(num_ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for step in range(20, 23):
            at = (step - 20) * step_seconds * 1e6 + 150 * rank
            for phase, share in zip(PHASES, SHARES, strict=True):
                length = share * step_seconds * 1e6
                event = {
                    "ph": "X",
                    "name": phase,
                    "cat": phase,
                    "pid": rank,
                    "tid": 0,
                    "ts": at,
                    "dur": length,
                }
                events.append({**event, "args": {"step": step, "wait": False}})
                if phase in ("input_dist", "output_dist", "all_reduce"):
                    wait = {**event, "name": "wait", "ts": at + length / 2, "dur": length / 2}
                    events.append({**wait, "args": {"step": step, "wait": True}})
                at += length
    return {"traceEvents": events}


def write(folder: pathlib.Path, num_ranks: int = 2, num_steps: int = 300) -> list[dict]:
    """Returns the lines of metrics.jsonl."""
    random.seed(1)
    lines: list[dict] = [
        {
            "kind": "run",
            "workload": "dlrm",
            "ranks": num_ranks,
            "started": "2026-11-15 20:14:03",
            "planned_steps": num_steps,
            "command": "tessera train dlrm --ranks 2 --data '<clicks>.bin'",
            "data": [{"path": "/data/<clicks>.bin", "bytes": 123456789}],
            "auc_ceiling": 0.8113,
            "versions": {"tessera": "0.1.0", "LibTorch": "2.13.0"},
            "machine": {"host": "<host>", "cpu": "A CPU of some kind", "cores": 2, "engine": "shm"},
        },
        *tables(num_ranks),
    ]
    for step in range(1, num_steps + 1):
        seconds = 0.0193 * (1 + 0.1 * random.random()) * (4 if step == 1 else 1)
        lines.append(
            {
                "kind": "step",
                "step": step,
                "loss": 0.44 + 0.25 * math.exp(-step / 60) + 0.012 * random.gauss(0, 1),
                "seconds": seconds,
                "samples_per_second": 4096 / seconds,
                "learning_rate": 0.02 * min(1, step / 30),
                "exposed_comm_seconds": 0.0006 * (1 + random.random()),
            }
        )
        if step == num_steps // 2 and step > 1:
            lines.append({"kind": "resume", "step": step, "started": "2026-11-15 20:20:00"})
        if step % 50 == 0:
            auc = 0.8113 - 0.2 * math.exp(-step / 80) - 0.01
            loss = 0.445 + 0.25 * math.exp(-step / 60)
            bins = [0.02 * (i + 1) ** 1.5 for i in range(10)]
            lines.append(
                {
                    "kind": "calibration",
                    "step": step,
                    "predicted": bins,
                    "observed": [p * (1 + 0.2 * math.sin(9 * p)) for p in bins],
                }
            )
            lines.append(
                {
                    "kind": "eval",
                    "step": step,
                    "log_loss": loss,
                    "auc": auc,
                    "normalized_entropy": loss / 0.6,
                    "calibration": 1.01,
                    "samples": 65536,
                }
            )
    total = 0.0203 * num_steps
    for rank in range(num_ranks):
        phases = {
            phase: {
                "seconds": share * total * (1 - 0.05 * rank),
                "waited": 0.4 * share * total if "dist" in phase or phase == "all_reduce" else 0.0,
            }
            for phase, share in zip(PHASES, SHARES, strict=True)
        }
        spent = sum(time["seconds"] for time in phases.values())
        phases["idle"] = {"seconds": total - spent, "waited": 0.0}
        lines.append(
            {"kind": "breakdown", "rank": rank, "steps": num_steps, "seconds": total, "phases": phases}
        )
    lines.append(
        {
            "kind": "end",
            "steps": num_steps,
            "seconds": total * 1.2,
            "samples": 4096 * num_steps,
            "peak_memory_bytes": [812e6 + 1e7 * rank for rank in range(num_ranks)],
            "status": "finished",
            "best_step": num_steps // 50 * 50,
            "resume": f"tessera train dlrm --resume {folder}",
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "trace.json").write_text(json.dumps(trace(num_ranks, 0.0203)))
    (folder / "config.toml").write_text('ranks = 2\nsteps = 300\n# </pre><script>alert("no")</script>\n')
    return lines
