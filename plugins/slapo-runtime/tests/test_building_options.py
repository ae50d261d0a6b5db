"""A dialect is asked for its options, with what the user gave to ``build``, before it plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

import slapo_core as slapo
from slapo_core.dialect import BuildArguments
from slapo_core.internals import Internals
from slapo_torch.dialect import TorchDialect
from tests.messages import Messages
from tests.support.building import real, sgd


class Folding(TorchDialect):
    """Has an option of its own for how many micro-batches a step takes."""

    name: ClassVar[str] = "folding"
    seen: ClassVar[list[Any]] = []

    def options(self, config: Mapping[str, Any], arguments: BuildArguments) -> Mapping[str, Any]:
        if config.get("steps", arguments.accumulate) != arguments.accumulate:
            raise slapo.BuildError(f"steps={config['steps']}, but accumulate={arguments.accumulate}")
        self.seen.append(arguments)
        return {**config, "steps": arguments.accumulate}

    def plan(self, schedule: Any, config: Mapping[str, Any]) -> slapo.Plan:
        self.seen.append(dict(config))
        return slapo.Plan(self.name, (f"{config['steps']} micro-batches",), config)

    def build(self, plan: slapo.Plan, context: Any) -> slapo.Engine:
        default = TorchDialect().plan(context.schedule, {})
        return TorchDialect().build(default, context)


class Mute(TorchDialect):
    name: ClassVar[str] = "mute"

    def options(self, config: Mapping[str, Any], arguments: BuildArguments) -> Any:
        return None


class Failing(TorchDialect):
    name: ClassVar[str] = "failing"

    def options(self, config: Mapping[str, Any], arguments: BuildArguments) -> Mapping[str, Any]:
        raise RuntimeError("no idea")


def schedule_with(*dialects: type[slapo.Dialect]) -> slapo.Schedule:
    schedule = slapo.create_schedule(real("mlp"))
    for dialect in dialects:
        Internals(schedule).registry.register(dialect, kind="dialects")
    Folding.seen.clear()
    return schedule


def test_dialect_plans_with_options_from_the_arguments() -> None:
    schedule = schedule_with(Folding)
    slapo.build(
        schedule,
        target="folding",
        optimizer=sgd,
        loss=lambda output, batch: output.sum(),
        max_grad_norm=0.5,
        accumulate=3,
        device="cpu",
        steps=3,
    )
    arguments = BuildArguments(
        has_optimizer=True, has_loss=True, max_grad_norm=0.5, accumulate=3, device=torch.device("cpu")
    )
    assert Folding.seen == [arguments, {"steps": 3}]


def test_build_arguments_have_their_defaults() -> None:
    slapo.build(schedule_with(Folding), target="folding")
    assert Folding.seen == [BuildArguments(), {"steps": 1}]


def test_an_option_that_contradicts_an_argument_leaves_the_schedule_usable() -> None:
    schedule = schedule_with(Folding)
    with pytest.raises(slapo.BuildError, match=r"^steps=4, but accumulate=2$"):
        slapo.build(schedule, target="folding", accumulate=2, steps=4)
    slapo.build(schedule, target="folding", accumulate=2, steps=2)


def test_options_default_to_the_users_config() -> None:
    config = {"bucket_cap_mb": 3}
    assert TorchDialect().options(config, BuildArguments(accumulate=2)) is config


def test_invalid_options_and_errors_name_the_plugin(message: Messages) -> None:
    schedule = schedule_with(Mute, Failing)
    with pytest.raises(slapo.BuildError) as caught:
        slapo.build(schedule, target="mute")
    message(caught, "'mute'", "got None")
    with pytest.raises(slapo.BuildError) as caught:
        slapo.build(schedule, target="failing")
    message(caught, "'failing'", "options()", "RuntimeError: no idea")
