"""Numbers that are asked for: here they are there at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["DeferrableMetrics"]


class DeferrableMetrics(dict):
    """Hold numbers by key. They are here: `resolve` returns them, `subscribe` calls at once."""

    def is_resolved(self) -> bool:
        """Return True."""
        return True

    def resolve(self) -> dict[str, Any]:
        """Return the numbers."""
        return dict(self)

    def subscribe(self, callback: Callable[[dict[str, Any]], Any]) -> None:
        """Call with the numbers."""
        callback(dict(self))
