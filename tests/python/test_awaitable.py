"""Awaitable, NoWait, LazyAwaitable and LazyNoWait."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from tessera.distributed.types import Awaitable, LazyAwaitable, LazyNoWait, NoWait


class Counting(Awaitable):
    def __init__(self, value):
        super().__init__()
        self.waits = 0
        self.raw = value

    def _wait_impl(self):
        self.waits += 1
        if isinstance(self.raw, Exception):
            raise self.raw
        return self.raw


class Lazy(LazyAwaitable):
    def __init__(self, raw):
        super().__init__()
        self._raw = raw
        self._waits = 0

    def _wait_impl(self):
        self._waits += 1
        return self._raw


class WithoutSuper(Awaitable):
    def __init__(self):
        pass

    def _wait_impl(self):
        return 1


def test_wait_runs_once_and_callbacks_in_order():
    result = Counting("a")
    result.callbacks.append(lambda text: text + "b")
    result.callbacks.append(lambda text: text + "c")
    assert result.wait() == "abc"
    assert result.wait() == "abc"
    assert result.waits == 1


def test_error_is_raised_by_every_wait():
    result = Counting(LookupError("gone"))
    for _ in range(2):
        with pytest.raises(LookupError, match="gone"):
            result.wait()
    assert result.waits == 1


def test_awaitable_is_abstract():
    with pytest.raises(TypeError):
        Awaitable()


def test_subclass_need_not_call_the_constructor():
    result = WithoutSuper()
    result.callbacks.append(lambda value: value + 1)
    assert result.wait() == 2


def test_no_wait_returns_its_value_through_callbacks():
    result = NoWait([1])
    assert result.wait() == [1]
    result = NoWait(2)
    result.callbacks.append(lambda value: value * 3)
    assert result.wait() == 6
    assert issubclass(NoWait, Awaitable)


def test_nothing_waits_before_the_first_use():
    lazy = Lazy(torch.ones(3))
    copies = [lazy, {"key": lazy}]
    assert repr(lazy) == "Lazy(not waited for yet)"
    assert not hasattr(lazy, "__array_interface__")
    assert lazy in {lazy: 1}
    assert copies[0] is lazy
    assert lazy._waits == 0
    assert lazy.sum() == 3
    assert lazy._waits == 1


def test_torch_functions_take_it_for_its_value():
    lazy = Lazy(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert torch.equal(torch.cat([lazy, torch.zeros(1, 2)]), torch.tensor([[1.0, 2], [3, 4], [0, 0]]))
    assert torch.equal(torch.stack([lazy, lazy])[0], lazy.wait())
    assert torch.equal(torch.nn.functional.linear(lazy, torch.eye(2)), lazy.wait())
    assert torch.equal(torch.add(input=lazy, other=lazy), lazy.wait() * 2)
    assert torch.equal(torch.ones(2, 2) @ lazy, torch.tensor([[4.0, 6.0], [4.0, 6.0]]))
    assert lazy._waits == 1


def test_gradient_flows_through_it():
    weight = torch.ones(3, requires_grad=True)
    loss = (LazyNoWait(weight * 2) * 3).sum()
    loss.backward()
    assert weight.grad.tolist() == [6.0] * 3


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne"]
)
def test_operators_work_on_both_sides(name):
    function = getattr(operator, name)
    value = torch.tensor([1.0, 2.0, 5.0])
    assert torch.equal(function(Lazy(value), 2.0), function(value, 2.0))
    assert torch.equal(function(3.0, Lazy(value)), function(3.0, value))
    assert torch.equal(function(Lazy(value), Lazy(value)), function(value, value))
    assert torch.equal(function(value, Lazy(value)), function(value, value))


def test_integer_operators_and_conversions():
    lazy = LazyNoWait(6)
    assert (lazy & 3, lazy | 1, lazy ^ 2, lazy << 1, lazy >> 1, ~lazy) == (2, 7, 4, 12, 3, -7)
    assert (1 << lazy, 5 - lazy, divmod(lazy, 4)) == (64, -1, (1, 2))
    assert (int(lazy), float(lazy), complex(lazy), bool(lazy), abs(-lazy), +lazy) == (
        6,
        6.0,
        6 + 0j,
        True,
        6,
        6,
    )
    assert [0] * lazy == [0] * 6
    assert list(range(10))[lazy] == 6


def test_containers_are_indexed_iterated_and_searched():
    lazy = LazyNoWait({"a": 1, "b": 2})
    assert lazy["a"] == 1
    assert "b" in lazy
    assert len(lazy) == 2
    assert list(lazy) == ["a", "b"]
    lazy["c"] = 3
    del lazy["a"]
    assert lazy.wait() == {"b": 2, "c": 3}
    assert list(lazy.keys()) == ["b", "c"]
    tensor = LazyNoWait(torch.arange(6).reshape(2, 3))
    assert torch.equal(tensor[:, 1], torch.tensor([1, 4]))
    assert tensor[1, LazyNoWait(2)] == 5
    assert tensor.shape == (2, 3)
    assert LazyNoWait(lambda x: x + 1)(4) == 5


def test_in_place_operators_write_the_value():
    value = torch.zeros(2)
    lazy = LazyNoWait(value)
    lazy += 1
    assert lazy is value
    assert value.tolist() == [1.0, 1.0]


def test_missing_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError):
        LazyNoWait(torch.ones(1)).no_such_name  # noqa: B018


def test_callbacks_run_on_lazy_use():
    lazy = Lazy(torch.ones(2))
    lazy.callbacks.append(lambda tensor: tensor * 5)
    assert (lazy + 0).tolist() == [5.0, 5.0]
    assert repr(LazyNoWait(3)) == "LazyNoWait(not waited for yet)"


def test_copies_are_independent_until_waited_for():
    lazy = LazyNoWait([1])
    other = copy.copy(lazy)
    assert other.wait() is lazy.wait()
