"""Apply one primitive: preconditions -> edits -> postconditions -> commit, or roll back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core.errors import (
    ApplyError,
    HookError,
    PostconditionError,
    PreconditionError,
    SlapoError,
)
from slapo_core.primitive import Primitive, Record, Violation, check_primitive
from slapo_core.schedule.scheduled_models import mark, unmark
from slapo_core.tree.edit import Edit
from slapo_core.tree.journal import Entry

if TYPE_CHECKING:
    from torch import nn

    from slapo_core.tree.node import Node
    from slapo_core.tree.tree import Tree


Ask = Callable[..., Iterable[tuple[str, Any]]]
"""Calls a plugin hook; returns all answers with their plugins: ``ask("slapo_preconditions", node=..., ...)``."""

Admit = Callable[[Primitive], tuple[str, str]]
"""Refuses the primitive of an unusable plugin; else activates its hooks and returns name and version."""

Settle = Callable[["Node", Primitive], Primitive]
"""Returns the primitive with its matches located in the present graphs."""


@dataclass(frozen=True)
class Step:
    """A committed step.

    Args:
        record: of the primitive.
        entries: they undo it.
        distributions: whose primitives took part.
    """

    record: Record
    entries: tuple[Entry, ...]
    distributions: frozenset[str] = frozenset()

    def undo(self) -> None:
        """Undo all entries; where your own changes prevent one, redo those undone so far."""
        unmark(self._changed)
        undone: list[Entry] = []
        try:
            for entry in reversed(self.entries):
                entry.undo()
                undone.append(entry)
        except BaseException:
            for entry in reversed(undone):
                entry.redo()
            self.mark()
            raise

    def redo(self) -> None:
        for entry in self.entries:
            entry.redo()
        self.mark()

    def mark(self) -> None:
        """Mark the changed modules as carrying a step."""
        mark(self._changed)

    @property
    def _changed(self) -> Iterator[nn.Module]:
        """Yield each module that the step changed."""
        return iter({id(module): module for entry in self.entries for module in entry.changed}.values())


class Transaction:
    """Applies one primitive at one node: everything or nothing.

    Args:
        tree: the tree that is changed.
        ask: calls plugin hooks; see :data:`Ask`.
        admit: see :data:`Admit`; also asked about primitives that this one applies.
        inner: filled with a record for each primitive that this one applies, for those after it to see.
        settle: see :data:`Settle`; also for primitives that this one applies.
        after_edit: called with the number of edits made so far after each; raising from it is a fault inside apply.
    """

    def __init__(
        self,
        tree: Tree,
        *,
        ask: Ask,
        admit: Admit,
        settle: Settle,
        inner: list[Record] | None = None,
        after_edit: Callable[[int], None] | None = None,
    ) -> None:
        self._inner = inner if inner is not None else []
        self._tree = tree
        self._ask = ask
        self._admit = admit
        self._settle = settle
        self._provider = ("", "")
        self._edit = Edit(tree, after_edit=after_edit)

    def run(self, node: Node, primitive: Primitive, *, index: int, location: str) -> tuple[Node, Step]:
        """Apply ``primitive`` at ``node``.

        Returns:
            the node on which a chained call continues, and the committed step.

        Raises:
            PreconditionError: a rule is broken; nothing was touched.
            ApplyError: the primitive raised; the model is as before.
            PostconditionError: the primitive did not take effect; the model is as before.
        """
        self._provider = self._admit(primitive)
        self._tree.open_edit = self._edit
        try:
            primitive = self._settle(node, primitive)
            self._check(node, primitive)
            try:
                result = self._change(node, primitive)
                record = Record(index, primitive, node.path, *self._provider, location, self._edit.effects(node.path))
            except BaseException:
                self._edit.rollback()
                raise
        finally:
            self._tree.open_edit = None
        distributions = frozenset({record.distribution, *(inner.distribution for inner in self._inner)})
        step = Step(record, tuple(self._edit.close()), distributions)
        step.mark()
        return result, step

    def _check(self, node: Node, primitive: Primitive) -> None:
        violations = _collect(primitive.preconditions(node), primitive, "preconditions", self._plugin)
        for distribution, answer in self._ask("slapo_preconditions", node=node, primitive=primitive):
            violations.extend(_answered(answer, distribution))
        if violations:
            raise PreconditionError(
                _message(f"cannot apply {primitive} at {_where(node)}", violations),
                violations=violations,
                path=node.path,
                plugin=self._plugin,
            )

    def _change(self, node: Node, primitive: Primitive) -> Node:
        first, before = len(self._edit.entries), len(self._edit.entries) + len(self._edit.notes)
        try:
            result = primitive.apply(node, self._edit)
            self._edit.follow(first)
        except SlapoError:
            raise
        except Exception as error:
            raise ApplyError(
                f"{primitive} failed at {_where(node)} and was rolled back: {type(error).__name__}: {error}",
                path=node.path,
                plugin=self._plugin,
            ) from error
        violations = _collect(primitive.postconditions(node), primitive, "postconditions", self._plugin)
        if not violations and len(self._edit.entries) + len(self._edit.notes) == before:
            violations = [
                Violation("nothing was changed and no reason was noted", "call edit.note(reason) if that is right")
            ]
        if violations:
            raise PostconditionError(
                _message(f"{primitive} at {_where(node)} did not take effect and was rolled back", violations),
                violations=violations,
                path=node.path,
                plugin=self._plugin,
            )
        return node if result is None else result

    def _apply_inner(self, node: Node, primitive: Primitive, edit: Edit) -> Node:
        check_primitive(primitive)
        before, known, outer = len(edit.entries), len(self._inner), self._provider
        self._provider = self._admit(primitive)
        try:
            primitive = self._settle(node, primitive)
            self._check(node, primitive)
            result = self._change(node, primitive)
        except BaseException:  # the outer primitive may go on without it
            edit.rollback_to(before)
            del self._inner[known:]
            self._provider = outer
            raise
        self._inner.append(Record(0, primitive, node.path, *self._provider))
        self._provider = outer
        return result

    @property
    def _plugin(self) -> str:
        return " ".join(self._provider)


def _collect(found: Iterable[Violation] | None, primitive: Primitive, method: str, plugin: str) -> list[Violation]:
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


def _answered(answer: Any, distribution: str) -> list[Violation]:
    """Return the violations of a plugin's hook."""
    violations = list(answer) if isinstance(answer, Iterable) and not isinstance(answer, str) else [answer]
    wrong = [item for item in violations if not isinstance(item, Violation)]
    if wrong:
        raise HookError(
            f"hook slapo_preconditions of {distribution} must yield Violation objects (got {wrong[0]!r})",
            plugin=distribution,
            hint='yield slapo_core.Violation("weight is split twice", hint="undo the first split")',
        )
    return violations


def _message(start: str, violations: list[Violation]) -> str:
    if len(violations) == 1:
        return f"{start}: {violations[0]}"
    return "\n".join([f"{start}:", *(f"  - {violation}" for violation in violations)])


def _where(node: Node) -> str:
    return f"'{node.path}'" if node.path else "the root"
