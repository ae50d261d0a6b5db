"""Queries of a tensor's properties in recorded code: sizes stay symbolic, other answers get guards."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from slapo_graph.sizes import symbolic
from slapo_graph.structure import concrete
from slapo_graph.tracing.recording import Recording
from slapo_graph.tracing.targets import attribute_of, is_method

Query = Callable[[Recording, Any, tuple[Any, ...], dict[str, Any]], Any]

_VALUES = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "__complex__", "numpy", "__contains__")


def query_of(func: Any) -> Query | None:
    """Return the handler of a query such as ``.shape``; None if ``func`` computes."""
    name = getattr(func, "__name__", None)
    if name == "__get__":
        return _ATTRIBUTES.get(attribute_of(func.__self__))
    return _METHODS.get(name) if name is not None and is_method(func, name) else None


def _value(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    raise recording.refusal(f"reads values of a tensor ({func.__name__})")


def _shape(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    node = recording.node(tensor)
    size = recording.compute(getattr, (node, "shape"))
    return torch.Size(
        [
            symbolic(recording, int(length), recording.compute(operator.getitem, (size, axis)))
            for axis, length in enumerate(func(tensor))
        ]
    )


def _size(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, *rest = args
    dim = rest[0] if rest else kwargs.get("dim")
    if dim is None:
        return _shape(recording, func, (tensor,), {})
    return recording.length(tensor, int(dim))


def _number(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Answer numel, len and stride by symbolic numbers."""
    out = func(*concrete(args), **concrete(kwargs))
    node = recording.call(func, args, kwargs) if func is not torch.Tensor.__len__ else None
    if node is None:
        node = recording.compute(len, (recording.node(args[0]),))
    return recording.give(out, node)


def _length(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Answer len() by a plain number, with a guard."""
    out = func(*args, **kwargs)
    recording.guard(recording.compute(len, (recording.node(args[0]),)), out)
    return out


def _constant(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _rank(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Answer the number of axes by a plain number, guarded for all tensors but the arguments."""
    node = recording.node(args[0])
    if node.op != "placeholder":
        recording.guard(recording.compute(torch.Tensor.dim, (node,)), func(*args, **kwargs))
    return func(*args, **kwargs)


def _guarded(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Answer a property that code may branch on (dtype, requires_grad, ...), with a guard."""
    out = func(*args, **kwargs)
    recording.guard(recording.call(func, args, kwargs), out)
    return out


def _device(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Answer the device by an object of its own, so that its uses are recognized."""
    device = func(*args)
    if device.type == "meta" and recording.meta_device is not None:
        device = recording.meta_device
    return recording.register(torch.device(str(device)), recording.call(func, args, kwargs))


_PROPERTIES = (
    "dtype", "requires_grad", "is_cuda", "is_sparse", "is_leaf", "is_quantized", "is_mkldnn", "is_mps", "is_xpu",
    "is_cpu", "layout", "itemsize", "nbytes", "is_contiguous", "is_floating_point", "is_complex",
    "get_device", "element_size",
)  # fmt: skip

_ATTRIBUTES: dict[str, Query] = {
    "shape": _shape,
    "ndim": _rank,
    "device": _device,
    **dict.fromkeys(("is_meta", "is_nested", "name"), _constant),
    **dict.fromkeys(_PROPERTIES, _guarded),
}

_METHODS: dict[str, Query] = {
    "size": _size,
    "dim": _rank,
    "ndimension": _rank,
    "numel": _number,
    "nelement": _number,
    "stride": _number,
    "__len__": _length,
    **dict.fromkeys(_PROPERTIES, _guarded),
    **dict.fromkeys(("__hash__", "__format__", "__repr__"), _constant),
    **dict.fromkeys(_VALUES, _value),
}
