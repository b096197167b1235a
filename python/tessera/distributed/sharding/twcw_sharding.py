"""Columns of tables on the ranks of one host."""

from __future__ import annotations

from tessera.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding

__all__ = ["TwCwPooledEmbeddingSharding"]


class TwCwPooledEmbeddingSharding(CwPooledEmbeddingSharding):
    """Pool columns of tables; that they share a host is the plan's doing."""
