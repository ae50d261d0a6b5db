"""What the ranks of a job do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import slapo_core as slapo
from slapo_tune.study import Study
from slapo_tune.trials.run import Run
from slapo_tune.trials.training import on

if TYPE_CHECKING:
    from slapo_core import Schedule

__all__ = ["TASKS", "Task"]


@dataclass(frozen=True)
class Task:
    """What a rank is told.

    Args:
        functions: of the study.
        settings: the point, the mesh and what else is plain.
        device: where to run; None where nothing runs.
        phase: its first item says what is being done, for the message of a failure.
    """

    functions: Mapping[str, Any]
    settings: Mapping[str, Any]
    device: str | None
    phase: list[str]

    @property
    def point(self) -> dict[str, Any]:
        return {name: _tupled(value) for name, value in self.settings["point"].items()}

    def study(self) -> Study:
        return Study(
            **self.functions,
            space=_no_space,
            mesh=partial(_given, self.settings["mesh"]) if self.settings["mesh"] is not None else None,
            **self.settings["study"],
        )

    def batch(self) -> Any:
        self.phase[0] = "batch"
        make = self.functions["batch"]
        return None if make is None else make(self.point)

    def schedule(self, batch: Any) -> Schedule:
        self.phase[0] = "model"
        with torch.device("meta"):
            model = self.functions["make_model"]()
        schedule = slapo.create_schedule(model, mesh=self.settings["mesh"], example_inputs=batch)
        self.phase[0] = "schedule"
        self.functions["schedule"](schedule, self.point)
        self.phase[0] = "run"
        return schedule


def check(task: Task) -> dict[str, Any]:
    """Make the schedule, and nothing more: on one process, with a mesh that is only declared."""
    schedule = task.schedule(task.batch())
    return {"outcome": "returned", "steps": len(schedule.records)}


def measure(task: Task) -> dict[str, Any]:
    """Train, or what the study does instead."""
    study = task.study()
    batch = task.batch()
    schedule = task.schedule(batch)
    device = task.device or "cpu"
    rank = torch.distributed.get_rank()
    run = Run(study, task.point, schedule, rank, on(batch, device), device)
    warnings.filterwarnings("ignore", message=".*was never verified")  # the best one is, after the search
    value = study.evaluate(run) if study.evaluate is not None else run.train()
    return {"outcome": "returned", **_plain_value(value), "measured": _plain_numbers(run.measured)}


def prove(task: Task) -> dict[str, Any]:
    """Compare the schedule with the untouched model; the schedule as a document."""
    batch = task.batch()
    schedule = task.schedule(batch)
    said: dict[str, Any] = {"outcome": "returned", "document": None, "report": ""}
    task.phase[0] = "verify"
    if task.settings["verify"]:
        report = slapo.verify(schedule, on(batch, task.device or "cpu"), timeout=task.settings["timeout"])
        said["report"] = str(report)
    try:
        said["document"] = schedule.document()  # with the mark of the verification
    except slapo.SerializationError as error:
        said["no_document"] = str(error)
    return said


TASKS: Mapping[str, Callable[[Task], dict[str, Any]]] = {"check": check, "try": measure, "verify": prove}


def _plain_value(value: Any) -> dict[str, Any]:
    """A finite number as it is; of anything else what it was."""
    try:
        number = None if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several elements raises the last
        number = None
    if number is None or not math.isfinite(number):
        return {"value": None, "was": repr(value)[:200]}
    return {"value": number}


def _plain_numbers(measured: Mapping[str, Any]) -> dict[str, float]:
    """Measurements by name; what is no finite number is NaN."""
    found = {str(name): _plain_value(value)["value"] for name, value in measured.items()}
    return {name: math.nan if value is None else value for name, value in found.items()}


def _given(mesh: dict[str, int], point: Any) -> dict[str, int]:
    return dict(mesh)


def _no_space(symbols: Any) -> None:
    raise RuntimeError("a trial has no space, only the point that it tries")


def _tupled(value: Any) -> Any:
    return tuple(_tupled(item) for item in value) if isinstance(value, list) else value
