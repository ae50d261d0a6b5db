"""Weights that only a plugin understands, and those that steps add, live with their stages like all others."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from slapo_testing.distributions import FakeEnvironment
from tests.support.edits import Call
from tests.support.staged import build, in_turn

from .test_weight_hooks import Model, odd, same

BATCH = (torch.linspace(-1, 1, 24).view(4, 6),)


class Loss(Model):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).square().mean()


class Scaled(nn.Module):
    """A linear layer with a factor for each output."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, linear.weight.shape[0]))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight, self.bias) * self.gain


def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return Loss().state_dict()


def engine_on(mesh: dict[str, int] | None) -> Any:
    with in_turn():
        with torch.device("meta"):
            model = Loss()
        sch = slapo.create_schedule(model, mesh=mesh, example_inputs=BATCH)
        sch["square"].columns()
        sch["pair"].fold()
        sch["out"].apply(Call(lambda node, edit: edit.replace_module(node, Scaled(node.module))))
        if mesh is not None:
            sch["square"].pipeline_split()
        return build(sch, weights=values(), max_grad_norm=0.1)


def trained(engine: Any) -> dict[str, torch.Tensor]:
    for _ in range(2):
        engine.train_step(BATCH)
    return engine.state.state_dict(include_added=True)


def on_two(path: str, directory: str) -> dict[str, Any]:
    sys.path.insert(0, path)
    engine = engine_on({"pp": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = engine.state.state_dict()
    state = trained(engine)
    engine.state.check_replicas(optimizer=engine.optimizer)
    engine.state.save(directory, optimizer=engine.optimizer)
    again = engine_on({"pp": 2})
    again.state.load(directory, optimizer=again.optimizer)
    return {
        "first": first,
        "state": state,
        "loaded": again.state.state_dict(include_added=True),
        "next": trained(again),
        "here": sorted(one.name for one in engine.state.tensors() if one.is_local),
    }


@pytest.mark.ranks
def test_translated_and_added_weights_live_with_their_stages(
    fake_distributions: FakeEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_distributions.install(odd())
    monkeypatch.syspath_prepend(str(fake_distributions.directory))
    results = run_ranks(on_two, str(fake_distributions.directory), str(tmp_path), world_size=2)
    plain = engine_on(None)
    state = trained(plain)
    plain.state.load(tmp_path, optimizer=plain.optimizer)
    loaded = plain.state.state_dict(include_added=True)
    following = trained(plain)
    assert results[0]["here"] == ["square.bias", "square.weight"]
    assert results[1]["here"] == ["out.bias", "out.gain", "out.weight", "pair.both"]
    for result in results:
        assert same(result["first"], values())
        assert list(result["state"]) == [*values(), "out.gain"]
        for name, tensor in state.items():
            torch.testing.assert_close(result["state"][name], tensor, rtol=1e-5, atol=1e-7)
        assert same(result["loaded"], result["state"])
        assert same(loaded, result["state"])
        for name, tensor in following.items():
            torch.testing.assert_close(result["next"][name], tensor, rtol=1e-5, atol=1e-7)
