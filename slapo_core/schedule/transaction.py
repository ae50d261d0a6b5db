"""Apply one primitive: preconditions -> edits -> postconditions -> commit, or roll back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slapo_core.errors import (
    ApplyError,
    PostconditionError,
    PreconditionError,
    SlapoError,
    UndoError,
    place,
)
from slapo_core.primitive import Primitive, Record, Selection, Selector, Violation
from slapo_core.schedule.scheduled_models import mark, unmark
from slapo_core.tree.edit import Edit
from slapo_core.tree.journal import JournalEntry

if TYPE_CHECKING:
    from torch import nn

    from slapo_core.plugins.registry import Registry
    from slapo_core.schedule.core import ScheduleCore
    from slapo_core.tree.node import Node


@dataclass(frozen=True)
class Step:
    """A committed step.

    Args:
        record: of the primitive.
        entries: they undo it.
        distributions: of its primitives.
    """

    record: Record
    entries: tuple[JournalEntry, ...]
    distributions: frozenset[str] = frozenset()

    def undo(self) -> None:
        """Undo all entries, or none: where one cannot be undone, redo the others."""
        unmark(self._changed)
        try:
            self._all_or_none("undo", "redo", self.entries[::-1])
        except BaseException:
            self.mark()
            raise

    def redo(self) -> None:
        """Redo all entries, or none."""
        self._all_or_none("redo", "undo", self.entries)
        self.mark()

    def _all_or_none(self, do: str, take_back: str, entries: tuple[JournalEntry, ...]) -> None:
        done: list[JournalEntry] = []
        try:
            for entry in entries:
                getattr(entry, do)()
                done.append(entry)
        except BaseException as error:
            left = []
            for entry in reversed(done):
                try:
                    getattr(entry, take_back)()
                except Exception as again:  # noqa: BLE001 - whatever code of the model raises
                    left.append(f"{entry.describe()} ({type(again).__name__}: {again})")
            if left:
                raise UndoError(
                    f"step {self.record} is partly in force: {do} failed ({type(error).__name__}: {error}), and of its "
                    f"{len(entries)} edits these could not be put back either: {'; '.join(left)}",
                    path=self.record.path,
                    hint="make a fresh model, and replay the schedule",
                ) from error
            raise

    def mark(self) -> None:
        """Mark the changed modules as carrying a step."""
        mark(self._changed)

    @property
    def _changed(self) -> Iterator[nn.Module]:
        """Yield each module that the step changed."""
        return iter({id(module): module for entry in self.entries for module in entry.changed}.values())


def transact(
    core: ScheduleCore,
    node: Node,
    primitive: Primitive,
    *,
    location: str,
    after_edit: Callable[[int], None] | None = None,
    note: str = "",
) -> tuple[Node, Step]:
    """Apply ``primitive`` at ``node``: everything or nothing.

    Args:
        core: of the schedule.
        node: where.
        primitive: what.
        location: the ``file:line`` to record.
        after_edit: called with the number of edits made so far after each; raising from it is a fault inside apply.
        note: the reason for the step, behind its edits.

    Returns:
        the node on which a chained call continues, and the committed step.

    Raises:
        PluginError: the primitive's plugin is not usable.
        PreconditionError: a precondition is not met; nothing was touched.
        ApplyError: the primitive raised; the model is as before.
        PostconditionError: the primitive did not take effect; the model is as before.
    """
    provider = core.registry.provider(primitive)
    core.hooks.activate(provider[0], version=provider[1])
    plugin = " ".join(provider)
    edit = core.tree.open_edit = Edit(core.tree, after_edit=after_edit)
    try:
        primitive = bound(primitive, node, core.registry)
        _check(core, node, primitive, plugin)
        try:
            result = _change(edit, node, primitive, plugin)
            if note:
                edit.note(note)
            edits = edit.described(node.path)
            record = Record(len(core.history) + 1, primitive, node.path, *provider, location, edits)
        except BaseException as error:
            _roll_back(edit, node, primitive, plugin, error)
            raise
    finally:
        core.tree.open_edit = None
    step = Step(record, tuple(edit.close()), frozenset({record.distribution}))
    step.mark()
    return result, step


def _check(core: ScheduleCore, node: Node, primitive: Primitive, plugin: str) -> None:
    """Ask the primitive and every active plugin for reasons to refuse the step."""
    violations = _violations(primitive.preconditions(node), primitive, "preconditions", plugin)
    hint = 'yield slapo_core.Violation("weight is split twice", hint="undo the first split")'
    found = core.hooks.collect("slapo_preconditions", (Violation,), hint, node=node, primitive=primitive)
    violations += [violation for _, violation in found]
    if violations:
        raise PreconditionError(
            _message(f"cannot apply {primitive} at {place(node.path)}", violations),
            violations=violations,
            path=node.path,
            plugin=plugin,
        )


def _change(edit: Edit, node: Node, primitive: Primitive, plugin: str) -> Node:
    """Let the primitive edit the model, and check that it took effect."""
    first, before = len(edit.entries), len(edit.entries) + len(edit.notes)
    try:
        result = primitive.apply(node, edit)
        edit.follow(first)
    except SlapoError:
        raise
    except Exception as error:
        raise ApplyError(
            f"{primitive} failed at {place(node.path)} and was rolled back: {type(error).__name__}: {error}",
            path=node.path,
            plugin=plugin,
        ) from error
    violations = _violations(primitive.postconditions(node), primitive, "postconditions", plugin)
    if not violations and len(edit.entries) + len(edit.notes) == before:
        violations = [
            Violation("nothing was changed and no reason was noted", "call edit.note(reason) if that is right")
        ]
    if violations:
        raise PostconditionError(
            _message(f"{primitive} at {place(node.path)} did not take effect and was rolled back", violations),
            violations=violations,
            path=node.path,
            plugin=plugin,
        )
    return node if result is None else result


def _roll_back(edit: Edit, node: Node, primitive: Primitive, plugin: str, error: BaseException) -> None:
    """Undo the edits of a step that failed with ``error``."""
    try:
        edit.rollback()
    except UndoError as left:
        cause = error.__cause__ or error
        raise UndoError(
            f"{primitive} failed at {place(node.path)} ({type(cause).__name__}), and {left.message}",
            path=node.path,
            plugin=plugin,
            hint=left.hint,
        ) from error.__cause__


def bound(primitive: Primitive, node: Node, registry: Registry) -> Primitive:
    """Locate a primitive's selections at a node, and bind it.

    Raises:
        PreconditionError: nothing is selected there, or it lies elsewhere.
        ApplyError: ``bind`` raised, or returned something other than a primitive of its class.
    """
    for name in primitive.selections:
        value = getattr(primitive, name)
        if value is not None:
            found = _select(primitive, name, value, node, registry)
            primitive = copy.copy(primitive)
            object.__setattr__(primitive, name, found)
    try:
        made = primitive.bind(node)
    except SlapoError:
        raise
    except Exception as error:
        raise ApplyError(
            f"the bind of {primitive} at {place(node.path)} raised {type(error).__name__}: {error}", path=node.path
        ) from error
    if type(made) is not type(primitive):
        raise ApplyError(
            f"the bind of {primitive} must return a {type(primitive).__name__} (got {made!r})", path=node.path
        )
    return made


def divided(primitive: Primitive, nodes: tuple[Node, ...], registry: Registry) -> list[tuple[Node, Primitive]]:
    """Divide a primitive over a group: each node gets its own part of the selections.

    Raises:
        PreconditionError: a part lies at none of the nodes.
    """
    own: dict[Node, Primitive] | None = None
    for name in primitive.selections:
        given = _given(getattr(primitive, name), registry)
        if given is None:
            continue
        parts = given.divided(nodes)
        if isinstance(parts, Violation):
            raise _refusal(primitive, nodes[0], parts)
        own = own or {}
        for node, part in parts:
            made = own[node] = copy.copy(own.get(node, primitive))
            object.__setattr__(made, name, part)
    return [(node, primitive) for node in nodes] if own is None else list(own.items())


def _given(value: Any, registry: Registry) -> Selection | None:
    if value is None or isinstance(value, Selection):
        return value
    return _ask_selectors(registry, lambda selector: selector.given(value), (Selection,))


def _ask_selectors(registry: Registry, ask: Callable[[Selector], Any], kinds: tuple[type, ...]) -> Any | None:
    """Return the first answer of a selector that is not None."""

    def asked(cls: type[Selector]) -> Any:
        answer = ask(cls())
        if answer is not None and not isinstance(answer, kinds):
            raise TypeError(
                f"{cls.__qualname__} must answer with {' or '.join(kind.__name__ for kind in kinds)} (got {answer!r})"
            )
        return answer

    return next((answer for answer in registry.each("selectors", asked) if answer is not None), None)


def _select(primitive: Primitive, name: str, value: Any, node: Node, registry: Registry) -> Selection:
    if isinstance(value, tuple | list) and not value:
        raise _refusal(
            primitive, node, Violation(f"{name} is an empty list of matches", "give what find() found, or a pattern")
        )
    given = _given(value, registry)
    found: Selection | Violation | None
    if given is not None:
        found = given.located(node)
    else:
        found = _ask_selectors(registry, lambda selector: selector.select(node, value), (Selection, Violation))
        if found is None:
            found = Violation(f"no installed plugin can match {value!r}", "pip install slapo-core[all]")
        if isinstance(found, Violation):
            found = replace(found, message=f"{name}: {found.message}")
    if isinstance(found, Violation):
        raise _refusal(primitive, node, found)
    return found


def _refusal(primitive: Primitive, node: Node, violation: Violation) -> PreconditionError:
    return PreconditionError(
        f"cannot apply {primitive.name} at {place(node.path)}: {violation}", violations=[violation], path=node.path
    )


def _violations(found: Iterable[Violation] | None, primitive: Primitive, method: str, plugin: str) -> list[Violation]:
    try:
        violations = list(found or ())
    except SlapoError:
        raise
    except Exception as error:
        raise ApplyError(
            f"the {method} of {primitive} raised {type(error).__name__}: {error}", plugin=plugin
        ) from error
    for violation in violations:
        if not isinstance(violation, Violation):
            raise ApplyError(
                f"the {method} of {primitive} must yield Violation objects (got {violation!r})", plugin=plugin
            )
    return violations


def _message(start: str, violations: list[Violation]) -> str:
    if len(violations) == 1:
        return f"{start}: {violations[0]}"
    return "\n".join([f"{start}:", *(f"  - {violation}" for violation in violations)])
