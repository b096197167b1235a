"""Columns of tables on ranks: each part is a table of its own, and its features are sent to it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.distributed.embedding_sharding import EmbeddingShardingInfo
from tessera.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from tessera.distributed.types import QuantizedCommCodecs, ShardingEnv
from tessera.distributed.utils import PermutePooledEmbeddings

__all__ = ["CwPooledEmbeddingSharding"]


class CwPooledEmbeddingSharding(TwPooledEmbeddingSharding):
    """Pool columns of tables on their ranks.

    With `permute_embeddings` the columns of an output are put side by side when they are home, and
    `embedding_names` has each once; otherwise, and for variable batches, parts stay in the order of the
    ranks, as the `uncombined_` names say.
    """

    def __init__(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(sharding_infos, env, device, qcomm_codecs_registry)
        self._permute_embeddings = permute_embeddings
        names = self.uncombined_embedding_names()
        columns = [shard.shard_offsets[1] for shard in self.embedding_shard_metadata()]
        self._combined = {
            name: sorted((k for k, other in enumerate(names) if other == name), key=columns.__getitem__)
            for name in names
        }

    def embedding_names(self) -> list[str]:
        """Return the names of the outputs."""
        return list(self._combined) if self._permute_embeddings else self.uncombined_embedding_names()

    def embedding_dims(self) -> list[int]:
        """Return the columns of each output."""
        dims = self.uncombined_embedding_dims()
        if not self._permute_embeddings:
            return dims
        return [sum(dims[k] for k in places) for places in self._combined.values()]

    def uncombined_embedding_names(self) -> list[str]:
        """Return the names of the parts, in the order of the ranks."""
        return super().embedding_names()

    def uncombined_embedding_dims(self) -> list[int]:
        """Return the columns of the parts, in the order of the ranks."""
        return super().embedding_dims()

    def embedding_permute(self) -> list[int]:
        """Return the parts in the order of the combined outputs."""
        return [place for places in self._combined.values() for place in places]

    def _callbacks(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        permute = self.embedding_permute()
        if not self._permute_embeddings or permute == sorted(permute):
            return []
        return [PermutePooledEmbeddings(self.uncombined_embedding_dims(), permute, self._device)]
