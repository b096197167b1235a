"""Speeds of this machine as `tessera doctor --profile` measured them."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

from tessera import _C

# Speeds of a rank that a topology names too; the others only a profile has.
NAMED_SPEEDS = ("memory_speed", "host_speed", "network_speed")


@dataclasses.dataclass(frozen=True)
class Measured:
    """What is known of a machine: nothing, unless it was measured."""

    speeds: dict[str, float] = dataclasses.field(default_factory=dict)
    kind: str = ""
    """The same for machines alike: processor, ranks and engine."""
    caution: str = ""
    """What to tell of a profile that was measured elsewhere than it is used, if it was."""


def measured_here(num_ranks: int = 0, engine: str = "") -> Measured:
    """Return what the kept profile says of this machine, whose host has so many ranks over an engine.

    $TESSERA_PROFILE names another file, or says "assume". A file that it names is used wherever it was
    measured; the one that the doctor keeps is not if that was another machine. Raises ValueError for a file
    that is no profile.
    """
    kept = _C.planner.profile_path()
    is_named = bool(os.environ.get("TESSERA_PROFILE"))
    if kept in ("", "assume") or not pathlib.Path(kept).exists():
        return Measured()
    text = pathlib.Path(kept).read_text()
    speeds = _C.planner.profile_speeds(text)
    is_other, words = _C.planner.profile_difference(text, num_ranks, engine)
    if is_other and not is_named:
        return Measured(
            caution=f"profile {kept} was measured {words}, so it is not used: tessera doctor --profile "
            f"measures this machine, TESSERA_PROFILE={kept} takes it all the same"
        )
    profile = json.loads(text)
    kind = json.dumps([profile[key] for key in ("machine", "ranks", "engine")])
    caution = f"profile {kept} was measured {words}: tessera doctor --profile measures again"
    return Measured(speeds, kind, caution if words else "")


def alike(machines: list[Measured]) -> list[dict[str, float]]:
    """Return the speeds of every machine, those of the first one for machines of a kind.

    Two measurements of one thing differ, and ranks that are alike are planned better.
    """
    first = {machine.kind: machine.speeds for machine in reversed(machines)}
    return [first[machine.kind] for machine in machines]
