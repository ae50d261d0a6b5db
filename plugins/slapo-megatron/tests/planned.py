"""Plans of small models, for the tests of the options: no rank runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.dialect import BuildArguments
from slapo_megatron.dialect import MegatronDialect

__all__ = ["RATE", "plan", "planned", "refusal", "schedule_of"]

RATE: dict[str, Any] = {"lr": 1e-3}


def schedule_of(
    mesh: Mapping[str, int] | None = None, *, samples: int | None = None, cuts: int = 0, dtype: Any = torch.float32
) -> slapo.Schedule:
    """Of linear layers; with a mesh that no rank runs, and perhaps example inputs and cuts after the first layers."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).to(dtype)
    inputs = None if samples is None else torch.zeros(samples, 4, dtype=dtype)
    schedule = slapo.create_schedule(model, mesh=mesh, example_inputs=inputs)
    for number in range(cuts):
        schedule[f"{number}"].pipeline_split()
    return schedule


def plan(
    mesh: Mapping[str, int] | None = None,
    *,
    schedule: slapo.Schedule | None = None,
    arguments: BuildArguments | None = None,
    **options: Any,
) -> slapo.Plan:
    """The plan; with ``arguments`` as ``build`` asks for it. Given its own options, it must be the same again."""
    schedule, dialect = schedule or schedule_of(mesh), MegatronDialect()
    given: Mapping[str, Any] = options
    if arguments is not None:
        given = dialect.options(given, arguments)
    made = dialect.plan(schedule, given)
    assert dialect.plan(schedule, dict(made.config)) == made
    return made


def planned(mesh: Mapping[str, int] | None = None, **more: Any) -> dict[str, Any]:
    """The options, filled in."""
    return dict(plan(mesh, **more).config)


def refusal(mesh: Mapping[str, int] | None = None, **more: Any) -> str:
    """The message of the BuildError, its hint included."""
    with pytest.raises(slapo.BuildError) as caught:
        plan(mesh, **more)
    return str(caught.value)
