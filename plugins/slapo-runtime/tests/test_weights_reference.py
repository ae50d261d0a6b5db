"""State dicts leave and enter with the reference model's names, shapes and layout, whatever the schedule did."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.internals import Replace
from slapo_runtime.launcher import run_ranks
from tests.messages import Messages
from tests.support.building import on_meta, real, split
from tests.support.reference_weights import load_reference_state_dict, reference_state_dict

NAMES = ["gpt2", "bert", "t5", "llama", "cnn"]


def round_trip(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The state before, the state after loading another model's, and what rank-0-only gives."""
    schedule = split(slapo.create_schedule(real(name), mesh={"tp": 2}), name)
    first = reference_state_dict(schedule)
    load_reference_state_dict(schedule, real(name, seed=5).state_dict())
    return first, reference_state_dict(schedule), reference_state_dict(schedule, rank0_only=True)


def round_trips(names: list[str]) -> dict[str, tuple[dict, dict, dict]]:
    return {name: round_trip(name) for name in names}


@pytest.mark.ranks
def test_a_sharded_model_gives_and_takes_the_plain_models_state_dict() -> None:
    for rank, results in enumerate(run_ranks(round_trips, NAMES, world_size=2)):
        for name, (first, second, rank0_only) in results.items():
            plain, other = real(name).state_dict(), real(name, seed=5).state_dict()
            assert list(first) == list(second) == list(plain)
            for key in plain:
                assert torch.equal(first[key], plain[key]), (name, key)
                assert torch.equal(second[key], other[key]), (name, key)
            assert list(rank0_only) == (list(plain) if rank == 0 else [])


@pytest.mark.parametrize("name", NAMES)
def test_a_state_dict_is_a_copy_with_ties(name: str) -> None:
    model = real(name)
    engine = slapo.build(slapo.create_schedule(model))
    state = engine.state_dict()
    expected = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    if name == "gpt2":
        assert state["lm_head.weight"] is state["transformer.wte.weight"]


class Gated(nn.Module):
    """Takes the linear layer's weight under another name, does without its bias, and adds a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(8, 6))
        self.gate = nn.Parameter(torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.kernel)
        nn.init.constant_(self.gate, 0.25)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.kernel) * self.gate


def gated(model: nn.Module) -> slapo.Schedule:
    schedule = slapo.create_schedule(model)
    with torch.device("meta" if model.fc1.weight.is_meta else "cpu"):
        module = Gated()
    schedule["fc1"].apply(Replace(module, params={"weight": "kernel"}, drop="bias", rtol=1.0))
    return schedule


def test_renamed_and_dropped_parameters_are_in_the_state_dict(
    message: Messages,
) -> None:
    plain = real("mlp").state_dict()
    engine = slapo.build(gated(real("mlp")))
    with pytest.warns(UserWarning, match="^the state dict leaves out") as caught:
        state = engine.state_dict()
    changed, left_out = caught
    assert "dropped fc1.bias" in str(changed.message)
    message(left_out.message, "does not have: fc1.gate")
    assert list(state) == list(plain)
    assert all(torch.equal(state[key], plain[key]) for key in plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.state_dict()  # told once
        assert list(engine.state_dict(include_added=True)) == [*plain, "fc1.gate"]

    other = real("mlp", seed=5).state_dict()
    engine.load_state_dict(other)
    assert all(torch.equal(tensor, other[key]) for key, tensor in engine.state_dict().items())
    assert torch.equal(engine.module.fc1.kernel, other["fc1.weight"])


@pytest.mark.filterwarnings("ignore:the state dict leaves out")
def test_meta_initialization_covers_kept_dropped_and_added_tensors() -> None:
    plain = slapo.build(slapo.create_schedule(on_meta("mlp"))).state_dict()
    engine = slapo.build(gated(on_meta("mlp")))
    state = engine.state_dict()
    assert all(torch.equal(state[key], plain[key]) for key in plain)  # of the reference model's own initialization
    assert torch.equal(engine.module.fc1.gate, torch.full((8,), 0.25))

    weights = real("mlp", seed=5).state_dict()
    loaded = slapo.build(gated(on_meta("mlp")), weights=weights)
    assert all(torch.equal(tensor, weights[key]) for key, tensor in loaded.state_dict().items())


def test_a_state_dict_that_does_not_fit_changes_nothing(message: Messages) -> None:
    engine = slapo.build(slapo.create_schedule(real("mlp")))
    before = engine.state_dict()
    wrong = {**real("mlp", seed=5).state_dict(), "fc2.bias": torch.ones(4)}
    with pytest.raises(slapo.WeightsError) as error:
        engine.load_state_dict(wrong)
    message(error, "unexpected: fc2.bias (4,)")
    assert all(torch.equal(tensor, before[key]) for key, tensor in engine.state_dict().items())


class Renaming(nn.Module):
    """Its state dict names the weight otherwise, in a clone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_state_dict_post_hook(self._rename)

    @staticmethod
    def _rename(module: Any, state: dict[str, torch.Tensor], prefix: str, metadata: Any) -> None:
        for name in ("one.weight", "two.weight"):
            state[f"{prefix}kernel.{name}"] = state.pop(prefix + name).clone()


def test_a_tensor_that_a_state_dict_hook_renames_and_clones_is_kept() -> None:
    model = Renaming()
    expected = model.state_dict()
    sch = slapo.create_schedule(model)
    sch["one"].checkpoint()
    state = slapo.state_dict(sch)
    assert set(state) == set(expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    slapo.load_state_dict(sch, {name: tensor + 1 for name, tensor in state.items()})
    assert torch.equal(model.two.weight, expected["kernel.two.weight"] + 1)

    alike = Renaming()
    alike.two.load_state_dict(alike.one.state_dict())
    with pytest.raises(slapo.WeightsError, match="state-dict hook"):
        slapo.state_dict(slapo.create_schedule(alike))
