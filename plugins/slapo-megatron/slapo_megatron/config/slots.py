"""The fields that the installed Megatron-core has: their defaults, and what values they take.

Megatron is imported in :func:`slots`.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = ["CLASSES", "Slot", "megatron_class", "slots"]

CLASSES = {
    "optimizer_config": "megatron.core.optimizer.OptimizerConfig",
    "ddp_config": "megatron.core.distributed.DistributedDataParallelConfig",
    "model_parallel_config": "megatron.core.model_parallel_config.ModelParallelConfig",
    "scheduler": "megatron.core.optimizer_param_scheduler.OptimizerParamScheduler",
}
"""Option of the dialect -> the class of Megatron's whose fields, or arguments, it takes."""

REQUIRED: Any = inspect.Parameter.empty
"""The default of an argument that has none."""


@dataclass(frozen=True)
class Slot:
    """One field, or argument.

    Args:
        default: Megatron's; ``REQUIRED`` where there is none.
        annotation: the type that Megatron's class says.
    """

    default: Any
    annotation: Any

    def takes(self, value: Any) -> bool:
        """Whether it is of the type, and a number that one can compute with."""
        same = type(value) is type(self.default) and value == self.default
        return same or _fits(value, self.annotation)

    @property
    def kind(self) -> str:
        """The type in words, e.g. ``"a number, or None"``."""
        return _words(self.annotation, self.default)


def megatron_class(option: str) -> Any:
    """The class of Megatron's that an option stands for.

    Args:
        option: e.g. ``"optimizer_config"``.
    """
    from importlib import import_module

    module, _, name = CLASSES[option].rpartition(".")
    return getattr(import_module(module), name)


@cache
def slots(option: str) -> Mapping[str, Slot]:
    """What the installed Megatron-core has, by name.

    Args:
        option: e.g. ``"optimizer_config"``.
    """
    found = megatron_class(option)
    if dataclasses.is_dataclass(found):
        hints = typing.get_type_hints(found)
        return {field.name: Slot(field.default, hints[field.name]) for field in dataclasses.fields(found)}
    hints = typing.get_type_hints(found.__init__, localns={"MegatronOptimizer": object})
    arguments = list(inspect.signature(found.__init__).parameters.values())[2:]  # without self and the optimizer
    return {one.name: Slot(one.default, hints[one.name]) for one in arguments}


def _fits(value: Any, annotation: Any) -> bool:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and all(_fits(one, arguments[0]) for one in value)
    if annotation is Any:
        return True
    if annotation is collections.abc.Callable or origin is collections.abc.Callable:
        return callable(value)
    if annotation is float:
        return type(value) in (int, float) and math.isfinite(value)
    if annotation in (bool, int, str):
        return type(value) is annotation
    return isinstance(value, origin or annotation)


def _words(annotation: Any, default: Any = REQUIRED) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(_words(one) for one in arguments)
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    names = {bool: "True or False", int: "a whole number", float: "a number", str: "a string", type(None): "None"}
    name = names.get(annotation)
    if name is None:
        name = f"a {annotation.__module__}.{annotation.__qualname__}" if inspect.isclass(annotation) else "a function"
    if origin in (list, tuple):
        name = f"a list, each item {_words(arguments[0])}"
    return f"{name}, or None" if default is None else name
