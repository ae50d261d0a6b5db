"""What a model on the meta device starts with is given by a plugin first, and by the model for the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.plugins import use_registry
from slapo_testing.distributions import FakeDistribution, FakeEnvironment
from tests.messages import Messages


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.square, self.out = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.out(self.square(input))


def model(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return Model()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[key], right[key]) for key in right)


@pytest.fixture
def scheduled(fake_distributions: FakeEnvironment) -> Callable[..., slapo.Schedule]:
    def make(made: nn.Module, *others: FakeDistribution, plugins: tuple[str, ...] = ()) -> slapo.Schedule:
        fake_distributions.install(*others)
        with use_registry(fake_distributions.registry(with_installed=True)):
            return slapo.create_schedule(made, plugins=plugins)

    return make


FILL = """
import torch
from slapo_core import hookimpl

@hookimpl
def slapo_initialize(path, name, shape, dtype):
    if path == "square" and name == "weight":
        return torch.eye(6, dtype=dtype)
"""


def filling(name: str, source: str = FILL) -> FakeDistribution:
    module = f"{name.replace('-', '_')}_hooks"
    return FakeDistribution(name, entry_points={"slapo.v1.hooks": {module: module}}, modules={module: source})


def test_a_plugin_gives_the_first_values_and_the_model_the_others(scheduled: Callable[..., slapo.Schedule]) -> None:
    plain = slapo.build(slapo.create_schedule(model("meta"))).state_dict()
    schedule = scheduled(model("meta"), filling("fill-slapo"), plugins=("fill-slapo",))
    slapo.verify(schedule, torch.randn(3, 6))
    assert same(slapo.build(schedule).state_dict(), {**plain, "square.weight": torch.eye(6)})


def test_real_weights_and_given_ones_are_not_asked_about(scheduled: Callable[..., slapo.Schedule]) -> None:
    fill = filling("fill-slapo", FILL.replace('if path == "square" and name == "weight"', "if True"))
    engine = slapo.build(scheduled(model(), fill, plugins=("fill-slapo",)))
    assert same(engine.state_dict(), model().state_dict())
    schedule = slapo.create_schedule(model("meta"), plugins=())
    assert same(slapo.build(schedule, weights=model().state_dict()).state_dict(), model().state_dict())


def test_two_plugins_that_give_first_values_are_both_named(
    scheduled: Callable[..., slapo.Schedule], message: Messages
) -> None:
    plugins = ("fill-slapo", "full-slapo")
    schedule = scheduled(model("meta"), *(filling(name) for name in plugins), plugins=plugins)
    with pytest.raises(slapo.HookError) as caught:
        slapo.build(schedule)
    call = "slapo_initialize(path='square', name='weight', shape=(6, 6), dtype=torch.float32)"
    message(caught, call, "fill-slapo 1.0", "full-slapo 1.0", "SLAPO_DISABLE_PLUGINS=full-slapo")


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ("torch.eye(5)", "(5, 5), torch.float32, cpu"),
        ("torch.eye(6, dtype=torch.float64)", "(6, 6), torch.float64, cpu"),
        ("torch.eye(6, device='meta')", "(6, 6), torch.float32, meta"),
    ],
)
def test_first_values_of_another_kind_are_refused(
    scheduled: Callable[..., slapo.Schedule], value: str, got: str, message: Messages
) -> None:
    fill = filling("fill-slapo", FILL.replace("torch.eye(6, dtype=dtype)", value))
    schedule = scheduled(model("meta"), fill, plugins=("fill-slapo",))
    with pytest.raises(slapo.HookError) as caught:
        slapo.build(schedule)
    message(caught, "slapo_initialize of fill-slapo 1.0", "'square.weight'", f"got {got}")
