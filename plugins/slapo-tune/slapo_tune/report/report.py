"""`Report`: everything that is to be said of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slapo_core.spec.sampler import Point, Trial
from slapo_core.spec.sizes import format_bytes
from slapo_tune.report.facts import Reason, Step, as_json, best_trial, counts, course, reasons
from slapo_tune.report.prediction import Agreement, agreement
from slapo_tune.report.symbols import Effect, effects
from slapo_tune.report.tables import print_table
from slapo_tune.report.words import choice, duration, number, point_words, same_point

__all__ = ["Report", "report"]


@dataclass(frozen=True)
class Report:
    """What a search found.

    Args:
        unit: of the value, e.g. ``"samples/s"``.
        points: that the space allows.
        refused: that it refuses by itself.
        untried: points that no trial has.
        trials: all of them, oldest first.
        best: of them; None if none was ``"ok"``.
        statuses: how many ended how.
        reasons: why the others did not end well, or were never started.
        course: trial by trial that was started.
        agreements: predicted against measured, of what has both.
        effects: of every candidate.
    """

    unit: str
    points: int
    refused: int
    untried: int
    trials: tuple[Trial, ...]
    best: Trial | None
    statuses: dict[str, int]
    reasons: tuple[Reason, ...]
    course: tuple[Step, ...]
    agreements: tuple[Agreement, ...]
    effects: tuple[Effect, ...]

    @property
    def seconds(self) -> float:
        """That all trials took together."""
        return sum(trial.seconds for trial in self.trials)

    def as_json(self) -> dict[str, Any]:
        """All of it, in what JSON has."""
        return {
            "best": as_json(self.best) if self.best else None,
            "course": [
                {
                    "best": step.best,
                    "number": step.trial.number,
                    "seconds": step.seconds,
                    "started": step.started,
                    "value": step.trial.value,
                }
                for step in self.course
            ],
            "prediction": {one.what: asdict(one) for one in self.agreements},
            "reasons": [
                {
                    "count": one.count,
                    "points": [dict(point) for point in one.points],
                    "reason": one.reason,
                    "status": one.status,
                }
                for one in self.reasons
            ],
            "seconds": self.seconds,
            "space": {"points": self.points, "refused": self.refused, "untried": self.untried},
            "statuses": self.statuses,
            "symbols": [
                {
                    "best": one.best.value if one.best else None,
                    "candidate": one.candidate,
                    "number": one.best.number if one.best else None,
                    "ok": one.ok,
                    "points": one.points,
                    "share": one.share,
                    "symbol": one.symbol,
                    "tried": one.tried,
                }
                for one in self.effects
            ],
            "trials": [as_json(trial) for trial in self.trials],
            "unit": self.unit,
        }

    def summary(self) -> str:
        """Two lines: how much was tried, and the best."""
        started = len(self.course)
        lines = [
            f"{self.points} points ({self.refused} more refused by the space); {started} started, "
            f"{len(self.trials) - started} pruned, {self.untried} not tried; {duration(self.seconds)}"
        ]
        if self.best is None:
            lines.append("no trial was ok")
        else:
            lines.append(
                f"best  {number(self.best.value or 0.0)} {self.unit}  {point_words(self.best.point)}"
                f"  (trial {self.best.number})"
            )
        return "\n".join(lines)

    def print(self, *, top: int = 10) -> None:
        """Print the tables.

        Args:
            top: so many of the best trials.
        """
        print(self.summary())
        fine = sorted((trial for trial in self.trials if trial.status == "ok"), key=lambda trial: -(trial.value or 0.0))
        title = f"the best {min(top, len(fine))} of {len(fine)} that were ok"
        print_table(title, _TRIAL_COLUMNS, [trial_row(trial, self.unit) for trial in fine[:top]])
        statuses = [(status, str(count)) for status, count in self.statuses.items() if count]
        print_table("how trials ended", ("STATUS", "COUNT"), statuses)
        rows = [(one.status, str(one.count), one.reason, point_words(one.points[0])) for one in self.reasons]
        print_table("why, of those that were not ok", ("STATUS", "COUNT", "REASON", "E.G."), rows)
        print_table(
            "predicted / measured",
            ("WHAT", "TRIALS", "MEDIAN", "LOWEST", "HIGHEST", "RANK CORRELATION"),
            [_agreement_row(one) for one in self.agreements],
        )
        print_table(
            "what each symbol does",
            ("SYMBOL", "CANDIDATE", "TRIED", f"BEST {self.unit}", "OF BEST", "WITH"),
            [_effect_row(one) for one in self.effects],
        )


def report(
    points: Sequence[Point],
    trials: Sequence[Trial],
    *,
    refused: Sequence[tuple[Point, str]] = (),
    unit: str = "samples/s",
) -> Report:
    """What is to be said of a search.

    Args:
        points: that the space allows.
        trials: of the search, oldest first.
        refused: points that the space refuses by itself, and why.
        unit: of the value.
    """
    known = {same_point(trial.point) for trial in trials}
    found = [agreement(trials, what) for what in ("memory", "time")]
    return Report(
        unit,
        len(points),
        len(refused),
        sum(same_point(point) not in known for point in points),
        tuple(trials),
        best_trial(trials),
        counts(trials),
        reasons(trials, refused),
        course(trials),
        tuple(one for one in found if one is not None),
        effects(points, trials),
    )


_TRIAL_COLUMNS = ("TRIAL", "VALUE", "STEP", "MEMORY", "PREDICTED", "POINT")


def trial_row(trial: Trial, unit: str) -> tuple[str, ...]:
    """A trial, for :data:`_TRIAL_COLUMNS`."""
    time, memory = trial.measured.get("time"), trial.measured.get("memory")
    predicted = trial.predicted.get("memory")
    return (
        str(trial.number),
        f"{number(trial.value)} {unit}" if trial.value is not None else trial.status,
        f"{time * 1e3:.4g} ms" if time else "",
        format_bytes(int(memory)) if memory else "",
        format_bytes(int(predicted)) if predicted else "",
        point_words(trial.point),
    )


def _agreement_row(one: Agreement) -> tuple[str, ...]:
    correlation = "" if one.correlation is None else f"{one.correlation:.3f}"
    return (one.what, str(one.count), f"{one.ratio:.3f}", f"{one.lowest:.3f}", f"{one.highest:.3f}", correlation)


def _effect_row(one: Effect) -> tuple[str, ...]:
    best = number(one.best.value) if one.best and one.best.value is not None else ""
    rest = {name: value for name, value in one.best.point.items() if name != one.symbol} if one.best else {}
    share = "" if one.share is None else f"{100 * one.share:.1f} %"
    return (one.symbol, choice(one.candidate), f"{one.tried} of {one.points}", best, share, point_words(rest))
