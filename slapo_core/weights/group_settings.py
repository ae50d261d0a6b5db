"""Settings of a checkpoint's groups of parameters for an optimizer whose groups may be others.

What is resumed is what every parameter was trained with. Where the groups are the same, an optimizer takes the
settings of the checkpoint as they are. Where they are not, it takes them only if each of its groups gets one value,
and no two of its groups lose what sets them apart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from slapo_core.errors import BuildError

__all__ = ["matched_settings"]

_SHOWN = 4  # names in a message
_HINT = "make groups in the factory that have one value each, as the checkpoint has it; or load the weights only"
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
    """What each group of an optimizer is to have, in their order.

    Args:
        saved: the groups of the checkpoint.
        present: those of the optimizer.
        states: the parameters of which the checkpoint holds state.
        frozen: those of the optimizer that are not trained.
        scheduled: settings that the runtime sets anew whatever is loaded.

    Raises:
        BuildError: other parameters; or settings that these groups cannot have.
    """
    group_of = {name: number for number, group in enumerate(saved) for name in group["params"]}
    own = {name for group in present for name in group["params"]}
    gone = sorted(name for name in group_of if name not in own and name in states)
    more = sorted(own - set(group_of) - set(frozen))
    if gone or more:
        raise BuildError(_others(gone, more), hint="make the optimizer of the parameters of the checkpoint")
    found, feeding = [], []
    for number, group in enumerate(present):
        names = [name for name in group["params"] if name in group_of]
        feeding.append(list(dict.fromkeys(group_of[name] for name in names)))
        if names:
            found.append(_united(saved, group_of, number, names))
        else:
            same_place = saved[number] if number < len(saved) and not saved[number]["params"] else group
            found.append(dict(same_place["hyperparameters"]))
    _refuse_levelled(saved, present, feeding, scheduled)
    return found


def _united(saved: Sequence[_Group], group_of: Mapping[str, int], number: int, names: Sequence[str]) -> dict[str, Any]:
    """The one value of each setting that the parameters of a group had."""
    first = saved[group_of[names[0]]]["hyperparameters"]
    for name in names:
        other = saved[group_of[name]]["hyperparameters"]
        for key in sorted({*first, *other}):
            one, two = first.get(key, _NOTHING), other.get(key, _NOTHING)
            if one != two:
                raise BuildError(
                    f"group {number} of this optimizer holds '{names[0]}' and '{name}', and the checkpoint has '{key}' "
                    f"= {_shown(one)} for the one and {_shown(two)} for the other",
                    hint=_HINT,
                )
    return dict(first)


def _refuse_levelled(
    saved: Sequence[_Group], present: Sequence[_Group], feeding: Sequence[Sequence[int]], scheduled: Collection[str]
) -> None:
    """Refuse where two groups that differ now would have the same after it."""
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
                        f"{_shown(two)}, and the checkpoint has {_shown(value)} for the parameters of both",
                        hint=_HINT,
                    )


def _others(gone: list[str], more: list[str]) -> str:
    parts = [f"only in the checkpoint: {_listed(gone)}"] if gone else []
    parts += [f"only in this optimizer: {_listed(more)}"] if more else []
    return f"the optimizer holds other parameters than that of the checkpoint: {'; '.join(parts)}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _shown(value: Any) -> str:
    return "nothing" if value is _NOTHING else repr(value)
