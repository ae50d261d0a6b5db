"""Find changes that make the schedule agree: suggestions, and equal blocks' steps."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_core.internals import Internals
from slapo_core.primitive import Change, Record, Suggestion
from slapo_verify.search import Search, Steps, block_pattern

if TYPE_CHECKING:
    from slapo_core import Schedule


class OutputSplits(TorchFunctionMode):
    """Record the sizes into which a model splits the outputs of its layers.

    Args:
        model: a private copy.

    Attributes:
        sizes: paths of modules, with the sizes in elements.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.sizes: dict[str, tuple[int, ...]] = {}
        for path, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_hook(functools.partial(_label, path))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        source = args[0] if args else (kwargs or {}).get("input")
        path = getattr(source, "slapo_output_of", None)
        if path is not None and isinstance(source, torch.Tensor) and not source.is_nested:
            sizes = _split_sizes(func, source, found)
            if len(sizes) > 1:
                self.sizes.setdefault(path, sizes)
        return found


def _label(path: str, module: nn.Module, args: Any, output: Any) -> None:
    if isinstance(output, torch.Tensor):
        output.slapo_output_of = path  # type: ignore[attr-defined]


def _split_sizes(func: Callable[..., Any], source: torch.Tensor, found: Any) -> tuple[int, ...]:
    """Return the sizes into which a function splits a tensor along one axis; empty if it does not."""
    extent = source.shape[-1] if source.dim() else 0
    if func is F.glu:
        return (extent // 2,) * 2
    if isinstance(found, torch.Tensor):
        is_view = found.dim() > source.dim() and found.shape[: source.dim() - 1] == source.shape[:-1]
        count = found.shape[source.dim() - 1] if is_view else 0
        return (extent // count,) * count if count in (2, 3) else ()
    if not isinstance(found, (tuple, list)) or not all(isinstance(each, torch.Tensor) for each in found):
        return ()
    if any(each.dim() != source.dim() for each in found):
        return ()
    sizes = (tuple(each.shape[axis] for each in found) for axis in range(source.dim()))
    return next((each for axis, each in enumerate(sizes) if sum(each) == source.shape[axis]), ())


def suggestions(
    schedule: Schedule, gradients: Sequence[str], splits: Mapping[str, tuple[int, ...]]
) -> list[Suggestion]:
    """Collect the suggestions of the plugins that a schedule names.

    Raises:
        HookError: a plugin's ``slapo_suggest`` raised, or gave something else than suggestions.
    """
    found = Internals(schedule).hooks.collect(
        "slapo_suggest",
        (Suggestion,),
        "yield slapo_core.Suggestion((slapo_core.Change(path, primitive),))",
        schedule=schedule,
        gradients=tuple(gradients),
        splits=splits,
    )
    return [suggestion for _, suggestion in found]


_MOST = 6


def as_the_others(records: Sequence[Record], paths: Sequence[str]) -> list[Suggestion]:
    """Suggest for a block's module the steps of the other blocks.

    Args:
        records: all steps of the schedule.
        paths: of all modules.

    Returns:
        the rarest variants first; empty where all blocks are equal, or all differ.
    """
    steps: dict[str, list[Record]] = {}
    for record in records:
        steps.setdefault(record.path, []).append(record)
    places: dict[str, list[str]] = {}
    for path in paths:
        places.setdefault(block_pattern(path), []).append(path)
    found: list[tuple[int, Suggestion]] = []
    for alike in places.values():
        if len(alike) < 2 or not any(path in steps for path in alike):
            continue
        variants = {path: tuple(steps.get(path, ())) for path in alike}
        counts = Counter(map(_texts, variants.values()))
        if len(counts) < 2 or len(counts) > 3:
            continue
        for path, own in variants.items():
            if counts[_texts(own)] == max(counts.values()) and len(set(counts.values())) > 1:
                continue
            for other in _unlike(own, variants.values()):
                changes = tuple(_changes(path, own, other))
                if changes:
                    found.append((counts[_texts(own)], Suggestion(changes, likely=True)))
    found.sort(key=lambda item: item[0])
    return [suggestion for _, suggestion in found][:_MOST]


def _texts(steps: Steps) -> tuple[str, ...]:
    return tuple(sorted(str(record.primitive) for record in steps))


def _unlike(own: Steps, variants: Iterable[Steps]) -> list[Steps]:
    unlike: dict[tuple[str, ...], Steps] = {}
    for other in variants:
        if _texts(other) != _texts(own):
            unlike.setdefault(_texts(other), other)
    return list(unlike.values())


def _changes(path: str, own: Steps, other: Steps) -> Iterator[Change]:
    """Yield the changes from one module's steps to another's."""
    wanted = Counter(_texts(other)) - Counter(_texts(own))
    surplus = Counter(_texts(own)) - Counter(_texts(other))
    added = [record for record in other if _take(wanted, record)]
    removed = [record for record in own if _take(surplus, record)]
    while removed and added and (pair := _pair(removed, added)):
        old, new = pair
        removed.remove(old)
        added.remove(new)
        yield Change(path, new.primitive, instead_of=old)
    for record in removed:
        yield Change(path, instead_of=record)
    for record in added:
        yield Change(path, record.primitive, first=record is other[0])


def _pair(removed: Sequence[Record], added: Sequence[Record]) -> tuple[Record, Record] | None:
    return next(((old, new) for old in removed for new in added if old.name == new.name), None)


def _take(counter: Counter[str], record: Record) -> bool:
    text = str(record.primitive)
    if not counter[text]:
        return False
    counter[text] -= 1
    return True


_LIKELY = 12  # trials, before the steps are narrowed down
_TOGETHER = 3  # at most this many steps are an answer

Suggest = Callable[[], Sequence[Suggestion]]


@dataclass(frozen=True)
class Fix:
    """Changes that make the schedule agree.

    Args:
        suggestion: the changes.
        of_part: whether only the searched part agrees with them, and the schedule has more mistakes.
    """

    suggestion: Suggestion
    of_part: bool = False


def change_pattern(change: Change) -> tuple[str, str, bool]:
    """Return a key that equal changes in repeated blocks share."""
    return block_pattern(change.path), str(change.primitive), change.instead_of is None


def applied(records: Sequence[Record], changes: Sequence[Change]) -> Steps:
    """Return the steps with the changes made."""
    found: list[Record] = []
    instead = {change.instead_of.index: change.primitive for change in changes if change.instead_of is not None}
    waiting = [change for change in changes if change.instead_of is None]
    for record in records:
        early = [change for change in waiting if change.first and change.path == record.path]
        waiting = [change for change in waiting if change not in early]
        found += map(_added, early)
        primitive = instead.get(record.index, record.primitive)
        if primitive is not None:
            found.append(dataclasses.replace(record, primitive=primitive))
    return (*found, *map(_added, waiting))


def _added(change: Change) -> Record:
    assert change.primitive is not None
    return Record(0, change.primitive, change.path, "", "")


def without_one(search: Search, part: Steps) -> Fix | None:
    """Find a step of ``part`` without which all others agree; several, if only together."""
    steps = part if len(search.steps) > 1 else ()
    changes = [Change(record.path, instead_of=record) for record in steps if search.agrees_without(record)]
    return Fix(Suggestion(tuple(changes))) if 0 < len(changes) <= _TOGETHER else None


def first_fix(search: Search, suggestions: Sequence[Suggestion]) -> Fix | None:
    """Try likely changes before the search; return the first that makes the schedule agree."""
    end, seen = search.trials + _LIKELY, set[object]()
    for suggestion in suggestions:
        key = tuple(map(change_pattern, suggestion.changes))
        for variant in _variants(search, suggestion) if suggestion.likely else ():
            if variant is not suggestion and key in seen:
                continue
            if search.trials < end and search.agrees(applied(search.steps, variant.changes)):
                return Fix(variant)
        seen.add(key)
    return None


def find_fix(search: Search, part: Steps, suggestions: Sequence[Suggestion]) -> Fix | None:
    """Find the first suggestion that makes the schedule agree, those near ``part`` first.

    Args:
        search: what tries.
        part: the steps that were found to fail.
        suggestions: what may be changed.
    """
    ordered = sorted(suggestions, key=lambda each: _distance(each, part))
    everywhere_first = bool(search.likewise)
    for suggestion in ordered:
        variants = _variants(search, suggestion)
        for variant in reversed(variants) if everywhere_first else variants:
            if search.agrees(applied(search.steps, variant.changes)):
                return Fix(variant)
    if len(part) == len(search.steps):
        return None
    for suggestion in ordered:
        if _is_within(suggestion, part) and search.agrees(applied(part, suggestion.changes)):
            return Fix(suggestion, of_part=True)
    return None


def _variants(search: Search, suggestion: Suggestion) -> list[Suggestion]:
    """Return a suggestion, and the same in all repeated blocks."""
    changes = {(str(each), each.first): each for change in suggestion.changes for each in _alike(search, change)}
    everywhere = [Suggestion(tuple(changes.values()))] if len(changes) > len(suggestion.changes) else []
    return [suggestion, *everywhere]


def _alike(search: Search, change: Change) -> Iterator[Change]:
    if change.instead_of is not None:
        old, place = str(change.instead_of.primitive), block_pattern(change.path)
        for record in search.steps:
            if str(record.primitive) == old and block_pattern(record.path) == place:
                yield dataclasses.replace(change, path=record.path, instead_of=record)
        return
    has = {record.path for record in search.steps if str(record.primitive) == str(change.primitive)}
    for path in search.paths if "*" in block_pattern(change.path) else (change.path,):
        if block_pattern(path) == block_pattern(change.path) and path not in has:
            yield dataclasses.replace(change, path=path)


def _is_within(suggestion: Suggestion, part: Steps) -> bool:
    indices = {record.index for record in part}
    return all(change.instead_of is None or change.instead_of.index in indices for change in suggestion.changes)


def _distance(suggestion: Suggestion, part: Steps) -> int:
    """Return how many levels above the part's steps a change is."""
    return max(min(_up(record.path, change.path) for record in part) for change in suggestion.changes)


def _up(path: str, other: str) -> int:
    levels, others = path.split("."), other.split(".")
    common = 0
    while common < min(len(levels), len(others)) and levels[common] == others[common]:
        common += 1
    return len(levels) - common
