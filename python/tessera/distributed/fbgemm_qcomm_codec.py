"""Codecs of the exchanges of sharded tables, made out of one record.

>>> codecs = get_qcomm_codecs(QCommsConfig(forward_precision=CommType.FP16))
>>> codecs.forward.quantized_dtype, codecs.backward.quantized_dtype
(torch.float16, torch.float32)
>>> sorted(get_qcomm_codecs_registry(QCommsConfig()))[0]
'POOLED_EMBEDDINGS_ALL_TO_ALL'
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique
from typing import TYPE_CHECKING, Any

import torch

from tessera.distributed.types import CommOp, NoOpQuantizedCommCodec, QuantizedCommCodec, QuantizedCommCodecs
from tessera.modules.embedding_configs import _fbgemm

if TYPE_CHECKING:
    from fbgemm_gpu.split_embedding_configs import SparseType

__all__ = [
    "CommType",
    "QCommsConfig",
    "comm_type_to_sparse_type",
    "get_qcomm_codecs",
    "get_qcomm_codecs_registry",
]


@unique
class CommType(Enum):
    """Name what values become on the wire."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    MX4 = "mx4"

    def __str__(self) -> str:
        return self.value


def comm_type_to_sparse_type(comm_type: CommType) -> SparseType:
    """Return fbgemm's name of the same, where fbgemm is installed."""
    return getattr(_fbgemm("split_embedding_configs").SparseType, CommType(comm_type).name)


@dataclass
class QCommsConfig:
    """Say how values and their gradients travel.

    `fp8_quantize_dim` and `fp8_quantize_dim_bwd` are the values that share a scale. There is no MX4.
    """

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None
    fp8_quantize_dim: int | None = None
    fp8_quantize_dim_bwd: int | None = None
    fp8_bwd_uses_143: bool | None = False
    fp8_output_dtype: Any = None
    mx4_quantize_dim: int | None = None
    mx4_quantize_dim_bwd: int | None = None
    mx4_rounding_mode: Any = None
    output_dtype: Any = None


def _codec(precision: CommType, loss_scale: float | None, row_dim: int | None) -> QuantizedCommCodec:
    if precision == CommType.MX4:
        raise ValueError("sharding.codecs: there is no MX4; use FP8 or INT8.")
    if precision == CommType.FP32 and loss_scale is None:
        return NoOpQuantizedCommCodec()
    return QuantizedCommCodec(precision.value, loss_scale, row_dim or 32)


def get_qcomm_codecs(qcomms_config: QCommsConfig | None) -> QuantizedCommCodecs:
    """Return the codecs of values and of gradients; none that change anything without a config."""
    config = qcomms_config or QCommsConfig()
    backward_dim = config.fp8_quantize_dim_bwd or config.fp8_quantize_dim
    return QuantizedCommCodecs(
        _codec(config.forward_precision, config.forward_loss_scale, config.fp8_quantize_dim),
        _codec(config.backward_precision, config.backward_loss_scale, backward_dim),
    )


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig,
    comm_ops: list[CommOp] | None = None,
    device: torch.device | None = None,
) -> dict[str, QuantizedCommCodecs] | None:
    """Return codecs by the names of exchanges, of all that have any if not told which."""
    return {operation.name: get_qcomm_codecs(qcomms_config) for operation in comm_ops or CommOp}
