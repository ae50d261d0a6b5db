"""``slapo tune show``: one trial, or the space."""

from __future__ import annotations

from pathlib import Path

from slapo_core.spec.sampler import Trial
from slapo_core.spec.sizes import format_bytes
from slapo_tune.commands.loading import load
from slapo_tune.commands.output import print_json, read, some, space_of, trial_of, unit_of
from slapo_tune.report.facts import as_json as trial_as_json, reasons
from slapo_tune.report.symbols import candidates, symbols
from slapo_tune.report.tables import print_table
from slapo_tune.report.words import choice, duration, number, point_words
from slapo_tune.study import Study
from slapo_tune.trials.outputs import output_file

__all__ = ["show_study"]

_LINES = 20  # of what a trial printed


def show_study(file: Path, which: int | None, *, log: Path | None, as_json: bool) -> None:
    """Print one trial, or the space.

    Args:
        file: of the study.
        which: the number of a trial; None for the space, which needs no log.
        log: replaces the study's own.
        as_json: as JSON.

    Raises:
        ArgumentError: there is no such trial.
    """
    study = load(file, log=log)
    if which is None:
        _show_space(study, as_json=as_json)
        return
    trial = trial_of(read(study, file).trials, which)
    printed = output_file(Path(study.log), which)
    tail = printed.read_text(encoding="utf-8", errors="replace").splitlines() if printed.is_file() else []
    if as_json:
        print_json({**trial_as_json(trial), "output": str(printed) if printed.is_file() else None})
    else:
        _print_trial(trial, unit_of(study), printed, tail)


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
    space = space_of(study)
    points, refused = some(space.points()), some(space.refused())
    names = symbols([*points, *(point for point, _ in refused)])
    why = reasons((), refused)
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
        [(str(one.count), one.reason, point_words(one.points[0])) for one in why],
    )
