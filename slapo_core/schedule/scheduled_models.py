"""Models with steps of a schedule, which a second schedule would take for reference models.

A model is known by itself, while it lives, with all that it contains. A copy of it is known by a mark: steps leave one
on the modules that they changed, which is copied and pickled with them, and goes away when the steps are undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch.utils.weak import WeakIdKeyDictionary

from slapo_core.errors import ArgumentError

if TYPE_CHECKING:
    from torch import nn


_MARK = "_slapo_steps"
"""On a module: how many steps changed it."""

_FRESH = "go on with that schedule, take it back first with sch.undo(to=0), or make a fresh model"


class Claim:
    """One schedule's claim on its model, which it does not keep alive."""

    def __init__(self) -> None:
        self.steps = 0

    def note(self, model: nn.Module, steps: int) -> None:
        """Note the number of this schedule's steps on ``model``."""
        self.steps = steps
        if steps:
            _CLAIMS[model] = self
        elif _CLAIMS.get(model) is self:
            del _CLAIMS[model]


# About models and not about plugins or settings: an entry goes with its model, so nothing leaks from test to test.
_CLAIMS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def mark(modules: Iterable[nn.Module]) -> None:
    """Note that one more step changed each of ``modules``."""
    for module in modules:
        module.__dict__[_MARK] = module.__dict__.get(_MARK, 0) + 1


def unmark(modules: Iterable[nn.Module]) -> None:
    """Note that one step less changed each of ``modules``."""
    for module in modules:
        left = module.__dict__.get(_MARK, 1) - 1
        if left:
            module.__dict__[_MARK] = left  # where it is: what else is there keeps its order
        else:
            module.__dict__.pop(_MARK, None)


def has_steps(module: nn.Module) -> bool:
    """Return whether steps changed a module, or one inside of it."""
    return any(_MARK in one.__dict__ for one in module.modules())


def refuse_if_scheduled(model: nn.Module, modules: Mapping[str, nn.Module] | None = None) -> None:
    """Raise if a model carries steps, contains a module that does, or is contained in one.

    Args:
        model: the model.
        modules: its modules by path, where the caller has them; None looks.

    Raises:
        ArgumentError: it does; the message says which part, of what, and how many steps.
    """
    kind = type(model).__name__
    modules = dict(model.named_modules()) if modules is None else modules
    parts = {id(part): path for path, part in modules.items()} if len(_CLAIMS) else {}
    for other, claim in list(_CLAIMS.items()):
        steps = "1 step" if claim.steps == 1 else f"{claim.steps} steps"
        carries = f"carries {steps} of another schedule, which would be taken for the reference model"
        if other is model:
            raise ArgumentError(f"this {kind} {carries}", hint=_FRESH)
        if id(other) in parts:
            raise ArgumentError(
                f"'{parts[id(other)]}' of this {kind} {carries}",
                hint=f"{_FRESH}; a schedule of this model reaches it: sch['{parts[id(other)]}']",
            )
        for path, part in other.named_modules():
            if part is model:
                raise ArgumentError(
                    f"this {kind} is '{path}' of a {type(other).__name__} that {carries}",
                    hint=f"{_FRESH}; the schedule of that model reaches it: sch['{path}']",
                )
            if id(part) in parts and _holds_tensors(part):
                raise ArgumentError(
                    f"'{parts[id(part)]}' of this {kind} is also '{path}' of a {type(other).__name__} that {carries}",
                    hint="put both models into one, e.g. nn.ModuleDict, and make one schedule of it",
                )
    for path, part in modules.items():
        if _MARK in part.__dict__:
            where = f"'{path}' of this {kind}" if path else f"this {kind}"
            raise ArgumentError(
                f"{where} is a copy, or a part, of a model under another schedule: steps changed it, which would be "
                "taken for the reference model",
                hint="copy the model before its first step, or inside of `with sch.reference() as model:`, or make a "
                "fresh model",
            )


def _holds_tensors(module: nn.Module) -> bool:
    """Return whether a module holds tensors or modules, which a step elsewhere could have split."""
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())
