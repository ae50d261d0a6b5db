"""`build` checks everything first, and a schedule that it refused can be used as before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_core.internals import Internals
from slapo_core.plugins import use_registry
from slapo_testing import FakeEnvironment
from slapo_torch.dialect import TorchDialect
from tests.messages import Messages
from tests.support.building import Split, batches, on_meta, real, sgd, split


def refused(schedule: slapo.Schedule, expected: type[slapo.SlapoError], **options: Any) -> str:
    """The message of the refusal, after looking that schedule and model are as before."""
    parameters = list(schedule.model.parameters())
    values = [parameter.detach().clone() for parameter in parameters]
    with pytest.raises(expected) as error:
        slapo.build(schedule, **options)
    assert type(error.value) is expected
    assert not schedule.is_sealed
    assert all(a is b for a, b in zip(schedule.model.parameters(), parameters, strict=True))
    assert all(a.is_meta or torch.equal(a, b) for a, b in zip(parameters, values, strict=True))
    return str(error.value)


def test_building_seals_the_schedule_and_keeps_its_records(message: Messages) -> None:
    schedule = split(slapo.create_schedule(on_meta("mlp"), mesh={"tp": 1}), "mlp")
    records = schedule.records
    engine = slapo.build(schedule, optimizer=sgd)
    assert isinstance(engine, slapo.Engine)
    assert engine.module is schedule.model
    assert schedule.is_sealed
    assert schedule.records == records
    with pytest.raises(slapo.SealedError, match="cannot undo"):
        schedule.undo()
    with pytest.raises(slapo.SealedError) as error:
        slapo.build(schedule)
    message(error, "cannot build", "sch.to_json()")


def test_abstract_mesh_is_refused_with_the_launch_command(message: Messages) -> None:
    schedule = split(slapo.create_schedule(real("mlp"), mesh={"dp": 2, "tp": 2}), "mlp")
    message(refused(schedule, slapo.BuildError), "4 processes", "`torchrun --nproc-per-node 4 your_script.py`")


def test_an_unknown_target_is_named() -> None:
    message = refused(slapo.create_schedule(real("mlp")), slapo.UnknownNameError, target="trch")
    assert "'trch'" in message
    assert "torch" in message


def test_target_torch_names_its_distribution_where_it_is_not_installed(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    with use_registry(fake_distributions.registry()):
        schedule = slapo.create_schedule(real("mlp"))
        message(refused(schedule, slapo.UnknownNameError), "dialect 'torch'", "pip install slapo-torch")


class Picky(TorchDialect):
    name = "picky"
    supports = frozenset({"dp"})

    def check(self, schedule: Any) -> Iterator[slapo.Violation]:
        yield slapo.Violation("the moon is full", "wait")
        yield slapo.Violation("it is Monday")

    def build(self, plan: slapo.Plan, schedule: Any, **options: Any) -> slapo.Engine:
        raise RuntimeError("the runtime broke")


class Fragile(Picky):
    name = "fragile"

    def check(self, schedule: Any) -> Iterator[slapo.Violation]:
        return iter(())


def test_every_reason_of_a_dialect_is_given(message: Messages) -> None:
    schedule = slapo.create_schedule(real("mlp"))
    Internals(schedule).registry.register(Picky, kind="dialects")
    message(
        refused(schedule, slapo.BuildError, target="picky"), "'picky'", "  - the moon is full; wait\n  - it is Monday"
    )


def test_a_dialect_that_fails_after_the_model_got_its_values_leaves_it_as_scheduled(message: Messages) -> None:
    for model in (on_meta("mlp"), real("mlp")):
        schedule = split(slapo.create_schedule(model, mesh={"tp": 1}), "mlp")
        Internals(schedule).registry.register(Fragile, kind="dialects")
        parameters = list(model.parameters())
        with pytest.raises(slapo.BuildError) as caught:
            slapo.build(schedule, target="fragile", weights=real("mlp", seed=5).state_dict())
        message(caught, "'fragile'", "RuntimeError: the runtime broke")
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert not schedule.is_sealed
        schedule.undo(to=0)
        schedule["fc1"].apply(Split(("bias",)))
        engine = slapo.build(schedule, optimizer=sgd)
        assert engine.train_step(next(batches(1))).loss.isfinite()


def test_mesh_dimensions_of_one_rank_need_no_support() -> None:
    schedule = slapo.create_schedule(real("mlp"), mesh={"pp": 1, "dp": 1, "tp": 1})
    slapo.build(schedule)


def test_a_mesh_dimension_that_nothing_uses_is_named() -> None:
    unused = slapo.create_schedule(torch.nn.Linear(2, 2), mesh={"dp": 2, "tp": 2})
    assert unused.explain().endswith("mesh_dim 'tp' (2 ranks) is used by no step: its ranks do the same work")
    with pytest.warns(UserWarning, match="mesh_dim 'tp'"), pytest.raises(slapo.SlapoError):
        slapo.build(unused)  # which needs processes
    used = slapo.create_schedule(torch.nn.Linear(2, 2), mesh={"dp": 2, "tp": 2})
    used.root.shard("weight", axis=0)
    assert "is used by no step" not in used.explain()


def test_an_optimizer_made_before_the_schedule_is_refused_with_the_call(message: Messages) -> None:
    model = real("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    text = refused(slapo.create_schedule(model), slapo.OptimizerError, optimizer=optimizer)
    message(text, "got an optimizer, SGD", "build(sch, optimizer=lambda params: torch.optim.SGD(params, lr=0.5))")


def test_an_optimizer_with_foreign_parameters_is_refused_and_names_them(message: Messages) -> None:
    model = real("mlp")
    untouched = list(model.parameters())
    schedule = split(slapo.create_schedule(model, mesh={"tp": 1}), "mlp")
    extra = torch.nn.Parameter(torch.ones(3))
    text = refused(schedule, slapo.OptimizerError, optimizer=lambda parameters: sgd([*parameters, untouched[0], extra]))
    message(text, "2 parameters", "'fc1.weight' of the reference model", "one of shape (3,)")


def test_an_optimizer_that_leaves_out_trainable_parameters_is_refused(message: Messages) -> None:
    model = real("mlp")
    schedule = slapo.create_schedule(model)
    text = refused(schedule, slapo.OptimizerError, optimizer=lambda parameters: sgd(parameters[:1]))
    message(text, "2 parameters", "fc1.bias, fc2.weight")
    for parameter in list(model.parameters())[1:]:
        parameter.requires_grad_(False)
    slapo.build(schedule, optimizer=lambda parameters: sgd(parameters[:1]))


def test_wrong_arguments_are_refused(message: Messages) -> None:
    schedule = slapo.create_schedule(real("mlp"))
    message(refused(schedule, slapo.OptimizerError, optimizer="adam"), "got 'adam'")
    message(refused(schedule, slapo.BuildError, max_grad_norm=0.0), "max_grad_norm", "got 0.0")
    with pytest.raises(slapo.ArgumentError) as error:
        slapo.build(real("mlp"))  # type: ignore[arg-type]
    message(error, "got Mlp")


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    """Dialects registered here are seen by this file's tests only."""
    from slapo_core.plugins import Registry

    registry = Registry.discover()
    registry.register(Split)
    from tests.support.building import SumOutput

    registry.register(SumOutput)
    with use_registry(registry):
        yield
