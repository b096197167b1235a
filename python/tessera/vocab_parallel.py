"""Losses and log-probabilities of logits whose vocabulary is sharded over a group.

Each rank holds some columns of the logits. One read of them gives a few numbers per token, one small
all-gather makes them known, and every rank merges them in rank order: results are the same bits on
all ranks. `group` may be None for logits that are whole. Logits that are a DTensor say by their
placement which ids they are, and over which group. Everything here but columns_of is collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tessera import _C, _vocab_ops, regions
from tessera._tensors import Columns, group_of, local_part, vocab_part, whole_on_group

__all__ = [
    "CrossEntropyScores",
    "TokenScores",
    "columns_of",
    "cross_entropy",
    "cross_entropy_with_scores",
    "jensen_shannon_divergence",
    "kept_log_probabilities",
    "linear_cross_entropy",
    "linear_cross_entropy_with_scores",
    "linear_jensen_shannon_divergence",
    "linear_log_probabilities_at",
    "log_probabilities",
    "log_probabilities_at",
    "log_softmax",
    "logits_at",
    "sampled_log_probabilities",
    "smallest_kept_logit",
    "soft_cross_entropy",
    "sum_of_squared_probabilities",
    "token_scores",
    "top_k",
]

_SCORES = ("log_probability", "log_sum_exp", "entropy", "argmax")


class TokenScores(NamedTuple):
    """One value per token; None for what was not asked for."""

    log_probability: Tensor | None
    log_sum_exp: Tensor | None
    entropy: Tensor | None
    argmax: Tensor | None


class CrossEntropyScores(NamedTuple):
    """A loss and the scores of the same pass."""

    loss: Tensor
    tokens: TokenScores


def _flags(wanted: tuple[str, ...]) -> list[bool]:
    unknown = [name for name in wanted if name not in _SCORES]
    if unknown:
        raise ValueError(f"vocab: there is no score '{unknown[0]}'. Choose from {', '.join(_SCORES)}.")
    return [name in wanted for name in _SCORES]


def _wanted_of(scores: tuple[Tensor | None, ...], wanted: tuple[str, ...]) -> TokenScores:
    # An operator of a compiled graph has something for each.
    return TokenScores(
        *(score if name in wanted else None for name, score in zip(_SCORES, scores[1:], strict=True))
    )


def columns_of(vocab_size: int, group: ProcessGroup | None = None) -> Columns:
    """Return this rank's range of ids when they are dealt out evenly. Not collective.

    The first vocab_size % ranks ranks get one more.

    >>> columns_of(8)
    (0, 8)
    """
    return _C.vocab_columns_of(vocab_size, group_of("columns_of", group))


def token_scores(
    local_logits: Tensor,
    labels: Tensor | None,
    group: ProcessGroup | None,
    wanted: tuple[str, ...],
    *,
    columns: Columns | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    reproducible_tile: int = 0,
    check_labels: bool | None = None,
    overwrite: str = "never",
) -> TokenScores:
    """Return the wanted scores of every token: "log_probability", "log_sum_exp", "entropy", "argmax".

    `columns` is this rank's range of ids (default: equal shares), ids from `vocab_size` on are
    padding. With `reproducible_tile`, results have the same bits for every number of ranks whose
    ranges begin at multiples of it. Differentiable once.

    >>> import torch
    >>> scores = token_scores(torch.zeros(1, 8), torch.tensor([3]), None, ("entropy", "log_probability"))
    >>> round(float(scores.entropy), 4), round(float(scores.log_probability), 4)
    (2.0794, -2.0794)
    """
    logits, group, columns = vocab_part("token_scores", local_logits, group, columns)
    scores = _vocab_ops.token_scores(
        logits, local_part(labels), group, _flags(wanted), columns=columns, vocab_size=vocab_size,
        ignore_index=ignore_index, temperature=temperature, reproducible_tile=reproducible_tile,
        check_labels=check_labels, overwrite=overwrite,
    )  # fmt: skip
    return _wanted_of(scores, wanted)


def cross_entropy_with_scores(
    local_logits: Tensor,
    labels: Tensor,
    group: ProcessGroup | None = None,
    wanted: tuple[str, ...] = (),
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    columns: Columns | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    reproducible_tile: int = 0,
    check_labels: bool | None = None,
    overwrite: str = "never",
    class_weights: Tensor | None = None,
) -> CrossEntropyScores:
    """Return the cross entropy and the wanted scores from one pass over the logits.

    Equal to torch.nn.functional.cross_entropy on the gathered logits, except that a mean over no
    tokens is 0. `overwrite` says when the gradient may take the place of the logits: "never",
    "backward" or "forward" (fastest; for reduced losses). `class_weights`, one per id of the whole
    vocabulary and the same on all ranks, multiply the losses; a mean is divided by their sum.

    >>> import torch
    >>> loss, tokens = cross_entropy_with_scores(torch.zeros(1, 8), torch.tensor([3]), None, ("argmax",))
    >>> round(float(loss), 4), int(tokens.argmax)
    (2.0794, 0)
    """
    if class_weights is not None:
        _check_class_weights(class_weights, label_smoothing)
    logits, group, columns = vocab_part("cross_entropy", local_logits, group, columns)
    asked = reduction if class_weights is None else "none"
    scores = _vocab_ops.cross_entropy(
        logits, local_part(labels), group, _flags(wanted), columns=columns, vocab_size=vocab_size,
        ignore_index=ignore_index, temperature=temperature, reproducible_tile=reproducible_tile,
        check_labels=check_labels, overwrite=overwrite, reduction=asked, label_smoothing=label_smoothing,
        z_loss=z_loss,
    )  # fmt: skip
    loss = scores[0]
    if class_weights is not None:
        loss = _weighted(loss, local_part(labels), class_weights, ignore_index, reduction)
    return CrossEntropyScores(loss, _wanted_of(scores, wanted))


def _check_class_weights(class_weights: Tensor, label_smoothing: float) -> None:
    if class_weights.dim() != 1:
        raise ValueError(
            f"vocab.cross_entropy: class weights of shape {list(class_weights.shape)} are not one per id."
        )
    if label_smoothing != 0.0:
        raise ValueError("vocab.cross_entropy: class weights and label smoothing do not go together.")


def _weighted(
    loss: Tensor, labels: Tensor, class_weights: Tensor, ignore_index: int, reduction: str
) -> Tensor:
    is_ignored = labels == ignore_index
    used = class_weights.to(loss.device, loss.dtype)[labels.masked_fill(is_ignored, 0).long()]
    used = used.masked_fill(is_ignored, 0.0)
    if reduction == "none":
        return loss * used
    total = (loss * used).sum()
    if reduction == "sum":
        return total
    divisor = used.sum()
    return total / torch.where(divisor == 0, 1.0, divisor)


def cross_entropy(
    local_logits: Tensor, labels: Tensor, group: ProcessGroup | None = None, **options
) -> Tensor:
    """Return the cross entropy of the labels; options as in cross_entropy_with_scores.

    >>> import torch
    >>> round(float(cross_entropy(torch.zeros(2, 8), torch.tensor([3, -100]))), 4)
    2.0794
    """
    return cross_entropy_with_scores(local_logits, labels, group, **options).loss


def log_probabilities(
    local_logits: Tensor, labels: Tensor, group: ProcessGroup | None = None, **options
) -> Tensor:
    """Return log p of every token's label, float32; options as in token_scores.

    >>> import torch
    >>> round(float(log_probabilities(torch.zeros(1, 8), torch.tensor([3]))), 4)
    -2.0794
    """
    return token_scores(local_logits, labels, group, ("log_probability",), **options).log_probability


def linear_cross_entropy_with_scores(
    hidden: Tensor,
    local_weight: Tensor,
    labels: Tensor,
    group: ProcessGroup | None = None,
    wanted: tuple[str, ...] = (),
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    columns: Columns | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    check_labels: bool | None = None,
    workspace_bytes: int | None = None,
    local_bias: Tensor | None = None,
    softcap: float = 0.0,
) -> CrossEntropyScores:
    """Return the cross entropy of softmax(hidden weight^T + bias) without ever holding all logits.

    `hidden` [..., features] is the same on all ranks, `local_weight` [columns, features] and
    `local_bias` [columns] are sharded. With `softcap` a logit x counts as softcap tanh(x / softcap).
    At most `workspace_bytes` of logits exist at a time; without it all of them if they are no larger than
    the weight, else 256 MiB. The gradient of the weight is summed in float32; that of `hidden` is summed
    over the group.

    >>> import torch
    >>> labels = torch.tensor([1, 2])
    >>> hidden, weight = torch.zeros(2, 4), torch.zeros(8, 4)
    >>> scores = linear_cross_entropy_with_scores(hidden, weight, labels, None, ("argmax",))
    >>> round(float(scores.loss), 4), scores.tokens.argmax.tolist()
    (2.0794, [0, 0])
    """
    weight, group, columns = vocab_part("linear_cross_entropy", local_weight, group, columns, dim=0)
    scores = _vocab_ops.linear_cross_entropy(
        whole_on_group(hidden), weight, local_part(labels), group, _flags(wanted), columns=columns,
        vocab_size=vocab_size, ignore_index=ignore_index, temperature=temperature,
        check_labels=check_labels, reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss,
        workspace_bytes=workspace_bytes, local_bias=local_part(local_bias), softcap=softcap,
    )  # fmt: skip
    return CrossEntropyScores(scores[0], _wanted_of(scores, wanted))


def linear_cross_entropy(
    hidden: Tensor, local_weight: Tensor, labels: Tensor, group: ProcessGroup | None = None, **options
) -> Tensor:
    """Return the loss alone; options as in linear_cross_entropy_with_scores.

    >>> import torch
    >>> round(float(linear_cross_entropy(torch.zeros(2, 4), torch.zeros(8, 4), torch.tensor([1, 2]))), 4)
    2.0794
    """
    return linear_cross_entropy_with_scores(hidden, local_weight, labels, group, **options).loss


def log_probabilities_at(
    local_logits: Tensor,
    ids: Tensor,
    group: ProcessGroup | None = None,
    *,
    columns: Columns | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    check_labels: bool | None = None,
    log_sum_exp: Tensor | None = None,
) -> Tensor:
    """Return log p at several ids per token ([..., k]), float32; 0 at `ignore_index`. Differentiable.

    With `log_sum_exp` ([...], of the logits over the temperature, as token_scores gives it) the logits
    are read at these ids alone, and its gradient is returned to it. Unless `check_labels`, the logit of an
    id outside the vocabulary is then taken for 0; without `log_sum_exp` its value is NaN.

    >>> import torch
    >>> log_probabilities_at(torch.zeros(1, 8), torch.tensor([[1, 5]])).shape
    torch.Size([1, 2])
    """
    logits, group, columns = vocab_part("log_probabilities_at", local_logits, group, columns)
    if log_sum_exp is not None:
        there = local_part(ids) != ignore_index
        at_ids = _vocab_ops.logits_at(
            logits, local_part(ids), group, columns=columns, vocab_size=vocab_size,
            ignore_index=ignore_index, check_labels=check_labels,
        )  # fmt: skip
        return torch.where(there, at_ids / temperature - log_sum_exp.unsqueeze(-1), 0.0)
    return _vocab_ops.log_probabilities_at(
        logits, local_part(ids), group, columns=columns, vocab_size=vocab_size, ignore_index=ignore_index,
        temperature=temperature, check_labels=check_labels,
    )  # fmt: skip


def logits_at(
    local_logits: Tensor,
    ids: Tensor,
    group: ProcessGroup | None = None,
    *,
    columns: Columns | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    check_labels: bool | None = None,
) -> Tensor:
    """Return the logits at several ids per token ([..., k]) as they are, float32; 0 at `ignore_index`.

    Differentiable.

    >>> import torch
    >>> logits_at(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[1, -100]])).tolist()
    [[3.0, 0.0]]
    """
    logits, group, columns = vocab_part("logits_at", local_logits, group, columns)
    return _vocab_ops.logits_at(
        logits, local_part(ids), group, columns=columns, vocab_size=vocab_size, ignore_index=ignore_index,
        check_labels=check_labels,
    )  # fmt: skip


def log_softmax(
    local_logits: Tensor,
    group: ProcessGroup | None = None,
    *,
    columns: Columns | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return this rank's columns of log softmax, computed in float32 and rounded once. Differentiable.

    >>> import torch
    >>> round(float(log_softmax(torch.zeros(1, 8))[0, 0]), 4)
    -2.0794
    """
    logits, group, columns = vocab_part("log_softmax", local_logits, group, columns)
    return _vocab_ops.log_softmax(
        logits, group, columns=columns, vocab_size=vocab_size, temperature=temperature
    )


def soft_cross_entropy(
    local_logits: Tensor,
    local_target_logits: Tensor,
    group: ProcessGroup | None = None,
    *,
    columns: Columns | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return the cross entropy with the softmax of other logits per token, float32.

    The gradient goes to `local_logits` alone.

    >>> import torch
    >>> round(float(soft_cross_entropy(torch.zeros(1, 8), torch.ones(1, 8))), 4)
    2.0794
    """
    logits, group, columns = vocab_part("soft_cross_entropy", local_logits, group, columns)
    return _vocab_ops.soft_cross_entropy(
        logits, local_part(local_target_logits), group, columns=columns, vocab_size=vocab_size,
        temperature=temperature,
    )  # fmt: skip


def top_k(
    local_logits: Tensor,
    k: int,
    group: ProcessGroup | None = None,
    *,
    columns: Columns | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of every token and their ids, largest first. No gradient.

    >>> import torch
    >>> values, ids = top_k(torch.tensor([[1.0, 3.0, 2.0]]), 2)
    >>> ids.tolist()
    [[1, 2]]
    """
    logits, group, columns = vocab_part("top_k", local_logits, group, columns)
    return _C.vocab_top_k(logits, k, group, _C.TokenOptions(columns=columns, vocab_size=vocab_size))


def smallest_kept_logit(
    local_logits: Tensor,
    group: ProcessGroup | None = None,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    columns: Columns | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return the smallest logit of every token that top-k and top-p filters keep, float32. No gradient.

    >>> import torch
    >>> smallest_kept_logit(torch.tensor([[1.0, 3.0, 2.0]]), top_k=2).tolist()
    [2.0]
    """
    logits, group, columns = vocab_part("smallest_kept_logit", local_logits, group, columns)
    options = _C.SamplingOptions(
        columns=columns, vocab_size=vocab_size, temperature=temperature, top_k=top_k, top_p=top_p
    )
    return _C.vocab_smallest_kept_logit(logits, group, options)


def sampled_log_probabilities(
    local_logits: Tensor,
    labels: Tensor,
    group: ProcessGroup | None = None,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    columns: Columns | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    check_labels: bool | None = None,
) -> Tensor:
    """Return log p of the labels among the ids that top-k and top-p filters keep, float32.

    A label that was dropped gives -inf, `ignore_index` gives 0. Differentiable.

    >>> import torch
    >>> logits = torch.tensor([[0.0, 0.0, -1.0]])
    >>> round(float(sampled_log_probabilities(logits, torch.tensor([0]), top_k=2)), 4)
    -0.6931
    """
    logits, group, columns = vocab_part("sampled_log_probabilities", local_logits, group, columns)
    return _vocab_ops.sampled_log_probabilities(
        logits, local_part(labels), group, top_k=top_k, top_p=top_p, columns=columns,
        vocab_size=vocab_size, ignore_index=ignore_index, temperature=temperature,
        check_labels=check_labels,
    )  # fmt: skip


def sum_of_squared_probabilities(
    local_logits: Tensor,
    group: ProcessGroup | None = None,
    *,
    columns: Columns | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return the sum over the vocabulary of p^2 for every token, float32. Differentiable.

    It is the probability that two samples are the same id. The logits are read twice: it is made of two
    log-sum-exps, one at half the temperature.

    >>> import torch
    >>> round(float(sum_of_squared_probabilities(torch.zeros(1, 8))), 4)
    0.125
    """
    plain, doubled = (
        token_scores(
            local_logits,
            None,
            group,
            ("log_sum_exp",),
            columns=columns,
            vocab_size=vocab_size,
            temperature=of,
        ).log_sum_exp
        for of in (temperature, temperature / 2)
    )
    return (doubled - 2 * plain).exp()


def kept_log_probabilities(
    local_logits: Tensor,
    labels: Tensor,
    kept_ids: Tensor,
    group: ProcessGroup | None = None,
    *,
    columns: Columns | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    check_labels: bool | None = None,
) -> Tensor:
    """Return log p of the labels among given ids ([..., k] per token, distinct), float32. Differentiable.

    Places of `kept_ids` with `ignore_index` hold no id. A label that is not among them gives -inf and the
    gradient of the others; one that is `ignore_index` gives 0.

    >>> import torch
    >>> kept = torch.tensor([[0, 1, -100]])
    >>> round(float(kept_log_probabilities(torch.zeros(1, 8), torch.tensor([1]), kept)), 4)
    -0.6931
    """
    kept_ids, labels = local_part(kept_ids), local_part(labels)
    at_ids = logits_at(
        local_logits,
        kept_ids,
        group,
        columns=columns,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        check_labels=check_labels,
    )
    at_ids = (at_ids / temperature).masked_fill(kept_ids == ignore_index, -torch.inf)
    is_label = (kept_ids == labels.unsqueeze(-1)) & (kept_ids != ignore_index)
    of_label = torch.where(is_label, at_ids, 0.0).sum(-1)
    value = torch.where(is_label.any(-1), of_label, -torch.inf) - torch.logsumexp(at_ids, -1)
    return value.masked_fill(labels == ignore_index, 0.0)


def linear_log_probabilities_at(
    hidden: Tensor,
    local_weight: Tensor,
    ids: Tensor,
    group: ProcessGroup | None = None,
    *,
    columns: Columns | None = None,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    check_labels: bool | None = None,
    workspace_bytes: int | None = None,
    local_bias: Tensor | None = None,
) -> Tensor:
    """Return log p at several ids per token ([..., k]) from hidden states, without holding all logits.

    Tensors as in linear_cross_entropy. Beside its workspace it holds the k rows of the weight of every
    token. 0 at `ignore_index`; ids are looked at as in log_probabilities_at. Differentiable.

    >>> import torch
    >>> ids = torch.tensor([[1, 5]])
    >>> round(float(linear_log_probabilities_at(torch.zeros(1, 4), torch.zeros(8, 4), ids)[0, 0]), 4)
    -2.0794
    """
    weight, group, columns = vocab_part("linear_log_probabilities_at", local_weight, group, columns, dim=0)
    return _LOG_PROBABILITIES_AT(
        whole_on_group(hidden), weight, local_part(ids), group, columns=columns, vocab_size=vocab_size,
        ignore_index=ignore_index, temperature=temperature, check_labels=check_labels,
        workspace_bytes=workspace_bytes, local_bias=local_part(local_bias),
    )  # fmt: skip


def _linear_log_probabilities_at(
    hidden: Tensor, weight: Tensor, ids: Tensor, group: ProcessGroup | None, options: _vocab_ops.Options
) -> Tensor:
    columns, vocab_size, bias = options.columns, options.vocab_size, options.local_bias
    if columns is None:
        first = weight.shape[0] * (0 if group is None else group.rank())
        columns = (first, first + weight.shape[0])
    is_checked = not hidden.is_cuda if options.check_labels is None else options.check_labels
    if is_checked:
        _check_ids(hidden, weight, ids, group, columns, options)
    end = columns[1] if vocab_size is None else min(columns[1], vocab_size)
    labels = torch.zeros(hidden.shape[:-1], dtype=torch.long, device=hidden.device)
    log_sum_exp = linear_cross_entropy_with_scores(
        hidden,
        weight,
        labels,
        group,
        ("log_sum_exp",),
        reduction="none",
        columns=columns,
        vocab_size=vocab_size,
        temperature=options.temperature,
        workspace_bytes=options.workspace_bytes,
        local_bias=bias,
    ).tokens.log_sum_exp
    is_own = (ids >= columns[0]) & (ids < end)
    places = torch.where(is_own, ids - columns[0], 0)
    states = hidden if group is None else regions.copy(hidden, group)  # also where there are no ids
    if weight.shape[0] == 0:
        own = states[..., :0].float().sum(-1, keepdim=True).expand(ids.shape)
    else:
        own = (weight[places].float() @ states.unsqueeze(-1).float()).squeeze(-1)
        if bias is not None:
            own = own + bias[places].float()
        own = torch.where(is_own, own, 0.0)
    at_ids = own if group is None else regions.reduce(own, group)
    value = at_ids / options.temperature - log_sum_exp.unsqueeze(-1)
    if not is_checked:
        with torch.no_grad():
            held = is_own.float()
            is_held = (held if group is None else regions.reduce(held, group)) > 0.0
        value = torch.where(is_held, value, torch.nan)
    return torch.where(ids == options.ignore_index, 0.0, value)


def _check_ids(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    group: ProcessGroup | None,
    columns: Sequence[int],
    options: _vocab_ops.Options,
) -> None:
    """Raise what logits_at says of these ids, in the name of this function."""
    # Logits of this shape that are one number in memory: only what does not fit is of interest.
    logits = hidden.new_zeros(()).expand(*hidden.shape[:-1], weight.shape[0])
    asked = _C.TokenOptions(
        columns=columns, vocab_size=options.vocab_size, ignore_index=options.ignore_index, check_labels=True
    )
    try:
        _C.vocab_logits_at(logits, ids, group, asked)
    except (IndexError, TypeError, ValueError) as error:
        text = str(error).replace("vocab.logits_at", "vocab.linear_log_probabilities_at", 1)
        raise type(error)(text) from None


_LOG_PROBABILITIES_AT = _vocab_ops.Operator(
    _linear_log_probabilities_at,
    "Tensor hidden, Tensor weight, Tensor ids, str? group",
    _vocab_ops.Options,
    f"{_vocab_ops.LABELS}, int? workspace_bytes, Tensor? local_bias",
    1,
    lambda hidden, weight, *inputs, **fields: _vocab_ops.of_ids(hidden, *inputs, **fields),
    differentiable=("hidden", "weight", "local_bias"),
)


def jensen_shannon_divergence(
    local_logits: Tensor,
    local_target_logits: Tensor,
    group: ProcessGroup | None = None,
    *,
    beta: float = 0.5,
    columns: Columns | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return the generalised Jensen-Shannon divergence from other logits' softmax per token, float32.

    beta KL(target || m) + (1 - beta) KL(own || m) with m = beta target + (1 - beta) own; a beta of 0 is
    KL(target || own), one of 1 KL(own || target). The gradient goes to `local_logits` alone. Holds a few
    float32 copies of the logits.

    >>> import torch
    >>> round(float(jensen_shannon_divergence(torch.zeros(1, 8), torch.ones(1, 8))), 4)
    0.0
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"vocab.jensen_shannon_divergence: a beta of {beta} is not between 0 and 1.")
    logits, group, columns = vocab_part("jensen_shannon_divergence", local_logits, group, columns)
    return _DIVERGENCE(
        logits, local_part(local_target_logits), group, columns=columns, vocab_size=vocab_size,
        temperature=temperature, beta=beta,
    )  # fmt: skip


def _jensen_shannon_divergence(
    logits: Tensor, target_logits: Tensor, group: ProcessGroup | None, options: _vocab_ops.Options
) -> Tensor:
    columns, vocab_size, beta = options.columns, options.vocab_size, options.beta
    shared = {"columns": columns, "vocab_size": vocab_size, "temperature": options.temperature}
    own = log_softmax(logits.float(), group, **shared)
    with torch.no_grad():
        target = log_softmax(target_logits.float(), group, **shared)
    if vocab_size is not None and columns is not None:
        valid = max(min(columns[1], vocab_size) - columns[0], 0)
        own, target = own[..., :valid], target[..., :valid]
    elif vocab_size is not None:
        first = logits.shape[-1] * (0 if group is None else group.rank())
        valid = min(max(vocab_size - first, 0), logits.shape[-1])
        own, target = own[..., :valid], target[..., :valid]

    def divergence(of: Tensor, other: Tensor) -> Tensor:
        # A probability of 0 counts 0, whatever the logarithms are.
        p = of.exp()
        return torch.where(p > 0, p * (of - other).nan_to_num(0.0, 0.0, 0.0), 0.0).sum(-1)

    if beta == 0.0:
        part = divergence(target, own)
    elif beta == 1.0:
        part = divergence(own, target)
    else:
        mixed = torch.logaddexp(target + math.log(beta), own + math.log1p(-beta))
        part = beta * divergence(target, mixed) + (1.0 - beta) * divergence(own, mixed)
    return part if group is None else regions.reduce(part, group)


_DIVERGENCE = _vocab_ops.Operator(
    _jensen_shannon_divergence,
    "Tensor logits, Tensor target_logits, str? group",
    _vocab_ops.Options,
    f"{_vocab_ops.COLUMNS}, float temperature, float beta",
    1,
    _vocab_ops.of_tokens,
)


class _LinearDivergence(torch.autograd.Function):
    """The divergence by parts of the tokens; backward computes each part's logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        own: tuple[Tensor, ...],
        target: tuple[Tensor, ...],
        group: ProcessGroup | None,
        beta: float,
        temperature: float,
        rows: int,
        *leaves: Tensor | None,
    ) -> Tensor:
        ctx.settings = own, target, beta, temperature, rows
        hidden = own[0]
        sums = torch.zeros(2, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for first in range(0, hidden.shape[0], rows):
            part = slice(first, first + rows)
            log_q, log_p, log_mixed = _logarithms(own, target, beta, temperature, part)
            if beta < 1.0:
                sums[0, part] = _divergence(log_p, log_q if beta == 0.0 else log_mixed)
            if beta > 0.0:
                sums[1, part] = _divergence(log_q, log_mixed)
        if group is not None:
            sums = regions.reduce(sums, group)
        # Of the student from the mixture, over all ids: its gradient needs it.
        ctx.save_for_backward(sums[1])
        return sums[0] if beta == 0.0 else beta * sums[0] + (1.0 - beta) * sums[1] if beta < 1.0 else sums[1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        own, target, beta, temperature, rows = ctx.settings
        hidden, weight, bias, _ = own
        (of_student,) = ctx.saved_tensors
        factor = gradients[0].float().unsqueeze(-1) / temperature
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[6:]
        of_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        of_weight = (
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_weight else None
        )
        of_bias = (
            torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device) if need_bias else None
        )
        for first in range(0, hidden.shape[0], rows):
            part = slice(first, first + rows)
            log_q, log_p, log_mixed = _logarithms(own, target, beta, temperature, part)
            q = log_q.exp()
            if beta == 0.0:
                slope = q - log_p.exp()
            else:
                slope = torch.where(q > 0, q * (log_q - log_mixed - of_student[part].unsqueeze(-1)), 0.0)
                slope *= 1.0 - beta if beta < 1.0 else 1.0
            slope *= factor[part]
            if need_hidden:
                of_hidden[part] = slope.to(weight.dtype) @ weight
            if of_weight is not None:
                of_weight += slope.to(hidden.dtype).t() @ hidden[part]
            if of_bias is not None:
                of_bias += slope.sum(0)
        return (
            *(None,) * 6,
            of_hidden.to(hidden.dtype) if need_hidden else None,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None or bias is None else of_bias.to(bias.dtype),
        )


def _logarithms(
    own: tuple[Tensor, ...], target: tuple[Tensor, ...], beta: float, temperature: float, part: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log q of the student, log p of the teacher and of what the student is held against."""

    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None, log_sum_exp: Tensor) -> Tensor:
        logits = (hidden[part] @ weight.t()).float()
        if bias is not None:
            logits += bias.float()
        return logits.div_(temperature).sub_(log_sum_exp[part].unsqueeze(-1))

    log_q, log_p = of(*own), of(*target)
    if beta in (0.0, 1.0):
        return log_q, log_p, log_p
    return log_q, log_p, torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))


def _divergence(of: Tensor, other: Tensor) -> Tensor:
    p = of.exp()
    return torch.where(p > 0, p * (of - other), 0.0).sum(-1)


def linear_jensen_shannon_divergence(
    hidden: Tensor,
    local_weight: Tensor,
    target_hidden: Tensor,
    local_target_weight: Tensor,
    group: ProcessGroup | None = None,
    *,
    beta: float = 0.5,
    columns: Columns | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    workspace_bytes: int | None = None,
    local_bias: Tensor | None = None,
    local_target_bias: Tensor | None = None,
) -> Tensor:
    """Return jensen_shannon_divergence of a student's and a teacher's hidden states, without all logits.

    Tensors as in linear_cross_entropy, the teacher's with a width of their own. The gradient goes to the
    student alone. What exists at a time of both models' logits stays near `workspace_bytes` (default: 256
    MiB), and backward computes them again.

    >>> import torch
    >>> hidden, weight = torch.ones(1, 4), torch.eye(4)
    >>> round(float(linear_jensen_shannon_divergence(hidden, weight, hidden, weight)), 4)
    0.0
    """
    name = "linear_jensen_shannon_divergence"
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"vocab.{name}: a beta of {beta} is not between 0 and 1.")
    weight, group, columns = vocab_part(name, local_weight, group, columns, dim=0)
    hidden, bias = whole_on_group(hidden), local_part(local_bias)
    target = whole_on_group(target_hidden), local_part(local_target_weight), local_part(local_target_bias)
    if target[1].shape[0] != weight.shape[0] or target[0].shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"vocab.{name}: hidden states of {list(hidden.shape)} and a weight of {list(weight.shape)} "
            f"beside a teacher's of {list(target[0].shape)} and {list(target[1].shape)}. Tokens and ids have "
            "to match."
        )
    return _LINEAR_DIVERGENCE(
        hidden, weight, *target[:2], group, columns=columns, vocab_size=vocab_size, temperature=temperature,
        beta=beta, workspace_bytes=workspace_bytes, local_bias=bias, local_target_bias=target[2],
    )  # fmt: skip


def _linear_jensen_shannon_divergence(
    hidden: Tensor,
    weight: Tensor,
    target_hidden: Tensor,
    target_weight: Tensor,
    group: ProcessGroup | None,
    options: _vocab_ops.Options,
) -> Tensor:
    columns, vocab_size, bias = options.columns, options.vocab_size, options.local_bias
    first = (weight.shape[0] * (0 if group is None else group.rank())) if columns is None else columns[0]
    valid = weight.shape[0] if vocab_size is None else min(max(vocab_size - first, 0), weight.shape[0])
    workspace = 256 * 2**20 if options.workspace_bytes is None else options.workspace_bytes
    shape = hidden.shape[:-1]

    def model(states: Tensor, rows: Tensor, addend: Tensor | None) -> tuple[Any, ...]:
        flat = states.detach().reshape(-1, states.shape[-1])
        labels = torch.zeros(flat.shape[0], dtype=torch.long, device=flat.device)
        scores = linear_cross_entropy_with_scores(
            flat, rows.detach(), labels, group, ("log_sum_exp",), reduction="none", columns=columns,
            vocab_size=vocab_size, temperature=options.temperature, workspace_bytes=workspace,
            local_bias=None if addend is None else addend.detach(),
        )  # fmt: skip
        kept = None if addend is None else addend.detach()[:valid]
        return flat, rows.detach()[:valid], kept, scores.tokens.log_sum_exp.float()

    with torch.no_grad():
        own_model = model(hidden, weight, bias)
        target_model = model(target_hidden, target_weight, options.local_target_bias)
    rows = max(1, workspace // (6 * 4 * max(valid, 1)))  # six float32 copies of a part's logits
    leaves = (hidden if group is None else regions.copy(hidden, group)).reshape(-1, hidden.shape[-1])
    value = _LinearDivergence.apply(
        own_model, target_model, group, options.beta, options.temperature, rows,
        leaves, weight[:valid], None if bias is None else bias[:valid],
    )  # fmt: skip
    return value.reshape(shape)


_LINEAR_DIVERGENCE = _vocab_ops.Operator(
    _linear_jensen_shannon_divergence,
    "Tensor hidden, Tensor weight, Tensor target_hidden, Tensor target_weight, str? group",
    _vocab_ops.Options,
    f"{_vocab_ops.COLUMNS}, float temperature, float beta, int? workspace_bytes, Tensor? local_bias, "
    "Tensor? local_target_bias",
    1,
    _vocab_ops.of_tokens,
    differentiable=("hidden", "weight", "local_bias"),
)
