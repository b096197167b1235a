"""The name of nemo_automodel.components.loss.kd_loss, on Tessera's engine."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tessera import vocab_parallel
from tessera._tensors import local_part

__all__ = ["KDLoss"]


class KDLoss(nn.Module):
    """KL divergence of the student's distribution from the teacher's, averaged over labels that count.

    Logits may be DTensors sharded by the vocabulary, or equal shares of it over `tp_group`; value and
    gradient are those of one process. Both are divided by `temperature`, and the loss multiplied by its
    square. Arithmetic is float32 whatever `fp32_upcast` says; `chunk_size` has no effect.

    >>> import torch
    >>> logits = torch.randn(2, 8)
    >>> abs(round(float(KDLoss()(logits, logits, torch.tensor([1, 2]))), 4))
    0.0
    """

    def __init__(
        self,
        ignore_index: int = -100,
        temperature: float = 1.0,
        fp32_upcast: bool = True,
        tp_group: ProcessGroup | None = None,
        chunk_size: int = 0,
    ):
        super().__init__()
        self.ignore_index = ignore_index
        self.temperature = temperature
        self.fp32_upcast = fp32_upcast
        self.tp_group = tp_group
        self.chunk_size = chunk_size

    def forward(
        self,
        student_logits: Tensor,
        teacher_logits: Tensor,
        labels: Tensor,
        num_batch_labels: int | None = None,
    ) -> Tensor:
        """Return the mean over labels that are not ignored, or the sum over `num_batch_labels`.

        If all labels are ignored, it is 0 and so is its gradient, which goes to the student alone.
        """
        counts = local_part(labels).to(student_logits.device) != self.ignore_index
        cross_entropy = vocab_parallel.soft_cross_entropy(
            student_logits, teacher_logits, self.tp_group, temperature=self.temperature
        )
        with torch.no_grad():
            entropy = vocab_parallel.token_scores(
                teacher_logits, None, self.tp_group, ("entropy",), temperature=self.temperature
            ).entropy
        divergence = torch.where(counts.reshape(entropy.shape), cross_entropy - entropy, 0.0)
        total = divergence.sum() * self.temperature**2
        if num_batch_labels is not None:
            return total / num_batch_labels
        return total / counts.sum().clamp_min(1)
