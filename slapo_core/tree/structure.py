"""Walk, compare and copy modules by what they are made of."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from slapo_core.private import call_hooks_of, children_of, tables_of

_CONTAINERS = (dict, list, set, OrderedDict)


def around(module: nn.Module) -> tuple[Any, ...]:
    """Return a module's own forward and its hooks, to be compared."""
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
        if path:  # what is around the root runs outside of its graph
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
    """Copy what ``deepcopy`` refuses or takes long for.

    Tensors that earlier forwards left on modules, without their graphs: a router's ``self.aux_loss``, or the weight
    that ``nn.utils.weight_norm`` computes before each forward. And containers with nothing in them, of which every
    module has a dozen.

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
