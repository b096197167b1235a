"""What values become on the wire."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tessera import _C


@dataclass
class QuantizationContext:
    """Carry from `encode` to `decode` how many values there were."""

    count: int | None = None


_Count = QuantizationContext | int | None


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
        self._loss_scale = loss_scale
        self._row_dim = row_dim
        self.comm_precision = comm_precision
        self._make()

    def _make(self) -> None:
        name = "NONE" if self.comm_precision == "fp32" else self.comm_precision.upper()
        scale = 1.0 if self._loss_scale is None else self._loss_scale
        self._codec = _C.comm_ops.Codec(getattr(_C.comm_ops.WireFormat, name), scale, self._row_dim)

    # The engine's part is made anew by copies and unpickled codecs.
    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_codec"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make()

    def encode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """Return the values as they travel, flat."""
        if ctx is not None:
            ctx.count = input_tensor.numel()
        return self._codec.encode(input_tensor.reshape(-1), [input_tensor.numel()])

    def decode(self, input_grad: Tensor, ctx: _Count = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values that `encode` was given, up to what the format loses.

        `ctx` says how many there were: the context of `encode`, or the number. Without it a wire of rows
        gives whole rows.
        """
        count = ctx.count if isinstance(ctx, QuantizationContext) else ctx
        if count is None:
            per_row = self._codec.wire_size(self._row_dim)
            count = input_grad.numel() // per_row * self._row_dim
        return self._codec.decode(input_grad, [count], dtype)

    @property
    def quantized_dtype(self) -> torch.dtype:
        """Return the type of the values on the wire."""
        return self._codec.encode(torch.empty(0), [0]).dtype

    def calc_quantized_size(self, input_len: int, ctx: QuantizationContext | None = None) -> int:
        """Return how many elements `input_len` values become."""
        return self._codec.wire_size(input_len)

    def padded_size(
        self,
        input_tensor: Tensor,
        dim_per_rank: list[int],
        my_rank: int,
        qcomm_ctx: QuantizationContext | None = None,
    ) -> tuple[int, int]:
        """Return the columns of `input_tensor`, or its elements if it has one dimension, and no padding.

        Rows of the wire need not be whole: the engine pads inside.
        """
        return (input_tensor.size(1) if input_tensor.dim() == 2 else input_tensor.numel()), 0

    def create_context(self) -> QuantizationContext | None:
        """Return a context for one `encode` and its `decode`."""
        return QuantizationContext()


class NoOpQuantizedCommCodec(QuantizedCommCodec):
    """Send values as they are.

    >>> NoOpQuantizedCommCodec().quantized_dtype
    torch.float32
    """

    def __init__(self) -> None:
        super().__init__("fp32")

    def encode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """Return the tensor itself."""
        return input_tensor

    def decode(self, input_grad: Tensor, ctx: _Count = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the tensor itself."""
        return input_grad

    def create_context(self) -> None:
        """Return None: there is nothing to carry."""


@dataclass
class QuantizedCommCodecs:
    """Hold one codec for the values and one for their gradients."""

    forward: QuantizedCommCodec = field(default_factory=NoOpQuantizedCommCodec)
    backward: QuantizedCommCodec = field(default_factory=NoOpQuantizedCommCodec)
