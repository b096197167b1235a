"""A training program as users of NeMo-RL write it: policy optimisation of a language model over ranks.

Its imports that differ are those of `distributed.model_utils` and `algorithms.logits_sampling_utils`, from
`nemo_rl` or from `tessera`. As in NeMo-RL torch cuts the layers over the ranks of a mesh, the last one by the
vocabulary, so that no rank has whole logits. Rollouts are drawn with top-k and top-p, and the policy learns
with the probabilities that its generator had. Side "alone" is the same training in plain torch, in one
process and with whole logits.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCAB, WIDTH, HEADS, LONGEST, END = 56, 16, 4, 8, 0
PROMPTS, SAMPLES, PROMPT = 4, 6, 3  # prompts of a step, answers to each, tokens of a prompt
TOP_K, TOP_P = 24, 0.97
CLIP_LOW, CLIP_HIGH, DIVERGENCE, ENTROPY = 0.2, 0.28, 0.02, 0.003


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        # As many heads as this rank has.
        q, k, v = (
            part(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList([Layer()])
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        # The body is in double precision, where sums in another order hardly show; logits never are.
        return self.lm_head(self.norm(x)).float()


CUT = {
    **{f"layers.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")},
    **{f"layers.*.{name}": RowwiseParallel() for name in ("o", "down")},
    "lm_head": ColwiseParallel(use_local_output=False),
}


class Sharded:
    """What the program takes from NeMo-RL's names, on a mesh of data and tensor ranks."""

    def __init__(self, root: str, tensor: int) -> None:
        self.utils = importlib.import_module(f"{root}.distributed.model_utils")
        self.sampling = importlib.import_module(f"{root}.algorithms.logits_sampling_utils")
        self.params = self.sampling.TrainingSamplingParams(top_k=TOP_K, top_p=TOP_P)
        self.mesh = init_device_mesh(
            "cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("dp", "tp")
        )
        self.group, self.data = self.mesh.get_group("tp"), self.mesh.get_group("dp")
        share, rank = VOCAB // tensor, self.group.rank()
        self.range = {"vocab_start_index": rank * share, "vocab_end_index": (rank + 1) * share}

    def cut(self, model: Policy) -> Policy:
        return parallelize_module(model, self.mesh["tp"], CUT)

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that are this data rank's."""
        return rows.chunk(self.data.size())[self.data.rank()]

    def everyones(self, value: torch.Tensor) -> torch.Tensor:
        return self.utils.group_all_reduce_sum(value, self.data)

    def whole(self, value: torch.Tensor) -> torch.Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def best(self, logits: DTensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The best logits of every place and their ids, and of these what the generator draws from."""
        values, ids = self.utils.distributed_vocab_topk(logits.to_local(), count, self.group, **self.range)
        return self.sampling.apply_top_k_top_p(values, None, TOP_P)[0], ids

    def likeliest(self, logits: DTensor) -> torch.Tensor:
        return self.utils.vocab_parallel_argmax(logits.to_local(), tp_group=self.group)

    def learned(self, logits: DTensor, ids: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the next tokens, with the way of NeMo-RL's Megatron policy."""
        return self.utils.from_parallel_logits_to_logprobs(
            logits.to_local(), ids, tp_group=self.group, sampling_params=self.params, **self.range
        )

    def old(self, logits: DTensor, ids: torch.Tensor) -> torch.Tensor:
        """The same of the policy that drew them, with the way of its DTensor policy."""
        return self.utils.get_logprobs_from_vocab_parallel_logits(logits, ids, sampling_params=self.params)

    def plain(self, logits: DTensor, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Log-probabilities without the generator's filters, of sequences packed into one."""
        starts = F.pad(lengths.cumsum(0), (1, 0))
        used = torch.arange(ids.shape[1]) < lengths[:, None]
        return self.utils.from_parallel_logits_to_logprobs_packed_sequences(
            logits.to_local()[used][None],
            ids[used][None],
            starts,
            ids.shape[1],
            group=self.group,
            **self.range,
        )

    def minus_entropy(self, logits: DTensor) -> torch.Tensor:
        return self.utils.ChunkedDistributedEntropy.apply(logits.to_local(), 4, self.group, False)

    def save(self, folder: str, model: Policy, optimizer: torch.optim.Optimizer) -> None:
        states = get_state_dict(model, optimizer)
        dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)

    def load(self, folder: str, model: Policy, optimizer: torch.optim.Optimizer) -> None:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )


class Alone:
    """The same in plain torch."""

    def cut(self, model: Policy) -> Policy:
        return model

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def everyones(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def whole(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def filtered(self, logits: torch.Tensor, count: int) -> torch.Tensor:
        """Logits of ids that are not among the best, or behind the share of top-p, are -inf."""
        values, order = logits.sort(-1, descending=True)
        values = values.masked_fill(torch.arange(logits.shape[-1]) >= count, -torch.inf)
        before = F.pad(values.softmax(-1).cumsum(-1)[..., :-1], (1, 0))
        values = values.masked_fill(before >= TOP_P, -torch.inf)
        return torch.full_like(logits, -torch.inf).scatter(-1, order, values)

    def best(self, logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = logits.topk(count)
        return self.filtered(values, count), ids

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)

    def at(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    def learned(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.at(self.filtered(logits, TOP_K), ids)

    def old(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.learned(logits, ids)

    def plain(self, logits: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        follows = torch.arange(1, ids.shape[1]) < lengths[:, None]
        return self.at(logits, ids) * follows

    def minus_entropy(self, logits: torch.Tensor) -> torch.Tensor:
        return (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)

    def save(self, folder: str, model: Policy, optimizer: torch.optim.Optimizer) -> None:
        torch.save([model.state_dict(), optimizer.state_dict()], os.path.join(folder, "alone.pt"))

    def load(self, folder: str, model: Policy, optimizer: torch.optim.Optimizer) -> None:
        states = torch.load(os.path.join(folder, "alone.pt"))
        for part, state in zip((model, optimizer), states, strict=True):
            part.load_state_dict(state)


def build(side: Sharded | Alone) -> tuple[Policy, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = side.cut(Policy().double())
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5, weight_decay=0.01, foreach=False)


@torch.no_grad()
def rollouts(side: Sharded | Alone, model: Policy, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw answers to this data rank's prompts; return the sequences and their lengths."""
    generator = torch.Generator().manual_seed(step)
    prompts = torch.randint(1, VOCAB, (PROMPTS, PROMPT), generator=generator).repeat_interleave(SAMPLES, 0)
    noise = -(-torch.rand(len(prompts), LONGEST, TOP_K, generator=generator).log()).log()
    ids, noise = side.own(prompts), side.own(noise)
    lengths = torch.full((len(ids),), LONGEST)
    for place in range(PROMPT, LONGEST):
        values, candidates = side.best(model(ids)[:, -1:], TOP_K)
        drawn = candidates.gather(-1, (values + noise[:, place : place + 1]).argmax(-1, keepdim=True))[..., 0]
        ended = lengths < LONGEST
        drawn = drawn.masked_fill(ended[:, None], END)
        lengths = torch.where(~ended & (drawn[:, 0] == END), place + 1, lengths)
        ids = torch.cat([ids, drawn], 1)
    return ids, lengths


def rewards(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Answers are the better the more of their tokens are even and below the token before."""
    answers = torch.arange(PROMPT, LONGEST) < lengths[:, None]
    right = (ids[:, PROMPT:] % 2 == 0).double() + (ids[:, PROMPT:] < ids[:, PROMPT - 1 : -1]).double()
    return (right * answers).sum(1) / 2 / (LONGEST - PROMPT)


def advantages(reward: torch.Tensor) -> torch.Tensor:
    """How much better an answer is than the others to its prompt."""
    groups = reward.view(-1, SAMPLES)
    others = (groups.sum(1, keepdim=True) - groups) / (SAMPLES - 1)
    return ((groups - others) / (groups.std(1, keepdim=True) + 1e-3)).view(-1)


def policy_loss(
    learned: torch.Tensor, old: torch.Tensor, plain: torch.Tensor, frozen: torch.Tensor, gain: torch.Tensor
) -> torch.Tensor:
    """The clipped loss of every token, with its divergence from the policy that training began with."""
    ratio = (learned - old).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    loss = torch.maximum(-gain[:, None] * ratio, -gain[:, None] * clipped)
    apart = frozen - plain
    return loss + DIVERGENCE * (apart.exp() - apart - 1)


def update(side, model, optimizer, batch: dict[str, torch.Tensor]) -> float:
    """One step of the optimizer over all data ranks; returns their loss."""
    ids, mask = batch["ids"], batch["mask"]
    logits = model(ids)
    learned = side.learned(logits, ids)
    plain = side.plain(logits, ids, batch["lengths"])
    # A token that the filters drop now has no probability to learn from.
    learned = torch.where((mask == 0) | learned.isinf(), batch["old"], learned)
    loss = policy_loss(learned, batch["old"], plain, batch["frozen"], batch["gain"])
    loss = loss + ENTROPY * side.minus_entropy(logits)[:, :-1]
    loss = (loss * mask).sum() / side.everyones(mask.sum())
    optimizer.zero_grad()
    loss.backward()
    squares = 0.0
    for parameter in model.parameters():
        gradient = parameter.grad
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        part.copy_(side.everyones(part))
        squares += float(side.whole(gradient.square().sum()))
    for parameter in model.parameters():
        parameter.grad.mul_(min(1.0, 1.0 / squares**0.5))
    optimizer.step()
    return float(side.everyones(loss.detach()))


def train(root: str, steps: int, folder: str, tensor: int = 0) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train, from a checkpoint after half of the steps; return losses and rewards, and the model's state.

    `tensor` ranks share the layers (0: all), and the others the prompts.
    """
    side = Alone() if root == "alone" else Sharded(root, tensor or dist.get_world_size())
    model, optimizer = build(side)
    frozen = copy.deepcopy(model).requires_grad_(False)
    found: list[float] = []
    for step in range(steps):
        if step == steps // 2:
            side.save(folder, model, optimizer)
            model, optimizer = build(side)
            side.load(folder, model, optimizer)
        ids, lengths = rollouts(side, model, step)
        reward = rewards(ids, lengths)
        places = torch.arange(1, LONGEST)
        mask = ((places >= PROMPT) & (places < lengths[:, None])).double()
        with torch.no_grad():
            batch = {"ids": ids, "lengths": lengths, "mask": mask, "gain": advantages(reward)}
            batch["old"] = side.old(model(ids), ids).masked_fill(mask == 0, 0.0)
            batch["frozen"] = side.plain(frozen(ids), ids, lengths)
        for half in range(2):  # of the answers: the second is learned from with older probabilities
            found.append(
                update(side, model, optimizer, {name: value[half::2] for name, value in batch.items()})
            )
        found.append(float(side.everyones(reward.sum())) / (PROMPTS * SAMPLES))
    with torch.no_grad():
        prompts = torch.tensor(list(itertools.product(range(1, 5), repeat=PROMPT)))
        answers = side.likeliest(model(prompts))[:, -1]
    state = {name: side.whole(value).clone() for name, value in model.state_dict().items()}
    return found, {**state, "answers": answers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", choices=("nemo_rl", "tessera", "alone"), default="tessera")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tensor", type=int, default=0)
    parser.add_argument("--folder", required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    found, _ = train(options.root, options.steps, options.folder, options.tensor)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
