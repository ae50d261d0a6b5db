"""A scheduler of the learning rate that ``build`` is given steps with the optimizer, and is saved and resumed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from slapo_torch.dialect import TorchDialect

STEPS = 6


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def loss(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def warmed_up(optimizer: torch.optim.Optimizer) -> Any:
    parts = [
        lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2),
        lr_scheduler.CosineAnnealingLR(optimizer, 4),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


FACTORIES = {
    "warmed up": warmed_up,
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=20),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3, 4], gamma=0.3),
    "a function": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
}


def reference(name: str) -> dict[str, torch.Tensor]:
    plain = model()
    optimizer = adam(plain.parameters())
    scheduler = FACTORIES[name](optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(plain(batch(step)), None).backward()
        optimizer.step()
        scheduler.step()
    return plain.state_dict()


def resumed(mesh: Any, name: str, directory: str) -> dict[str, torch.Tensor]:
    """Half of the steps, saved; the others by a fresh engine."""
    engine: Any = None
    for half in (range(3), range(3, STEPS)):
        sch = slapo.create_schedule(model(), mesh=mesh, example_inputs=batch(0))
        if mesh and "pp" in mesh:
            sch["0"].pipeline_split()
        options = {"microbatches": 2} if mesh and "pp" in mesh else {}
        engine = slapo.build(sch, optimizer=adam, loss=loss, lr_scheduler=FACTORIES[name], **options)
        if half[0]:
            engine.load(directory)
        for step in half:
            engine.train_step(batch(step))
        engine.save(directory)
    found: dict[str, torch.Tensor] = engine.state_dict()
    assert engine.lr_scheduler.last_epoch == STEPS
    engine.close()
    assert engine.lr_scheduler is None
    return found


@pytest.mark.parametrize("name", FACTORIES)
def test_scheduler_resumes_where_it_was_saved(name: str, tmp_path: Path) -> None:
    found, expected = resumed(None, name, str(tmp_path)), reference(name)
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.ranks
def test_stages_schedule_alike(tmp_path: Path) -> None:
    for found in run_ranks(resumed, {"pp": 2}, "warmed up", str(tmp_path), world_size=2):
        for key, value in reference("warmed up").items():
            torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12)


def test_another_scheduler_than_the_saved_one_starts_afresh_with_a_warning(tmp_path: Path) -> None:
    def built(**options: Any) -> Any:
        return slapo.build(slapo.create_schedule(model()), optimizer=adam, loss=loss, **options)

    engine = built(lr_scheduler=FACTORIES["milestones"])
    engine.train_step(batch(0))
    engine.save(tmp_path)
    with pytest.warns(UserWarning, match="MultiStepLR"):
        built(lr_scheduler=FACTORIES["a function"]).load(tmp_path)
    with pytest.warns(UserWarning, match="lr_scheduler"):
        built().load(tmp_path)


class Forgetful(TorchDialect):
    """A dialect of before there was the argument."""

    name = "forgetful"

    def build(self, plan: slapo.Plan, context: Any) -> Any:
        return SimpleNamespace(optimizer=context.make_optimizer())


def test_target_without_the_lr_scheduler_is_refused(isolated_registry: Any) -> None:
    isolated_registry.register(Forgetful, kind="dialects")
    sch = slapo.create_schedule(model())
    with pytest.raises(slapo.BuildError, match="does not schedule the learning rate"):
        slapo.build(sch, target="forgetful", optimizer=adam, loss=loss, lr_scheduler=FACTORIES["milestones"])
    slapo.build(sch, target="forgetful", optimizer=adam, loss=loss)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"lr_scheduler": FACTORIES["milestones"]}, "without an optimizer"),
        ({"optimizer": adam, "lr_scheduler": 3}, "factory"),
        ({"optimizer": adam, "lr_scheduler": lambda optimizer: None}, "NoneType"),
        ({"optimizer": adam, "lr_scheduler": lr_scheduler.ReduceLROnPlateau}, "metric"),
        ({"optimizer": adam, "lr_scheduler": lambda _: FACTORIES["milestones"](adam(model().parameters()))}, "another"),
    ],
)
def test_invalid_lr_scheduler_is_refused(options: Any, word: str) -> None:
    with pytest.raises(slapo.OptimizerError, match=word):
        slapo.build(slapo.create_schedule(model()), loss=loss, **options)
