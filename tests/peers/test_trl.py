"""TRL's own log-probabilities and entropies against ours of the same names."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch
from projects import need, only_files_of, stand_in

need("trl")


def trl():
    """Return trl.trainer.utils."""
    no = {f"is_{name}_available": lambda: False for name in ("comet", "triton", "peft", "rich")}
    only_files_of("trl", "trainer")
    for name in (
        "accelerate",
        "accelerate.logging",
        "datasets",
        "huggingface_hub",
        "pandas",
        "transformers",
        "transformers.models",
        "transformers.models.auto",
        "transformers.models.auto.auto_factory",
        "transformers.utils",
        "trl.kernels",
        "trl.kernels.chunked_logprob",
        "trl.trainer.model_config",
    ):
        stand_in(name, get_logger=lambda name: None, **no)
    return importlib.import_module("trl.trainer.utils")


def both(ours, theirs, logits, *words, **named):
    # What TRL makes of 16 bits is rounded at every step; here once.
    is_short = logits.dtype != torch.float32
    if is_short:
        assert theirs(logits, *words, **named).dtype == logits.dtype
    found = []
    for function, given in ((ours, logits), (theirs, logits.float())):
        leaf = given.clone().requires_grad_(True)
        values = function(leaf, *words, **named)
        values = values if isinstance(values, tuple) else (values,)
        weighted = [(v * torch.arange(1.0, v.numel() + 1).view(v.shape)).sum() for v in values]
        torch.stack([value for value in weighted if value.requires_grad]).sum().backward()
        found.append([*(value.detach() for value in values), leaf.grad])
    rounding = 2**-7 if is_short else 1e-5
    for mine, expected in zip(*found, strict=True):
        assert mine.dtype == logits.dtype
        torch.testing.assert_close(mine.float(), expected.float(), rtol=rounding, atol=rounding)


def compare():
    theirs = trl()
    from tessera.integrations import trl as ours

    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(2, 7, 31, generator=generator) * 3
    index = torch.randint(31, (2, 7), generator=generator)
    several = torch.randint(31, (2, 7, 4), generator=generator)
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, 3:] = 0
    one, both_of = ours.selective_log_softmax, ours.selective_log_softmax_and_entropy
    for dtype in (torch.float32, torch.bfloat16):
        logits = whole.to(dtype)
        both(one, theirs.selective_log_softmax, logits, index)
        both(one, theirs.selective_log_softmax, logits, several)
        both(ours.entropy_from_logits, theirs.entropy_from_logits, logits, 3)
    for words in ({"temperature": 0.7}, {"row_mask": mask}, {"temperature": 1.5, "row_mask": mask.bool()}):
        both(one, theirs.selective_log_softmax, whole, index, **words)
        for has_gradient in (True, False):
            both(both_of, theirs.selective_log_softmax_and_entropy, whole, index, has_gradient, **words)
    for side in (ours, theirs):
        with pytest.raises(ValueError, match="temperature must be positive"):
            side.selective_log_softmax(whole, index, 0.0)
    assert "trl.trainer.utils.selective_log_softmax_and_entropy" in ours.install()
    assert theirs.selective_log_softmax is one


def test_functions_agree():
    # In a process of its own: what TRL would import is not there.
    subprocess.run([sys.executable, "-W", "ignore", __file__], check=True, timeout=240)


if __name__ == "__main__":
    compare()
