"""One optimizer's state made of those of pipeline stages, each of which trains its own parameters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from slapo_core.errors import BuildError

__all__ = ["Held", "Part", "United", "unite"]


@dataclass(frozen=True)
class Held:
    """A tensor of an optimizer's state.

    Args:
        places: of the ranks along ``pp`` that hold it, ascending.
        shape: whole.
        dtype: its element type.
    """

    places: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Part:
    """What one rank along ``pp`` has, as :class:`~slapo_core.weights.optimizer_state.OptimizerState` collects it.

    Args:
        kind: the optimizer's class.
        groups: its parameters by name, and its settings, of each group.
        scalars: by parameter and key.
        tensors: by full key.
        empty_ones_count: whether the settings of a group without parameters here are those of the group elsewhere.
    """

    kind: str
    groups: Sequence[Mapping[str, Any]]
    scalars: Mapping[str, dict[str, Any]]
    tensors: Mapping[str, Held]
    empty_ones_count: bool = True


@dataclass(frozen=True)
class United:
    """All parts as one: the same on all ranks along ``pp``; ``held`` in the order of its names."""

    groups: list[dict[str, Any]]
    scalars: dict[str, dict[str, Any]]
    held: dict[str, Held]


def unite(parts: Sequence[Part], order: Sequence[str]) -> United:
    """Put the parts together: groups by their position, what several ranks hold once.

    Args:
        parts: in the order of the ranks along ``pp``.
        order: the names of all parameters, in that of the model.

    Raises:
        BuildError: the groups do not correspond.
    """
    first = parts[0]
    for here, there in itertools.combinations(range(len(parts)), 2):
        different = _difference(parts[here], parts[there])
        if different is not None:
            raise BuildError(
                "the optimizers of the pipeline stages have no common groups of parameters: "
                f"{different[0]} on rank {here} of 'pp', and {different[1]} on rank {there}",
                hint="let the factory make the same groups with the same settings on every rank, empty ones too",
            )
    position = {name: number for number, name in enumerate(order)}
    groups = []
    for number, group in enumerate(first.groups):
        names = dict.fromkeys(name for part in parts for name in part.groups[number]["params"])
        counting = next((part.groups[number] for part in parts if _counts(part, number)), group)
        groups.append({**counting, "params": sorted(names, key=lambda name: position[name])})
    scalars: dict[str, dict[str, Any]] = {}
    held: dict[str, Held] = {}
    for place, part in enumerate(parts):
        for name, values in part.scalars.items():
            scalars.setdefault(name, values)
        for key, one in part.tensors.items():
            before = held[key].places if key in held else ()
            held[key] = replace(one, places=(*before, place))
    return United(groups, scalars, {key: held[key] for key in sorted(held)})


def _counts(part: Part, number: int) -> bool:
    return part.empty_ones_count or bool(part.groups[number]["params"])


def _difference(one: Part, other: Part) -> tuple[str, str] | None:
    if one.kind != other.kind:
        return one.kind, other.kind
    if len(one.groups) != len(other.groups):
        return f"{len(one.groups)} groups", f"{len(other.groups)} groups"
    for number, (here, there) in enumerate(zip(one.groups, other.groups, strict=True)):
        own, others = here["hyperparameters"], there["hyperparameters"]
        if not _counts(one, number) or not _counts(other, number):
            continue
        for key in sorted({*own, *others}):
            if own.get(key) != others.get(key):
                return tuple(f"'{key}' of group {number} = {values.get(key)!r}" for values in (own, others))  # type: ignore[return-value]
    return None
