"""An optimizer that is not known to be element-wise is refused where parameters are split, and used where none is."""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import OptimizerError
from slapo_core.plugins import use_registry
from slapo_runtime.launcher import run_ranks
from slapo_runtime.weights.optimizer import make_optimizer
from slapo_testing import FakeDistribution, FakeEnvironment
from tests.messages import Messages
from tests.support.building import batches, real, split


class OwnSGD(torch.optim.SGD):
    """Element-wise, but nobody knows."""


ELEMENTWISE = ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta", "Adagrad"]


def made(factory: Any, *, is_split: bool = True, **options: Any) -> Any:
    parameter = nn.Parameter(torch.ones(4, 4))
    axes = {id(parameter): (0,)} if is_split else {}
    return make_optimizer({"weight": parameter}, factory, {}, axes, **options)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_torch_s_element_wise_optimizers_take_shards_and_compute_shards_of_their_steps(name: str) -> None:
    factory = getattr(torch.optim, name)
    assert isinstance(made(factory), factory)
    torch.manual_seed(0)
    full, gradients = torch.randn(4, 4), torch.randn(3, 4, 4)

    def stepped(rows: slice) -> torch.Tensor:
        parameter = nn.Parameter(full[rows].clone())
        optimizer = factory([parameter])
        for gradient in gradients:
            parameter.grad = gradient[rows].clone()
            optimizer.step()
        return parameter.detach()

    assert torch.equal(torch.cat([stepped(slice(0, 2)), stepped(slice(2, 4))]), stepped(slice(0, 4)))


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_optimizers_that_are_not_elementwise_are_refused_for_split_parameters(name: str, message: Messages) -> None:
    with pytest.raises(OptimizerError) as refused:
        made(getattr(torch.optim, name))
    message(refused, name, "'weight'", "elementwise=True")
    assert made(getattr(torch.optim, name), is_split=False) is not None


class Closing(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize("options", [{}, {"is_split": False}, {"is_part": True}, {"elementwise": True}])
def test_optimizers_with_a_closure_are_refused(options: dict[str, Any], message: Messages) -> None:
    for factory in (torch.optim.LBFGS, Closing):
        with pytest.raises(OptimizerError) as refused:
            made(factory, **options)
        message(refused, factory.__name__, "'closure'")


class Weighted(nn.Module):
    """Weights of the size of a usual initialization."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(64, 6).mul(0.02).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) @ self.weight.mT).square().mean()


@pytest.mark.parametrize(
    ("dtype", "name", "rate", "warns"),
    [
        (torch.bfloat16, "AdamW", 1e-5, True),
        (torch.bfloat16, "Adam", 1e-5, True),
        (torch.bfloat16, "AdamW", 1e-3, False),
        (torch.float16, "AdamW", 1e-5, False),
        (torch.bfloat16, "SGD", 1e-5, False),
        (torch.float32, "AdamW", 1e-5, False),
    ],
)
def test_updates_that_rounding_loses_are_warned_of_once(dtype: Any, name: str, rate: float, warns: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = slapo.build(
            slapo.create_schedule(Weighted(dtype)), optimizer=lambda params: getattr(torch.optim, name)(params, lr=rate)
        )
        before = engine.state_dict()["weight"]
        for _ in range(2):
            engine.train_step(torch.randn(4, 6))
    told = [str(one.message) for one in caught if "rounding" in str(one.message)]
    assert len(told) == warns
    assert all("MixedPrecisionPolicy" in one and str(dtype)[6:] in one for one in told)
    if name != "SGD":
        moved = float((engine.state_dict()["weight"] != before).float().mean())
        assert (moved < 0.5) == warns


def test_a_live_step_is_warned_of_lost_updates_too(message: Messages) -> None:
    sch = slapo.create_schedule(nn.Sequential(Weighted(torch.bfloat16)))
    sch["0"].replace(Weighted(torch.bfloat16))
    optimizer = torch.optim.AdamW(sch.model.parameters(), lr=1e-5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            sch.model(torch.randn(4, 6)).backward()
            optimizer.step()
    [told] = [str(one.message) for one in caught if "rounding" in str(one.message)]
    message(told, "bfloat16", "float32", 'target="deepspeed"')


def test_an_unknown_one_is_taken_at_the_user_s_word() -> None:
    for factory in (OwnSGD, lambda parameters: OwnSGD(parameters, lr=0.1)):
        with pytest.raises(OptimizerError, match="OwnSGD"):
            made(factory)
        assert isinstance(made(factory, elementwise=True), OwnSGD)


def test_pipeline_stages_need_one_that_goes_by_single_parameters() -> None:
    for name in ("SGD", "Adafactor", "Muon"):
        assert made(getattr(torch.optim, name), is_split=False, is_part=True) is not None
    with pytest.raises(OptimizerError, match="pipeline stage"):
        made(OwnSGD, is_split=False, is_part=True)
    assert made(OwnSGD, is_split=False, is_part=True, elementwise=True) is not None


def build_with(factory: Any, mesh: Any, splits: bool, directory: str | None, **options: Any) -> str:
    schedule = slapo.create_schedule(real("mlp"), mesh=mesh)
    if splits:
        split(schedule, "mlp")
    try:
        engine = slapo.build(schedule, optimizer=factory, **options)
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
    return {
        "split": build_with(adafactor, {"tp": 2}, True, f"{directory}/split"),
        "theirs, split": build_with(TheirAdafactor, {"tp": 2}, True, f"{directory}/theirs-split"),
        "replicas": build_with(adafactor, {"dp": 2}, True, f"{directory}/replicas"),
        "theirs, replicas": build_with(TheirAdafactor, {"dp": 2}, False, f"{directory}/theirs"),
        "nothing split": build_with(adafactor, {"tp": 2}, False, f"{directory}/whole"),
        "elementwise": build_with(torch.optim.AdamW, {"tp": 2}, True, f"{directory}/elementwise"),
        "declared": build_with(OwnSGD, {"tp": 2}, True, None, elementwise=True),
        "unknown": build_with(OwnSGD, {"tp": 2}, True, None),
    }


@pytest.mark.ranks
def test_build_refuses_unknown_optimizers_only_for_split_parameters(tmp_path: Path, message: Messages) -> None:
    first, second = run_ranks(build_all, str(tmp_path), world_size=2)
    [refused] = {result.pop("unknown") for result in (first, second)}
    message(refused, "OptimizerError: OwnSGD", "'fc1.weight'", 'mesh={"dp": ...}')
    for result in (first, second):
        assert set(result.values()) == {"fine"}, result


@pytest.mark.parametrize("mesh", [None, {"tp": 1}], ids=str)
def test_factored_state_is_saved_and_resumed_without_shards(mesh: Any, tmp_path: Path) -> None:
    from transformers.optimization import Adafactor as TheirAdafactor

    for number, factory in enumerate((torch.optim.Adafactor, TheirAdafactor)):
        assert build_with(factory, mesh, mesh is not None, str(tmp_path / str(number))) == "fine"


class Normalized(torch.optim.Optimizer):
    """The update of a parameter has the length of the learning rate."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["steps"] = self.state[one].get("steps", 0) + 1
                one.sub_(one.grad / one.grad.norm(), alpha=group["lr"])


DECLARED = """
from slapo_core import hookimpl

@hookimpl
def slapo_full_matrix(optimizer):
    return True if optimizer.__name__ == "Normalized" else None
"""


def normalized(mesh: Any, directory: str, plugins: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Two steps, one of them after a checkpoint."""
    for number, batch in enumerate(batches(2)):
        schedule = slapo.create_schedule(real("mlp"), mesh=mesh, plugins=plugins)
        engine = slapo.build(split(schedule, "mlp") if mesh else schedule, optimizer=Normalized)
        if number:
            engine.load(directory)
        engine.train_step(batch)
        engine.save(directory)
    return engine.state_dict()


def normalized_on_ranks(directory: str) -> tuple[dict[str, torch.Tensor], str]:
    with tempfile.TemporaryDirectory() as installed:
        environment = FakeEnvironment(Path(installed))
        points = {"slapo.v1.hooks": {"acme": "acme_optimizers"}}
        environment.install(FakeDistribution("acme-slapo", "1.0", points, {"acme_optimizers": DECLARED}))
        sys.path.insert(0, installed)
        try:
            with use_registry(environment.registry(with_installed=True)):
                found = normalized({"tp": 2}, directory, ("acme-slapo",))
                try:
                    normalized({"tp": 2}, directory, ())
                except OptimizerError as error:
                    return found, error.message
        finally:
            sys.path.remove(installed)
            environment.forget_modules()
    raise AssertionError("nobody declared it, and it was taken")


@pytest.mark.ranks
def test_a_plugin_declares_an_optimizer_of_full_matrices(tmp_path: Path) -> None:
    expected = normalized(None, str(tmp_path / "plain"), ())
    for found, refused in run_ranks(normalized_on_ranks, str(tmp_path / "tp"), world_size=2):
        assert "Normalized is not known" in refused
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
