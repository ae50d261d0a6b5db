"""Look for the effects of steps in the training phase of the scheduled model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from slapo_core.effects import Casts, Collective, Recomputes
from slapo_runtime.receipts.receipt import Expectation, Finding, expectations, receipt, unexplained
from slapo_runtime.receipts.watch import Observed, Watch

if TYPE_CHECKING:
    from torch import nn

    from slapo_core import Schedule


class Receipts:
    """Watch a run, and compare it with what the steps of a schedule expect.

    Types are left out: the models run in float64, or in another type than the model's own.

    Args:
        schedule: with all its steps in force.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._observed: Observed | None = None

    @contextmanager
    def watching(self, modules: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
        """Watch the modules of a copy of the model."""
        with Watch(self._schedule, modules).watching() as observed:
            observed.steps = 1
            yield
        self._observed = observed

    def findings(self) -> tuple[Finding, ...]:
        """Return each effect with what was seen of it on this rank."""
        if self._observed is None:
            return ()
        expected = [_without_types(one) for one in expectations(self._schedule) if not isinstance(one.effect, Casts)]
        found = receipt([one for one in expected if not _may_keep_nothing(one)], self._observed)
        return (*found, *unexplained(self._observed, expected))


def _may_keep_nothing(one: Expectation) -> bool:
    """Return whether a checkpoint is of matches, of which nothing is kept where they are dropout, which is off here."""
    is_of_match = one.step is not None and getattr(one.step.primitive, "match", None) is not None
    return is_of_match and isinstance(one.effect, Recomputes)


def _without_types(one: Expectation) -> Expectation:
    if not isinstance(one.effect, Collective):
        return one
    return dataclasses.replace(one, effect=dataclasses.replace(one.effect, dtype=None))
