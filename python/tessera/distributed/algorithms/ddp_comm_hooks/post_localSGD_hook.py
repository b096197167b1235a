"""Averaging over all ranks first and over a few later: the names of torch's post_localSGD_hook."""

import torch
import torch.distributed as dist

from tessera import _C
from tessera.distributed.algorithms.ddp_comm_hooks._native import run

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]


class PostLocalSGDState:
    """When to stop averaging over all ranks, and over which ranks to average then.

    Without a `subgroup`, the ranks of each host are one. Making it is collective.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ):
        if subgroup is None and post_local_gradient_allreduce:
            subgroup, _ = dist.new_subgroups(group_size=_C.get_local_size(dist.get_world_size()))
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.native = _C.post_local_sgd_hook(subgroup, start_localSGD_iter, post_local_gradient_allreduce)
        self.runner = _C.HookRunner(self.native)

    @property
    def iter(self) -> int:
        """Steps done."""
        return self.native.state()[1]["step"]


def post_localSGD_hook(
    state: PostLocalSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average over all ranks, and from `start_localSGD_iter` on over the subgroup or not at all."""
    return run(state.runner, bucket, state.process_group)


post_localSGD_hook.__tessera_native__ = lambda state: state.native if state.process_group is None else None
