"""Runs of `tessera train`, as they happen and afterwards: a callback for every step and evaluation.

>>> import json, pathlib, tempfile
>>> from tessera import runs
>>> folder = pathlib.Path(tempfile.mkdtemp())
>>> lines = [{"kind": "step", "step": 1, "loss": 0.5}, {"kind": "end", "steps": 1, "status": "finished"}]
>>> _ = (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
>>> runs.follow(folder, lambda metrics: print(metrics.kind, metrics.step, metrics.figures))
step 1 {'loss': 0.5}
end 1 {}
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

__all__ = ["Metrics", "follow", "read"]

_KINDS = {"step": "step", "eval": "evaluation", "end": "end"}
_POLL = 0.2  # seconds


@dataclass(frozen=True)
class Metrics:
    """What is known of a step: ``kind`` is "step", "evaluation" or "end"."""

    kind: str
    step: int
    figures: dict[str, float] = field(default_factory=dict)
    status: str = ""  # of the end: finished, stopped, stopped early, diverged


def _metrics_of(line: str) -> Metrics | None:
    record = json.loads(line)
    kind = _KINDS.get(record.get("kind", ""))
    if kind is None:
        return None
    if kind == "end":
        return Metrics(kind, record.get("steps", 0), {}, record.get("status", ""))
    skipped = {"kind", "step"}
    figures = {
        name: value
        for name, value in record.items()
        if name not in skipped and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return Metrics(kind, record["step"], figures)


def read(folder: str | os.PathLike) -> Iterator[Metrics]:
    """Return what a run has logged so far. Half a line at the end is left out."""
    with open(pathlib.Path(folder) / "metrics.jsonl", encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n") and (metrics := _metrics_of(line)) is not None:
                yield metrics


def follow(
    folder: str | os.PathLike, callback: Callable[[Metrics], None], *, timeout: float | None = None
) -> None:
    """Call ``callback`` for every step and evaluation of a run, those that were and those to come.

    Returns when the run has ended. A run that is not there yet is waited for. ``timeout`` is how many
    seconds may pass without anything new before :class:`TimeoutError` is raised; a run that was killed
    never says that it has ended. A run that goes on after a checkpoint is followed from there.
    """
    path = pathlib.Path(folder) / "metrics.jsonl"
    place, last_step, rest = 0, 0, ""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        size = path.stat().st_size if path.exists() else 0
        if size < place:  # a run that goes on drops what came after its checkpoint
            place, rest = 0, ""
        if size > place:
            with open(path, encoding="utf-8") as file:
                file.seek(place)
                rest += file.read()
                place = file.tell()
            *lines, rest = rest.split("\n")
            for line in lines:
                metrics = _metrics_of(line) if line else None
                if metrics is None or (metrics.kind == "step" and metrics.step <= last_step):
                    continue
                last_step = max(last_step, metrics.step)
                callback(metrics)
                if metrics.kind == "end":
                    return
            deadline = None if timeout is None else time.monotonic() + timeout
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"tessera.runs.follow: {path} has had nothing new for {timeout} s.")
        time.sleep(_POLL)
