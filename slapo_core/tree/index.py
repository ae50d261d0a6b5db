"""Paths of modules, places of tied tensors, and the structure of modules."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from slapo_core.private import buffers_of, call_hooks_of, children_of, parameters_of, tables_of

_CONTAINERS = (dict, list, set, OrderedDict)


class ModuleIndex:
    """Every module of a model under its canonical path, the first one in registration order.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.aliases: dict[str, str] = {}  # alias -> canonical path
        self._canonical: dict[int, str] = {}
        self._visit(root, "")

    def _visit(self, root: nn.Module, path: str) -> None:
        modules, aliases, canonical = self.modules, self.aliases, self._canonical
        stack = [(path, root)]
        while stack:
            path, module = stack.pop()
            known = canonical.get(id(module))
            if known is not None:
                aliases[path] = known
                continue
            canonical[id(module)] = path
            modules[path] = module
            children = children_of(module)
            if children:
                prefix = f"{path}." if path else ""
                stack.extend(
                    [(prefix + name, child) for name, child in reversed(children.items()) if child is not None]
                )

    def path_of(self, module: nn.Module) -> str | None:
        """The canonical path of a module; None if the model does not contain it."""
        return self._canonical.get(id(module))

    def paths_of(self, canonical: str) -> tuple[str, ...]:
        """Every path under which the module at ``canonical`` is registered, the canonical one first."""
        return (canonical, *(alias for alias, target in self.aliases.items() if target == canonical))

    def tensor_at(self, name: str) -> torch.Tensor | None:
        """The parameter or buffer of a full name whose module's path is canonical; None if there is none."""
        path, _, own_name = name.rpartition(".")
        module = self.modules.get(path)
        return {**parameters_of(module), **buffers_of(module)}.get(own_name) if module is not None else None

    @functools.cached_property
    def all_aliases(self) -> dict[str, str]:
        """``aliases``, and the paths below them: where ``b`` is ``a``, ``b.weight_norm`` is ``a.weight_norm``."""
        found: dict[str, str] = {}
        for alias, target in self.aliases.items():
            self._expand(alias, target, found, inside=())
        return found

    def _expand(self, alias: str, target: str, found: dict[str, str], inside: tuple[str, ...]) -> None:
        if target in inside:
            return  # a module that contains itself
        found[alias] = target
        for name, child in children_of(self.modules[target]).items():
            if child is not None:
                path = self._canonical[id(child)]
                self._expand(full_name(alias, name), path, found, inside=(*inside, target))


class TensorSites:
    """The places of each parameter and buffer object; several mean tied.

    Args:
        index: the modules to look at.
    """

    def __init__(self, index: ModuleIndex) -> None:
        self._sites: dict[int, tuple[torch.Tensor, list[tuple[str, str]]]] = {}
        for path, module in index.modules.items():
            for name, tensor in _own_tensors(module):
                self._sites.setdefault(id(tensor), (tensor, []))[1].append((path, name))

    def of(self, tensor: torch.Tensor) -> tuple[tuple[str, str], ...]:
        """``(module path, own name)`` of every place that holds ``tensor``."""
        entry = self._sites.get(id(tensor))
        return tuple(entry[1]) if entry else ()

    def at(self, path: str, name: str) -> torch.Tensor | None:
        """The tensor that was registered at a place; None if there was none."""
        return next((tensor for tensor, sites in self._sites.values() if (path, name) in sites), None)

    def move(self, old: torch.Tensor | None, new: torch.Tensor | None, sites: tuple[tuple[str, str], ...]) -> None:
        """Note that ``new`` now stands at ``sites``, where ``old`` stood."""
        if old is not None and id(old) in self._sites:
            left = [site for site in self._sites[id(old)][1] if site not in sites]
            if left:
                self._sites[id(old)] = (old, left)
            else:
                del self._sites[id(old)]
        if new is not None:
            present = self._sites.setdefault(id(new), (new, []))[1]
            present.extend(site for site in sites if site not in present)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for tensors in (parameters_of(module), buffers_of(module)):
        for name, tensor in tensors.items():
            if tensor is not None:
                yield name, tensor


def shape_of(tensor: torch.Tensor) -> str:
    """``"(4, 4)"``; a lazy module's tensors have no shape before its first call."""
    return "(no shape yet)" if is_lazy(tensor) else str(tuple(tensor.shape))


def full_name(path: str, name: str) -> str:
    """The name of a tensor in a state dict: ``full_name("fc", "weight") == "fc.weight"``."""
    return f"{path}.{name}" if path else name


def around(module: nn.Module) -> tuple[Any, ...]:
    """Return a module's own forward and its hooks, for comparison."""
    forward = module.__dict__.get("forward")
    return (getattr(forward, "__func__", forward), *(tuple(hooks.values()) for hooks in call_hooks_of(module)))


def walk(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return ``root.named_modules(remove_duplicate=False)`` in a tenth of the time."""
    found: list[tuple[str, nn.Module]] = []
    stack: list[tuple[str, nn.Module]] = [("", root)]
    while stack:
        path, module = stack.pop()
        found.append((path, module))
        children = children_of(module)
        if children:
            prefix = f"{path}." if path else ""
            stack += [(prefix + name, child) for name, child in reversed(children.items()) if child is not None]
    return found


def structure(root: nn.Module) -> Any:
    """Return a module's structure: hashable, equal for modules that record equally.

    Classes, modes, parameters and buffers with shape, dtype, device and whether they are trained, which of them are the
    same tensor, hooks, and forwards that were set on an instance.
    """
    numbers: dict[int, int] = {}
    found = []
    for path, module in walk(root):
        parameters, buffers, children = tables_of(module)
        tensors = [
            (name, *_tensor(tensor, numbers))
            for table in (parameters, buffers, module.__dict__)
            for name, tensor in table.items()
            if tensor is None or isinstance(tensor, torch.Tensor)
        ]
        steps: tuple[Any, ...] = ()
        if path:  # hooks and forward of the root run outside of its graph
            steps = around(module)
        number = numbers.setdefault(id(module), len(numbers))
        found.append((path, type(module), number, module.training, tuple(children), tuple(tensors), steps))
    return tuple(found)


def _tensor(tensor: torch.Tensor | None, numbers: dict[int, int]) -> tuple[Any, ...]:
    if tensor is None:
        return (None,)
    number = numbers.setdefault(id(tensor), len(numbers))
    return (number, type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def made_beforehand(model: nn.Module) -> dict[int, Any]:
    """Copy the attributes that ``deepcopy`` refuses or is slow for.

    Tensors that earlier forwards left on modules, without their graphs: a router's ``self.aux_loss``, or the weight
    that ``nn.utils.weight_norm`` computes before each forward. And empty containers, of which every module has a
    dozen.

    Returns:
        by the id of the object, for the memo of ``copy.deepcopy``.
    """
    found: dict[int, Any] = {}
    for module in model.modules():
        for value in module.__dict__.values():
            if type(value) in _CONTAINERS and not value and not getattr(value, "__dict__", None):
                found[id(value)] = type(value)()
                continue
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            for tensor in (value, *inside):
                if isinstance(tensor, torch.Tensor) and not tensor.is_leaf:
                    found[id(tensor)] = tensor.detach().clone()
    return found
