"""From what users write to a pattern as data."""

from __future__ import annotations

import functools
import inspect
import re
import traceback
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from slapo_core.errors import ArgumentError
from slapo_core.graph.location import Location
from slapo_core.graph.patterns.data import Form, Step, Target
from slapo_core.graph.patterns.forms import forms_of
from slapo_core.graph.patterns.language import AnyConstant, AnyOf, Where
from slapo_core.graph.patterns.modules import is_plain_module
from slapo_core.graph.patterns.operations import operation_of
from slapo_core.graph.patterns.pattern import GraphPattern
from slapo_core.graph.patterns.schemas import required_parameters
from slapo_core.graph.patterns.tracing import Tracer
from slapo_core.spec.extensions import Pattern

__all__ = ["pattern_of"]

Load = Callable[[str], type[Pattern] | Pattern | None]


def pattern_of(value: Any, load: Load | None = None) -> GraphPattern:
    """What ``find`` takes, as data.

    Args:
        value: a function, ``functools.partial``, module, name of a pattern of a plugin, glob or regular expression over
            call targets, ``where(...)``, ``any_of(...)``, or a pattern as data already.
        load: gives the pattern that a plugin registered under a name, None if there is none.

    Raises:
        ArgumentError: it is none of these, or cannot be traced.
    """
    if isinstance(value, GraphPattern):
        return value
    plugin = _plugin(value, load)
    if plugin is not None:
        return _of_plugin(plugin, load, value)
    text = _text(value)
    return GraphPattern(tuple(dict.fromkeys(_forms(value, load, text))), text)


def _forms(value: Any, load: Load | None, text: str) -> list[Form]:
    if isinstance(value, GraphPattern):
        return list(value.forms)
    if isinstance(value, AnyOf):
        return [form for each in value.alternatives for form in _forms(each, load, _text(each))]
    if isinstance(value, Where):
        return [_single(Target("where", predicate=value.predicate))]
    if isinstance(value, re.Pattern):
        return [_single(Target("regex", value.pattern, value.flags))]
    if isinstance(value, str):
        plugin = _plugin(value, load)
        if plugin is not None:
            return list(_of_plugin(plugin, load, value).forms)
        if not value:
            raise ArgumentError("a pattern needs a text (got '')", hint='find("*gelu*")')
        return [_single(Target("glob", value))]
    if isinstance(value, nn.Module):
        return _of_module(value, text)
    if callable(value) and not isinstance(value, type):
        return _of_function(value, text)
    raise ArgumentError(
        f"a pattern is a function, a module, a text, a regular expression, where(...) or any_of(...) (got {value!r})",
        hint="find(lambda x, bias: F.gelu(x + bias))",
    )


def _plugin(name: Any, load: Load | None) -> type[Pattern] | Pattern | None:
    return load(name) if load is not None and isinstance(name, str) and "." in name else None


def _single(target: Target) -> Form:
    return Form((Step(target),), (0,), (), ())


_OF_PLUGINS: WeakKeyDictionary[type[Pattern], GraphPattern] = WeakKeyDictionary()
"""A cache of a pure function, not a registry: some have hundreds of forms, and are looked for in every layer."""


def _of_plugin(plugin: type[Pattern] | Pattern, load: Load | None, name: str) -> GraphPattern:
    made = _OF_PLUGINS.get(plugin) if isinstance(plugin, type) else None
    if made is None or made.name != name:
        made = GraphPattern(tuple(dict.fromkeys(_made_by_plugin(plugin, load, name))), _text(name), name)
        if isinstance(plugin, type):
            _OF_PLUGINS[plugin] = made
    return made


def _made_by_plugin(plugin: type[Pattern] | Pattern, load: Load | None, name: str) -> list[Form]:
    made = plugin() if isinstance(plugin, type) else plugin
    forms: list[Form] = []
    expected: set[str] | None = None
    for number, each in enumerate(made.forms(), start=1):
        new = _forms(each, load, f"form {number} of '{name}'")
        captures = {capture for form in new for capture, _ in form.captures}
        if expected is not None and captures != expected:
            raise ArgumentError(
                f"the forms of '{name}' must have the same captures: form {number} has {_names(captures)}, form 1 has "
                f"{_names(expected)}",
                hint="give the parameters and captures of every form the same names",
            )
        expected = captures
        forms += new
    if not forms:
        raise ArgumentError(f"'{name}' has no forms", hint="yield at least one from forms()")
    return forms


def _names(names: set[str]) -> str:
    return " and ".join(sorted(names)) or "none"


def _of_function(function: Callable[..., Any], text: str) -> list[Form]:
    tracer = Tracer(text, _home(function))
    signature = _signature(function, text)
    args, kwargs = _arguments(tracer, signature, text)
    return _traced(tracer, lambda: function(*args, **kwargs), signature)


def _signature(function: Callable[..., Any], text: str) -> inspect.Signature:
    """The parameters of a function; of one of torch's own, those that it cannot do without."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        whole: Any = function
    given = 0
    named: set[str] = set()
    while isinstance(whole, functools.partial):
        given += len(whole.args)
        named |= whole.keywords.keys()
        whole = whole.func
    names = required_parameters(operation_of(whole))[given:]
    if not names and not given:
        raise ArgumentError(f"{text} does not say which parameters it has", hint="find(lambda x: torch.relu(x))")
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in names if name not in named])


def _arguments(tracer: Tracer, signature: inspect.Signature, text: str) -> tuple[list[Any], dict[str, Any]]:
    """A wildcard for each parameter without a default; a default stays what it is."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise ArgumentError(
                f"{text} takes any number of arguments ({parameter})", hint="name each: lambda x, bias: ..."
            )
        if parameter.default is inspect.Parameter.empty:
            made = tracer.wildcard(name)
        elif isinstance(parameter.default, AnyConstant):
            made = tracer.wildcard(name, "constant")
        else:
            made = parameter.default
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            kwargs[name] = made
        else:
            args.append(made)
    return args, kwargs


def _of_module(module: nn.Module, text: str) -> list[Form]:
    tracer = Tracer(text, _home(type(module).forward))
    signature = inspect.signature(module.forward)
    tracer.know(module)
    args, kwargs = _arguments(tracer, signature, text)
    if is_plain_module(module):
        return _traced(tracer, lambda: tracer.module(module, tuple(args), kwargs), signature)
    return _traced(tracer, lambda: module.forward(*args, **kwargs), signature)


def _traced(tracer: Tracer, run: Callable[[], Any], signature: inspect.Signature) -> list[Form]:
    try:
        with tracer.active():
            returned = run()
    except ArgumentError:
        raise
    except Exception as error:
        raise tracer.refusal(
            f"cannot be traced: it raises {type(error).__name__}: {error}",
            "a pattern is called with values that stand for anything: torch functions, methods and operators only",
            _line(error, tracer.home),
        ) from error
    names = [name for name, each in signature.parameters.items() if each.default is inspect.Parameter.empty]
    constants = [name for name, each in signature.parameters.items() if isinstance(each.default, AnyConstant)]
    return forms_of(tracer, returned, names, constants)


def _home(function: Any) -> Location | None:
    """Where a function begins."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def _line(error: Exception, home: Location | None) -> Location | None:
    """The last line of the pattern's own file that the error came through."""
    lines = [(each.filename, each.lineno or 0) for each in traceback.extract_tb(error.__traceback__)]
    return next((line for line in reversed(lines) if home is not None and line[0] == home[0]), home)


def _text(value: Any) -> str:
    if isinstance(value, GraphPattern):
        return value.text
    if isinstance(value, AnyOf):
        return f"any_of({', '.join(map(_text, value.alternatives))})"
    if isinstance(value, Where):
        return f"where({getattr(value.predicate, '__name__', value.predicate)})"
    if isinstance(value, re.Pattern):
        return f"the pattern /{value.pattern}/"
    if isinstance(value, str):
        return f"the pattern '{value}'"
    if isinstance(value, nn.Module):
        return f"the pattern {type(value).__name__}"
    if isinstance(value, functools.partial):
        return f"{_text(value.func)} with arguments"
    name = getattr(value, "__name__", type(value).__name__)
    return "the pattern" if name == "<lambda>" else f"the pattern {name}"
