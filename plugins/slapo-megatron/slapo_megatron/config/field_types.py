"""Check the user's options against the fields of Megatron's own classes."""

from __future__ import annotations

import collections.abc
import copy
import dataclasses
import difflib
import inspect
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from slapo_core import BuildError
from slapo_megatron.config.fields import FIELDS
from slapo_megatron.installation import found_version

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
class FieldType:
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
    """Return Megatron's class of an option.

    Args:
        option: e.g. ``"optimizer_config"``.
    """
    from importlib import import_module

    module, _, name = CLASSES[option].rpartition(".")
    return getattr(import_module(module), name)


@cache
def field_types_of(option: str) -> Mapping[str, FieldType]:
    """Return the fields of the installed Megatron-core, by name.

    Args:
        option: e.g. ``"optimizer_config"``.
    """
    found = megatron_class(option)
    if dataclasses.is_dataclass(found):
        hints = typing.get_type_hints(found)
        return {field.name: FieldType(field.default, hints[field.name]) for field in dataclasses.fields(found)}
    hints = typing.get_type_hints(found.__init__, localns={"MegatronOptimizer": object})
    arguments = list(inspect.signature(found.__init__).parameters.values())[2:]  # without self and the optimizer
    return {one.name: FieldType(one.default, hints[one.name]) for one in arguments}


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


_EXAMPLES = {
    "optimizer_config": 'optimizer_config={"lr": 1e-4, "bf16": True}',
    "ddp_config": 'ddp_config={"overlap_grad_reduce": True}',
    "model_parallel_config": 'model_parallel_config={"deallocate_pipeline_outputs": True}',
    "scheduler": 'scheduler={"lr_warmup_steps": 100, "lr_decay_steps": 10_000, "lr_decay_style": "cosine"}',
}
_DERIVED = {
    "autocast_dtype": "params_dtype",
    "expert_tensor_parallel_size": "tensor_model_parallel_size",
    "microbatch_group_size_per_vp_stage": "pipeline_model_parallel_size",
}
"""What Megatron's class sets itself, where nothing is given -> the field whose value it takes."""


def read(option: str, given: Any) -> dict[str, Any]:
    """Copy the user's options, and refuse all wrong names and types at once.

    Args:
        option: e.g. ``"optimizer_config"``.
        given: a mapping, an object of Megatron's class, or None for nothing.

    Returns:
        the values by field; of an object, those that differ from Megatron's defaults.

    Raises:
        BuildError: it is neither, or a field that Megatron does not have, or a value that it does not take.
    """
    values = _values(option, given)
    raise_all([problem for name, value in values.items() if (problem := _problem(option, name, value)) is not None])
    return {name: copy.copy(value) for name, value in values.items()}


def raise_all(problems: list[str]) -> None:
    """
    Raises:
        BuildError: with all of them, if there are any.
    """
    start = "Megatron cannot be run with these options"
    if problems:
        lines = (
            [f"{start}: {problems[0]}"] if len(problems) == 1 else [f"{start}:", *(f"  - {one}" for one in problems)]
        )
        raise BuildError("\n".join(lines))


def _values(option: str, given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    name = CLASSES[option].rpartition(".")[2]
    if isinstance(given, Mapping):
        for key in given:
            if not isinstance(key, str):
                raise BuildError(f"the keys of {option} must be names of fields (got {key!r})", hint=_EXAMPLES[option])
        return dict(given)
    has_objects = option != "scheduler"  # whose class needs the optimizer
    if not (has_objects and isinstance(given, megatron_class(option))):
        what = f"a dictionary, or Megatron's {name}" if has_objects else "a dictionary"
        raise BuildError(f"{option} must be {what} (got {_shown(given)})", hint=_EXAMPLES[option])
    known = field_types_of(option)
    more = [one.name for one in dataclasses.fields(given) if one.name not in known]
    if more:
        raise BuildError(
            f"{option} must be Megatron's {name} itself (got a {type(given).__name__}, which has {len(more)} fields "
            f"more, {more[0]!r} among them: they describe Megatron's own layers)",
            hint=f"{option}={name}(**{{name: getattr(config, name) for name in {name}.__dataclass_fields__}})",
        )
    return _of_object(option, given)


def _of_object(option: str, given: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults."""
    found = {}
    for name, field_type in field_types_of(option).items():
        value = getattr(given, name)
        derived = _DERIVED.get(name)
        if derived is not None and value == getattr(given, derived):
            continue
        if not _same(value, field_type.default):
            found[name] = value
    return found


def _problem(option: str, name: str, value: Any) -> str | None:
    field_type, place = field_types_of(option).get(name), f"'{name}' of {option}"
    field = FIELDS[option].get(name)
    version = f"Megatron-core {found_version()}"
    if field_type is None:
        if field is not None:
            return f"{version} has no {place}, other versions do"
        return f"{version} has no {place}{_nearest(option, name)}"
    if field_type.default is not REQUIRED and _same(value, field_type.default):
        return None
    if field is None:
        return f"{place} is a field of {version} that this version of slapo-megatron does not know"
    if field.how == "refused":
        return f"{place} is refused: {field.why}"
    if not field_type.takes(value):
        return f"{place} must be {field_type.kind} (got {_shown(value)})"
    return None


def _nearest(option: str, name: str) -> str:
    usable = [one for one in field_types_of(option) if one in FIELDS[option] and FIELDS[option][one].how != "refused"]
    elsewhere = [other for other in CLASSES if other != option and name in field_types_of(other)]
    if elsewhere:
        return f"; it is one of {elsewhere[0]}"
    close = difflib.get_close_matches(name, list(field_types_of(option)), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(sorted(usable))}"


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and value == default)


def _shown(value: Any) -> str:
    """Without addresses, so that all ranks say the same."""
    plain = value is None or isinstance(value, (bool, int, float, str, list, tuple, dict))
    return repr(value) if plain or str(value).startswith("torch.") else f"a {type(value).__name__}"
