"""Rows of benchmark results: read, write, compare, print."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable

Row = dict


def parse(text: str) -> list[Row]:
    """Read the lines of JSON that a benchmark printed; other lines are skipped."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def load(path: pathlib.Path) -> list[Row]:
    return parse(path.read_text())


def save(path: pathlib.Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def key_of(row: Row) -> tuple[str, str]:
    return row["name"], row.get("state", "")


def value_of(row: Row, which: str) -> float:
    """Return the median, p10 or p90 of a row, in microseconds or bytes."""
    return row[f"{which}_bytes" if "median_bytes" in row else f"{which}_us"]


def spread_of(row: Row) -> float:
    return value_of(row, "p90") - value_of(row, "p10")


def verdict(before: Row, after: Row) -> str:
    """Say whether the medians differ by more than the wider of the two spreads."""
    difference = value_of(after, "median") - value_of(before, "median")
    if abs(difference) <= max(spread_of(before), spread_of(after)):
        return "same"
    return "slower" if difference > 0 else "faster"


def peer_name(name: str) -> str | None:
    """Return the row that this one is measured against."""
    module, operation, variant, shape = name.split("/")
    if (module, operation) == ("vocab", "cross_entropy"):
        return f"torch/cross_entropy/{'forward' if variant.startswith('forward') else 'new_gradient'}/{shape}"
    peer = {
        "comm": "gloo",
        "python": "gloo",
        "launch": "torchrun",
        "checkpoint": "dcp",
        "data": "log" if operation.startswith("train") else "pandas",
        "data_parallel": "torch",
        "dlrm": "torch" if operation.startswith("interaction") else "torchrec",
        "embedding": "fbgemm",
        "faults": "torch gloo",
        "jagged": "fbgemm",
        "serving": "fbgemm" if operation.startswith("lookup") else None,
        "sharding": "torchrec",
        "vocab": "operators_gloo",
        "graph": {"layer": "gather", "exchange": "gather", "python_layer": "fairchem_gather"}.get(operation),
    }.get(module)
    return None if peer is None or variant == peer else f"{module}/{operation}/{peer}/{shape}"


def peer_of(row: Row, rows: dict[tuple[str, str], Row]) -> Row | None:
    """Find the peer's row of the same shape: in the same state if there is one, else in the other."""
    name = peer_name(row["name"])
    states = [row.get("state", ""), "near", "far", ""]
    return next((rows[name, state] for state in states if (name, state) in rows), None)


def time_text(microseconds: float) -> str:
    if microseconds < 10:
        return f"{microseconds:.2f} us"
    if microseconds < 1000:
        return f"{microseconds:.1f} us"
    if microseconds < 100_000:
        return f"{microseconds / 1e3:.2f} ms"
    return f"{microseconds / 1e3:.0f} ms"


def value_text(row: Row, which: str) -> str:
    value = value_of(row, which)
    return f"{value / 1e6:.0f} MB" if "median_bytes" in row else time_text(value)


# Share of the cores that other programs may take before a row is void.
MAX_OTHERS = 0.1


def state_text(row: Row) -> str:
    return row.get("state", "") + ("!" if row.get("others", 0) > MAX_OTHERS else "")


HEADERS = ["row", "state", "median", "p10", "p90", "n", "x peer", "floor"]


def cells(row: Row, index: dict[tuple[str, str], Row]) -> list[str]:
    peer = peer_of(row, index)
    ratio = ""
    if peer is not None:
        mark = "" if peer.get("state", "") == row.get("state", "") else "*"
        ratio = f"{value_of(peer, 'median') / value_of(row, 'median'):.1f}{mark}"
    floor = row.get("floor_us", 0)
    # Below that, the caches hold everything and memory is no floor.
    share = f"{100 * floor / value_of(row, 'median'):.0f} %" if floor and row["bytes"] >= 25e6 else ""
    return [
        row["name"],
        state_text(row),
        value_text(row, "median"),
        value_text(row, "p10"),
        value_text(row, "p90"),
        str(row["repetitions"]),
        ratio,
        share,
    ]


def table(rows: list[Row]) -> str:
    """Format rows as a Markdown table that is aligned in plain text too."""
    index = {key_of(row): row for row in rows}
    lines = [HEADERS] + [cells(row, index) for row in rows]
    if any("max_us" in row for row in rows):  # where the worst case is the promise
        worst = ["max"] + [time_text(row["max_us"]) if "max_us" in row else "" for row in rows]
        place = HEADERS.index("p90") + 1
        lines = [[*line[:place], text, *line[place:]] for line, text in zip(lines, worst, strict=True)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def joined(line: list[str]) -> str:
        first = [line[0].ljust(widths[0]), line[1].ljust(widths[1])]
        rest = [text.rjust(width) for text, width in zip(line[2:], widths[2:], strict=True)]
        return "| " + " | ".join(first + rest) + " |"

    rule = "|" + "|".join("-" * (width + 1) + ("-" if i < 2 else ":") for i, width in enumerate(widths)) + "|"
    return "\n".join([joined(lines[0]), rule] + [joined(line) for line in lines[1:]]) + "\n"
