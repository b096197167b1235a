"""Sharded modules of a model, found and run so that their inputs travel ahead of the model's forward."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.distributed import ProcessGroup

from tessera.distributed.embedding_sharding import FusedKJTListSplitsAwaitable, KJTSplitsAllToAllMeta
from tessera.distributed.model_parallel import get_unwrapped_module
from tessera.distributed.types import Awaitable, LazyNoWait, ShardedModule
from tessera.distributed.utils import append_prefix
from tessera.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from tessera.streamable import Multistreamable

# What torchrec's users know.
__all__ = [
    "ArgInfo",
    "BaseForward",
    "EmbeddingPipelinedForward",
    "EmbeddingTrainPipelineContext",
    "KJTAllToAllForward",
    "PipelinedForward",
    "PrefetchPipelinedForward",
    "PrefetchTrainPipelineContext",
    "Tracer",
    "TrainPipelineContext",
]

Extractor = Callable[[Any], Any]


@dataclass
class ArgInfo:
    """Say where an argument of a sharded module is found in a batch.

    >>> info = ArgInfo(["range", "stop"], [True, False], None)  # batch["range"].stop
    >>> info.of({"range": range(7)})
    7
    """

    input_attrs: list[str]
    is_getitems: list[bool]
    name: str | None

    def of(self, batch: Any) -> Any:
        """Return the argument."""
        for attr, is_getitem in zip(self.input_attrs, self.is_getitems, strict=True):
            batch = batch[attr] if is_getitem else getattr(batch, attr)
        return batch


class _Extracted(ArgInfo):
    """An argument that a function finds in a batch."""

    def __init__(self, extractor: Extractor) -> None:
        super().__init__([], [], None)
        self._extractor = extractor

    def of(self, batch: Any) -> Any:
        return self._extractor(batch)


class _Postproc(ArgInfo):
    """An argument that a module makes of others."""

    def __init__(self, module: nn.Module, args: list[ArgInfo], kwargs: dict[str, ArgInfo], name: str | None):
        super().__init__([], [], name)
        self._module = module
        self._args = args
        self._kwargs = kwargs

    def of(self, batch: Any) -> Any:
        named = {name: arg.of(batch) for name, arg in self._kwargs.items()}
        return self._module(*(arg.of(batch) for arg in self._args), **named)


class _Part(ArgInfo):
    """An attribute or element of an argument."""

    def __init__(self, whole: ArgInfo, attrs: list[str], is_getitems: list[bool], name: str | None) -> None:
        super().__init__(attrs, is_getitems, name)
        self._whole = whole

    def of(self, batch: Any) -> Any:
        return super().of(self._whole.of(batch))


class _Constant(ArgInfo):
    """An argument that is the same for all batches."""

    def __init__(self, value: Any, name: str | None) -> None:
        super().__init__([], [], name)
        self._value = value

    def of(self, batch: Any) -> Any:
        return self._value


@contextlib.contextmanager
def _replaced(
    modules: Mapping[str, nn.Module], make: Callable[[str, nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """Within it, the modules have other forwards."""
    for name, module in modules.items():
        module.__dict__["forward"] = make(name, module)
    try:
        yield
    finally:
        for module in modules.values():
            del module.__dict__["forward"]


@dataclass
class TrainPipelineContext:
    """Hold the inputs of all pipelined modules for one batch, by the names of the modules.

    A context belongs to one batch, and the engine sends the sizes of a group together: the fields
    `module_contexts_next_batch` and `fused_splits_awaitables` stay empty.
    """

    input_dist_splits_requests: dict[str, Awaitable[Any]] = field(default_factory=dict)
    input_dist_tensors_requests: dict[str, Awaitable[Any]] = field(default_factory=dict)
    module_contexts: dict[str, Multistreamable] = field(default_factory=dict)
    module_contexts_next_batch: dict[str, Multistreamable] = field(default_factory=dict)
    fused_splits_awaitables: list[tuple[list[str], FusedKJTListSplitsAwaitable]] = field(default_factory=list)
    postproc_results: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def recording(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Within it, each of the modules runs once, and its result is kept for the model's forward."""

        def once(name: str, module: nn.Module) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if name not in self.postproc_results:
                    self.postproc_results[name] = type(module).forward(module, *args, **kwargs)
                return self.postproc_results[name]

            return run

        with _replaced(modules, once):
            yield

    @contextlib.contextmanager
    def replaying(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Within it, the modules return what they returned when they ran ahead; others run."""

        def kept(name: str, module: nn.Module) -> Callable[..., Any]:
            def get(*args: Any, **kwargs: Any) -> Any:
                if name in self.postproc_results:
                    return self.postproc_results[name]
                return type(module).forward(module, *args, **kwargs)

            return get

        with _replaced(modules, kept):
            yield

    def wait_sizes(self) -> None:
        """Wait for the sizes; the ids are sent. Collective."""
        for name in list(self.input_dist_splits_requests):
            self.input_dist_tensors_requests[name] = self.input_dist_splits_requests.pop(name).wait()

    def wait_ids(self) -> None:
        """Wait for the ids. Collective."""
        self.wait_sizes()
        for request in self.input_dist_tensors_requests.values():
            request.wait()


@dataclass
class PrefetchTrainPipelineContext(TrainPipelineContext):
    """Hold also what was given to the modules' `prefetch`."""

    module_input_post_prefetch: dict[str, Multistreamable] = field(default_factory=dict)
    module_contexts_post_prefetch: dict[str, Multistreamable] = field(default_factory=dict)


@dataclass
class EmbeddingTrainPipelineContext(TrainPipelineContext):
    """Hold also the rows that were looked up ahead, and what the model computes with in their place.

    Of each module in the order of their calls: its rows, with their history; the same without it, which
    collect gradients; and the features they belong to.
    """

    embedding_a2a_requests: dict[str, Any] = field(default_factory=dict)
    embedding_tensors: list[list[torch.Tensor]] = field(default_factory=list)
    embedding_features: list[list[Any]] = field(default_factory=list)
    detached_embedding_tensors: list[list[torch.Tensor]] = field(default_factory=list)

    def embedding_backward(self) -> None:
        """Send the gradients that the model has left to the tables. Collective."""
        rows, gradients = [], []
        for own, detached in zip(self.embedding_tensors, self.detached_embedding_tensors, strict=True):
            for tensor, leaf in zip(own, detached, strict=True):
                if leaf.grad is not None and tensor.requires_grad:
                    rows.append(tensor)
                    gradients.append(leaf.grad)
        if rows:
            torch.autograd.backward(rows, gradients)


def _has_gradient(value: Any) -> bool:
    if isinstance(value, KeyedJaggedTensor):
        value = value.weights_or_none()
    return isinstance(value, torch.Tensor) and value.requires_grad


def _bytes_of(value: Any) -> int:
    if isinstance(value, KeyedJaggedTensor):
        return value.size_in_bytes()
    return value.nbytes if isinstance(value, torch.Tensor) else 0


class BaseForward:
    """Stand in for the forward of a sharded module while a pipelined model runs."""

    def __init__(
        self,
        name: str,
        args: list[ArgInfo],
        module: ShardedModule,
        context: TrainPipelineContext,
        stream: torch.Stream | None,
    ) -> None:
        self._name = name
        self._args = args
        self._module = module
        self._context = context
        self._stream = stream

    @property
    def name(self) -> str:
        """Return the path of the module in the model."""
        return self._name

    @property
    def args(self) -> list[ArgInfo]:
        """Return where the module's arguments are found in a batch."""
        return self._args

    @property
    def module(self) -> ShardedModule:
        """Return the module."""
        return self._module

    def set_context(self, context: TrainPipelineContext) -> None:
        """Compute with the inputs of another batch from now on."""
        self._context = context

    def start(self, batch: Any, context: TrainPipelineContext) -> int:
        """Start the input dist of a batch; return the bytes of its features. Collective."""
        given = [arg.of(batch) for arg in self._args]
        if any(map(_has_gradient, given)):
            raise ValueError(
                f"pipeline: the weights of '{self._name}' need a gradient, so they come from parameters "
                "that earlier batches still change. Run this module outside of the pipeline."
            )
        named = {arg.name: value for arg, value in zip(self._args, given, strict=True) if arg.name}
        placed = [value for arg, value in zip(self._args, given, strict=True) if not arg.name]
        module_context = self._module.create_context()
        context.module_contexts[self._name] = module_context
        context.input_dist_splits_requests[self._name] = self._module.input_dist(
            module_context, *placed, **named
        )
        return sum(map(_bytes_of, given))

    def _take(self, inputs: dict[str, Any], contexts: dict[str, Any]) -> tuple[Any, Any]:
        if self._name not in inputs:
            raise ValueError(
                f"pipeline: '{self._name}' was called twice in one forward. A module that is used twice "
                "cannot be pipelined; leave it out of `modules`."
            )
        return inputs.pop(self._name), contexts.pop(self._name)

    def is_used(self) -> bool:
        """Tell whether the model's forward has called the module."""
        return self._name not in self._context.module_contexts


class PipelinedForward(BaseForward):
    """Compute with the ids that were sent ahead, whatever the forward is given."""

    def __call__(self, *input: Any, **kwargs: Any) -> Awaitable[Any]:
        request, module_context = self._take(
            self._context.input_dist_tensors_requests, self._context.module_contexts
        )
        return self._module.compute_and_output_dist(module_context, request.wait())


class PrefetchPipelinedForward(BaseForward):
    """Compute with the ids that were sent ahead and given to the module's `prefetch`."""

    def __init__(
        self,
        name: str,
        args: list[ArgInfo],
        module: ShardedModule,
        context: PrefetchTrainPipelineContext,
        prefetch_stream: torch.Stream | None,
    ) -> None:
        super().__init__(name, args, module, context, prefetch_stream)

    def prefetch(self, context: PrefetchTrainPipelineContext) -> None:
        """Wait for the ids and let the module bring their rows nearer, where it knows how."""
        if self._name in context.module_input_post_prefetch:
            return
        data = context.input_dist_tensors_requests.pop(self._name).wait()
        module_context = context.module_contexts.pop(self._name)
        if hasattr(self._module, "prefetch"):
            self._module.prefetch(data, self._stream, module_context)
        context.module_input_post_prefetch[self._name] = data
        context.module_contexts_post_prefetch[self._name] = module_context

    def __call__(self, *input: Any, **kwargs: Any) -> Awaitable[Any]:
        data, module_context = self._take(
            self._context.module_input_post_prefetch, self._context.module_contexts_post_prefetch
        )
        return self._module.compute_and_output_dist(module_context, data)

    def is_used(self) -> bool:
        """Tell whether the model's forward has called the module."""
        return self._name not in self._context.module_contexts_post_prefetch


class EmbeddingPipelinedForward(BaseForward):
    """Give the model rows that were looked up ahead, cut off from the tables' backward, which runs later."""

    def look_up(self, context: EmbeddingTrainPipelineContext) -> None:
        """Wait for the ids, look up their rows and send them. Collective."""
        if self._name in context.embedding_a2a_requests:
            return
        data = context.input_dist_tensors_requests.pop(self._name).wait()
        module_context = context.module_contexts.pop(self._name)
        found = self._module.compute_and_output_dist(module_context, data)
        context.embedding_a2a_requests[self._name] = found

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        requests = self._context.embedding_a2a_requests
        found, _ = self._take(requests, dict.fromkeys(requests))
        if not isinstance(found, tuple):
            return LazyNoWait(self._cut_off(found.wait()))
        # Managed collision: rows, and the features as they were mapped.
        rows, *others = (each.wait() for each in found)
        return (LazyNoWait(self._cut_off(rows)), *(LazyNoWait(each) for each in others))

    def _cut_off(self, rows: Any) -> Any:
        if isinstance(rows, KeyedTensor):
            leaf = self._leaf(rows.values())
            self._keep([rows.values()], [leaf], [rows.keys()])
            return KeyedTensor(rows.keys(), rows.length_per_key(), leaf, rows.key_dim())
        own = [feature.values() for feature in rows.values()]
        leaves = [self._leaf(tensor) for tensor in own]
        self._keep(own, leaves, list(rows))
        return {
            name: JaggedTensor(leaf, feature.weights_or_none(), feature.lengths(), feature.offsets_or_none())
            for (name, feature), leaf in zip(rows.items(), leaves, strict=True)
        }

    def _leaf(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.detach().requires_grad_(rows.requires_grad)

    def _keep(self, own: list[torch.Tensor], leaves: list[torch.Tensor], features: list[Any]) -> None:
        self._context.embedding_tensors.append(own)
        self._context.detached_embedding_tensors.append(leaves)
        self._context.embedding_features.append(features)

    def is_used(self) -> bool:
        """Tell whether the model's forward has called the module."""
        return self._name not in self._context.embedding_a2a_requests


class KJTAllToAllForward:
    """Stand in for the forward of a KJTAllToAll: note what is sent, for one message with all sizes."""

    def __init__(self, pg: ProcessGroup, splits: list[int], stagger: int = 1) -> None:
        self._pg = pg
        self._splits = splits
        self._stagger = stagger

    def __call__(self, input: KeyedJaggedTensor) -> KJTSplitsAllToAllMeta:
        return KJTSplitsAllToAllMeta.of(self._pg, input, self._splits, self._stagger)


def _sharded_paths(module: nn.Module, path: str = "") -> Iterator[str]:
    if isinstance(module, ShardedModule):
        yield path
        return
    for name, child in module.named_children():
        yield from _sharded_paths(child, append_prefix(path, name))


class Tracer(fx.Tracer):
    """Follow a batch to the sharded modules of a model; what holds none of them is not looked into."""

    proxy_buffer_attributes = False

    def __init__(self, leaf_modules: list[str] | None = None) -> None:
        super().__init__()
        self._leaf_modules = leaf_modules or []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Tell whether a module is called as a whole."""
        return (
            module_qualified_name in self._leaf_modules
            or not any(True for _ in _sharded_paths(m))
            or isinstance(m, ShardedModule)
            or super().is_leaf_module(m, module_qualified_name)
        )


class _Postprocs:
    """The modules that make features of a batch, as far as they may run ahead."""

    def __init__(self, model: nn.Module, runs_ahead: bool) -> None:
        self._model = model
        self._runs_ahead = runs_ahead
        self.found: dict[str, nn.Module] = {}
        self._made: dict[fx.Node, ArgInfo] = {}

    def arg_of(self, node: fx.Node, batch: fx.Node) -> ArgInfo | None:
        """Return what a module makes; None if it is sharded, trains, or is not to run ahead."""
        if not self._runs_ahead or node.op != "call_module":
            return None
        if node in self._made:
            return self._made[node]
        module = self._model.get_submodule(node.target)
        trains = any(parameter.requires_grad for parameter in module.parameters())
        if trains or any(True for _ in _sharded_paths(module)) or node.target in self.found:
            return None
        args = [_arg_of(value, None, batch, self) for value in node.args]
        named = {name: _arg_of(value, None, batch, self) for name, value in node.kwargs.items()}
        if None in args or None in named.values():
            return None
        self.found[node.target] = module
        self._made[node] = _Postproc(module, args, named, None)
        return self._made[node]


def _arg_of(value: Any, name: str | None, batch: fx.Node, postprocs: _Postprocs) -> ArgInfo | None:
    """Return where a traced argument is found in the batch; None if it is computed."""
    if not isinstance(value, fx.Node):
        holds_nodes = isinstance(value, (list, tuple, dict, slice))
        return None if holds_nodes else _Constant(value, name)
    attrs: list[str] = []
    is_getitems: list[bool] = []
    while value is not batch:
        if value.op != "call_function" or value.target not in (getattr, operator.getitem):
            made = postprocs.arg_of(value, batch)
            return None if made is None else _Part(made, attrs, is_getitems, name)
        is_getitems.insert(0, value.target is operator.getitem)
        value, attr = value.args[:2]
        if isinstance(attr, fx.Node) or not isinstance(value, fx.Node):
            return None
        attrs.insert(0, attr)
    return ArgInfo(attrs, is_getitems, name)


def find_args(model: nn.Module) -> dict[str, list[ArgInfo]]:
    """Trace a model and return the arguments of its sharded modules by their paths.

    Raise ValueError if it cannot be traced, or a module is used twice or on more than the batch holds.
    """
    return find_args_and_makers(model, runs_ahead=False)[0]


def find_args_and_makers(
    model: nn.Module, runs_ahead: bool
) -> tuple[dict[str, list[ArgInfo]], dict[str, nn.Module]]:
    """Return what `find_args` does, and the modules that make arguments, which run ahead, by their paths.

    Only those without parameters to train may run ahead.
    """
    paths = list(_sharded_paths(model))
    if not paths:
        return {}, {}
    postprocs = _Postprocs(model, runs_ahead)
    try:
        if "forward" in model.__dict__:  # torch.fx would follow the one of the class
            raise TypeError("it is not the forward of its class")
        graph = Tracer().trace(model)
    except Exception as error:
        raise ValueError(
            f"pipeline: the model's forward cannot be traced ({error}). Name its sharded modules, each with "
            f"a function from a batch to its features: modules={{'{paths[0]}': ...}}."
        ) from error
    batch = next((node for node in graph.nodes if node.op == "placeholder"), None)
    found: dict[str, list[ArgInfo]] = {}
    for node in graph.nodes:
        if node.op != "call_module" or node.target not in paths:
            continue
        if node.target in found:
            raise ValueError(
                f"pipeline: '{node.target}' is called twice in a forward, which cannot be pipelined. Name "
                "the modules that can be, with `modules`."
            )
        args = [_arg_of(value, None, batch, postprocs) for value in node.args]
        args += [_arg_of(value, name, batch, postprocs) for name, value in node.kwargs.items()]
        if None in args:
            warnings.warn(
                f"pipeline: the input of '{node.target}' is computed, not taken from the batch as it is: the "
                "module runs without the pipeline. Name its features with `modules`, or let what has no "
                "parameters run ahead with `pipeline_postproc`.",
                stacklevel=2,
            )
            continue
        found[node.target] = args
    return found, postprocs.found


def find_module(model: nn.Module, name: str) -> ShardedModule:
    """Return a sharded module by its path, without the names of wrappers. Raise ValueError."""
    try:
        module = get_unwrapped_module(model).get_submodule(name)
    except AttributeError:
        raise ValueError(f"pipeline: the model has no module '{name}'.") from None
    if not isinstance(module, ShardedModule):
        raise ValueError(
            f"pipeline: '{name}' is no sharded module. Modules that are not sharded need not be named."
        )
    return module
