"""Groups of parameters are made by reference names, alike under every schedule; contradictions are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_core.errors import BuildError, OptimizerError
from slapo_runtime.state import ModelState
from slapo_runtime.weights.optimizer import make_optimizer
from slapo_runtime.weights.parameter_groups import GroupedFactory, ParameterGroups
from tests.messages import Messages
from tests.support import tied_model
from tests.support.tied_model import adamw, batch

NO_DECAY = ("*.bias", "*norm*", "scale", "strength")
GROUPS: dict[str, dict[str, Any]] = {
    "head.*": {"lr": 1e-3},
    "blocks.1.*": {"lr": 5e-3, "betas": (0.8, 0.9)},
    "blocks.*": {"lr": 2e-2, "eps": 1e-3},
}

GROUP_KEYS = ("lr", "betas", "eps", "weight_decay")


def schedule(model: torch.nn.Module | None = None) -> slapo.Schedule:
    return slapo.create_schedule(model or tied_model.make())


def groups(sch: slapo.Schedule, optimizer: torch.optim.Optimizer) -> list[tuple[list[str], dict[str, Any]]]:
    names = {id(parameter): name for name, parameter in sch.model.named_parameters()}
    return [
        ([names[id(one)] for one in group["params"]], {key: group[key] for key in GROUP_KEYS})
        for group in optimizer.param_groups
    ]


def expected(model: torch.nn.Module) -> list[tuple[list[str], dict[str, Any]]]:
    """The groups by hand: the first pattern counts for each setting, and the embedding is also called head.weight."""
    named = dict(model.named_parameters())
    rest = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-4, "weight_decay": 1e-2}
    last, first = {**rest, "lr": 5e-3, "betas": (0.8, 0.9), "eps": 1e-3}, {**rest, "lr": 2e-2, "eps": 1e-3}

    def names(block: str, *, decays: bool) -> list[str]:
        return [name for name in named if name.startswith(block) and decays != ("bias" in name or "norm" in name)]

    return [
        (["scale", "strength"], {**rest, "weight_decay": 0.0}),
        (["embedding.weight"], {**rest, "lr": 1e-3}),
        (names("blocks.1.", decays=True), last),
        (names("blocks.1.", decays=False), {**last, "weight_decay": 0.0}),
        (names("blocks.0.", decays=True), first),
        (names("blocks.0.", decays=False), {**first, "weight_decay": 0.0}),
    ]


def test_groups_of_build_and_of_a_live_loop_are_those_made_by_hand() -> None:
    sch = schedule()
    live = torch.optim.AdamW(slapo.parameter_groups(sch, no_decay=NO_DECAY, param_groups=GROUPS), lr=1e-2, eps=1e-4)
    engine: Any = slapo.build(sch, optimizer=adamw, no_decay=NO_DECAY, param_groups=GROUPS)
    assert groups(sch, live) == groups(sch, engine.optimizer) == expected(sch.model)
    assert sum(len(names) for names, _ in expected(sch.model)) == len(list(sch.model.parameters()))


def test_patterns_train_like_groups_by_hand() -> None:
    plain = tied_model.make()
    named, optimizer = dict(plain.named_parameters()), None
    by_hand = [{"params": [named[name] for name in names], **settings} for names, settings in expected(plain)]
    optimizer = torch.optim.AdamW(by_hand)
    engine: Any = slapo.build(
        schedule(),
        optimizer=adamw,
        no_decay=NO_DECAY,
        param_groups=GROUPS,
        lr_scheduler=lambda made: torch.optim.lr_scheduler.ExponentialLR(made, 0.5),
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        optimizer.zero_grad()
        plain(**batch(step)).backward()
        optimizer.step()
        scheduler.step()
        engine.train_step(batch(step))
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in engine.state_dict().items())


def test_without_patterns_the_factory_gets_parameters_and_may_make_groups() -> None:
    seen: list[Any] = []

    def own(parameters: Any) -> torch.optim.Optimizer:
        seen.extend(parameters)
        by_size = [{"params": [one for one in parameters if one.dim() == axes]} for axes in (0, 1, 2)]
        return torch.optim.SGD(by_size, lr=0.1)

    engine: Any = slapo.build(schedule(), optimizer=own)
    assert all(isinstance(one, torch.nn.Parameter) for one in seen)
    assert [len(group["params"]) for group in engine.optimizer.param_groups] == [1, 13, 9]


def test_frozen_and_added_parameters_are_in_groups() -> None:
    model = tied_model.make()
    model.blocks[0].requires_grad_(False)
    made = slapo.parameter_groups(schedule(model), no_decay="blocks.0.*")
    assert [len(group["params"]) for group in made] == [13, 10]
    assert not any(one.requires_grad for one in made[1]["params"])

    sch = schedule()
    sch["blocks.0.q"].replace(torch.nn.Sequential(torch.nn.Linear(8, 8)), drop=["weight", "bias"])
    made = slapo.parameter_groups(sch, no_decay="blocks.0.q.0.bias")
    assert [tuple(one.shape) for one in made[1]["params"]] == [(8,)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no match": ({"no_decay": ("*.bias", "*.Norm.*")}, "norm.weight"),
    "a module": ({"param_groups": {"blocks.1.norm": {"lr": 1.0}}}, "blocks.1.norm.weight"),
    "an earlier pattern": ({"param_groups": {"blocks.*": {"lr": 1.0}, "blocks.0.*": {"lr": 2.0}}}, "narrower"),
    "decay and none": ({"no_decay": "*.bias", "param_groups": {"blocks.*": {"weight_decay": 0.3}}}, "0.3"),
    "no patterns": ({"no_decay": {"*.bias": 0.0}}, "no_decay"),
    "no settings": ({"param_groups": {"head.*": {}}}, "head"),
    "params": ({"param_groups": {"head.*": {"params": []}}}, "head"),
    "a list": ({"param_groups": [{"params": []}]}, "list"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_patterns_without_effect_and_contradictions_are_refused(case: str, message: Messages) -> None:
    arguments, word = REFUSED[case]
    with pytest.raises(OptimizerError) as refused:
        slapo.build(schedule(), optimizer=adamw, **arguments)
    message(refused, word)
    with pytest.raises(OptimizerError):
        slapo.parameter_groups(schedule(), **arguments)


def test_a_setting_that_the_optimizer_does_not_have_is_refused(message: Messages) -> None:
    with pytest.raises(OptimizerError) as refused:
        slapo.build(schedule(), optimizer=adamw, param_groups={"head.*": {"learning_rate": 1e-3}})
    message(refused, "learning_rate")

    class Bare(torch.optim.SGD):
        """With its settings in groups alone."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.defaults = {}

    engine: Any = slapo.build(schedule(), optimizer=Bare, param_groups={"head.*": {"use_muon": True}})
    assert [group.get("use_muon") for group in engine.optimizer.param_groups] == [None, True]


def test_a_factory_that_joins_the_groups_is_refused(message: Messages) -> None:
    def joined(made: Any) -> torch.optim.Optimizer:
        return adamw([one for group in made for one in group["params"]])

    with pytest.raises(OptimizerError) as refused:
        slapo.build(schedule(), optimizer=joined, no_decay="*.bias")
    message(refused, "'weight_decay' is 0.01 in place of 0.0")


def test_a_pipeline_rank_without_parameters_has_all_groups() -> None:
    groups = ParameterGroups(ModelState.of(schedule()), NO_DECAY, GROUPS)
    optimizer = make_optimizer({}, GroupedFactory(adamw, groups), {}, {}, is_part=True)
    assert optimizer is not None
    made = [{key: value for key, value in group.items() if key in GROUP_KEYS} for group in optimizer.param_groups]
    assert made == [settings for _, settings in expected(tied_model.make())]
    optimizer.step()


def test_groups_without_an_optimizer_are_refused(message: Messages) -> None:
    with pytest.raises(BuildError) as refused:
        slapo.build(schedule(), no_decay="*.bias")
    message(refused, "no_decay", "no optimizer")
