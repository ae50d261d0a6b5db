"""What must be the same on every rank, as text that can be compared and shown."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from slapo_core.ranks.checksum import checksum

__all__ = ["RankFact", "describe", "describe_tensor", "first_difference"]

_NOTHING = "(nothing)"


@dataclass(frozen=True)
class RankFact:
    """Something that must be the same on every rank.

    Args:
        what: of the message "ranks disagree about ...", e.g. ``"the seed given to build"``; once in a list of facts.
        value: for people and for comparing, e.g. ``"0"``; None if this rank cannot tell, and is not compared.
        over: compared only among ranks that differ in nothing but their place along this mesh dimension, e.g.
            ``"tp"``; None compares all.
    """

    what: str
    value: str | None
    over: str | None = None


def describe(value: Any) -> str:
    """A text that is the same in every process for the same value.

    Plain values, and containers and frozen dataclasses of them, are given in full; functions and classes by their
    name, devices by their type, and of anything else only the type: its repr may hold an address. What has a text of
    its own for this (``slapo_described``) is given by it.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return repr(value)
    if isinstance(value, torch.device):
        return repr(value.type)
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(describe, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(describe, value))) + "}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{describe(key)}: {describe(item)}" for key, item in value.items())) + "}"
    if isinstance(value, functools.partial):
        arguments = [*map(describe, value.args), *(f"{key}={describe(item)}" for key, item in value.keywords.items())]
        return f"<functools.partial of {', '.join([describe(value.func), *arguments])}>"
    if inspect.isclass(value) or inspect.isroutine(value):
        return f"<{'class' if inspect.isclass(value) else 'function'} {_name(value)}>"
    kind = type(value)
    if hasattr(kind, "slapo_described"):
        return str(value.slapo_described)
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        own = (f"{field.name}={describe(getattr(value, field.name))}" for field in fields(value) if field.compare)
        return f"{kind.__qualname__}({', '.join(own)})"
    return f"<{_name(kind)}>"


def describe_tensor(tensor: torch.Tensor) -> str:
    """Shape, type and checksum: ``"(8, 6), torch.float32, checksum 9ae16a3b2f90404f"``."""
    values = "without values" if tensor.is_meta else f"checksum {checksum(tensor):016x}"
    return f"{tuple(tensor.shape)}, {tensor.dtype}, {values}"


def first_difference(
    by_rank: Mapping[int, Sequence[RankFact]], parts: Mapping[str | None, Iterable[Sequence[int]]]
) -> str | None:
    """The first fact that ranks disagree about, with everybody's value; None if there is none.

    Args:
        by_rank: global rank -> its facts. The list of some rank may be longer: a step that another rank lacks is
            named before what comes after it.
        parts: for every ``over`` in the facts, the ranks that are compared with each other.

    Returns:
        the message: ``"ranks disagree about the seed given to build:\\n  rank 0: 0\\n  ranks 1, 2: 1"``.
    """
    longest_first = sorted(by_rank.values(), key=len, reverse=True)
    scopes = {fact.what: fact.over for facts in reversed(longest_first) for fact in facts}
    values = {rank: {fact.what: fact.value for fact in facts} for rank, facts in by_rank.items()}
    for what in dict.fromkeys(fact.what for facts in longest_first for fact in facts):
        for ranks in parts[scopes[what]]:
            ranks_by_value: dict[str, list[int]] = {}
            for rank in ranks:
                value = values[rank].get(what, _NOTHING)
                if value is not None:
                    ranks_by_value.setdefault(value, []).append(rank)
            if len(ranks_by_value) > 1:
                lines = [f"  {_ranks(those)}: {value}" for value, those in ranks_by_value.items()]
                return "\n".join([f"ranks disagree about {what}:", *lines])
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _name(value: Any) -> str:
    """The dotted name of a class or a function."""
    function = getattr(value, "__func__", value)
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None) or type(value).__qualname__
    return f"{module}.{name}" if module else name
