"""Built engines: what a watch of their training steps needs, and the receipt of the first step."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ReceiptError
from slapo_core.internals import Internals
from slapo_runtime.ranks.world import World
from slapo_runtime.receipts.attribution import StepPlaces
from slapo_runtime.receipts.receipt import (
    Expectation,
    Finding,
    expectations,
    expectations_of_plan,
    receipt,
    unexplained,
)
from slapo_runtime.receipts.watch import Watch

if TYPE_CHECKING:
    from slapo_core import Engine, Plan, Schedule


@dataclass(frozen=True)
class Built:
    """The schedule and plan of an engine, and what both expect.

    Args:
        schedule: which the build sealed.
        plan: of the dialect.
        places: of the schedule's steps.
        of_steps: the effects of the steps, asked before the runtime took the model over; or the error of one.
    """

    schedule: Schedule
    plan: Plan
    places: StepPlaces
    of_steps: tuple[Expectation, ...] | Exception

    @classmethod
    def before(cls, schedule: Schedule, plan: Plan) -> Built:
        """Read the schedule before the dialect builds; a build drops its changes."""
        try:
            found: tuple[Expectation, ...] | Exception = tuple(expectations(schedule, by_runtime=True))
        except Exception as error:  # noqa: BLE001 - a broken plugin breaks nothing but its own effects
            found = error
        return cls(schedule, plan, StepPlaces.of(schedule.model, Internals(schedule).entries()), found)

    @property
    def expected(self) -> tuple[Expectation, ...]:
        """The effects of steps and dialect.

        Raises:
            Exception: that of a step, asked for its effects.
        """
        if isinstance(self.of_steps, Exception):
            raise self.of_steps
        return (*self.of_steps, *expectations_of_plan(self.plan))

    def watch(self) -> Watch:
        """Make a watch of the engine's training steps."""
        return Watch(self.schedule, places=self.places)


_BUILT: weakref.WeakKeyDictionary[Any, Built] = weakref.WeakKeyDictionary()


def note_built(engine: Engine, built: Built) -> None:
    """Keep what a watch needs, as long as the engine lives; nothing of an engine without weak references."""
    with contextlib.suppress(TypeError):
        _BUILT[engine] = built


def built_of(engine: Engine) -> Built | None:
    """Return what a watch of an engine needs; None of one that :func:`slapo_core.build` did not make."""
    try:
        return _BUILT.get(engine)
    except TypeError:  # no engine
        return None


def check_first_step(engine: Any, built: Built) -> None:
    """Let the engine's first ``train_step`` run under a watch, which it leaves without a trace.

    Args:
        engine: new; the step raises :class:`slapo_core.ReceiptError` where an effect is missing.
        built: of it.
    """
    step, expected = engine.train_step, built.expected

    def first_step(batch: Any) -> Any:
        with built.watch().watching() as record:
            record.steps = 1
            result = step(batch)
        del engine.train_step
        findings = (*receipt(expected, record), *unexplained(record, expected, by_runtime=True))
        own = [dataclasses.asdict(one) for one in findings if not one.is_seen]
        world = World(built.schedule.mesh)
        for rank, text in enumerate(world.gather_by_store(json.dumps([len(findings), own]))):
            count, missing = json.loads(text)
            if missing:
                where = "" if world.is_alone else f" on rank {world.ranks[rank]}"
                raise _error([Finding(**each) for each in missing], count, where)
        return result

    engine.train_step = first_step


_SHOWN = 10


def _error(missing: list[Finding], count: int, where: str) -> ReceiptError:
    first, more = missing[0], len(missing) - _SHOWN
    what = f"{len(missing)} of {count} effects are missing{where} in the first training step, whose update was made"
    lines = "\n".join(f"  {one}" for one in missing[:_SHOWN]) + (f"\n  and {more} more" if more > 0 else "")
    return ReceiptError(
        f"{what}:\n{lines}",
        record=first.source,
        location=first.location,
        expected=first.expected,
        seen=first.seen,
        hint="look at the step named first; observe(engine, batch) shows what a training step does",
    )
