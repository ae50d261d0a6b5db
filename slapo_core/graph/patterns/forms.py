"""From the traced function of a pattern to its forms: alternatives taken one by one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence, Set
from typing import Any

from slapo_core.graph.patterns.calls import Items, Slice
from slapo_core.graph.patterns.data import Constant, Form, Result, Step, Wildcard
from slapo_core.graph.patterns.operations import plain
from slapo_core.graph.patterns.proxies import Proxy
from slapo_core.graph.patterns.tracing import SETTING, Alternatives, TracedCall, Tracer

__all__ = ["forms_of"]

MOST_FORMS = 256


def forms_of(tracer: Tracer, returned: Any, names: Sequence[str], constants: Sequence[str]) -> list[Form]:
    """Every form of a traced pattern, those with the earlier alternatives first.

    Args:
        tracer: after the run.
        returned: by the function.
        names: of the parameters that are values.
        constants: of the parameters that are constants.

    Raises:
        ArgumentError: it returns no call, or makes calls or has parameters that no form needs.
    """
    outputs = [value for value in _leaves(plain(returned)) if value is not None]
    if not outputs or not all(isinstance(value, Proxy) for value in outputs):
        raise tracer.refusal(
            f"returns {returned!r}, which is not computed from its arguments", "return what the pattern computes"
        )
    forms: list[Form] = []
    used: set[int] = set()
    wildcards: set[str] = set()
    choices: list[tuple[int, int]] = []  # taken, and how many there were
    while True:
        made = _Making(tracer, [taken for taken, _ in choices], {*names, *constants})
        forms.append(made.form(outputs, [*names, *constants], names))
        used |= made.used
        wildcards |= made.wildcards
        choices = [(taken, count) for taken, count in zip(made.taken, made.counts, strict=True)]
        while choices and choices[-1][0] + 1 == choices[-1][1]:
            choices.pop()
        if not choices:
            break
        choices[-1] = (choices[-1][0] + 1, choices[-1][1])
        if len(forms) > MOST_FORMS:
            raise tracer.refusal(f"has more than {MOST_FORMS} forms", "fewer any_of and optional in one pattern")
    for call in tracer.calls:
        if id(call) not in used:
            line = f" ({call.location})" if call.location else ""
            raise tracer.refusal(f"computes {call}{line} and does not use it", "return it, or what is computed from it")
    for name in (*names, *constants):
        if name not in wildcards:
            raise tracer.refusal(f"does not use its argument '{name}'", "leave it out")
    return forms


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    if isinstance(value, Items):
        return [leaf for part in value.values for leaf in _leaves(part)]
    return [value]


class _Making:
    """One form: the alternatives in the order in which they are met, first those of ``given``, then the first ones."""

    def __init__(self, tracer: Tracer, given: list[int], parameters: Set[str]) -> None:
        self.tracer, self.given = tracer, given
        self.reserved = {*parameters, *(name for name, _ in tracer.captures)}
        self.taken: list[int] = []
        self.counts: list[int] = []
        self.steps: list[Step] = []
        self.used: set[int] = set()
        self.wildcards: set[str] = set()
        self._made: dict[int, Any] = {}
        self._renamed: dict[str, str] = {}
        self._inputs: dict[str, Wildcard] = {}

    def form(self, outputs: list[Proxy], order: Sequence[str], names: Sequence[str]) -> Form:
        results = [self.operand(value) for value in outputs]
        if not all(isinstance(result, Result) for result in results):
            raise self.tracer.refusal(
                "returns an argument as it is" if not self.taken else "may return an argument as it is",
                "return what the pattern computes: a pattern must have at least one call",
            )
        captures = [(name, self._inputs[name]) for name in order if name in self._inputs]
        captures += [(name, each) for name, each in self._inputs.items() if name not in order and name[0] != "_"]
        for name, proxy in self.tracer.captures:
            found = self._captured(proxy)
            if found is not None:
                captures.append((name, found))
        values = [name for name in names if name in self._inputs]
        values += [name for name, each in self._inputs.items() if each.kind == "parameter"]
        return Form(
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
        if isinstance(source, Alternatives):
            number = len(self.taken)
            chosen = self.given[number] if number < len(self.given) else 0
            self.taken.append(chosen)
            self.counts.append(len(source.values))
            found = self.operand(source.values[chosen])
        else:
            assert isinstance(source, TracedCall)
            self.used.add(id(source))
            arguments = tuple((name, self.operand(value)) for name, value in source.arguments.items())
            found = Result(len(self.steps))
            self.steps.append(Step(source.target, arguments, source.is_commutative, source.location))
        self._made[id(source)] = found
        return found

    def _free(self, name: str) -> str:
        """``name`` for a capture, or the first of ``name_2``, ... that the pattern does not use."""
        taken = {*self.reserved, *self._renamed.values()}
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        return next(each for each in itertools.chain([name], numbered) if each not in taken)

    def _captured(self, proxy: Proxy) -> Any:
        source = proxy._source
        if isinstance(source, Wildcard):
            name = self._renamed.get(source.name, source.name)
            return self._inputs.get(name)
        return self._made.get(id(source))
