"""A switch of torchrec's inference, kept for programs that set it: it changes nothing here.

>>> set_propogate_device(True)
>>> get_propogate_device()
True
>>> set_propogate_device(False)
"""

from __future__ import annotations

__all__ = ["get_propogate_device", "set_propogate_device"]

_propagates = False


def set_propogate_device(val: bool) -> None:
    """Keep the value. Sharded quantised tables find their devices without it."""
    global _propagates
    _propagates = val


def get_propogate_device() -> bool:
    """Return the value."""
    return _propagates
