"""The name of nemo_automodel.components.loss.chunked_ce, on Tessera's engine."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from tessera.loss.masked_ce import MaskedCrossEntropy

__all__ = ["ChunkedCrossEntropy"]


class ChunkedCrossEntropy(MaskedCrossEntropy):
    """MaskedCrossEntropy under the name that takes a chunk; one pass needs none, nor a compiler.

    >>> import torch
    >>> round(float(ChunkedCrossEntropy()(torch.zeros(2, 8), torch.tensor([3, -100]))), 4)
    2.0794
    """

    def __init__(
        self,
        chunk_len: int = 32,
        compile: bool = True,
        ignore_index: int = -100,
        reduction: str = "sum",
        *,
        inplace_grad: bool = False,
        tp_group: ProcessGroup | None = None,
    ):
        super().__init__(
            ignore_index=ignore_index, reduction=reduction, inplace_grad=inplace_grad, tp_group=tp_group
        )
        self.chunk_len = chunk_len
        self.compile = compile
