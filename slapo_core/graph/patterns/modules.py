"""Calls of modules: torch.nn's own as the functions that they stand for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from slapo_core.graph.functional import INPUT, Own, functional_form, input_of
from slapo_core.graph.leaves import is_changed, is_predefined
from slapo_core.graph.patterns.calls import Attribute, Call
from slapo_core.graph.patterns.operations import constant_kind, function_call, plain
from slapo_core.graph.structure import is_plain

__all__ = ["is_plain_module", "module_call", "settings"]


def is_plain_module(module: nn.Module) -> bool:
    """Whether a call of ``module`` is nothing but what torch.nn says: no hooks, no forward step, its own class."""
    return is_predefined(module) and not is_changed(module)


def settings(module: nn.Module) -> Any:
    """What :func:`module_call` depends on, to be compared later: class, hooks, settings, which tensors there are."""
    own = [(name, value) for name, value in vars(module).items() if isinstance(value, _COMPARED)]
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return type(module), is_changed(module), own, [name for name, tensor in tensors if tensor is not None]


_COMPARED = (bool, int, float, str, tuple, list, type(None))


@functools.cache
def _forward(forward: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(forward).parameters.values())[1:]


def forward_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The parameters of a module's forward, and the arguments of a call of it by their names, without defaults."""
    parameters = _forward(type(module).forward)
    names = tuple(each.name for each in parameters)
    given: dict[str, Any] = {}
    for position, value in enumerate(args):
        if position < len(parameters) and parameters[position].kind in _POSITIONAL:
            given[names[position]] = value
        else:
            given[str(position)] = value
    given.update(kwargs)
    for each in parameters:
        if each.name in given and type(given[each.name]) is type(each.default) and given[each.name] == each.default:
            del given[each.name]
    return names, given


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def module_call(
    module: nn.Module,
    path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    held: Callable[[str], Any] | None = None,
) -> tuple[Call | None, tuple[str, ...], dict[str, Any]]:
    """What a call of a module below a graph's computes.

    Args:
        module: the one that is called.
        path: of it, relative to the traced module.
        args: of the call.
        kwargs: of the call.
        held: gives what stands for a parameter or buffer of the module, by its name.

    Returns:
        the call as an operation, if it is one of torch.nn with nothing around it; the parameters of its forward; the
        arguments by their names.
    """
    names, given = forward_arguments(module, plain(args), {name: plain(value) for name, value in kwargs.items()})
    if not is_plain_module(module):
        return None, names, given
    held = held or (lambda name: Attribute(f"{path}.{name}"))
    cls = type(module)
    targets = (cls.__name__, path) if path else (cls.__name__,)
    form, given_input = functional_form(module), input_of(module, args, kwargs)
    if form is not None and given_input:
        operands = [_operand(value, given_input[0], held) for value in form.args]
        named = {name: _operand(value, given_input[0], held) for name, value in form.kwargs.items()}
        call = function_call(form.function, tuple(operands), named, _kind)
        return replace(call, names=(call.operation, *targets)), names, given
    own = {f"self.{name}": held(name) for name, _ in (*module.named_parameters(), *module.named_buffers())}
    for name, value in vars(module).items():
        if not name.startswith("_") and is_plain(value):
            own[f"self.{name}"] = plain(value)
    operation = f"{cls.__module__}.{cls.__qualname__}"
    return Call(operation, {**given, **own}, names=(operation, *targets)), names, given


def _operand(value: Any, given: Any, held: Callable[[str], Any]) -> Any:
    if value is INPUT:
        return given
    return held(value.name) if isinstance(value, Own) else value


def _kind(value: Any) -> str:
    kind = constant_kind(value)
    return "tensor" if kind == "other" else kind
