"""Types that the distributed modules share."""

from __future__ import annotations

import torch

from tessera import _C
from tessera.comm import Awaitable, LazyAwaitable, LazyNoWait, NoWait

__all__ = [
    "Awaitable",
    "LazyAwaitable",
    "LazyNoWait",
    "NoWait",
    "QuantizedCommCodec",
    "QuantizedCommCodecs",
]


class QuantizedCommCodec:
    """Say what values become on the wire: ``fp32``, ``fp16``, ``bf16``, ``int8`` or ``fp8``.

    16-bit values are clamped to the finite range. ``int8`` and ``fp8`` encode rows of `row_dim` values
    with a scale of their own. `loss_scale` multiplies before encoding and divides after.

    >>> codec = QuantizedCommCodec("int8")
    >>> codec.calc_quantized_size(64)
    80
    """

    _FORMATS = ("fp32", "fp16", "bf16", "int8", "fp8")

    def __init__(self, comm_precision: str = "fp32", loss_scale: float | None = None, row_dim: int = 32):
        if comm_precision not in self._FORMATS:
            known = ", ".join(self._FORMATS)
            raise ValueError(f"QuantizedCommCodec: {comm_precision!r} is not one of {known}.")
        name = "NONE" if comm_precision == "fp32" else comm_precision.upper()
        scale = 1.0 if loss_scale is None else loss_scale
        self._codec = _C.comm_ops.Codec(getattr(_C.comm_ops.WireFormat, name), scale, row_dim)
        self.comm_precision = comm_precision

    def encode(self, input_tensor: torch.Tensor) -> torch.Tensor:
        """Return the values as they travel, flat."""
        return self._codec.encode(input_tensor.reshape(-1), [input_tensor.numel()])

    def decode(self, wire: torch.Tensor, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the `count` values that `encode` was given, up to what the format loses."""
        return self._codec.decode(wire, [count], dtype)

    def calc_quantized_size(self, input_len: int) -> int:
        """Return how many elements `input_len` values become."""
        return self._codec.wire_size(input_len)


class QuantizedCommCodecs:
    """Hold one codec for the values and one for their gradients."""

    def __init__(self, forward: QuantizedCommCodec | None = None, backward: QuantizedCommCodec | None = None):
        self.forward = forward or QuantizedCommCodec()
        self.backward = backward or QuantizedCommCodec()
