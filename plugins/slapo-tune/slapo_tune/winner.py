"""The best schedule: verified on real ranks, and kept as a document."""

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
from slapo_tune.samplers import Trial
from slapo_tune.space import decode, encode
from slapo_tune.study import Study
from slapo_tune.trials import Trials, output_file

_FORMAT = 1
_PATIENCE = 10.0  # verifying runs both models many times, in float64


@dataclass(frozen=True)
class Winner:
    """A schedule that a search found.

    Args:
        number: of its trial.
        point: the choices.
        value: of the maximized function.
        mesh: its sizes; None for one rank.
        document: what ``sch.document()`` gave; None where a step holds what JSON cannot carry.
        right: whether it was verified on real ranks and agrees with the reference model; None where that could
            not be found out.
        reason: why it is wrong, not known, or without a document.
        text: the report of the verification.
        predicted: as in :class:`slapo_core.Trial`.
        measured: as in :class:`slapo_core.Trial`.
        versions: of the packages that it was found with.
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
            mesh: as for :func:`slapo_core.create_schedule`; None takes the one that it was found with.
            example_inputs: as for :func:`slapo_core.create_schedule`.

        Raises:
            StudyError: the document is missing.
            ReplayError: a step is refused.
        """
        if self.document is None:
            raise StudyError(
                f"the schedule of trial {self.number} could not be kept: {self.reason}",
                hint="sch = slapo_core.create_schedule(model, mesh=...); schedule(sch, best.point) of the study",
            )
        mesh = mesh if mesh is not None else self.mesh
        return slapo.replay(model, self.document, mesh=mesh, example_inputs=example_inputs)


def prove(study: Study, trial: Trial, *, trials: Trials | None = None) -> Winner:
    """Make the schedule of a trial on real ranks, and verify it there.

    Args:
        study: that the trial is of.
        trial: one that was ``"ok"``.
        trials: what runs it; None makes one.
    """
    trials = trials or Trials(study)
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
    said = outcome.said
    right, reason = None, ""
    if outcome.status == "wrong":
        right, reason = False, outcome.reason
    elif outcome.status != "ok":
        reason = f"the verification ended as {outcome.status}: {outcome.reason}"
    elif verifies:
        right, reason = True, said.get("no_document", "")
    else:
        reason = "it was not verified: " + ("verify=False" if study.batch is not None else "the study gives no batch")
    return Winner(
        number=trial.number,
        point=dict(trial.point),
        value=trial.value if trial.value is not None else float("nan"),
        mesh=mesh,
        document=said.get("document"),
        right=right,
        reason=reason,
        text=said.get("report", ""),
        predicted=dict(trial.predicted),
        measured=dict(trial.measured),
        versions={name: version(name) for name in ("slapo-core", "slapo-tune", "torch")},
    )


def apply(study: Study, trial: Trial, *, rank: int = 0) -> slapo.Schedule:
    """Make the schedule of a trial in this process, with an abstract mesh; the model is on the meta device.

    Args:
        study: that the trial is of.
        trial: any.
        rank: the one to play.
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
    """Write the best schedule next to the log, replacing the former one atomically."""
    path = best_file(log)
    data = {"slapo_tune_best": _FORMAT, "saved": time.time(), **vars(winner), "point": encode(winner.point)}
    replace_file(path, data)
    return path


def replace_file(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON so that a reader, or who comes after a kill, sees the old file or the new one."""
    beside = path.with_name(f"{path.name}.part")
    with beside.open("w", encoding="utf-8") as file:
        file.write(json.dumps(data, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def best(log: str | os.PathLike[str]) -> Winner:
    """Read the best schedule of a search that has ended.

    Args:
        log: of the search, e.g. ``"run.jsonl"``, or of its best schedule, ``"run.best.json"``.

    Raises:
        LogError: there is none yet, or the file is something else.
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
            f"there is no {path}: the search has not ended yet, or found no schedule",
            hint="slapo tune resume STUDY.py",
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise LogError(f"{path} does not hold a schedule that a search found: {error}") from error
