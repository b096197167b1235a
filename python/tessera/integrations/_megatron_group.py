"""The group that Megatron shares the vocabulary over."""

from __future__ import annotations

import sys
from typing import Any

from torch.distributed import ProcessGroup


def tensor_parallel_group(group: Any) -> ProcessGroup | None:
    """Return `group`, or Megatron's tensor-parallel group if it is None and there is one."""
    state = sys.modules.get("megatron.core.parallel_state")
    if group is not None or state is None or not state.model_parallel_is_initialized():
        return group
    return state.get_tensor_model_parallel_group()
