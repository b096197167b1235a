"""Ports that are free, and conditions that come true."""

from __future__ import annotations

import socket
import time

LIMIT = 60.0  # seconds until a wait is given up; for a loaded machine, not a figure


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition, limit: float = LIMIT, what: str = "the condition"):
    """Return the first true value of `condition`."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError(f"{what} did not come true within {limit} s")
