"""Optimizers of embedding tables, by torchrec's module path."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tessera.optim._optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
)

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "LarsSGD",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "in_backward_optimizer_filter",
]


def in_backward_optimizer_filter(
    named_parameters: Iterator[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the parameters that backward does not step; with `include`, those that it does.

    >>> list(in_backward_optimizer_filter(nn.Linear(1, 1).named_parameters(), include=True))
    []
    """
    for name, parameter in named_parameters:
        if hasattr(parameter, "_in_backward_optimizers") == include:
            yield name, parameter
