"""Rounds the tables of a model to few bits.

>>> from tessera.modules.embedding_configs import EmbeddingBagConfig
>>> tables = [EmbeddingBagConfig(4, 16, "t", feature_names=["f"])]
>>> model = nn.Sequential(EmbeddingBagCollection(tables))
>>> quantize_embeddings(model, torch.qint8, inplace=False)[0].embedding_bags["t"].weight.shape
torch.Size([4, 32])
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from tessera.modules.embedding_modules import EmbeddingBagCollection
from tessera.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from tessera.quant.embedding_modules import QuantConfig

__all__ = ["quantize_embeddings"]


def quantize_embeddings(
    module: nn.Module,
    dtype: torch.dtype,
    inplace: bool,
    additional_qconfig_spec_keys: list[type[nn.Module]] | None = None,
    additional_mapping: dict[type[nn.Module], type[nn.Module]] | None = None,
    output_dtype: torch.dtype = torch.float32,
    per_table_weight_dtype: dict[str, torch.dtype] | None = None,
) -> nn.Module:
    """Put rounded collections in the place of the float ones; return the model.

    `dtype` is torch.qint8, quint4x2, quint2x4, float16, bfloat16 or float32. `additional_mapping` names
    further types of modules and what has a `from_float` for them; `additional_qconfig_spec_keys` those of
    them that get the types. With `inplace`, `module` itself is changed, unless it is a collection.
    """
    mapping: dict[type, type] = {EmbeddingBagCollection: QuantEmbeddingBagCollection}
    mapping |= additional_mapping or {}
    typed = {EmbeddingBagCollection, *(additional_qconfig_spec_keys or ())}
    qconfig = QuantConfig.of(dtype, output_dtype, per_table_weight_dtype)

    def rounded(own: nn.Module) -> nn.Module | None:
        if type(own) not in mapping:
            return None
        if type(own) in typed:
            own.qconfig = qconfig
        return mapping[type(own)].from_float(own)

    if not inplace:
        module = copy.deepcopy(module)
    whole = rounded(module)
    if whole is not None:
        return whole
    waiting = [module]
    while waiting:
        parent = waiting.pop()
        for name, child in parent.named_children():
            made = rounded(child)
            if made is None:
                waiting.append(child)
            else:
                setattr(parent, name, made)
    return module
