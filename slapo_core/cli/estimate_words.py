"""What the words of ``slapo estimate`` mean: functions, sizes, batches, optimizers."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import typer

__all__ = ["batch_of", "find", "mesh_of", "optimizer_of"]

_TENSOR = re.compile(r"(?:([A-Za-z_]\w*)=)?(\d+(?:x\d+)*):(\w+)", re.ASCII)
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)
_KNOWN = 2**22  # elements of an integer tensor that is really made


def find(name: str, option: str) -> Callable[..., Any]:
    """The function ``"module:name"``."""
    if _FUNCTION.fullmatch(name) is None:
        raise typer.BadParameter(f"{name!r} is not of the form MODULE:FUNCTION", param_hint=option)
    module, _, own = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), own, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise typer.BadParameter(f"there is no module {error.name!r} here", param_hint=option) from error
    if not callable(found):
        raise typer.BadParameter(f"the module {module!r} has no function {own!r}", param_hint=option)
    function: Callable[..., Any] = found
    return function


def mesh_of(text: str | None) -> dict[str, int] | None:
    """``"dp=8,tp=8"`` as sizes."""
    if text is None:
        return None
    sizes: dict[str, int] = {}
    for part in text.split(","):
        mesh_dim, equals, size = part.strip().partition("=")
        if not equals or not size.isascii() or not size.isdecimal() or mesh_dim in sizes or int(size) < 1:
            raise typer.BadParameter(f"{text!r} is not of the form dp=8,tp=8", param_hint="--mesh")
        sizes[mesh_dim] = int(size)
    return sizes


def optimizer_of(name: str) -> Callable[..., Any] | None:
    """A factory of optimizers; None for ``"none"``."""
    import torch

    if name.lower() == "none":
        return None
    if ":" in name:
        return find(name, "--optimizer")
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise typer.BadParameter(f"torch.optim has no optimizer {name!r}", param_hint="--optimizer")
    factory: Callable[..., Any] = found
    return factory


def batch_of(words: Sequence[str]) -> Any:
    """The batch: what a function gives; or a dictionary of tensors, or a tuple of those without a name."""
    if len(words) == 1 and _FUNCTION.fullmatch(words[0]) and _TENSOR.fullmatch(words[0]) is None:
        made = find(words[0], "--batch")()
        if made is None:
            raise typer.BadParameter(f"{words[0]} gives None, and no batch", param_hint="--batch")
        return made
    named: dict[str, Any] = {}
    positional: list[Any] = []
    for word in words:
        match = _TENSOR.fullmatch(word)
        if match is None:
            raise typer.BadParameter(
                f"{word!r} is neither MODULE:FUNCTION nor of the form input_ids=4x512:int64", param_hint="--batch"
            )
        tensor = _tensor(match[1] or "", [int(size) for size in match[2].split("x")], match[3])
        if match[1] is None:
            positional.append(tensor)
        elif match[1] in named:
            raise typer.BadParameter(f"{match[1]!r} is given twice", param_hint="--batch")
        else:
            named[match[1]] = tensor
    if named and positional:
        raise typer.BadParameter("give all tensors a name, or none", param_hint="--batch")
    return named or tuple(positional)


def _tensor(name: str, shape: list[int], dtype_name: str) -> Any:
    """Integers have values, because models ask masks about theirs; other tensors have none."""
    import math

    import torch

    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise typer.BadParameter(f"torch has no dtype {dtype_name!r}", param_hint="--batch")
    if dtype.is_floating_point or dtype.is_complex or math.prod(shape) > _KNOWN:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.full(shape, int("mask" in name), dtype=dtype)
