"""Speeds of this machine as `tessera doctor --profile` measured them."""

from __future__ import annotations

import pathlib

from tessera import _C

# Speeds of a rank that a topology names too; the others only a profile has.
NAMED_SPEEDS = ("memory_speed", "host_speed", "network_speed")


def measured_speeds(path: str = "") -> dict[str, float]:
    """Return the speeds of a profile, or of the one that the doctor keeps; nothing if there is none.

    $TESSERA_PROFILE names another file, or says "assume". Raises ValueError for a file that is no profile.
    """
    kept = path or _C.planner.profile_path()
    if kept in ("", "assume") or not (path or pathlib.Path(kept).exists()):
        return {}
    return _C.planner.profile_speeds(pathlib.Path(kept).read_text())
