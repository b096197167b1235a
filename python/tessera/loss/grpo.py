"""Group relative policy optimisation from hidden states, by the signature of Liger's fused loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tessera import vocab_parallel

__all__ = ["FusedLinearGRPOLoss"]

_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo")


class FusedLinearGRPOLoss(nn.Module):
    """The clipped policy loss of a last layer's log-probabilities, without ever holding all logits.

    The weight may be sharded by the vocabulary over `group`, with the same hidden states on all its ranks.
    `loss_type` says what the losses of the tokens are divided by: "grpo" averages over each sequence and
    then over sequences, "bnpo" over all tokens, "dr_grpo" by sequences times `max_completion_length`.
    `compiled`, `use_ref_model` and `chunk_size` have no effect.

    >>> import torch
    >>> loss = FusedLinearGRPOLoss(beta=0.0)
    >>> value, _ = loss(
    ...     torch.zeros(1, 2, 4), torch.zeros(8, 4), torch.tensor([[3, 1]]), torch.ones(1, 2), torch.ones(1)
    ... )
    >>> float(value)
    -1.0
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "bnpo",
        max_completion_length: int | None = None,
        temperature: float = 1.0,
        *,
        group: ProcessGroup | None = None,
    ):
        super().__init__()
        if loss_type not in _LOSS_TYPES:
            raise ValueError(
                f"vocab.FusedLinearGRPOLoss: there is no loss type '{loss_type}'. Choose from "
                f"{', '.join(_LOSS_TYPES)}."
            )
        if loss_type == "dr_grpo" and max_completion_length is None:
            raise ValueError("vocab.FusedLinearGRPOLoss: 'dr_grpo' needs max_completion_length.")
        self.beta = beta
        self.epsilon_low = epsilon_low
        self.epsilon_high = epsilon_high
        self.loss_type = loss_type
        self.max_completion_length = max_completion_length
        self.temperature = temperature
        self.group = group

    def log_probabilities(self, hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None) -> Tensor:
        """Return log p of `ids` ([batch, length]) from hidden states [batch, length, features]."""
        return -vocab_parallel.linear_cross_entropy(
            hidden,
            weight,
            ids,
            self.group,
            reduction="none",
            temperature=self.temperature,
            local_bias=bias,
        )

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
    ) -> tuple[Tensor, list[Any]]:
        """Return the loss, and as metrics the mean divergence (with a beta) and the share that is clipped.

        `advantages` are one per sequence. Without `old_per_token_logps` the policy is its own old one. With a
        beta the reference's log-probabilities are given, or made from `ref_input` and `ref_weight`.
        """
        log_p = self.log_probabilities(_input, lin_weight, selected_token_ids, bias)
        mask = attention_mask.to(log_p.dtype)
        old = log_p.detach() if old_per_token_logps is None else old_per_token_logps
        ratio = torch.exp(log_p - old)
        clipped = ratio.clamp(1.0 - self.epsilon_low, 1.0 + self.epsilon_high)
        gains = advantages.unsqueeze(1)
        loss = -torch.minimum(ratio * gains, clipped * gains)
        metrics = []
        if self.beta != 0.0:
            reference = self._reference(
                ref_per_token_logps, ref_input, ref_weight, ref_bias, selected_token_ids
            )
            divergence = torch.exp(reference - log_p) - (reference - log_p) - 1.0
            loss = loss + self.beta * divergence
            metrics.append(((divergence * mask).sum() / mask.sum().clamp_min(1.0)).detach())
        is_clipped = ((ratio < 1.0 - self.epsilon_low) & (gains < 0)) | (
            (ratio > 1.0 + self.epsilon_high) & (gains > 0)
        )
        metrics.append((is_clipped * mask).sum() / mask.sum().clamp_min(1.0))
        loss = loss * mask
        if self.loss_type == "grpo":
            return (loss.sum(1) / mask.sum(1).clamp_min(1.0)).mean(), metrics
        if self.loss_type == "bnpo":
            return loss.sum() / mask.sum().clamp_min(1.0), metrics
        return loss.sum() / (loss.shape[0] * self.max_completion_length), metrics

    def _reference(
        self,
        given: Tensor | None,
        hidden: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        ids: Tensor,
    ) -> Tensor:
        if given is not None:
            return given
        if hidden is None or weight is None:
            raise ValueError(
                f"vocab.FusedLinearGRPOLoss: a beta of {self.beta} needs ref_per_token_logps, or ref_input "
                "and ref_weight."
            )
        with torch.no_grad():
            return self.log_probabilities(hidden, weight, ids, bias)
