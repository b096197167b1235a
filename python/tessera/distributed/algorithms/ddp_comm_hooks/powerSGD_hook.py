"""Gradients as products of thin matrices: the names of torch's powerSGD_hook.

Works with any number of buckets on any backend. State is kept by parameter name, so that
`start_powerSGD_iter` may be 0 and a checkpoint may go to another number of ranks.
"""

from typing import Any

import torch
import torch.distributed as dist

from tessera import _C
from tessera.distributed.algorithms.ddp_comm_hooks._native import run

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]


class PowerSGDState:
    """Options and memory of PowerSGD for one model. Pickles without its process group."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = True,
    ):
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        # Accepted for torch's sake: equal shapes are always batched, and statistics are for asking.
        self.compression_stats_logging_frequency = compression_stats_logging_frequency
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self._native: _C.PowerSgd | None = None
        self._runner: _C.HookRunner | None = None
        self._saved: Any = None
        self._batched = False

    def native(self, batched: bool) -> _C.PowerSgd:
        """Return the C++ hook with this state; made when it is first known which of the two it is."""
        if self._native is None:
            self._batched = batched
            self._native = _C.power_sgd_hook(
                _C.PowerSgdOptions(
                    matrix_approximation_rank=self.matrix_approximation_rank,
                    start_step=self.start_powerSGD_iter,
                    min_compression_rate=self.min_compression_rate,
                    use_error_feedback=self.use_error_feedback,
                    warm_start=self.warm_start,
                    orthogonalization_epsilon=self.orthogonalization_epsilon,
                    random_seed=self.random_seed,
                    batched=batched,
                )
            )
            if self._saved is not None:
                self._native.load_state(self._saved)
            self._runner = _C.HookRunner(self._native)
        if batched != self._batched:
            raise ValueError("PowerSGDState: one state cannot serve both powerSGD_hook and its batched form.")
        return self._native

    def runner(self, batched: bool) -> _C.HookRunner:
        self.native(batched)
        assert self._runner is not None
        return self._runner

    @property
    def iter(self) -> int:
        """Steps done."""
        return self._native.step if self._native is not None else 0

    def compression_stats(self) -> tuple[float, int, int]:
        """Return the rate of compression and the elements before and after it."""
        before, after = self._native.stats() if self._native is not None else (0, 0)
        return (before / after if after > 0 else 0, before, after)

    def __getstate__(self) -> dict:
        skipped = ("process_group", "_native", "_runner", "_saved")
        saved = {key: value for key, value in self.__dict__.items() if key not in skipped}
        saved["_saved"] = self._native.state() if self._native is not None else self._saved
        return saved

    def __setstate__(self, saved: dict) -> None:
        self.__dict__.update(saved)
        self.process_group = None
        self._native = None
        self._runner = None


def powerSGD_hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average each parameter's gradient as a product of two thin matrices."""
    return run(state.runner(batched=False), bucket, state.process_group)


def batched_powerSGD_hook(
    state: PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average each bucket, seen as one square matrix, as a product of two thin matrices."""
    return run(state.runner(batched=True), bucket, state.process_group)


powerSGD_hook.__tessera_native__ = lambda state: (
    state.native(batched=False) if state.process_group is None else None
)
batched_powerSGD_hook.__tessera_native__ = lambda state: (
    state.native(batched=True) if state.process_group is None else None
)
