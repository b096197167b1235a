"""The names of megatron.core's vocabulary-parallel cross entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import regions, vocab_parallel
from tessera._tensors import vocab_part
from tessera.integrations import _replace
from tessera.integrations._megatron_group import tensor_parallel_group

__all__ = [
    "OutputProcessorContext",
    "fused_vocab_parallel_cross_entropy",
    "install",
    "output_processor",
    "vocab_parallel_cross_entropy",
]


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """Return the loss of every token, shaped as `target`, float32. The logits stay as they are.

    `tp_group` is Megatron's tensor-parallel group if it is left out and Megatron is set up; otherwise the
    logits are whole. Smoothing is Megatron's: of K ids the label keeps 1 - label_smoothing, and the others
    share the rest. K is the size of the whole vocabulary, where Megatron takes this rank's share.

    >>> import torch
    >>> round(float(vocab_parallel_cross_entropy(torch.zeros(1, 1, 8), torch.tensor([[3]]), 0.1)), 4)
    2.0794
    """
    logits, group, columns = vocab_part(
        "vocab_parallel_cross_entropy", vocab_parallel_logits, tensor_parallel_group(tp_group)
    )
    smoothing = 0.0
    if label_smoothing != 0.0:
        if not 0.0 < label_smoothing < 1.0:
            raise ValueError(
                f"vocab.vocab_parallel_cross_entropy: a label smoothing of {label_smoothing} is not between "
                "0 and 1."
            )
        ids = vocab_parallel_logits.shape[-1]
        if columns is None and group is not None:
            ids *= group.size()
        # What is dealt out evenly to all ids gives the label its share, too.
        smoothing = min(label_smoothing * ids / (ids - 1), 1.0) if ids > 1 else 0.0
    return vocab_parallel.cross_entropy(
        logits, target, group, columns=columns, reduction="none", label_smoothing=smoothing
    )


def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: ProcessGroup | None = None
) -> Tensor:
    """Return vocab_parallel_cross_entropy without smoothing; the gradient has the logits' type.

    >>> import torch
    >>> round(float(fused_vocab_parallel_cross_entropy(torch.zeros(1, 1, 8), torch.tensor([[3]]))), 4)
    2.0794
    """
    return vocab_parallel_cross_entropy(vocab_parallel_logits, target, 0.0, tp_group)


@dataclass
class OutputProcessorContext:
    """Say what `output_processor` computes; a model passes it on as `output_processor_context`."""

    temperature: float = 1.0
    wants_entropy: bool = False
    workspace_bytes: int | None = None


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    labels: Tensor,
    output_weight: Tensor | None = None,
    context: Any = None,
    config: Any = None,
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return log p of the labels, [batch, sequence] float32, out of hidden states, without the logits.

    It is what Megatron's `GPTModel.forward(..., labels=labels, output_processor=output_processor,
    output_processor_context=OutputProcessorContext(...))` calls in the place of its output layer, and
    returns. Hidden states are [sequence, batch, features], with sequence parallelism this rank's part of the
    sequence; the weight is `output_weight`, or the output layer's own. With `wants_entropy` the entropy of
    every token comes along. `context` may be any object with a `temperature`.

    >>> import torch
    >>> layer = torch.nn.Linear(4, 8, bias=False)
    >>> hidden = torch.zeros(1, 1, 4)
    >>> value = output_processor(hidden_states=hidden, output_layer=layer, labels=torch.tensor([[3]]))
    >>> round(float(value.detach()), 4)
    -2.0794
    """
    if labels is None:
        raise ValueError("vocab.output_processor: there are no labels. Give them to the model's forward.")
    if getattr(config, "use_mup", False):
        raise ValueError("vocab.output_processor: logits that are scaled (use_mup) are not computed here.")
    weight = output_layer.weight if output_weight is None else output_weight
    group = tensor_parallel_group(getattr(output_layer, "tp_group", None))
    if getattr(config, "sequence_parallel", False) and group is not None and group.size() > 1:
        hidden_states = regions.gather(hidden_states, group, 0)
    scores = vocab_parallel.linear_cross_entropy_with_scores(
        hidden_states.transpose(0, 1),
        weight,
        labels,
        group,
        ("entropy",) if getattr(context, "wants_entropy", False) else (),
        reduction="none",
        temperature=getattr(context, "temperature", 1.0),
        workspace_bytes=getattr(context, "workspace_bytes", None),
        local_bias=getattr(output_layer, "bias", None),
    )
    return -scores.loss if scores.tokens.entropy is None else (-scores.loss, scores.tokens.entropy)


def install() -> list[str]:
    """Put these functions in the place of Megatron's, and return where. Raises ImportError without it."""
    return _replace.replace(
        "megatron",
        {
            "megatron.core.tensor_parallel.cross_entropy": {
                "vocab_parallel_cross_entropy": vocab_parallel_cross_entropy
            },
            "megatron.core.fusions.fused_cross_entropy": {
                "fused_vocab_parallel_cross_entropy": fused_vocab_parallel_cross_entropy
            },
        },
    )
