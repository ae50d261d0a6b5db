"""Notice, and put back, what an import changed in slapo itself, in `torch.nn.Module`, or in Python's built-in names.

A plugin extends slapo through entry points and hooks. One that replaces our functions at import would change every
schedule, named in it or not.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

__all__ = ["ImportGuard"]

_BOOKKEEPING = frozenset(
    {"__abstractmethods__", "__annotate__", "__annotations__", "__annotations_cache__", "__warningregistry__"}
)
"""Attributes that the interpreter itself adds to modules and classes while they are used."""

_ABSENT = object()


class ImportGuard:
    """The attributes of every loaded slapo_core module and class, of `torch.nn.Module` if loaded, and of builtins.

    Example::

        guard = ImportGuard()
        importlib.import_module("acme_slapo")
        changes = guard.restore()  # ["slapo_core.errors.SlapoError was replaced"]
    """

    def __init__(self) -> None:
        self._modules = {name: module for name, module in sorted(sys.modules.items()) if _is_ours(name)}
        self._attributes: list[tuple[str, Any, dict[str, Any]]] = []
        for name, module in self._modules.items():
            if not isinstance(module, ModuleType):
                continue
            self._attributes.append((name, module, dict(vars(module))))
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    self._attributes.append((f"{name}.{value.__qualname__}", value, dict(vars(value))))
        self._builtins = {name: value for name, value in vars(builtins).items() if not name.startswith("_")}
        torch_nn = sys.modules.get("torch.nn")
        if torch_nn is not None:
            self._attributes.append(("torch.nn.Module", torch_nn.Module, dict(vars(torch_nn.Module))))

    def restore(self) -> list[str]:
        """Put back whatever differs now from when the guard was made.

        Returns:
            one line for each change undone, e.g. ``"torch.nn.Module.forward was replaced"``.
        """
        changes = []
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                sys.modules[name] = module
                changes.append(f"the module {name} was replaced")
        for label, owner, before in self._attributes:
            changes += [f"{label}.{name} was {what}" for name, what in _put_back(owner, before)]
        changes += [f"builtins.{name} was {what}" for name, what in _put_back(builtins, self._builtins)]
        for label, owner, before in self._attributes:  # only now: what is lazily cached was put back above
            changes += [f"{label}.{name} was added" for name in _take_away(owner, before)]
        return changes


def _is_ours(module: str) -> bool:
    return module == "slapo_core" or module.startswith("slapo_core.")


def _put_back(owner: Any, before: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    after = dict(vars(owner))
    for name, value in before.items():
        if after.get(name, _ABSENT) is value or name in _BOOKKEEPING:
            continue
        if isinstance(owner, type):
            type.__setattr__(owner, name, value)  # whatever __setattr__ its metaclass has now
        else:
            vars(owner)[name] = value
        yield name, "replaced" if name in after else "deleted"


def _take_away(owner: Any, before: Mapping[str, Any]) -> Iterator[str]:
    after = dict(vars(owner))
    for name in sorted(after.keys() - before.keys() - _BOOKKEEPING):
        if isinstance(owner, type):
            type.__delattr__(owner, name)
        elif not _is_own_growth(owner, name, after[name], before):
            del vars(owner)[name]
        else:
            continue
        yield name


def _is_own_growth(module: ModuleType, name: str, value: Any, before: Mapping[str, Any]) -> bool:
    """Whether a new attribute is slapo's own doing: a submodule just imported, or a lazy public name now cached."""
    if isinstance(value, ModuleType):
        return sys.modules.get(f"{module.__name__}.{name}") is value
    lazy = before.get("__getattr__")
    return lazy is not None and name in before.get("__all__", ()) and lazy(name) is value
