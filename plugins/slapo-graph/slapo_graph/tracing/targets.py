"""Torch calls as targets of a graph, and queries of a tensor's properties."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.graph import inplace_methods, magic_methods, reflectable_magic_methods

from slapo_graph.private import TensorBase
from slapo_graph.tracing.sizes import symbolic
from slapo_graph.tracing.structure import concrete

if TYPE_CHECKING:
    from slapo_graph.tracing.recording import Recording


Query = Callable[["Recording", Any, tuple[Any, ...], dict[str, Any]], Any]

_REFLECTED = {
    f"__r{name.strip('_')}__": getattr(operator, name, operator.truediv) for name in reflectable_magic_methods
}
_OPERATORS: dict[str, Any] = {
    f"__{name.strip('_')}__": getattr(operator, name, operator.truediv)
    for name in (*magic_methods, *inplace_methods, "abs", "setitem")
}
_OPERATORS.update(_REFLECTED, __idiv__=operator.itruediv)
"""Python's operators by the names of tensors' methods."""

_WRAPPED = {
    func: name for name in _OPERATORS if isinstance(func := getattr(torch.Tensor, name, None), types.FunctionType)
}
"""Operators that torch writes in Python, some of them (``**``) under the name of what they call."""


def target_of(func: Any, recording: Recording) -> tuple[str, Any, tuple[int, ...] | None]:
    """Return how a graph calls a torch function.

    Returns:
        ``"function"``, ``"method"`` or ``"attribute"``; what is called; the order of its operands, or None.
    """
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", None) == "__get__" and owner is not None:
        return "attribute", _attribute(owner), None
    name = _name(func)
    if name == "__set__":
        raise recording.refusal(f"sets .{_attribute(owner)} of a tensor")
    if name in _OPERATORS and _is_method(func, name):
        return "function", _OPERATORS[name], (1, 0) if name in _REFLECTED else None
    if _is_method(func, name):
        return "method", name, None
    return "function", func, None


def writes_to_first(func: Any) -> bool:
    """Return whether a function writes its first argument in place: ``add_``, ``+=``."""
    name = _name(func)
    if name.startswith("__"):
        return name in _OPERATORS and name.startswith("__i") and name != "__invert__"
    return bool(name.endswith("_")) and _is_method(func, name)


def _name(func: Any) -> str:
    """Return the name of the tensor method that a torch function is, or its own name."""
    name = str(getattr(func, "__name__", ""))
    return name if _is_method(func, name) or not isinstance(func, types.FunctionType) else _WRAPPED.get(func, name)


def _attribute(descriptor: Any) -> str:
    """Return the attribute of a getter or setter."""
    named: Any = descriptor.fget if isinstance(descriptor, property) else descriptor
    return str(named.__name__)


def _is_method(func: Any, name: str) -> bool:
    return getattr(torch.Tensor, name, None) is func or getattr(TensorBase, name, None) is func


_VALUES = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "__complex__", "numpy", "__contains__")


# -- asking --------------------------------------------------------------------------------------------------------


def query_of(func: Any) -> Query | None:
    """Return the handler of a query such as ``.shape``; None if ``func`` computes."""
    name = getattr(func, "__name__", None)
    if name == "__get__":
        return _ATTRIBUTES.get(_attribute(func.__self__))
    return _METHODS.get(name) if name is not None and _is_method(func, name) else None


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
    """numel, len, stride: numbers, or tuples of them."""
    out = func(*concrete(args), **concrete(kwargs))
    node = recording.call(func, args, kwargs) if func is not torch.Tensor.__len__ else None
    if node is None:
        node = recording.compute(len, (recording.node(args[0]),))
    return recording.give(out, node)


def _length(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """len() must give a plain number: a guard stays behind."""
    out = func(*args, **kwargs)
    recording.guard(recording.compute(len, (recording.node(args[0]),)), out)
    return out


def _constant(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _rank(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """The number of axes: a plain number. The tensors that come in are held to theirs; modules may give others."""
    node = recording.node(args[0])
    if node.op != "placeholder":
        recording.guard(recording.compute(torch.Tensor.dim, (node,)), func(*args, **kwargs))
    return func(*args, **kwargs)


def _guarded(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """A property that the code may branch on: dtype, requires_grad, is_cuda, ..."""
    out = func(*args, **kwargs)
    recording.guard(recording.call(func, args, kwargs), out)
    return out


def _device(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """The device, as an object of its own, so that it is known again where it is used."""
    device = func(*args)
    if device.type == "meta" and recording.home is not None:
        device = recording.home
    return recording.know(torch.device(str(device)), recording.call(func, args, kwargs))


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
