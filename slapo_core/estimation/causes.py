"""Which step of the schedule put the code there that runs: its hooks, its wrappers, its modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_core.estimation.place import At, Place
from slapo_core.graph.leaves import is_inlined
from slapo_core.graph.recorder import is_recording
from slapo_core.tree.forward import ModuleForward
from slapo_core.tree.journal import AddHook, AddModule, ReplaceModule, WrapForward

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule
    from slapo_core.spec.edit import Forward
    from slapo_core.spec.primitive import Record
    from slapo_core.tree.journal import Entry

__all__ = ["name_causes"]

_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def name_causes(schedule: Schedule, place: Place) -> None:
    """Let ``place`` know by which step the code came that runs; for a model that is only played.

    Each hook and wrapper is exchanged for one that says so and does the same. A module that a step put in came with all
    that is below it and was not there before.

    Args:
        schedule: with all its steps in force.
        place: of its model.
    """
    entries = list(schedule.entries())
    _modules(schedule.model, entries, place)
    paths = {id(module): path for path, module in schedule.model.named_modules()}
    hooks: dict[int, dict[str, str]] = {}  # function -> path -> the step; the first, where replacing carried it over
    for record, entry in entries:
        if isinstance(entry, AddHook):
            hooks.setdefault(id(entry.function), {}).setdefault(record.path, str(record))
        elif isinstance(entry, WrapForward):
            hooks.setdefault(id(entry.wrapper), {}).setdefault(record.path, str(record))

    place.hooks = {
        (record.path, entry.function): str(record)
        for record, entry in reversed(entries)
        if isinstance(entry, AddHook) and getattr(entry.function, "slapo_is_inlined", False)
    }

    def cause(function: Any, module: nn.Module) -> str | None:
        known = hooks.get(id(function), {})
        return known.get(paths[id(module)], next(iter(known.values()), None))

    for module in schedule.model.modules():
        own = place.own_code(module)
        for table in _TABLES:
            functions = getattr(module, table)
            for number, function in functions.items():
                name = cause(function, module)
                if name is not None:
                    functions[number] = _Hook(place, At(own.module, name), function)
        forward = module.__dict__.get("forward")
        if isinstance(forward, ModuleForward) and forward.wrappers:
            names = [cause(wrapper, module) or "" for wrapper in forward.wrappers]
            innermost, *others = forward.wrappers
            first = _Wrapper(place, At(own.module, names[0]), innermost, beneath=own, is_own=forward.base is None)
            rest = (_Wrapper(place, At(own.module, name), each) for name, each in zip(names[1:], others, strict=True))
            forward.exchange_wrappers([first, *rest])


def _modules(model: nn.Module, entries: list[tuple[Record, Entry]], place: Place) -> None:
    """What steps put in is theirs, the latest's; what was there before stays the model's own."""
    old = {id(module) for _, entry in entries if isinstance(entry, ReplaceModule) for module in entry.old.modules()}
    came: dict[int, str] = {}
    for record, entry in entries:
        if isinstance(entry, (ReplaceModule, AddModule)):
            came.update(
                (id(module), str(record)) for module in entry.new.modules() if id(module) not in old | came.keys()
            )
    for module in model.modules():
        if id(module) in came:
            place.came_by(module, came[id(module)])


@dataclass(frozen=True, eq=False)
class _Hook:
    """A hook that says whose it is while it runs; to a graph that was recorded with it, the hook itself."""

    place: Place
    at: At
    function: Callable[..., Any]

    @property
    def slapo_is_inlined(self) -> bool:
        return is_inlined(self.function)

    def __eq__(self, other: object) -> bool:
        return bool(self.function == (other.function if isinstance(other, _Hook) else other))

    def __hash__(self) -> int:
        return hash(self.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_recording():  # what a graph holds is no call of the model
            return self.function(*args, **kwargs)
        return self.place.run(self.at, self.function, *args, **kwargs)


@dataclass(frozen=True)
class _Wrapper:
    """A wrapper that says whose it is while it runs.

    Args:
        place: is told.
        at: of the wrapper.
        function: the wrapper.
        beneath: of the forward beneath it, which does not say so itself; None if it does.
        is_own: whether that is the own forward of the class, which a wrapper sees by ``slapo_own`` then.
    """

    place: Place
    at: At
    function: Callable[[Forward], Forward]
    beneath: At | None = None
    is_own: bool = False

    def __call__(self, forward: Forward) -> Forward:
        if self.beneath is None:
            return self._saying(self.at, self.function(forward))
        said = self._saying(self.beneath, forward)
        if self.is_own:
            said.slapo_own = said  # type: ignore[attr-defined]
        return self._saying(self.at, self.function(said))

    def _saying(self, at: At, forward: Forward) -> Forward:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self.place.run(at, forward, *args, **kwargs)

        for name, value in list(vars(run).items()):
            if value is forward and name != "__wrapped__":  # a mark that says: this very function, and none around it
                setattr(run, name, run)
        if is_inlined(forward):
            run.slapo_is_inlined = run  # type: ignore[attr-defined]
        return run
