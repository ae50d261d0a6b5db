"""Make a wrong module of a right one: the same class and tensors, with a forward of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from tests.integration.bank.faults.fault import Fault, fault
from tests.integration.bank.steps import Right, Wrong, step

__all__ = ["as_copy_with", "changed_by", "first_tensor", "mistake_at", "on_first"]


def changed_by(mixin: type) -> Callable[[nn.Module], nn.Module]:
    """A function for ``replace``: a copy of the old module whose forward is that of ``mixin``."""

    def new(old: nn.Module) -> nn.Module:
        made = copy.deepcopy(old)
        made.__class__ = type(mixin.__name__, (mixin, type(old)), {})
        return made

    new.__name__ = mixin.__name__
    return new


def as_copy_with(**attributes: Any) -> Callable[[nn.Module], nn.Module]:
    """A function for ``replace``: a copy with other attributes; those that the module lacks are left out."""

    def new(old: nn.Module) -> nn.Module:
        made = copy.deepcopy(old)
        for name, value in attributes.items():
            if hasattr(made, name):
                setattr(made, name, value(getattr(made, name)) if callable(value) else value)
        return made

    new.__name__ = f"with_{'_'.join(attributes)}"
    return new


def mistake_at(
    name: str,
    breaks: str,
    places: dict[str, str],
    new: Callable[[nn.Module], nn.Module],
    *,
    by_hand: str = "",
    kind: str = "whole",
    arguments: dict[str, Any] | None = None,
    wrong: dict[str, Any] | None = None,
    models: Any = None,
    at_most: int = 1,
    **options: Any,
) -> Fault:
    """The class of mistakes that puts ``new`` in the place of one module of each model, in front of all other steps.

    Args:
        name: of the class.
        breaks: what number changes.
        places: model -> path, with ``{n}`` for the number of a layer.
        new: for ``replace``.
        by_hand: why it is wrong, where the plain comparison cannot see it.
        kind: of the right schedule.
        arguments: of ``replace``.
        wrong: fields of the cases.
        models: those that it fits; all that have a place.
        at_most: cases of a model.
        options: of the models.
    """

    @fault(name, breaks, kinds=(kind,), models=models or tuple(places), at_most=at_most, **options)
    def make(right: Right) -> Iterator[Wrong]:
        for path in dict.fromkeys(places[right.model].format(n=number) for number in range(2)):
            replaced = step(path, "replace", new, **(arguments or {}))
            yield Wrong(right, path, right.inserted(0, replaced), guilty=(0,), by_hand=by_hand, **(wrong or {}))

    return make


def first_tensor(output: Any) -> Tensor:
    """The tensor of an output, or the first one of a tuple."""
    return output[0] if isinstance(output, tuple) else output


def on_first(output: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The output with its first tensor changed."""
    return (function(output[0]), *output[1:]) if isinstance(output, tuple) else function(output)
