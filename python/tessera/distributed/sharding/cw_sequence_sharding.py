"""Rows of single ids of tables whose columns lie on ranks."""

from __future__ import annotations

from tessera.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding

__all__ = ["CwSequenceEmbeddingSharding"]


class CwSequenceEmbeddingSharding(TwSequenceEmbeddingSharding):
    """Look up parts of rows: a feature is sent to every part, all of which have as many columns.

    `embedding_names` has an output once for each part, and `embedding_shard_metadata` its columns.
    """
