"""Stand-ins for values that nobody knows yet: what the tracer ``fx`` runs a forward on."""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from slapo_core.graph.recording import Recording

if TYPE_CHECKING:
    from slapo_core.graph.tracers.fx import SymbolicRecorder

__all__ = ["Symbol", "SymbolicRecording", "class_of_result"]

_READABLE = ("H", "T", "device", "imag", "mH", "mT", "ndim", "real", "shape")
"""Attributes of tensors that may be handed on without knowing them; of others, dtype say, code wants the value."""


class SymbolicRecording(Recording):
    """A recording in which tensors are symbols."""

    recorder: SymbolicRecorder

    def node(self, value: Any) -> Any:
        if type(value) is Symbol:
            return value.node
        if type(value) in (tuple, list):
            return type(value)(self.node(part) for part in value)
        if type(value) is dict:
            return {key: self.node(part) for key, part in value.items()}
        return super().node(value)

    def give(self, value: Any, node: fx.Node) -> Any:
        return self.symbol(node, torch.Tensor) if isinstance(value, torch.Tensor) else super().give(value, node)

    def symbol(self, node: fx.Node, cls: type | None = None) -> Symbol:
        """What stands for the value of ``node``; ``cls`` is None if even its class is not known."""
        return Symbol(node, self.recorder, cls)


class Symbol(fx.Proxy):
    """The value of a node. It can be computed with; whatever code would have to know of it is refused.

    Args:
        node: gives the value.
        recorder: writes down what is computed.
        cls: of the value, for ``isinstance``; None if it is not known.
    """

    def __init__(self, node: fx.Node, recorder: SymbolicRecorder, cls: type | None) -> None:
        super().__init__(node, recorder.for_symbols)
        self._recorder, self._cls = recorder, cls

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        if self._cls is None:
            raise self._refusal("asks for the class of a result")
        return self._cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(name)
        if callable(getattr(torch.Tensor, name)):
            return _Method(self, name)
        if name not in _READABLE:
            raise self._refusal(f"reads .{name} of a tensor")
        return self._recorder.write(getattr, (self, name), {})

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node", "_recorder", "_cls"):
            raise self._refusal(f"sets .{name} of a tensor")
        super().__setattr__(name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._recorder.write(operator.setitem, (self, key, value), {})

    def __iter__(self) -> Iterator[Any]:
        """Only to be unpacked: ``a, b = x.chunk(2)``, whose length is checked when the graph runs."""
        frame = sys._getframe(1)
        instruction = next(one for one in dis.get_instructions(frame.f_code) if one.offset == frame.f_lasti)
        if instruction.opname != "UNPACK_SEQUENCE":
            raise self._refusal("iterates over a tensor or a result")
        recording = self._recorder.recording
        recording.guard(recording.compute(len, (self.node,)), instruction.argval)
        return iter([self._recorder.write(operator.getitem, (self, index), {}) for index in range(instruction.argval)])

    def __bool__(self) -> bool:
        raise self._refusal("branches on a tensor, a size or a result")

    def _refuse_value(self, *_: Any) -> Any:
        raise self._refusal("needs the value of a tensor, a size or a result")

    __len__ = __int__ = __float__ = __index__ = __complex__ = __hash__ = __contains__ = _refuse_value  # type: ignore[assignment]

    def _refusal(self, problem: str) -> Exception:
        return self._recorder.recording.refusal(f"{problem}, which is not known before the call")


class _Method:
    """A method of a symbol."""

    def __init__(self, owner: Symbol, name: str) -> None:
        self.owner, self.name = owner, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.owner._recorder.record_call(None, getattr(torch.Tensor, self.name), (self.owner, *args), kwargs)


def class_of_result(function: Any, args: tuple[Any, ...]) -> type | None:
    """The class of what a call gives, as far as it is certain: of sizes, and what is computed with them."""
    first = object.__getattribute__(args[0], "_cls") if args and type(args[0]) is Symbol else None
    if function is getattr:
        return torch.Size if args[1] == "shape" else int if args[1] == "ndim" else None
    if function is torch.Tensor.size:
        return torch.Size if len(args) == 1 else int
    if function in (torch.Tensor.numel, torch.Tensor.dim, torch.Tensor.nelement, torch.Tensor.ndimension):
        return int
    if function is operator.getitem and first is torch.Size:
        return torch.Size if isinstance(args[1], slice) else int
    if first is int and len(args) == 2 and function in (operator.add, operator.sub, operator.mul, operator.floordiv):
        return int if type(args[1]) is int or (type(args[1]) is Symbol and args[1]._cls is int) else None
    return None


def _in_place(function: Any) -> Any:
    def change(self: Symbol, other: Any) -> Symbol:
        recorder = self._recorder
        object.__setattr__(self, "node", recorder.write(function, (self, other), {}).node)
        return self

    return change


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(Symbol, f"__i{_name}__", _in_place(getattr(operator, f"i{_name}")))
