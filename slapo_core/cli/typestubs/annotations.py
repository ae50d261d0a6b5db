"""Types as source text: what a type checker must read for the annotation of a primitive's field."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Collection
from typing import Any

__all__ = ["AnnotationWriter"]


class AnnotationWriter:
    """Writes types as source, and remembers the imports that the source needs.

    Modules are imported under names with an underscore (``import torch as _torch``), so that no primitive, whatever
    its name, hides one inside the class body.

    Args:
        taken: names that mean something else where the annotations stand; builtins among them are qualified.
    """

    def __init__(self, taken: Collection[str] = ()) -> None:
        self._taken = frozenset(taken)
        self._modules: set[str] = set()

    @property
    def imports(self) -> tuple[str, ...]:
        """The import lines, sorted."""
        return tuple(f"import {module} as {_alias(module)}" for module in sorted(self._modules))

    def argument(self, hint: Any) -> str:
        """The type to accept for a field declared as ``hint``.

        Lists become tuples and sets frozen sets when a primitive is made, so both are accepted: the field
        ``tuple[str, ...]`` gives ``tuple[str, ...] | list[str]``.
        """
        if hint is None or hint is types.NoneType:
            return "None"
        if hint is Any or isinstance(hint, typing.TypeVar):
            return self._name("typing", "Any")
        if hint is ...:
            return "..."
        origin = typing.get_origin(hint)
        return self._class(hint) if origin is None else self._generic(origin, typing.get_args(hint))

    def _generic(self, origin: Any, arguments: tuple[Any, ...]) -> str:
        if origin in (typing.Union, types.UnionType):
            return " | ".join(dict.fromkeys(map(self.argument, arguments)))
        if origin is typing.Annotated:
            return self.argument(arguments[0])
        if origin is typing.Literal:
            return f"{self._name('typing', 'Literal')}[{', '.join(map(repr, arguments))}]"
        if origin is Callable:
            takes, gives = arguments if len(arguments) == 2 else (..., arguments[-1])
            listed = f"[{', '.join(map(self.argument, takes))}]" if isinstance(takes, list) else "..."
            return f"{self._class(origin)}[{listed}, {self.argument(gives)}]"
        if origin is tuple and arguments == ((),):
            return f"{self._class(tuple)}[()]"
        inner = ", ".join(map(self.argument, arguments))
        text = f"{self._class(origin)}[{inner}]"
        if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
            return f"{text} | {self._class(list)}[{self.argument(arguments[0])}]"
        if origin is frozenset:
            return f"{text} | {self._class(set)}[{inner}]"
        return text

    def _class(self, hint: Any) -> str:
        module, name = getattr(hint, "__module__", None), getattr(hint, "__qualname__", None)
        if not isinstance(module, str) or not isinstance(name, str) or "<locals>" in name or module == "__main__":
            return self._name("typing", "Any")  # a checker has no name for it
        if module == "builtins" and name not in self._taken:
            return name
        return self._name(module, name)

    def _name(self, module: str, name: str) -> str:
        self._modules.add(module)
        return f"{_alias(module)}.{name}"


def _alias(module: str) -> str:
    return "_" + module.replace(".", "_")
