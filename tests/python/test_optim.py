"""The optimizers of tables beside torch's own, with rows that occur several times."""

import pytest
import torch
from tessera import optim

PAIRS = [
    (optim.SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    (optim.Adagrad, torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.01, "eps": 1e-6}),
    (optim.Adagrad, torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    (optim.Adam, torch.optim.Adam, {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.01}),
    (optim.AdamW, torch.optim.AdamW, {"lr": 0.05}),
]
OTHERS = [
    optim.RowWiseAdagrad,
    optim.PartialRowWiseAdam,
    optim.LAMB,
    optim.PartialRowWiseLAMB,
    optim.LarsSGD,
]


def bag_loss(weight, sparse, seed):
    """Every row is looked up, several of them more than once."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.arange(6), torch.randint(6, (10,), generator=generator)])
    offsets = torch.tensor([0, 3, 3, 9])
    pooled = torch.nn.functional.embedding_bag(ids, weight, offsets, mode="sum", sparse=sparse)
    return (pooled * torch.rand(pooled.shape, generator=generator)).sum()


@pytest.mark.parametrize(("ours", "theirs", "numbers"), PAIRS)
@pytest.mark.parametrize("sparse", [True, False])
def test_steps_are_torchs(ours, theirs, numbers, sparse):
    torch.manual_seed(1)
    start = torch.randn(6, 5)
    mine = torch.nn.Parameter(start.clone())
    wanted = torch.nn.Parameter(start.clone())
    optimizer = ours({"table": mine}, **numbers)
    judge = theirs([wanted], **numbers)
    for step in range(4):
        bag_loss(mine, sparse, step).backward()
        bag_loss(wanted, False, step).backward()
        optimizer.step()
        judge.step()
        optimizer.zero_grad()
        judge.zero_grad()
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
    assert optimizer.num_steps == 4
    assert mine.grad is None


@pytest.mark.parametrize("sparse", [True, False])
def test_passes_add_up_and_are_clipped_as_torch_does(sparse):
    torch.manual_seed(2)
    start = torch.randn(6, 5)
    mine = torch.nn.Parameter(start.clone())
    wanted = torch.nn.Parameter(start.clone())
    optimizer = optim.SGD([mine], lr=0.1)
    for seed in (3, 4):
        bag_loss(mine, sparse, seed).backward()
        bag_loss(wanted, False, seed).backward()
    norm = optimizer.clip_grad_norm(0.5)
    assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_([wanted], 0.5).item(), rel=1e-5)
    optimizer.step()
    torch.testing.assert_close(mine, start - 0.1 * wanted.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ours", [ours for ours, _, _ in PAIRS] + OTHERS)
def test_rows_without_a_gradient_stay(ours):
    torch.manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(6, 5))
    before = weight.detach().clone()
    optimizer = ours([weight], lr=0.1)
    for _ in range(2):
        weight.grad = torch.sparse_coo_tensor([[4, 1, 4]], torch.ones(3, 5), (6, 5))
        optimizer.step()
    moved = (weight != before).any(1)
    assert moved.tolist() == [False, True, False, False, True, False]


@pytest.mark.parametrize("ours", [ours for ours, _, _ in PAIRS] + OTHERS)
def test_state_and_rate_go_into_a_dictionary_and_back(ours):
    torch.manual_seed(4)
    first = torch.nn.Parameter(torch.randn(6, 5))
    second = torch.nn.Parameter(first.detach().clone())
    one = ours({"t": first}, lr=0.1)
    two = ours({"t": second}, lr=0.3)
    bag_loss(first, True, 1).backward()
    one.step()
    two.load_state_dict(one.state_dict())
    with torch.no_grad():
        second.copy_(first)
    one.zero_grad()
    for weight, optimizer in ((first, one), (second, two)):
        bag_loss(weight, True, 2).backward()
        optimizer.step()
    assert torch.equal(first, second)
    one.param_groups[0]["lr"] = 0.0
    before = first.detach().clone()
    one.step()
    if ours is not optim.LarsSGD:  # its momentum goes on
        assert torch.equal(first, before)


def test_says_what_is_wrong():
    with pytest.raises(ValueError, match=r"^optim: there are no tables to optimize\.$"):
        optim.SGD([])
    weight = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"learning_rate is -1; it must be finite and not negative"):
        optim.SGD([weight], lr=-1.0)
    optimizer = optim.Adam({"t": weight})
    with pytest.raises(ValueError, match=r"^embedding\.load_state_dict: 'step' is missing\.$"):
        optimizer.load_state_dict({"state": {}, "lr": 0.1})
