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
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"^optim: the state has nothing for parameter 0 of group 0\.$"):
        optimizer.load_state_dict({**state, "state": {}})
    with pytest.raises(
        ValueError, match=r"^optim: 'exp_avg' of parameter 0 has 2 elements in the state and 6"
    ):
        optimizer.load_state_dict({**state, "state": {0: {**state["state"][0], "exp_avg": torch.zeros(2)}}})


def test_is_an_optimizer_of_torch():
    """Schedules, groups, closures and the state of torch's and torchrec's own."""
    weights = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4, 3))]
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "lr": 0.5}]
    optimizer = optim.RowWiseAdagrad(groups, lr=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for weight in weights:
        weight.grad = torch.full_like(weight, 2.0)
    assert optimizer.step(lambda: 7) == 7
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.25]
    assert optimizer.state[weights[1]]["sum"].tolist() == [[4.0]] * 4
    assert optimizer.state[weights[0]]["step"].item() == 1.0
    torch.testing.assert_close(weights[1].detach(), torch.full((4, 3), 0.5))
    state = optimizer.state_dict()
    assert list(state["state"]) == [0, 1] and list(state["state"][0]) == ["step", "sum"]
    other = optim.RowWiseAdagrad(groups, lr=0.1)
    other.load_state_dict(state)
    assert other.state_dict()["param_groups"] == state["param_groups"]
    other.param_groups[0]["weight_decay"] = 0.5  # any number may change
    other.step()
    assert other.num_steps == 2 and other.state[weights[1]]["sum"].tolist() == [[8.0]] * 4
    with torch.device("meta"):
        optim.Adam([torch.nn.Parameter(torch.ones(2, 2))])
