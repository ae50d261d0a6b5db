"""The best schedule: verified on real ranks, and saved as a document."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import slapo_core as slapo
from slapo_tune.errors import LogError, StudyError
from slapo_tune.plain_data import decode, encode
from slapo_tune.samplers import Trial
from slapo_tune.settings import StudySettings
from slapo_tune.trials import TrialRunner, output_file

_FORMAT = 1
_PATIENCE = 10.0  # verification runs both models many times, in float64


@dataclass(frozen=True)
class Winner:
    """The best schedule of a search.

    Args:
        number: number of its trial.
        point: the choices.
        value: its value.
        mesh: sizes; None for one rank.
        document: the result of ``sch.document()``; None if JSON cannot store an argument of a step.
        right: whether it agrees with the reference model on real ranks; None if not verified.
        reason: why it is wrong, not verified, or without a document.
        text: the report of the verification.
        predicted: as in :class:`slapo_core.Trial`.
        measured: as in :class:`slapo_core.Trial`.
        versions: versions of the packages that found it.
    """

    number: int
    point: Mapping[str, Any]
    value: float
    mesh: Mapping[str, int] | None
    document: Mapping[str, Any] | None
    right: bool | None
    reason: str
    text: str
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    versions: Mapping[str, str]

    def apply(self, model: nn.Module, *, mesh: Any = None, example_inputs: Any = None) -> slapo.Schedule:
        """Apply the schedule to another instance of the model.

        Args:
            model: a fresh instance.
            mesh: as for :func:`slapo_core.create_schedule`; None takes the mesh of its trial.
            example_inputs: as for :func:`slapo_core.create_schedule`.

        Raises:
            StudyError: the document is missing.
            ReplayError: a step is refused.
        """
        if self.document is None:
            raise StudyError(
                f"trial {self.number} has no schedule document: {self.reason}",
                hint="sch = slapo.create_schedule(model, mesh=...); schedule(sch, best.point) of the study",
            )
        mesh = mesh if mesh is not None else self.mesh
        return slapo.replay(model, self.document, mesh=mesh, example_inputs=example_inputs)


def verify_winner(study: StudySettings, trial: Trial, *, trials: TrialRunner | None = None) -> Winner:
    """Make and verify the schedule of a trial on real ranks.

    Args:
        study: the study of the trial.
        trial: a trial with status ``"ok"``.
        trials: runs the verification; None makes a runner.
    """
    trials = trials or TrialRunner(study)
    verifies = study.verify and study.batch is not None
    mesh = study.mesh_of(trial.point)
    outcome = trials.run(
        "verify",
        trial.point,
        mesh,
        output=output_file(study.log, trial.number).with_suffix(".verify.txt"),
        timeout=_PATIENCE * study.timeout,
        ranks=study.world_size,
        verify=verifies,
    )
    result = outcome.result
    right, reason = None, ""
    if outcome.status == "wrong":
        right, reason = False, outcome.reason
    elif outcome.status != "ok":
        reason = f"the verification ended as {outcome.status}: {outcome.reason}"
    elif verifies:
        right, reason = True, result.get("no_document", "")
    else:
        reason = "not verified: " + ("verify=False" if study.batch is not None else "the study has no batch=")
    return Winner(
        number=trial.number,
        point=dict(trial.point),
        value=trial.value if trial.value is not None else float("nan"),
        mesh=mesh,
        document=result.get("document"),
        right=right,
        reason=reason,
        text=result.get("report", ""),
        predicted=dict(trial.predicted),
        measured=dict(trial.measured),
        versions={name: version(name) for name in ("slapo-core", "slapo-tune", "torch")},
    )


def apply(study: StudySettings, trial: Trial, *, rank: int = 0) -> slapo.Schedule:
    """Make the schedule of a trial in this process, on an abstract mesh and the meta device.

    Args:
        study: the study of the trial.
        trial: the trial.
        rank: the rank on the abstract mesh.
    """
    with torch.device("meta"):
        model = study.make_model()
    batch = None if study.batch is None else study.batch(trial.point)
    schedule = slapo.create_schedule(model, mesh=study.mesh_of(trial.point), example_inputs=batch, rank=rank)
    study.schedule(schedule, trial.point)
    return schedule


def best_file(log: str | os.PathLike[str]) -> Path:
    """Return the path of a search's best schedule: ``run.best.json`` next to ``run.jsonl``."""
    return Path(log).with_suffix(".best.json")


def save(winner: Winner, log: str | os.PathLike[str]) -> Path:
    """Write the best schedule next to the log, atomically."""
    path = best_file(log)
    data = {"slapo_tune_best": _FORMAT, "saved": time.time(), **vars(winner), "point": encode(winner.point)}
    replace_file(path, data)
    return path


def replace_file(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON atomically, also if the process is killed."""
    temporary = path.with_name(f"{path.name}.part")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def best(log: str | os.PathLike[str]) -> Winner:
    """Read the best schedule of a search that has ended.

    Args:
        log: path of the log, e.g. ``"run.jsonl"``, or of the best schedule, ``"run.best.json"``.

    Raises:
        LogError: not found, or not a schedule of a search.
    """
    path = Path(log) if Path(log).name.endswith(".best.json") else best_file(log)
    try:
        data = json.loads(path.read_text())
        if data.pop("slapo_tune_best") != _FORMAT:
            raise ValueError("another format")
        data.pop("saved")
        return Winner(**{**data, "point": decode(data["point"])})
    except FileNotFoundError as error:
        raise LogError(
            f"{path} not found: the search has not ended, or no trial was ok",
            hint="slapo tune resume STUDY.py",
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise LogError(f"{path} is not the best schedule of a search: {error}") from error


def saved_winner(log: str | os.PathLike[str], trial: Trial) -> Winner | None:
    """Read the best schedule of a search if it is of this trial; None otherwise."""
    try:
        winner = best(log)
    except LogError:
        return None
    is_it = (winner.number, winner.point, winner.value) == (trial.number, dict(trial.point), trial.value)
    return winner if is_it else None
