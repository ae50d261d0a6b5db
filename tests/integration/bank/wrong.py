"""Every wrong schedule, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from tests.integration.bank.faults import (
    collectives,
    layers,
    modules,
    outside,
    ranks,
    replacements,
    sequence,
    splits,
    steps,
    vocabulary,
)
from tests.integration.bank.faults.fault import Fault
from tests.integration.bank.right import base
from tests.integration.bank.steps import Wrong

__all__ = ["bank", "faults", "wrong_schedules"]

MODELS_OF_A_CLASS = 4

_MODULES = (collectives, splits, sequence, vocabulary, steps, replacements, modules, layers, outside, ranks)


@cache
def faults() -> tuple[Fault, ...]:
    """Every class of mistakes."""
    found = tuple(value for module in _MODULES for value in vars(module).values() if isinstance(value, Fault))
    assert len({each.name for each in found}) == len(found)
    return found


@cache
def wrong_schedules() -> Mapping[str, tuple[str, Wrong]]:
    """Every wrong schedule, at every place that its mistake fits: the name of the case -> its class and itself."""
    found: dict[str, tuple[str, Wrong]] = {}
    for each in faults():
        for group in _groups(each):
            for wrong in group:
                name = _name(each, wrong)
                assert name not in found, name
                found[name] = (each.name, wrong)
    return found


def bank() -> list[str]:
    """The names of the cases that the table is of: of every class some models, and some places in each.

    One of each class comes first, then a second one, and so on.
    """
    rounds: dict[int, list[str]] = {}
    for number, each in enumerate(faults()):
        groups = [group for group in _groups(each) if group]
        kept = [group for position, group in enumerate(groups) if (position + number) % len(groups) < MODELS_OF_A_CLASS]
        spread = [wrong for position, group in enumerate(kept) for wrong in _spread(group, each.at_most, position)]
        for turn, wrong in enumerate(spread):
            rounds.setdefault(turn, []).append(_name(each, wrong))
    return [name for turn in sorted(rounds) for name in rounds[turn]]


def _name(each: Fault, wrong: Wrong) -> str:
    return f"{wrong.right.name}: {each.name}: {wrong.place}"


def _groups(each: Fault) -> Iterator[list[Wrong]]:
    for model in each.models:
        for kind in each.kinds:
            if kind != "sequence" or model in ("llama", "qwen3"):
                yield list(each.make(base(model, kind, **dict(each.options))))


def _spread(cases: list[Wrong], at_most: int, number: int) -> list[Wrong]:
    """Some of the cases, from the first to the last; if one, then another one for each model."""
    if len(cases) <= at_most:
        return cases
    if at_most == 1:
        return [cases[number % len(cases)]]
    return [cases[round(step * (len(cases) - 1) / (at_most - 1))] for step in range(at_most)]
