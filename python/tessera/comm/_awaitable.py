"""Results that are on their way."""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable
from typing import Any, Generic, TypeVar

W = TypeVar("W")


class Awaitable(abc.ABC, Generic[W]):
    """Hold a result that has to be waited for.

    A subclass says how to wait in ``_wait_impl``. That runs once; the functions in ``callbacks``
    then change the result one after the other, and later waits return the same value.

    >>> class Sum(Awaitable[int]):
    ...     def _wait_impl(self):
    ...         return 1 + 1
    >>> result = Sum()
    >>> result.callbacks.append(lambda value: value * 10)
    >>> result.wait()
    20
    """

    # Defaults of the class, for subclasses whose __init__ does not call this one.
    _callbacks: list[Callable[[W], W]] | None = None
    _is_done = False
    _value: Any = None
    _error: BaseException | None = None

    def __init__(self) -> None:
        self._callbacks = []

    @abc.abstractmethod
    def _wait_impl(self) -> W:
        """Return the raw result, waiting for it."""

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """The functions that change the result when it is waited for, in order."""
        if self._callbacks is None:
            self._callbacks = []
        return self._callbacks

    def wait(self) -> W:
        """Return the result, waiting for it the first time; an error is raised every time."""
        if self._error is not None:
            raise self._error
        if not self._is_done:
            try:
                value = self._wait_impl()
                for callback in self.callbacks:
                    value = callback(value)
            except BaseException as error:
                self._error = error
                raise
            self._value = value
            self._is_done = True
        return self._value


class NoWait(Awaitable[W]):
    """Hold a result that is there already.

    >>> NoWait(3).wait()
    3
    """

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


def _waited(value: Any) -> Any:
    """Return `value` with every LazyAwaitable in it replaced by its result."""
    if isinstance(value, LazyAwaitable):
        return value.wait()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_waited, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_waited, value))
    if isinstance(value, dict):
        return {key: _waited(item) for key, item in value.items()}
    return value


class LazyAwaitable(Awaitable[W]):
    """Stand in for a result that is waited for when it is first used.

    It may be used as if it were the result: by torch functions, operators, indexing, iteration,
    calls, and attributes. The later the first use, the more communication is hidden.

    >>> import torch
    >>> lazy = LazyNoWait(torch.tensor([1.0, 2.0]))
    >>> torch.sum(lazy + 1), lazy.shape
    (tensor(5.), torch.Size([2]))
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func(*_waited(args), **_waited(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that the awaitable itself lacks. Special names are looked for by
        # copy, pickle and debuggers, and must not wait.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self.wait(), name)

    def __repr__(self) -> str:
        state = repr(self._value) if self._is_done else "not waited for yet"
        return f"{type(self).__name__}({state})"

    __hash__ = object.__hash__


class LazyNoWait(LazyAwaitable[W]):
    """Stand in for a result that is there already."""

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


def _forwarding(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def method(self, *args):
        return function(self.wait(), *_waited(args))

    method.__name__ = method.__qualname__ = name
    return method


def _reflected(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def method(self, other):
        return function(other, self.wait())

    method.__name__ = method.__qualname__ = name
    return method


_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_OTHER = (
    *("eq", "ne", "lt", "le", "gt", "ge", "pos", "neg", "abs", "invert", "index"),
    *("getitem", "setitem", "delitem", "contains"),
)


def _install_operators() -> None:
    names = (*_BINARY, *_OTHER, *(f"i{name}" for name in _BINARY))
    table = {f"__{name}__": getattr(operator, f"__{name}__") for name in names}
    table |= {
        "__len__": len,
        "__iter__": iter,
        "__bool__": bool,
        "__int__": int,
        "__float__": float,
        "__complex__": complex,
        "__divmod__": divmod,
        "__round__": round,
        "__call__": lambda value, *args: value(*args),
    }
    for name, function in table.items():
        setattr(LazyAwaitable, name, _forwarding(function, name))
    for name in _BINARY:
        method = _reflected(getattr(operator, f"__{name}__"), f"__r{name}__")
        setattr(LazyAwaitable, f"__r{name}__", method)


_install_operators()
