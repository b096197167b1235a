"""The names of nemo_rl.distributed.model_utils in its place."""

from __future__ import annotations

from tessera.distributed import model_utils
from tessera.distributed.model_utils import *  # noqa: F403
from tessera.integrations import _replace

__all__ = [*model_utils.__all__, "install"]

# Types of arguments, which the project makes itself.
_KEPT = ("TrainingSamplingParams",)


def install() -> list[str]:
    """Put the functions in the place of NeMo-RL's, and return where. Raises ImportError without it."""
    names = {name: getattr(model_utils, name) for name in model_utils.__all__ if name not in _KEPT}
    return _replace.replace("nemo_rl", {"nemo_rl.distributed.model_utils": names})
