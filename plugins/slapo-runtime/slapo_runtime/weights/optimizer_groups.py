"""Match parameter groups with a checkpoint's; merge optimizer states of pipeline ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from slapo_core.errors import BuildError

_SHOWN = 4  # names in a message
_HINT = "make parameter groups in the factory with the settings of the checkpoint; or load the weights only"
_NOTHING = object()

_Group = Mapping[str, Any]  # "params": names; "hyperparameters": settings, as JSON


def matched_settings(
    saved: Sequence[_Group],
    present: Sequence[_Group],
    *,
    states: Collection[str],
    frozen: Collection[str],
    scheduled: Collection[str],
) -> list[dict[str, Any]]:
    """Match the saved settings to an optimizer's groups.

    Args:
        saved: the groups of the checkpoint.
        present: the groups of the optimizer.
        states: the parameters with state in the checkpoint.
        frozen: the frozen parameters of the optimizer.
        scheduled: settings that the runtime sets after loading.

    Raises:
        BuildError: the parameters differ, or parameters of one group have different settings.
    """
    group_of = {name: number for number, group in enumerate(saved) for name in group["params"]}
    own = {name for group in present for name in group["params"]}
    gone = sorted(name for name in group_of if name not in own and name in states)
    more = sorted(own - set(group_of) - set(frozen))
    if gone or more:
        raise BuildError(_others(gone, more), hint="make the optimizer with the parameters of the checkpoint")
    found, feeding = [], []
    for number, group in enumerate(present):
        names = [name for name in group["params"] if name in group_of]
        feeding.append(list(dict.fromkeys(group_of[name] for name in names)))
        if names:
            found.append(_merged_settings(saved, group_of, number, names))
        else:
            same_place = saved[number] if number < len(saved) and not saved[number]["params"] else group
            found.append(dict(same_place["hyperparameters"]))
    _refuse_levelled(saved, present, feeding, scheduled)
    return found


def _merged_settings(
    saved: Sequence[_Group], group_of: Mapping[str, int], number: int, names: Sequence[str]
) -> dict[str, Any]:
    """Return the common settings of a group's parameters."""
    first = saved[group_of[names[0]]]["hyperparameters"]
    for name in names:
        other = saved[group_of[name]]["hyperparameters"]
        for key in sorted({*first, *other}):
            one, two = first.get(key, _NOTHING), other.get(key, _NOTHING)
            if one != two:
                raise BuildError(
                    f"group {number} of this optimizer holds '{names[0]}' and '{name}', but the checkpoint has '{key}' "
                    f"= {_shown(one)} for the first and {_shown(two)} for the second",
                    hint=_HINT,
                )
    return dict(first)


def _refuse_levelled(
    saved: Sequence[_Group], present: Sequence[_Group], feeding: Sequence[Sequence[int]], scheduled: Collection[str]
) -> None:
    """Refuse to give two groups with different settings the same ones."""
    first_of: dict[int, int] = {}
    for number, sources in enumerate(feeding):
        for source in sources:
            before = first_of.setdefault(source, number)
            here, there = present[before]["hyperparameters"], present[number]["hyperparameters"]
            for key in sorted({*here, *there} - set(scheduled)):
                one, two = here.get(key, _NOTHING), there.get(key, _NOTHING)
                if one != two:
                    value = saved[source]["hyperparameters"].get(key, _NOTHING)
                    raise BuildError(
                        f"groups {before} and {number} of this optimizer have '{key}' = {_shown(one)} and "
                        f"{_shown(two)}, but the checkpoint has {_shown(value)} for the parameters of both",
                        hint=_HINT,
                    )


def _others(gone: list[str], more: list[str]) -> str:
    parts = [f"only in the checkpoint: {_listed(gone)}"] if gone else []
    parts += [f"only in this optimizer: {_listed(more)}"] if more else []
    return f"the optimizer and the checkpoint have different parameters: {'; '.join(parts)}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _shown(value: Any) -> str:
    return "nothing" if value is _NOTHING else repr(value)


@dataclass(frozen=True)
class StateTensor:
    """A tensor of an optimizer's state.

    Args:
        places: the ranks along ``pp`` that hold it, ascending.
        shape: of the full tensor.
        dtype: its element type.
        is_typed: whether that is not the type of its parameter.
    """

    places: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_typed: bool = False


@dataclass(frozen=True)
class RankState:
    """The optimizer state of one pipeline rank.

    Args:
        groups: parameters by name, and settings, of each group.
        scalars: by parameter and key.
        tensors: by full key.
        empty_ones_count: whether the settings of a group without parameters are valid.
    """

    groups: Sequence[Mapping[str, Any]]
    scalars: Mapping[str, dict[str, Any]]
    tensors: Mapping[str, StateTensor]
    empty_ones_count: bool = True


@dataclass(frozen=True)
class MergedState:
    """The merged optimizer state of all pipeline ranks."""

    groups: list[dict[str, Any]]
    scalars: dict[str, dict[str, Any]]
    held: dict[str, StateTensor]


def merge(parts: Sequence[RankState], order: Sequence[str]) -> MergedState:
    """Merge the optimizer states of pipeline ranks: groups by their number, shared tensors once.

    `make_optimizer` and the comparison of replicas ensure that the groups correspond.

    Args:
        parts: in the order of the ranks along ``pp``.
        order: the names of all parameters, in the model's order.
    """
    first = parts[0]
    position = {name: number for number, name in enumerate(order)}
    groups = []
    for number, group in enumerate(first.groups):
        names = dict.fromkeys(name for part in parts for name in part.groups[number]["params"])
        counting = next((part.groups[number] for part in parts if _counts(part, number)), group)
        groups.append({**counting, "params": sorted(names, key=lambda name: position[name])})
    scalars: dict[str, dict[str, Any]] = {}
    held: dict[str, StateTensor] = {}
    for place, part in enumerate(parts):
        for name, values in part.scalars.items():
            scalars.setdefault(name, values)
        for key, one in part.tensors.items():
            before = held[key].places if key in held else ()
            held[key] = replace(one, places=(*before, place))
    return MergedState(groups, scalars, {key: held[key] for key in sorted(held)})


def _counts(part: RankState, number: int) -> bool:
    return part.empty_ones_count or bool(part.groups[number]["params"])
