"""``slapo tune best``: the winner, verified and applied, and its schedule document."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer

from slapo_core import ArgumentError, Schedule
from slapo_core.spec.sampler import Trial
from slapo_tune.commands.loading import load
from slapo_tune.commands.output import print_json, read, trial_of, unit_of
from slapo_tune.errors import LogError
from slapo_tune.report.facts import as_json as trial_as_json, best_trial
from slapo_tune.report.words import number, point_words
from slapo_tune.search.predictions import sources
from slapo_tune.search.winner import Winner, apply, best, prove
from slapo_tune.study import Study

__all__ = ["best_of_study"]


def best_of_study(
    file: Path, *, log: Path | None, out: Path | None, trial: int | None, again: bool, as_json: bool
) -> None:
    """Verify, apply and write the winner.

    Args:
        file: of the study.
        log: replaces the study's own.
        out: of the schedule document; None for none.
        trial: number of a trial in place of the best one.
        again: verify also what the search has verified.
        as_json: as JSON, the document with it.

    Raises:
        ArgumentError: no trial was ok, or not this one; there is no document, or it cannot be written.
    """
    study = replace(load(file, log=log), verify=True)
    known = read(study, file)
    chosen = _chosen(study, file, known.trials, trial)
    edited = known.header.get("sources") != sources(study)
    winner = (None if again or edited else _kept(study, chosen)) or prove(study, chosen)
    schedule = _applied(study, chosen, winner)
    wrote = None
    if out is not None and winner.right is not False:
        wrote = _write(winner, out)
    if as_json:
        answer = {"document": winner.document, "reason": winner.reason, "right": winner.right, "text": winner.text}
        print_json({**answer, "trial": trial_as_json(chosen), "wrote": str(wrote) if wrote else None})
    else:
        _print(winner, unit_of(study), schedule, wrote)
    if winner.right is not True:
        raise typer.Exit(1)


def _chosen(study: Study, file: Path, trials: Sequence[Trial], which: int | None) -> Trial:
    if which is None:
        found = best_trial(trials)
        if found is None:
            raise ArgumentError(
                f"no trial in {study.log} was ok ({len(trials)} in all)", hint=f"slapo tune report {file} says why"
            )
        return found
    found = trial_of(trials, which)
    if found.status != "ok":
        raise ArgumentError(f"trial {which} was not ok: {found.status}: {found.reason}")
    return found


def _kept(study: Study, chosen: Trial) -> Winner | None:
    """What the search itself has verified, if that is this trial."""
    try:
        found = best(study.log)
    except LogError:
        return None  # it has not ended
    return found if found.number == chosen.number and found.point == chosen.point and found.right else None


def _applied(study: Study, chosen: Trial, winner: Winner) -> Schedule:
    """The schedule, from its document: on a model without memory, with a mesh that is only declared."""
    if winner.document is None:
        return apply(study, chosen)
    with torch.device("meta"):
        model = study.make_model()
    return winner.apply(model, example_inputs=None if study.batch is None else study.batch(chosen.point))


def _print(winner: Winner, unit: str, schedule: Schedule, wrote: Path | None) -> None:
    print(f"{number(winner.value)} {unit}  {point_words(winner.point)}  (trial {winner.number})")
    if winner.text:
        print(f"\n{winner.text}")
    if winner.right is not True:
        print(f"\n{'WRONG' if winner.right is False else 'not verified'}: {winner.reason}")
    steps = schedule.explain()
    print(f"\napplied: {len(schedule.records)} steps{':' if steps else ''}\n{steps}".rstrip())
    if wrote is not None:
        print(f'\nwrote {wrote}: sch = slapo_core.replay(model, "{wrote}")')


def _write(winner: Winner, out: Path) -> Path:
    """By rename: a reader sees the old document or the new one."""
    if winner.document is None:
        raise ArgumentError(f"the schedule of trial {winner.number} cannot be kept: {winner.reason}")
    tuned: dict[str, Any] = {"point": dict(winner.point), "value": winner.value, "versions": dict(winner.versions)}
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({**winner.document, "tuned": tuned}, indent=2) + "\n", encoding="utf-8")
        part.replace(out)
    except OSError as error:
        raise ArgumentError(f"the schedule cannot be written: {error}", hint="--out schedule.json") from error
    return out
