"""Decorators that give a hardware's configuration numbers and formulas of its own.

Those of a class set an attribute of it. Those of a method mark it as a formula, for all sharding types or for
some: `@forward_compute`, `@forward_compute("table_wise")`, `@forward_compute(sharding_type=["row_wise"])`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

__all__ = [
    "backward_compute",
    "bwd_coefficient",
    "bwd_comms",
    "ddr_mem_bw",
    "device_bw",
    "forward_compute",
    "fwd_coefficient",
    "fwd_comms",
    "get_backward_compute",
    "get_bwd_coefficient",
    "get_bwd_comms",
    "get_custom_method",
    "get_forward_compute",
    "get_fwd_coefficient",
    "get_fwd_comms",
    "get_input_dist_comms",
    "get_output_write_size",
    "get_prefetch_coefficient",
    "get_prefetch_compute",
    "hbm_mem_bw",
    "hbm_to_ddr_mem_bw",
    "input_data_type_size",
    "input_dist_comms",
    "inter_host_bw",
    "intra_host_bw",
    "output_write_size",
    "prefetch_coefficient",
    "prefetch_compute",
    "ssd_mem_bw",
    "supported_sharding_types",
    "use_block_usage_penalty",
    "use_bytes_for_input_read_size",
    "use_min_dim_for_lookup",
]

Kind = TypeVar("Kind", bound=type)
Method = Callable[..., Any]
Types = str | list[str] | None


# --- Of classes. ---


def _sets(attribute: str, value: object) -> Callable[[Kind], Kind]:
    def decorator(cls: Kind) -> Kind:
        setattr(cls, attribute, value)
        return cls

    return decorator


def hbm_mem_bw(value: float) -> Callable[[Kind], Kind]:
    """Set the speed of device memory, in bytes per millisecond."""
    return _sets("hbm_mem_bw", value)


def ddr_mem_bw(value: float) -> Callable[[Kind], Kind]:
    """Set the speed of host memory."""
    return _sets("ddr_mem_bw", value)


def ssd_mem_bw(value: float) -> Callable[[Kind], Kind]:
    """Set the speed of disks."""
    return _sets("ssd_mem_bw", value)


def hbm_to_ddr_mem_bw(value: float) -> Callable[[Kind], Kind]:
    """Set the speed between device and host."""
    return _sets("hbm_to_ddr_mem_bw", value)


def intra_host_bw(value: float) -> Callable[[Kind], Kind]:
    """Set the speed of links inside a host."""
    return _sets("intra_host_bw", value)


def inter_host_bw(value: float) -> Callable[[Kind], Kind]:
    """Set the speed of links between hosts."""
    return _sets("inter_host_bw", value)


def use_min_dim_for_lookup(value: bool = True) -> Callable[[Kind], Kind]:
    """Say whether rows narrower than 32 columns are read as such of 32."""
    return _sets("_use_min_dim_for_lookup", value)


def use_block_usage_penalty(value: bool = True) -> Callable[[Kind], Kind]:
    """Say whether rows narrower than 128 columns cost more than their bytes."""
    return _sets("_use_block_usage_penalty", value)


def use_bytes_for_input_read_size(value: bool = True) -> Callable[[Kind], Kind]:
    """Say whether ids are counted in bytes, or each as one."""
    return _sets("_use_bytes_for_input_read_size", value)


def input_data_type_size(value: float) -> Callable[[Kind], Kind]:
    """Set the bytes of an id."""
    return _sets("_input_data_type_size", value)


def supported_sharding_types(*sharding_types: str) -> Callable[[Kind], Kind]:
    """Name the only sharding types there are."""
    return _sets("_supported_sharding_types", frozenset(one.lower() for one in sharding_types))


def device_bw(
    bandwidth: float | None = None,
    *,
    device: str | None = None,
    compute_kernel: str | list[str] | None = None,
) -> Callable[[Kind], Kind]:
    """Set how fast rows are read: of all kernels, or of some on one device."""
    if device is None or compute_kernel is None:
        return _sets("device_bw", bandwidth)
    kernels = [compute_kernel] if isinstance(compute_kernel, str) else compute_kernel
    more = {(device.lower(), kernel.lower()): bandwidth for kernel in kernels}

    def decorator(cls: Kind) -> Kind:
        # A dictionary of its own: that of a base class is not changed.
        known = getattr(cls, "kernel_device_bandwidths", None) or {}
        return _sets("kernel_device_bandwidths", {**known, **more})(cls)

    return decorator


# --- Of methods. ---


def _formula(mark: str, first: Method | Types, sharding_type: Types) -> Any:
    """Mark a method as the formula of `mark`; as a decorator with or without arguments."""
    types = sharding_type if sharding_type is not None else None if callable(first) else first

    def decorator(method: Method) -> Method:
        method.__dict__[mark] = True
        method.__dict__["_custom_sharding_type"] = types
        return method

    return decorator(first) if callable(first) else decorator


def forward_compute(method_or_sharding_type: Method | Types = None, *, sharding_type: Types = None) -> Any:
    """Mark `method(self, ctx)`: milliseconds of the lookup."""
    return _formula("_is_custom_forward_compute", method_or_sharding_type, sharding_type)


def backward_compute(method_or_sharding_type: Method | Types = None, *, sharding_type: Types = None) -> Any:
    """Mark `method(self, ctx)`: milliseconds of gradients and step."""
    return _formula("_is_custom_backward_compute", method_or_sharding_type, sharding_type)


def prefetch_compute(method: Method) -> Method:
    """Mark `method(self, ctx)`: milliseconds of rows fetched ahead."""
    method.__dict__["_is_custom_prefetch_compute"] = True
    return method


def input_dist_comms(method_or_sharding_type: Method | Types = None, *, sharding_type: Types = None) -> Any:
    """Mark `method(self, ctx)`: milliseconds of ids on their way."""
    return _formula("_is_custom_input_dist_comms", method_or_sharding_type, sharding_type)


def fwd_comms(method_or_sharding_type: Method | Types = None, *, sharding_type: Types = None) -> Any:
    """Mark `method(self, ctx)`: milliseconds of rows on their way."""
    return _formula("_is_custom_fwd_comms", method_or_sharding_type, sharding_type)


def bwd_comms(method_or_sharding_type: Method | Types = None, *, sharding_type: Types = None) -> Any:
    """Mark `method(self, ctx)`: milliseconds of gradients on their way."""
    return _formula("_is_custom_bwd_comms", method_or_sharding_type, sharding_type)


def output_write_size(method_or_sharding_type: Method | Types = None, *, sharding_type: Types = None) -> Any:
    """Mark `method(self, ctx, is_fwd=True)`: bytes that a lookup writes."""
    return _formula("_is_custom_output_write_size", method_or_sharding_type, sharding_type)


def _coefficient(mark: str, types: Types) -> Callable[[Method], Method]:
    def decorator(method: Method) -> Method:
        method.__dict__[mark] = True
        method.__dict__["_coefficient_sharding_type"] = types
        return method

    return decorator


def fwd_coefficient(sharding_type: Types = None) -> Callable[[Method], Method]:
    """Mark a method that returns the `PerfCoefficient` of lookups."""
    return _coefficient("_is_fwd_coefficient", sharding_type)


def bwd_coefficient(sharding_type: Types = None) -> Callable[[Method], Method]:
    """Mark a method that returns the `PerfCoefficient` of gradients and step."""
    return _coefficient("_is_bwd_coefficient", sharding_type)


def prefetch_coefficient() -> Callable[[Method], Method]:
    """Mark a method that returns `PrefetchCoefficients`."""
    return _coefficient("_is_prefetch_coefficient", None)


# --- What was marked. ---


def _is_for(method: Method, attribute: str, sharding_type: str | None) -> bool:
    types = getattr(method, attribute, None)
    if types is None or sharding_type is None:
        return True
    every: Iterable[str] = [types] if isinstance(types, str) else types
    return sharding_type.lower() in (one.lower() for one in every)


def _marked(
    config: object, mark: str, sharding_type: str | None = None, types: str = "_custom_sharding_type"
) -> Method | None:
    """Return the first method of `config`, by name, that has the mark and is for that sharding type."""
    for name in dir(type(config)):  # of the class: properties are not asked
        method = getattr(type(config), name)
        if name.startswith("_") or not callable(method) or not getattr(method, mark, False):
            continue
        if _is_for(method, types, sharding_type):
            return getattr(config, name)  # type: ignore[no-any-return]
    return None


def get_custom_method(
    obj: object, method_name: str, annotation_attr: str, sharding_type: str | None = None
) -> Method | None:
    """Return a method by its name, if it has that mark and is for that sharding type."""
    method = getattr(obj, method_name, None)
    if method is None or not getattr(method, annotation_attr, False):
        return None
    return method if _is_for(method, "_custom_sharding_type", sharding_type) else None


def get_forward_compute(config: object, sharding_type: str | None = None) -> Method | None:
    """Return the configuration's own formula of lookups, or None."""
    return _marked(config, "_is_custom_forward_compute", sharding_type)


def get_backward_compute(config: object, sharding_type: str | None = None) -> Method | None:
    """Return the configuration's own formula of gradients and step, or None."""
    return _marked(config, "_is_custom_backward_compute", sharding_type)


def get_prefetch_compute(config: object) -> Method | None:
    """Return the configuration's own formula of rows fetched ahead, or None."""
    return _marked(config, "_is_custom_prefetch_compute")


def get_input_dist_comms(config: object, sharding_type: str | None = None) -> Method | None:
    """Return the configuration's own formula of ids on their way, or None."""
    return _marked(config, "_is_custom_input_dist_comms", sharding_type)


def get_fwd_comms(config: object, sharding_type: str | None = None) -> Method | None:
    """Return the configuration's own formula of rows on their way, or None."""
    return _marked(config, "_is_custom_fwd_comms", sharding_type)


def get_bwd_comms(config: object, sharding_type: str | None = None) -> Method | None:
    """Return the configuration's own formula of gradients on their way, or None."""
    return _marked(config, "_is_custom_bwd_comms", sharding_type)


def get_output_write_size(config: object, sharding_type: str | None = None) -> Method | None:
    """Return the configuration's own formula of written bytes, or None."""
    return _marked(config, "_is_custom_output_write_size", sharding_type)


def _called(config: object, mark: str, sharding_type: str | None) -> Any:
    method = _marked(config, mark, sharding_type, "_coefficient_sharding_type")
    return None if method is None else method()


def get_fwd_coefficient(config: object, sharding_type: str) -> Any:
    """Return what the method marked with `fwd_coefficient` says, or None."""
    return _called(config, "_is_fwd_coefficient", sharding_type)


def get_bwd_coefficient(config: object, sharding_type: str) -> Any:
    """Return what the method marked with `bwd_coefficient` says, or None."""
    return _called(config, "_is_bwd_coefficient", sharding_type)


def get_prefetch_coefficient(config: object) -> Any:
    """Return what the method marked with `prefetch_coefficient` says, or None."""
    return _called(config, "_is_prefetch_coefficient", None)
