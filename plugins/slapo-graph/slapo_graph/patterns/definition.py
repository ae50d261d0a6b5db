"""Patterns made of functions, globs, predicates and plugin classes."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import traceback
from collections.abc import Callable, Sequence, Set
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from slapo_core.errors import ArgumentError
from slapo_graph.match import Pattern
from slapo_graph.patterns.data import (
    Alternative,
    Constant,
    Items,
    PatternStep,
    PatternTarget,
    PatternValue,
    Slice,
    Wildcard,
)
from slapo_graph.patterns.operations import is_plain_module, operation_of, plain
from slapo_graph.patterns.pattern import GraphPattern
from slapo_graph.patterns.reader import (
    SETTING,
    AnyConstant,
    OneOf,
    PatternReader,
    Proxy,
    TracedCall,
)
from slapo_graph.patterns.schemas import required_parameters
from slapo_graph.patterns.vocabulary import AnyOf, Where
from slapo_graph.tracing.diagnostics import Location

# From the traced function of a pattern to its alternatives, one for each combination of choices.

MOST_ALTERNATIVES = 256


def alternatives_of(
    reader: PatternReader, returned: Any, names: Sequence[str], constants: Sequence[str]
) -> list[Alternative]:
    """Return every alternative of a traced pattern, combinations of earlier choices first.

    Args:
        reader: after the run.
        returned: by the function.
        names: of the parameters that are values.
        constants: of the parameters that are constants.

    Raises:
        ArgumentError: it returns no call, or makes calls or has parameters that no alternative needs.
    """
    outputs = [value for value in _leaves(plain(returned)) if value is not None]
    if not outputs or not all(isinstance(value, Proxy) for value in outputs):
        raise reader.refusal(
            f"returns {returned!r}, which is not computed from its arguments", "return what the pattern computes"
        )
    alternatives: list[Alternative] = []
    used: set[int] = set()
    wildcards: set[str] = set()
    choices: list[tuple[int, int]] = []  # taken, and how many there were
    while True:
        made = _AlternativeBuilder(reader, [taken for taken, _ in choices], {*names, *constants})
        alternatives.append(made.alternative(outputs, [*names, *constants], names))
        used |= made.used
        wildcards |= made.wildcards
        choices = [(taken, count) for taken, count in zip(made.taken, made.counts, strict=True)]
        while choices and choices[-1][0] + 1 == choices[-1][1]:
            choices.pop()
        if not choices:
            break
        choices[-1] = (choices[-1][0] + 1, choices[-1][1])
        if len(alternatives) > MOST_ALTERNATIVES:
            raise reader.refusal(
                f"has more than {MOST_ALTERNATIVES} alternatives", "fewer any_of and optional in one pattern"
            )
    for call in reader.calls:
        if id(call) not in used:
            line = f" ({call.location})" if call.location else ""
            raise reader.refusal(f"computes {call}{line} and does not use it", "return it, or a value computed from it")
    for name in (*names, *constants):
        if name not in wildcards:
            raise reader.refusal(f"does not use its argument '{name}'", "leave it out")
    return alternatives


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    if isinstance(value, Items):
        return [leaf for part in value.values for leaf in _leaves(part)]
    return [value]


class _AlternativeBuilder:
    """Build one alternative, by the given choices; further choice points take their first value."""

    def __init__(self, reader: PatternReader, given: list[int], parameters: Set[str]) -> None:
        self.reader, self.given = reader, given
        self.reserved = {*parameters, *(name for name, _ in reader.captures)}
        self.taken: list[int] = []
        self.counts: list[int] = []
        self.steps: list[PatternStep] = []
        self.used: set[int] = set()
        self.wildcards: set[str] = set()
        self._made: dict[int, Any] = {}
        self._renamed: dict[str, str] = {}
        self._inputs: dict[str, Wildcard] = {}

    def alternative(self, outputs: list[Proxy], order: Sequence[str], names: Sequence[str]) -> Alternative:
        results = [self.operand(value) for value in outputs]
        if not all(isinstance(result, PatternValue) for result in results):
            raise self.reader.refusal(
                "returns an argument as it is" if not self.taken else "may return an argument as it is",
                "return what the pattern computes: a pattern must have at least one call",
            )
        captures = [(name, self._inputs[name]) for name in order if name in self._inputs]
        captures += [(name, each) for name, each in self._inputs.items() if name not in order and name[0] != "_"]
        for name, proxy in self.reader.captures:
            found = self._captured(proxy)
            if found is not None:
                captures.append((name, found))
        values = [name for name in names if name in self._inputs]
        values += [name for name, each in self._inputs.items() if each.kind == "parameter"]
        return Alternative(
            tuple(self.steps),
            tuple(dict.fromkeys(result.step for result in results)),
            tuple(values),
            tuple(captures),
        )

    def operand(self, value: Any) -> Any:
        if isinstance(value, Proxy):
            return self._source(value._source)
        if isinstance(value, tuple):
            return tuple(self.operand(part) for part in value)
        if isinstance(value, Slice):
            return Slice(self.operand(value.start), self.operand(value.stop), self.operand(value.step))
        if isinstance(value, Items):
            return Items(value.keys, tuple(self.operand(part) for part in value.values))
        return Constant(value)

    def _source(self, source: Any) -> Any:
        if isinstance(source, Wildcard):
            if source.name.startswith(SETTING):
                name = self._renamed.setdefault(source.name, self._free(source.name.split()[1]))
                source = Wildcard(name, source.kind)
            elif source.name.startswith("_"):
                name = self._renamed.setdefault(source.name, f"_{len(self._renamed)}")
                source = Wildcard(name, source.kind, source.shape)
            self._inputs.setdefault(source.name, source)
            self.wildcards.add(source.name)
            return source
        if id(source) in self._made:
            return self._made[id(source)]
        if isinstance(source, OneOf):
            number = len(self.taken)
            chosen = self.given[number] if number < len(self.given) else 0
            self.taken.append(chosen)
            self.counts.append(len(source.values))
            found = self.operand(source.values[chosen])
        else:
            assert isinstance(source, TracedCall)
            self.used.add(id(source))
            arguments = tuple((name, self.operand(value)) for name, value in source.arguments.items())
            found = PatternValue(len(self.steps))
            self.steps.append(PatternStep(source.target, arguments, source.is_commutative, source.location))
        self._made[id(source)] = found
        return found

    def _free(self, name: str) -> str:
        """Return ``name`` for a capture, or the first unused one of ``name_2``, ..."""
        taken = {*self.reserved, *self._renamed.values()}
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        return next(each for each in itertools.chain([name], numbered) if each not in taken)

    def _captured(self, proxy: Proxy) -> Any:
        source = proxy._source
        if isinstance(source, Wildcard):
            name = self._renamed.get(source.name, source.name)
            return self._inputs.get(name)
        return self._made.get(id(source))


# Patterns of users as data.

Load = Callable[[str], type[Pattern] | Pattern | None]


def pattern_of(value: Any, load: Load | None = None) -> GraphPattern:
    """Return a pattern as data.

    Args:
        value: a function, ``functools.partial``, module, name of a pattern of a plugin, glob or regular expression over
            call targets, ``where(...)``, ``any_of(...)``, or a pattern as data already.
        load: returns the pattern that a plugin registered under a name; None if there is none.

    Raises:
        ArgumentError: it is none of these, or cannot be traced.
    """
    if isinstance(value, GraphPattern):
        return value
    plugin = _plugin(value, load)
    if plugin is not None:
        return _of_plugin(plugin, load, value)
    text = _text(value)
    return GraphPattern(tuple(dict.fromkeys(_alternatives(value, load, text))), text)


def _alternatives(value: Any, load: Load | None, text: str) -> list[Alternative]:
    if isinstance(value, GraphPattern):
        return list(value.alternatives)
    if isinstance(value, AnyOf):
        return [alternative for each in value.alternatives for alternative in _alternatives(each, load, _text(each))]
    if isinstance(value, Where):
        return [_single(PatternTarget("where", predicate=value.predicate))]
    if isinstance(value, re.Pattern):
        return [_single(PatternTarget("regex", value.pattern, value.flags))]
    if isinstance(value, str):
        plugin = _plugin(value, load)
        if plugin is not None:
            return list(_of_plugin(plugin, load, value).alternatives)
        if not value:
            raise ArgumentError("a pattern needs a text (got '')", hint='find("*gelu*")')
        return [_single(PatternTarget("glob", value))]
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


def _single(target: PatternTarget) -> Alternative:
    return Alternative((PatternStep(target),), (0,), (), ())


_OF_PLUGINS: WeakKeyDictionary[type[Pattern], GraphPattern] = WeakKeyDictionary()
"""A cache of a pure function, not a registry: some have hundreds of alternatives, and are looked for in every layer."""


def _of_plugin(plugin: type[Pattern] | Pattern, load: Load | None, name: str) -> GraphPattern:
    made = _OF_PLUGINS.get(plugin) if isinstance(plugin, type) else None
    if made is None or made.name != name:
        made = GraphPattern(tuple(dict.fromkeys(_made_by_plugin(plugin, load, name))), _text(name), name)
        if isinstance(plugin, type):
            _OF_PLUGINS[plugin] = made
    return made


def _made_by_plugin(plugin: type[Pattern] | Pattern, load: Load | None, name: str) -> list[Alternative]:
    made = plugin() if isinstance(plugin, type) else plugin
    alternatives: list[Alternative] = []
    expected: set[str] | None = None
    for number, each in enumerate(made.alternatives(), start=1):
        new = _alternatives(each, load, f"alternative {number} of '{name}'")
        captures = {capture for alternative in new for capture, _ in alternative.captures}
        if expected is not None and captures != expected:
            raise ArgumentError(
                f"the alternatives of '{name}' must have the same captures: alternative {number} has "
                f"{_names(captures)}, alternative 1 has {_names(expected)}",
                hint="give the parameters and captures of every alternative the same names",
            )
        expected = captures
        alternatives += new
    if not alternatives:
        raise ArgumentError(f"'{name}' has no alternatives", hint="yield at least one from alternatives()")
    return alternatives


def _names(names: set[str]) -> str:
    return " and ".join(sorted(names)) or "none"


def _of_function(function: Callable[..., Any], text: str) -> list[Alternative]:
    reader = PatternReader(text, _first_line(function))
    signature = _signature(function, text)
    args, kwargs = _arguments(reader, signature, text)
    return _traced(reader, lambda: function(*args, **kwargs), signature)


def _signature(function: Callable[..., Any], text: str) -> inspect.Signature:
    """Return the parameters of a function; of torch's builtins, the required ones."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        wrapped: Any = function
    given = 0
    named: set[str] = set()
    while isinstance(wrapped, functools.partial):
        given += len(wrapped.args)
        named |= wrapped.keywords.keys()
        wrapped = wrapped.func
    names = required_parameters(operation_of(wrapped))[given:]
    if not names and not given:
        raise ArgumentError(f"{text} does not say which parameters it has", hint="find(lambda x: torch.relu(x))")
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in names if name not in named])


def _arguments(reader: PatternReader, signature: inspect.Signature, text: str) -> tuple[list[Any], dict[str, Any]]:
    """Return a wildcard for each parameter without a default, and the defaults of the others."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise ArgumentError(
                f"{text} takes any number of arguments ({parameter})", hint="name each: lambda x, bias: ..."
            )
        if parameter.default is inspect.Parameter.empty:
            made = reader.wildcard(name)
        elif isinstance(parameter.default, AnyConstant):
            made = reader.wildcard(name, "constant")
        else:
            made = parameter.default
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            kwargs[name] = made
        else:
            args.append(made)
    return args, kwargs


def _of_module(module: nn.Module, text: str) -> list[Alternative]:
    reader = PatternReader(text, _first_line(type(module).forward))
    signature = inspect.signature(module.forward)
    reader.note_module(module)
    args, kwargs = _arguments(reader, signature, text)
    if is_plain_module(module):
        return _traced(reader, lambda: reader.module(module, tuple(args), kwargs), signature)
    return _traced(reader, lambda: module.forward(*args, **kwargs), signature)


def _traced(reader: PatternReader, run: Callable[[], Any], signature: inspect.Signature) -> list[Alternative]:
    try:
        with reader.active():
            returned = run()
    except ArgumentError:
        raise
    except Exception as error:
        raise reader.refusal(
            f"cannot be traced: it raises {type(error).__name__}: {error}",
            "a pattern is called with symbolic values: use torch functions, methods and operators only",
            _line(error, reader.location),
        ) from error
    names = [name for name, each in signature.parameters.items() if each.default is inspect.Parameter.empty]
    constants = [name for name, each in signature.parameters.items() if isinstance(each.default, AnyConstant)]
    return alternatives_of(reader, returned, names, constants)


def _first_line(function: Any) -> Location | None:
    """Return the location of a function."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def _line(error: Exception, start: Location | None) -> Location | None:
    """Return the last line in the pattern's own file of an error's traceback."""
    lines = [(each.filename, each.lineno or 0) for each in traceback.extract_tb(error.__traceback__)]
    return next((line for line in reversed(lines) if start is not None and line[0] == start[0]), start)


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
