"""Hooks of a distribution are active while a schedule names it: by a primitive, the target, or ``plugins=``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.plugins import use_registry
from slapo_testing.distributions import FakeDistribution, FakeEnvironment, primitive_source
from tests.messages import Messages

DIALECT = """
from slapo_torch.dialect import TorchDialect

class Loop(TorchDialect):
    name = "acme"
    def build(self, plan, schedule, **options):
        {}
        return super().build(plan, schedule, **options)
"""
HOOKS = """
from slapo_core import hookimpl
heard = []

@hookimpl
def slapo_initialize(path, name):
    heard.append(f"materialize {path}.{name}")

@hookimpl
def slapo_preconditions(primitive):
    heard.append(f"preconditions {primitive.name}")
"""


def thing(name: str, body: str) -> str:
    return primitive_source(name).replace("        return None", body)


@pytest.fixture
def environment(fake_distributions: FakeEnvironment) -> FakeEnvironment:
    acme = FakeDistribution(
        "acme-slapo",
        entry_points={
            "slapo.v1.primitives": {"acme.note": "acme_slapo:Thing"},
            "slapo.v1.dialects": {"acme": "acme_dialect:Loop"},
            "slapo.v1.hooks": {"acme": "acme_hooks"},
        },
        modules={
            "acme_slapo": thing("acme.note", "        edit.note('noted')"),
            "acme_dialect": DIALECT.format("pass"),
            "acme_hooks": HOOKS,
        },
    )
    fake_distributions.install(acme)
    return fake_distributions


@pytest.fixture
def schedule(environment: FakeEnvironment) -> Iterator[slapo.Schedule]:
    with use_registry(environment.registry(with_installed=True)):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(2, 2))
        yield slapo.create_schedule(model)


def heard() -> list[str]:
    return sys.modules["acme_hooks"].heard if "acme_hooks" in sys.modules else []


def test_the_hooks_of_the_target_are_active_during_build(schedule: slapo.Schedule) -> None:
    slapo.build(schedule, target="acme")
    assert heard() == ["materialize 0.weight", "materialize 0.bias"]


def test_another_target_leaves_them_alone(schedule: slapo.Schedule) -> None:
    slapo.build(schedule)
    assert "acme_hooks" not in sys.modules


def test_a_build_that_failed_switches_the_hooks_of_its_target_off(
    environment: FakeEnvironment, schedule: slapo.Schedule, message: Messages
) -> None:
    (environment.directory / "acme_dialect.py").write_text(DIALECT.format("raise OSError('no cluster')"))
    with pytest.raises(slapo.BuildError) as caught:
        slapo.build(schedule, target="acme")
    message(caught, "target 'acme' of acme-slapo 1.0", "build()", "OSError: no cluster")
    assert schedule._core.hooks.active == ()
    schedule["0"].checkpoint()
    assert heard() == ["materialize 0.weight", "materialize 0.bias"]


def test_a_primitive_names_its_distribution_until_it_is_undone(schedule: slapo.Schedule) -> None:
    schedule["0"].acme.note()
    assert schedule._core.hooks.active == ("acme-slapo",)
    assert heard() == ["preconditions acme.note"]
    with pytest.raises(slapo.PreconditionError):
        schedule["0"].shard("nothing", axis=0)
    assert schedule._core.hooks.active == ("acme-slapo",)
    schedule.undo()
    assert schedule._core.hooks.active == ()


@pytest.mark.parametrize(
    ("answer", "shown"), [("'no good'", "'no good'"), ("5", "5"), ("[None]", "None"), ("True", "True")]
)
def test_a_refusal_that_is_no_violation_names_the_plugin(
    fake_distributions: FakeEnvironment, answer: str, shown: str, message: Messages
) -> None:
    source = f"from slapo_core import hookimpl\n@hookimpl\ndef slapo_preconditions():\n    return {answer}\n"
    points = {"slapo.v1.hooks": {"odd": "odd_hooks"}}
    fake_distributions.install(FakeDistribution("odd-slapo", entry_points=points, modules={"odd_hooks": source}))
    with use_registry(fake_distributions.registry(with_installed=True)):
        schedule = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2)), plugins=["odd-slapo"])
    with pytest.raises(slapo.HookError) as caught:
        schedule["0"].checkpoint()
    message(caught, "slapo_preconditions of odd-slapo", "Violation", f"got {shown}")


def test_single_violation_needs_no_list(fake_distributions: FakeEnvironment) -> None:
    source = "from slapo_core import hookimpl, Violation\n@hookimpl\ndef slapo_preconditions():\n"
    source += "    return Violation('not on Mondays')\n"
    points = {"slapo.v1.hooks": {"odd": "odd_hooks"}}
    fake_distributions.install(FakeDistribution("odd-slapo", entry_points=points, modules={"odd_hooks": source}))
    with use_registry(fake_distributions.registry(with_installed=True)):
        schedule = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2)), plugins=["odd-slapo"])
    with pytest.raises(slapo.PreconditionError, match="not on Mondays"):
        schedule["0"].checkpoint()


def test_plugins_are_a_list_of_distributions(environment: FakeEnvironment, message: Messages) -> None:
    with use_registry(environment.registry(with_installed=True)):
        with pytest.raises(slapo.ArgumentError) as caught:
            slapo.create_schedule(nn.Linear(2, 2), plugins="acme-slapo")
        message(caught, "got 'acme-slapo'", "plugins=['acme-slapo']")
        with pytest.raises(slapo.UnknownNameError) as unknown:
            slapo.create_schedule(nn.Linear(2, 2), plugins=["acme"])
        assert unknown.value.hint == "did you mean acme-slapo?"
