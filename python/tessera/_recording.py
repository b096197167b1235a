"""Gradients inside an operator of torch, whose inside records none by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_AUTOGRAD = [
    key
    for name in ("ADInplaceOrView", "AutogradFunctionality", "AutogradCPU", "AutogradCUDA", "AutogradOther")
    if (key := getattr(torch._C.DispatchKey, name, None)) is not None
]


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Record gradients, which the inside of an operator does not."""
    excluded = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _AUTOGRAD]
    for key in _AUTOGRAD:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for key, was in zip(_AUTOGRAD, excluded, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, was)
