"""An optimiser that needs the whole of a parameter is refused where parameters are split, and used where none is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.building.optimizer_probe import Finding, probe
from slapo_core.ranks.launcher import run_ranks
from tests.core.building_support import batches, real, split
from tests.messages import Messages


class Base(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self.update(parameter, group["params"]), alpha=-group["lr"])

    def update(self, parameter: torch.Tensor, all_of_them: list[torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError


class LayerWise(Base):
    """The trust ratio of LARS and LAMB."""

    def update(self, parameter: torch.Tensor, all_of_them: list[torch.Tensor]) -> torch.Tensor:
        assert parameter.grad is not None
        return parameter.grad * (parameter.norm() / parameter.grad.norm())


class Centred(Base):
    """Gradients with their mean over each row taken out: halves along axis 0 are halves of the whole."""

    def update(self, parameter: torch.Tensor, all_of_them: list[torch.Tensor]) -> torch.Tensor:
        assert parameter.grad is not None
        return parameter.grad - parameter.grad.mean(dim=1, keepdim=True)


class Together(Base):
    """The first parameter moves by its gradient, and the others by a step length that all gradients decide."""

    def update(self, parameter: torch.Tensor, all_of_them: list[torch.Tensor]) -> torch.Tensor:
        assert parameter.grad is not None
        total = sum(float(other.grad.abs().sum()) for other in all_of_them if other.grad is not None)
        return parameter.grad * (1.0 if parameter is all_of_them[0] else total)


class Noisy(Base):
    def update(self, parameter: torch.Tensor, all_of_them: list[torch.Tensor]) -> torch.Tensor:
        assert parameter.grad is not None
        return parameter.grad + torch.randn_like(parameter)


class Rows(torch.optim.SGD):
    """Steps as SGD, and keeps one number for each row."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["row"] = torch.ones(parameter.shape[0], 1)


class Around(Base):
    """Another optimiser with something around it."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class NeedsClosure(Base):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape))


def found(factory: Callable[..., Any], *, axes: int = 2, axis: int = 0, **settings: Any) -> Finding:
    optimizer = factory([parameter(*(6,) * axes)], **settings)
    values = [tensor.clone() for tensor in optimizer.param_groups[0]["params"]]
    random, state = torch.get_rng_state(), dict(optimizer.state)
    finding = probe(optimizer, [(0, axes, axis)])
    assert torch.equal(random, torch.get_rng_state())
    assert optimizer.state == state
    assert all(torch.equal(a, b) for a, b in zip(values, optimizer.param_groups[0]["params"], strict=True))
    return finding


def steps_without_state(name: str) -> bool:
    """Whether torch's optimizer makes up for the state that its constructor left."""
    optimizer = getattr(torch.optim, name)([weight := parameter(2)])
    optimizer.state.clear()
    weight.grad = torch.ones(2)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


ELEMENTWISE = ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta", "Adagrad"]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_optimiser_that_treats_elements_one_by_one_is_found_to_do_so(name: str) -> None:
    expected = Finding() if steps_without_state(name) else Finding(unknown="KeyError: 'sum'")  # Adagrad of torch 2.11
    for axes, axis in ((1, 0), (2, 0), (2, 1), (4, 1)):
        finding = found(getattr(torch.optim, name), axes=axes, axis=axis)
        assert finding == expected


def test_settings_change_nothing_about_that() -> None:
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    for settings in ({"foreach": True}, {"fused": True}, {"amsgrad": True}, {"lr": torch.tensor(1e-3)}, {"lr": 0.0}):
        assert found(adamw, **settings) == Finding()
    assert found(sgd, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1) == Finding()
    assert found(Noisy) == Finding()  # it draws other noise in any case
    scheduled = adamw([parameter(4, 4)], lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: 0.0)  # a warm-up, which patches step()
    assert probe(scheduled, [(0, 2, 0)]) == Finding()


def test_an_optimiser_that_needs_the_whole_tensor_is_found(message: Messages) -> None:
    from transformers.optimization import Adafactor

    halves = Finding(message(found(torch.optim.Adafactor).reason, "half"))
    assert found(torch.optim.Adafactor) == halves
    assert found(Adafactor, axes=1) == halves
    assert found(torch.optim.Muon) == halves
    assert found(torch.optim.Muon, lr=0.0) == halves
    assert found(LayerWise) == halves
    assert found(LayerWise, lr=1e-9) == halves
    assert found(Centred, axis=0) == Finding()
    assert found(Centred, axis=1) == halves
    message(found(torch.optim.LBFGS).reason, "other elements")
    message(found(Together).reason, "depends on the others")
    message(found(Rows, lr=0.1).reason, "'row' of shape (4, 1)", "shape (4, 4)")


def test_an_optimiser_that_cannot_be_tried_says_why(message: Messages) -> None:
    assert found(NeedsClosure) == Finding(
        unknown="TypeError: NeedsClosure.step() missing 1 required positional argument: 'closure'"
    )
    around_another = found(lambda parameters: Around(torch.optim.SGD(parameters, lr=0.1)))
    assert around_another.reason is Finding().reason
    message(around_another.unknown, "its groups")


def around(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Around(torch.optim.SGD(parameters, lr=0.1))


def build_with(factory: Any, mesh: dict[str, int], splits: bool, directory: str | None) -> str:
    schedule = slapo.create_schedule(real("mlp"), mesh=mesh)
    if splits:
        split(schedule, "mlp")
    try:
        engine = slapo.build(schedule, optimizer=factory)
    except slapo.SlapoError as error:
        schedule.undo(to=0)
        return f"{type(error).__name__}: {error}"
    batch = next(batches(1))
    engine.train_step(batch)
    if directory is None:
        return "fine"
    engine.save(directory)
    expected = engine.train_step(batch).loss
    engine.load(directory)
    return "fine" if torch.equal(engine.train_step(batch).loss, expected) else "resumed elsewhere"


def build_all(directory: str) -> dict[str, str]:
    from transformers.optimization import Adafactor as TheirAdafactor

    adafactor = torch.optim.Adafactor
    found = {
        "split": build_with(adafactor, {"tp": 2}, True, None),
        "theirs, split": build_with(TheirAdafactor, {"tp": 2}, True, None),
        "replicas": build_with(adafactor, {"dp": 2}, True, f"{directory}/replicas"),
        "theirs, replicas": build_with(TheirAdafactor, {"dp": 2}, False, f"{directory}/theirs"),
        "nothing split": build_with(adafactor, {"tp": 2}, False, f"{directory}/whole"),
        "elementwise": build_with(torch.optim.AdamW, {"tp": 2}, True, f"{directory}/elementwise"),
    }
    with pytest.warns(UserWarning, match=r"Around .*'fc1\.weight'.* could not be tried"):
        found["unknown"] = build_with(around, {"tp": 2}, True, None)
    return found


@pytest.mark.ranks
def test_build_refuses_it_where_something_is_split_and_only_there(tmp_path: Path, message: Messages) -> None:
    first, second = run_ranks(build_all, str(tmp_path), world_size=2)
    [refused] = {result[case] for result in (first, second) for case in ("split", "theirs, split")}
    message(refused, "OptimizerError: Adafactor", "'fc1.weight'", 'mesh={"dp": ...}')
    for result in (first, second):
        for case in ("replicas", "theirs, replicas", "nothing split", "elementwise", "unknown"):
            assert result[case] == "fine", case


@pytest.mark.parametrize("mesh", [None, {"tp": 1}], ids=str)
def test_what_keeps_rows_is_saved_and_resumed_where_nothing_is_split(mesh: Any, tmp_path: Path) -> None:
    from transformers.optimization import Adafactor as TheirAdafactor

    for number, factory in enumerate((torch.optim.Adafactor, TheirAdafactor)):
        assert build_with(factory, mesh, mesh is not None, str(tmp_path / str(number))) == "fine"


class Logging(Base):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.log: list[float] = []
        self.counts = {"steps": 0}

    def update(self, parameter: torch.Tensor, all_of_them: list[torch.Tensor]) -> torch.Tensor:
        assert parameter.grad is not None
        self.log.append(float(parameter.grad.sum()))
        self.counts["steps"] += 1
        return parameter.grad


def test_trying_an_optimiser_leaves_no_trace_in_it() -> None:
    optimizer = Logging([nn.Parameter(torch.ones(4, 4))])
    assert probe(optimizer, [(0, 2, 0)]) == Finding()
    assert optimizer.log == []
    assert optimizer.counts == {"steps": 0}
