"""Megatron's GPTModel without its logits."""

from __future__ import annotations

import torch

from tessera import regions
from tessera.distributed._next_token import from_parallel_hidden_states_to_logprobs

_NAME = "patch_gpt_model_forward_for_linear_ce_fusion"


def _context_ranks(model) -> int:
    """Over how many ranks a model's sequences are cut: its group says it, without one its configuration."""
    group = getattr(model.pg_collection, "cp", None)
    return group.size() if group is not None else getattr(model.config, "context_parallel_size", 1)


def patch_gpt_model_forward_for_linear_ce_fusion(*, chunk_size: int) -> None:
    """Teach Megatron's GPTModel to return log-probabilities without making logits.

    A call of its forward with `return_logprobs_for_linear_ce_fusion=True` then returns next-token
    log-probabilities of `labels` (or of `input_ids`) instead of logits. Raises ImportError without
    megatron.core, and such a call ValueError under context parallelism: labels of a part of the sequence
    do not say which token follows its end. Calling it again changes the chunk size.
    """
    try:
        from megatron.core.models.gpt import GPTModel
    except ImportError as error:
        raise ImportError(f"vocab.{_NAME}: there is no megatron.core to patch.") from error
    GPTModel._linear_ce_fusion_chunk_size = chunk_size
    if getattr(GPTModel, "_linear_ce_fusion_forward_patched", False):
        return
    plain_forward = GPTModel.forward

    def forward(self, input_ids, *words, return_logprobs_for_linear_ce_fusion=False, labels=None, **named):
        if not return_logprobs_for_linear_ce_fusion or not self.post_process:
            return plain_forward(self, input_ids, *words, labels=labels, **named)
        ranks = _context_ranks(self)
        if ranks > 1:
            raise ValueError(
                f"vocab.{_NAME}: the model's sequences are cut over {ranks} context ranks, and labels of a "
                "part do not say which token follows it. Use context_parallel_size=1, or "
                "from_parallel_hidden_states_to_logprobs with cp_group and the labels of whole sequences."
            )
        # Without its last step the model returns the hidden states.
        self.post_process = False
        try:
            hidden = plain_forward(self, input_ids, *words, **named)
        finally:
            self.post_process = True
        weight = self.output_layer.weight
        if getattr(self, "share_embeddings_and_output_weights", False):
            weight = self.shared_embedding_or_output_weight()
        group = self.pg_collection.tp
        if not self.config.sequence_parallel and group is not None and group.size() > 1:
            hidden = regions.scatter(hidden, group, 0)
        share = weight.shape[0]
        first = share * (group.rank() if group is not None else 0)
        return from_parallel_hidden_states_to_logprobs(
            hidden,
            weight,
            False,
            input_ids if labels is None else labels,
            first,
            first + share,
            group,
            inference_only=not torch.is_grad_enabled(),
            chunk_size=self._linear_ce_fusion_chunk_size,
        )

    GPTModel._original_forward_for_linear_ce_fusion = plain_forward
    GPTModel.forward = forward
    GPTModel._linear_ce_fusion_forward_patched = True
