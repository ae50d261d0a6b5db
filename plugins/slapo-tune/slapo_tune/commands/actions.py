"""Actions of the commands: load a study, run it, print its results."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import typer

from slapo_core import ArgumentError, Schedule
from slapo_core.cli import print_json
from slapo_runtime.sizes import format_bytes
from slapo_tune.log import Log, read_log
from slapo_tune.predictions import sources
from slapo_tune.report import (
    StudyReport,
    best_trial,
    candidates,
    choice,
    duration,
    number,
    point_words,
    print_table,
    symbols,
)
from slapo_tune.samplers import Trial
from slapo_tune.search import SearchResult
from slapo_tune.space import Space
from slapo_tune.study import Study, load_study
from slapo_tune.trials import output_file
from slapo_tune.winner import Winner, apply, replace_file, saved_winner, verify_winner


def load(file: Path, *, log: Path | None = None, trials: int | None = None, sampler: str | None = None) -> Study:
    """Load the study of a file, with the options of the command line.

    Args:
        file: Python, with a :class:`slapo_tune.Study` named ``study`` at its top level.
        log: replaces the study's log.
        trials: replaces the study's limit.
        sampler: replaces the study's sampler.

    Raises:
        StudyError: the file does not exist, cannot be imported, or has no such study.
    """
    changes: dict[str, Any] = {"log": log, "trials": trials, "sampler": sampler}
    return replace(load_study(file), **{name: value for name, value in changes.items() if value is not None})


def read(study: Study, file: Path) -> Log:
    """Read the study's log.

    Args:
        study: the study.
        file: file of the study, for the message.

    Raises:
        ArgumentError: not found, or of another space.
        LogError: damaged, or not a log.
    """
    log = Path(study.log)
    if not log.exists():
        raise ArgumentError(f"log not found: {log} (in {Path.cwd()})", hint=f"slapo tune run {file}")
    found = read_log(log)
    if found.header.get("fingerprint") != Space.of(study.space).fingerprint():
        raise ArgumentError(
            f"{log} is the log of another space than that of {file}", hint="--log OTHER.jsonl, or restore the space"
        )
    return found


def trial_of(trials: Iterable[Trial], number: int) -> Trial:
    """Return the trial with a number.

    Raises:
        ArgumentError: not found.
    """
    known = {trial.number: trial for trial in trials}
    if number not in known:
        has = f"trials {min(known)} to {max(known)}" if known else "no trials yet"
        raise ArgumentError(f"trial {number} not found: the log has {has}")
    return known[number]


INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""


def run_study(
    file: Path, *, log: Path | None, trials: int | None, sampler: str | None, as_json: bool, resume: bool
) -> None:
    """Run a study to its end.

    Args:
        file: file of the study.
        log: replaces the study's log.
        trials: replaces the study's limit.
        sampler: replaces the study's sampler.
        as_json: print the report as JSON.
        resume: resume from the log; otherwise the log must have no trials.
    """
    before = time.monotonic()
    study = load(file, log=log, trials=trials, sampler=sampler)
    option = f" --log {log}" if log is not None else ""
    again = option + (f" --sampler {sampler}" if sampler is not None else "")
    _require_log(study, file, again, resume=resume)
    try:
        result = study.run(progress=True, resume=resume)
    except KeyboardInterrupt:
        print(f"interrupted: all finished trials are in {study.log}; resume by", file=sys.stderr)
        print(f"  slapo tune resume {file}{again}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    found = study.report(result.trials)
    if as_json:
        winner = {"reason": result.winner.reason, "right": result.winner.right} if result.winner else None
        spent = {**result.seconds, "all": time.monotonic() - before}
        print_json({**found.as_json(), "ended": result.ended, "log": str(study.log), "spent": spent, "winner": winner})
    else:
        _print_search(found, result, f"{file}{option}", time.monotonic() - before)
    if result.winner is None or result.winner.right is False:
        raise typer.Exit(1)


def _require_log(study: Study, file: Path, option: str, *, resume: bool) -> None:
    """Require a log with trials to resume, or one without to start.

    Raises:
        ArgumentError: a log with trials at the start, or no log to resume.
    """
    log = Path(study.log)
    trials = study.report().trials
    if trials and not resume:
        raise ArgumentError(
            f"the log {log} already has {len(trials)} trials",
            hint=f"slapo tune resume {file}{option}, or slapo tune run {file} --log ANOTHER.jsonl",
        )
    if resume and not log.exists():
        raise ArgumentError(f"log not found: {log}", hint=f"slapo tune run {file}{option}")


def _print_search(found: StudyReport, result: SearchResult, words: str, seconds: float) -> None:
    print(found.summary())
    parts = {**result.seconds, "the rest": max(0.0, seconds - sum(result.seconds.values()))}
    print(f"this run took {duration(seconds)}: " + ", ".join(f"{name} {duration(parts[name])}" for name in parts))
    print(f"the search ended: {_ENDS.get(result.ended, result.ended)}")
    if found.best is None:
        for one in found.reasons[:5]:
            print(f"  {one.count} {one.status}: {one.reason}")
        print(f"slapo tune report {words} shows the reasons")
        return
    if result.winner is not None:
        print("the best schedule is verified" if result.winner.right else f"not verified: {result.winner.reason}")
    print(f"slapo tune report {words} shows the tables")
    print(f"slapo tune best {words} --out schedule.json shows and saves the schedule")


_ENDS = {
    "space": "the sampler proposes nothing more",
    "trials": "the limit of trials is reached",
    "budget": "the budget of time is used",
}


def report_study(file: Path, *, log: Path | None, plot: Path | None, axes: str | None, top: int, as_json: bool) -> None:
    """Print the results of a search, and plot it.

    Args:
        file: file of the study.
        log: replaces the study's log.
        plot: file of the plot; None for no plot.
        axes: two symbols, separated by a comma; None takes the two with the most candidates.
        top: number of best trials to print.
        as_json: print the report as JSON.

    Raises:
        ArgumentError: ``axes`` are not two symbols.
    """
    chosen = _axes(axes)
    study = load(file, log=log)
    trials = read(study, file).trials
    found = study.report(trials)
    if plot is not None:
        study.plot(plot, axes=chosen, title=file.name, trials=trials)
    if as_json:
        print_json({**found.as_json(), "log": str(study.log), "picture": None if plot is None else str(plot)})
        return
    found.print(top=top)
    if plot is not None:
        print(f"wrote {plot}", file=sys.stderr)


def _axes(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2:
        raise ArgumentError(f"--axes must be two symbols (got {text!r})", hint="--axes batch,checkpoint")
    return (names[0], names[1])


_LINES = 20  # of a trial's output


def show_study(file: Path, which: int | None, *, log: Path | None, as_json: bool) -> None:
    """Print one trial, or the space.

    Args:
        file: file of the study.
        which: number of a trial; None for the space, which needs no log.
        log: replaces the study's log.
        as_json: print JSON.

    Raises:
        ArgumentError: the trial does not exist.
    """
    study = load(file, log=log)
    if which is None:
        _show_space(study, as_json=as_json)
        return
    trial = trial_of(read(study, file).trials, which)
    printed = output_file(Path(study.log), which)
    tail = printed.read_text(encoding="utf-8", errors="replace").splitlines() if printed.is_file() else []
    if as_json:
        print_json({**asdict(trial), "output": str(printed) if printed.is_file() else None})
    else:
        _print_trial(trial, study.unit, printed, tail)


def _print_trial(trial: Trial, unit: str, printed: Path, tail: list[str]) -> None:
    value = f"  {number(trial.value)} {unit}" if trial.value is not None else ""
    print(f"trial {trial.number}  {trial.status}{value}  {duration(trial.seconds)}\n")
    for name, chosen in trial.point.items():
        print(f"  {name} = {choice(chosen)}")
    if trial.reason:
        print(f"\n{trial.reason.rstrip()}")
    rows = []
    for name in dict.fromkeys((*trial.predicted, *trial.measured)):
        before, after = trial.predicted.get(name), trial.measured.get(name)
        rows.append((name, _amount(name, before), _amount(name, after)))
    print_table("numbers", ("", "PREDICTED", "MEASURED"), rows)
    if printed.is_file():
        print(f"\n{printed}" + (f" (the last {_LINES} of {len(tail)} lines)" if len(tail) > _LINES else ""))
        print("\n".join(f"  {line}" for line in tail[-_LINES:]))


def _amount(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if not isinstance(value, (int, float)):
        return str(value)
    if name == "memory":
        return format_bytes(value)
    return f"{value * 1e3:.4g} ms" if name == "time" else number(value)


def _show_space(study: Study, *, as_json: bool) -> None:
    space = study.report(())
    points, refused = space.points, space.refused
    names = symbols([*points, *(point for point, _ in refused)])
    if as_json:
        print_json(
            {
                "points": [dict(point) for point in points],
                "refused": [{"point": dict(point), "reason": reason} for point, reason in refused],
                "symbols": {name: list(candidates(points, name)) for name in names},
            }
        )
        return
    print(f"{len(points)} points, {len(refused)} more refused")
    rows = [(name, ", ".join(map(choice, candidates(points, name)))) for name in names]
    print_table("symbols", ("SYMBOL", "CANDIDATES"), rows)
    print_table(
        "refused by the space",
        ("COUNT", "REASON", "E.G."),
        [(str(one.count), one.reason, point_words(one.points[0])) for one in space.reasons],
    )


def best_of_study(
    file: Path, *, log: Path | None, out: Path | None, trial: int | None, again: bool, as_json: bool
) -> None:
    """Verify, apply and write the best schedule.

    Args:
        file: file of the study.
        log: replaces the study's log.
        out: file of the schedule document; None for no file.
        trial: number of a trial; None for the best one.
        again: verify again, also if the search has verified the trial.
        as_json: print JSON, with the document.

    Raises:
        ArgumentError: no trial was ok, or not this one; the document is missing or cannot be written.
    """
    study = replace(load(file, log=log), verify=True)
    known = read(study, file)
    chosen = _chosen(study, file, known.trials, trial)
    edited = known.header.get("sources") != sources(study)
    saved = None if again or edited else saved_winner(study.log, chosen)
    winner = saved if saved is not None and saved.right else verify_winner(study, chosen)
    schedule = _applied(study, chosen, winner)
    wrote = None
    if out is not None and winner.right is not False:
        wrote = _write(winner, out)
    if as_json:
        answer = {"document": winner.document, "reason": winner.reason, "right": winner.right, "text": winner.text}
        print_json({**answer, "trial": asdict(chosen), "wrote": str(wrote) if wrote else None})
    else:
        _print_winner(winner, study.unit, schedule, wrote)
    if winner.right is not True:
        raise typer.Exit(1)


def _chosen(study: Study, file: Path, trials: Sequence[Trial], which: int | None) -> Trial:
    if which is None:
        found = best_trial(trials)
        if found is None:
            raise ArgumentError(
                f"no trial in {study.log} was ok (got {len(trials)} trials)",
                hint=f"slapo tune report {file} shows the reasons",
            )
        return found
    found = trial_of(trials, which)
    if found.status != "ok":
        raise ArgumentError(f"trial {which} must be ok (got {found.status}: {found.reason})")
    return found


def _applied(study: Study, chosen: Trial, winner: Winner) -> Schedule:
    """Apply the document to a model on the meta device, on an abstract mesh."""
    if winner.document is None:
        return apply(study, chosen)
    with torch.device("meta"):
        model = study.make_model()
    return winner.apply(model, example_inputs=None if study.batch is None else study.batch(chosen.point))


def _print_winner(winner: Winner, unit: str, schedule: Schedule, wrote: Path | None) -> None:
    print(f"{number(winner.value)} {unit}  {point_words(winner.point)}  (trial {winner.number})")
    if winner.text:
        print(f"\n{winner.text}")
    if winner.right is not True:
        print(f"\n{'WRONG' if winner.right is False else 'not verified'}: {winner.reason}")
    steps = schedule.explain()
    print(f"\napplied: {len(schedule.records)} steps{':' if steps else ''}\n{steps}".rstrip())
    if wrote is not None:
        print(f'\nwrote {wrote}: sch = slapo.replay(model, "{wrote}")')


def _write(winner: Winner, out: Path) -> Path:
    if winner.document is None:
        raise ArgumentError(f"trial {winner.number} has no schedule document: {winner.reason}")
    tuned: dict[str, Any] = {"point": dict(winner.point), "value": winner.value, "versions": dict(winner.versions)}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, {**winner.document, "tuned": tuned})
    except OSError as error:
        raise ArgumentError(f"the schedule cannot be written: {error}", hint="--out schedule.json") from error
    return out
