"""A partition binds to copies of its model by names; where a copy would be cut otherwise, it is asked for anew."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core import GuardError
from slapo_core.internals import ScheduledCopy
from slapo_graph import flat as tracing
from slapo_verify.stages import Answers, StagedCalls

from .staging import cut_schedule

FACTOR = 2


class Config:
    def __init__(self) -> None:
        self.is_doubled = False


class Block(nn.Module):
    """A module that stays a call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(4, 4), 4
        self.register_buffer("sizes", torch.tensor([4, 2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, : self.keep]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config, self.scale = Config(), 2.0
        self.first, self.second, self.third = Block(), Block(), Block()
        self.third.linear.weight = self.first.linear.weight

    def forward(self, x: torch.Tensor, kind: str = "sum") -> Any:
        h = self.second(self.first(x)) * self.scale * FACTOR
        if self.config.is_doubled:
            h = h * 2
        return (self.third(h).sum(), h.shape) if kind == "sum" else self.third(h)


class Looks(Model):
    """Its third block looks into values."""

    def __init__(self) -> None:
        super().__init__()
        forward = Block.forward
        self.third.__class__ = type(
            "Looking", (Block,), {"forward": lambda self, x: forward(self, x)[: self.sizes.tolist()[0]]}
        )


CALL = {"x": torch.rand(3, 4, generator=torch.Generator().manual_seed(0))}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that were recorded."""
    made: list[Any] = []
    record = tracing.recorded

    def noted(module: nn.Module, *rest: Any, **options: Any) -> Any:
        made.append(module)
        return record(module, *rest, **options)

    monkeypatch.setattr(tracing, "recorded", noted)
    return made


def asked(schedule: Any, answers: Answers, model: nn.Module, call: dict[str, Any] | None = None) -> Any:
    """The stages of a copy of the schedule's model."""
    return StagedCalls(ScheduledCopy(schedule, model), answers=answers).of(call or CALL)


def trained(staged: Any, model: nn.Module, call: dict[str, Any] | None = None) -> list[torch.Tensor]:
    """The output of stages, and every gradient of their model."""
    model.zero_grad()
    out = staged.run(call or CALL)
    loss = out[0] if isinstance(out, tuple) else out.sum()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def test_a_copy_is_not_recorded_and_trains_as_if_it_were(recorded: list[Any]) -> None:
    schedule, answers = cut_schedule(Model(), ["first", "second"]), Answers()
    asked(schedule, answers, schedule.model)
    other = copy.deepcopy(schedule.model)
    with torch.no_grad():
        other.first.linear.weight.fill_(0.5)  # type: ignore[union-attr]
    bound = asked(schedule, answers, other)
    assert recorded == [schedule.model]
    again = asked(schedule, Answers(), other)
    assert recorded == [schedule.model, other]
    found = trained(bound, other)
    assert all(map(torch.equal, found, trained(again, other)))
    assert len(found) == 6
    assert bound.partition.ties == again.partition.ties != ()
    assert {id(one) for stage in bound.partition.stages for one in stage.module.parameters()} == set(
        map(id, other.parameters())
    )
    assert bound.run({"x": CALL["x"]})[1] == again.run({"x": CALL["x"]})[1]


def test_each_stage_may_be_of_another_copy(recorded: list[Any]) -> None:
    schedule = cut_schedule(Model(), ["first", "second"])
    made = asked(schedule, Answers(), schedule.model).partition
    models = [copy.deepcopy(schedule.model) for _ in range(3)]
    bound = made.bind(models)
    assert bound is not None
    assert bound.stages[2].module.get_submodule("third") is models[2].third
    assert bound.ties == (), "they share nothing"
    assert recorded == [schedule.model]


def test_a_bound_stage_refuses_other_calls() -> None:
    schedule, answers = cut_schedule(Model(), ["first", "second"]), Answers()
    asked(schedule, answers, schedule.model)
    other = copy.deepcopy(schedule.model)
    bound = asked(schedule, answers, other)
    schedule.model.scale = 3.0  # type: ignore[assignment]
    bound.run(CALL)
    other.scale = 3.0  # type: ignore[assignment]
    with pytest.raises(GuardError, match=r"self\.scale == 2\.0"):
        bound.run(CALL)
    other.scale, other.first.keep = 2.0, 3  # type: ignore[assignment, union-attr]
    with pytest.raises(GuardError, match=r"\(3, 4\)"):
        bound.run(CALL)


def _set(path: str, name: str, value: Any) -> Callable[[Model], None]:
    return lambda model: setattr(model.get_submodule(path), name, value)


def _forward(model: Model) -> None:
    original = model.first.forward
    model.first.forward = lambda x: original(x)[:2]  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Model], Any]] = {
    "a setting": _set("", "scale", 3.0),
    "the configuration": lambda model: setattr(model.config, "is_doubled", True),
    "another module": _set("first", "linear", nn.Sequential(nn.Linear(4, 4)).append(nn.ReLU())),
    "a module of another size": _set("second", "linear", nn.Linear(4, 4, bias=False)),
    "another class": lambda model: setattr(model.first, "__class__", type("Other", (Block,), {})),
    "a frozen parameter": lambda model: model.second.linear.weight.requires_grad_(False),
    "another dtype": lambda model: model.double(),
    "a mode": lambda model: model.second.eval(),
    "a hook": lambda model: model.first.linear.register_forward_hook(lambda *_: None),
    "a forward of its own": _forward,
    "an untied weight": lambda model: setattr(model.third.linear, "weight", nn.Parameter(torch.ones(4, 4))),
    "a global name": lambda model: globals().__setitem__("FACTOR", 3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_copy_gets_new_stages(name: str, recorded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "FACTOR", 2)
    schedule, answers = cut_schedule(Model(), ["first", "second"]), Answers()
    asked(schedule, answers, schedule.model)
    other: Any = copy.deepcopy(schedule.model)
    CHANGES[name](other)
    call = {"x": CALL["x"].to(other.first.linear.weight.dtype if name == "another dtype" else torch.float32)}
    found = asked(schedule, answers, other, call)
    assert recorded == [schedule.model, other]
    expected = other(**call)[0]
    assert torch.equal(found.run(call)[0], expected)


@pytest.mark.parametrize(
    "given", [{"x": torch.ones(2, 4)}, {"x": torch.ones(3, 4, requires_grad=True)}, {**CALL, "kind": "none"}]
)
def test_another_form_of_the_batch_is_asked_for_anew(given: dict[str, Any], recorded: list[Any]) -> None:
    schedule, answers = cut_schedule(Model(), ["first", "second"]), Answers()
    asked(schedule, answers, schedule.model)
    asked(schedule, answers, copy.deepcopy(schedule.model), given)
    assert len(recorded) == 2


def test_other_steps_are_asked_for_anew(recorded: list[Any]) -> None:
    schedule, answers = cut_schedule(Model(), ["first"]), Answers()
    asked(schedule, answers, schedule.model)
    schedule["second"].pipeline_split()
    assert len(asked(schedule, answers, copy.deepcopy(schedule.model)).partition.stages) == 3
    assert len(recorded) == 2


def test_models_that_read_values_are_recorded_for_each_copy(recorded: list[Any]) -> None:
    schedule, answers = cut_schedule(Looks(), ["first", "second"]), Answers()
    asked(schedule, answers, schedule.model)
    asked(schedule, answers, copy.deepcopy(schedule.model))
    assert len(recorded) >= 2


def test_verify_records_a_cut_model_once_for_each_form(recorded: list[Any]) -> None:
    schedule = cut_schedule(Model(), ["first", "second"])
    slapo.verify(schedule, CALL)
    assert len(recorded) == 6, "in float64 in both modes, with the gradient of x, for two more sizes; in its own type"


def test_torch_finds_calls_with_parameters_among_those_that_it_knows() -> None:
    weight, x = nn.Parameter(torch.ones(7)), torch.ones(2, 7)
    mode, seen = tracing.FakeMode(), "non-fake tensor"
    before = mode.cache_info().bypasses.get(seen, 0)
    with mode:
        fake = mode.fake(x)
        made = [fake * weight, torch.cat([fake[0], weight]), fake.add_(other=weight)]
    assert mode.cache_info().bypasses.get(seen, 0) == before
    assert [tuple(one.shape) for one in made] == [(2, 7), (14,), (2, 7)]
    assert made[0].grad_fn.next_functions[1][0].variable is weight
