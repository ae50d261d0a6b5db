"""Plans of small models, for the tests of the configuration: no rank runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.dialect import BuildArguments
from slapo_deepspeed.dialect import DeepSpeedDialect
from tests.processor import DTYPES, reporting

__all__ = ["ADAM", "plan", "planned", "refusal", "schedule_of"]

ADAM: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-3}}


def schedule_of(
    mesh: Mapping[str, int] | None = None, *, samples: int | None = None, dtype: torch.dtype = torch.float32
) -> slapo.Schedule:
    """Of two linear layers; with a mesh that no rank runs, and perhaps example inputs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)).to(dtype)
    inputs = None if samples is None else torch.zeros(samples, 4, dtype=dtype)
    return slapo.create_schedule(model, mesh=mesh, example_inputs=inputs)


def plan(
    config: Any = None,
    mesh: Mapping[str, int] | None = None,
    *,
    schedule: slapo.Schedule | None = None,
    arguments: BuildArguments | None = None,
    processor: Collection[str] = tuple(DTYPES),
    **options: Any,
) -> slapo.Plan:
    """The plan; with ``arguments`` as ``build`` asks for it. Given its own options, it must be the same again.

    DeepSpeed finds a processor with these types, whatever the processor of the tests has.
    """
    schedule, dialect = schedule or schedule_of(mesh), DeepSpeedDialect()
    given: Mapping[str, Any] = {"config": config, **options}
    with reporting(processor):
        if arguments is not None:
            given = dialect.options(given, arguments)
        made = dialect.plan(schedule, given)
        assert dialect.plan(schedule, dict(made.config)) == made
    return made


def planned(config: Any = None, mesh: Mapping[str, int] | None = None, **more: Any) -> dict[str, Any]:
    """DeepSpeed's configuration, filled in."""
    made: dict[str, Any] = plan(config, mesh, **more).config["config"]
    return made


def refusal(config: Any = None, mesh: Mapping[str, int] | None = None, **more: Any) -> str:
    """The message of the BuildError, its hint included."""
    with pytest.raises(slapo.BuildError) as caught:
        plan(config, mesh, **more)
    return str(caught.value)
