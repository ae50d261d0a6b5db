"""The values that the function of a pattern is called with."""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slapo_core.graph.patterns.tracing import Tracer

__all__ = ["Proxy"]


class Proxy:
    """Stands for a value: what is done with it is written down.

    Args:
        tracer: where to.
        source: what gives the value: a wildcard, a traced call, or alternatives.
        length: of its parts, if it is known.
    """

    def __init__(self, tracer: Tracer, source: Any, *, length: int | None = None) -> None:
        self._tracer, self._source, self._length = tracer, source, length

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from slapo_core.graph.patterns.tracing import active_tracer

        return active_tracer().torch_call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Member(self, name)

    def __getitem__(self, index: Any) -> Any:
        return self._tracer.call(operator.getitem, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        raise self._tracer.refusal("writes to a part of a value", "write it with a function that gives the result")

    def __iter__(self) -> Iterator[Any]:
        count = self._length if self._length is not None else _unpacked_into(sys._getframe(1))
        if count is None:
            raise self._tracer.refusal(
                "loops over a value, whose length a pattern does not know", "take parts by number: x[0], x[1]"
            )
        return iter([self[index] for index in range(count)])

    def __bool__(self) -> bool:
        raise self._tracer.refusal(
            "branches on a value", "find(any_of(one_pattern, other_pattern)), or patterns.optional(function, x)"
        )

    def _number(self, *_: Any) -> Any:
        raise self._tracer.refusal(
            "needs a plain number where a value stands", "patterns.any_constant() as the default of the parameter"
        )

    __int__ = __float__ = __index__ = __len__ = __complex__ = __round__ = __trunc__ = __floor__ = __ceil__ = _number
    __contains__ = _number
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<value of a pattern: {self._source}>"


class _Member(Proxy):
    """``x.name``: a method that is called next, or an attribute."""

    def __init__(self, owner: Proxy, name: str) -> None:
        self._owner, self._name = owner, name
        self._tracer, self._length = owner._tracer, None
        self._made: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tracer.method(self._name, (self._owner, *args), kwargs)

    @property
    def _source(self) -> Any:  # type: ignore[override]
        if self._made is None:
            self._made = self._tracer.call(getattr, (self._owner, self._name), {})
        return self._made._source


def _binary(function: Callable[..., Any], *, reflected: bool = False) -> Callable[[Proxy, Any], Any]:
    def compute(self: Proxy, other: Any) -> Any:
        return self._tracer.call(function, (other, self) if reflected else (self, other), {})

    return compute


def _unary(function: Callable[..., Any]) -> Callable[[Proxy], Any]:
    return lambda self: self._tracer.call(function, (self,), {})


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
):
    _function = getattr(operator, _name if hasattr(operator, _name) else f"{_name}_")
    setattr(Proxy, f"__{_name}__", _binary(_function))
    setattr(Proxy, f"__r{_name}__", _binary(_function, reflected=True))
    if hasattr(operator, f"i{_name}"):
        setattr(Proxy, f"__i{_name}__", _binary(getattr(operator, f"i{_name}")))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Proxy, f"__{_name}__", _binary(getattr(operator, _name)))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(Proxy, f"__{_name}__", _unary(getattr(operator, _name)))


def _unpacked_into(frame: Any) -> int | None:
    """Into how many names the code of ``frame`` unpacks what it is about to iterate over."""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            return instruction.argval if instruction.opname == "UNPACK_SEQUENCE" else None
    return None
