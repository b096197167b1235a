"""Types that modules of all kinds share, by torchrec's path.

>>> print(DataType.FP16)
FP16
"""

from __future__ import annotations

from abc import abstractmethod
from enum import Enum, unique

import torch
from torch import nn

__all__ = ["CacheMixin", "CopyMixIn", "DataType", "ModuleCopyMixin", "ModuleNoCopyMixin"]


@unique
class DataType(Enum):
    """Say how the numbers of a row are stored.

    Rows that train are FP32, FP16 or BF16; INT8, INT4 and INT2 are those of quantised tables, which take
    UINT8 for INT8. The others name types of tensors alone: no table has such rows.
    """

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT64 = "INT64"
    INT32 = "INT32"
    INT8 = "INT8"
    UINT8 = "UINT8"
    INT4 = "INT4"
    INT2 = "INT2"
    NFP8 = "NFP8"

    def __str__(self) -> str:
        return self.value


class CacheMixin:
    """Let a module forget what it keeps between calls."""

    @abstractmethod
    def clear_cache(self) -> None:
        """Forget it."""


class CopyMixIn:
    """Let a module say how it is copied to a device: `copy_to_device` asks it."""

    @abstractmethod
    def copy(self, device: torch.device) -> nn.Module:
        """Return the copy."""


class ModuleCopyMixin(CopyMixIn):
    """Go to the device as modules do."""

    def copy(self, device: torch.device) -> nn.Module:
        """Return the module, on the device."""
        return self.to(device)


class ModuleNoCopyMixin(CopyMixIn):
    """Stay where it is."""

    def copy(self, device: torch.device) -> nn.Module:
        """Return the module as it is.

        >>> module = ModuleNoCopyMixin()
        >>> module.copy(torch.device("meta")) is module
        True
        """
        return self
