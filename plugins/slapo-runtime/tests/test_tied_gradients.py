"""Gradients of what several stages use are summed over those; norms, copies and state know where tensors live."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.internals import Internals
from slapo_runtime.correspondence.storage import Placement
from slapo_runtime.gradients import GradientClipper, TiedGradients
from slapo_runtime.launcher import run_ranks
from slapo_runtime.replicas import compare_all
from slapo_runtime.state import ModelState
from tests.messages import Messages
from tests.support.building import Split

PLACES = {"first": (0, 3), "second": (0, 1, 3), "low": (0, 3), "none": (1, 2), "own": (2,), "all": (0, 1, 2, 3)}


class Parameters(nn.Module):
    """Parameters by name, whose values are their places in the alphabet."""

    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(PLACES):
            dtype = torch.bfloat16 if name == "low" else torch.float64
            self.register_parameter(name, nn.Parameter(torch.full((3, 2), float(number), dtype=dtype)))
        self.none.requires_grad_(True)


def placed(mesh: dict[str, int], places: dict[str, tuple[int, ...]], model: nn.Module) -> slapo.Schedule:
    sch = slapo.create_schedule(model, mesh=mesh)
    Internals(sch).tree.tensors.placement = Placement(places)
    return sch


def on_four() -> dict[str, Any]:
    model = Parameters()
    sch = placed({"pp": 4}, PLACES, model)
    rank = sch.mesh.rank("pp")
    state = ModelState.of(sch)
    for name, ranks in PLACES.items():
        if rank not in ranks:
            getattr(model, name).data.fill_(math.nan)  # what is read of it anywhere shows
        elif name not in ("none", "own") and (name, rank) != ("second", 1):
            getattr(model, name).grad = torch.full_like(getattr(model, name), 10.0**rank)
    tied = TiedGradients(state.correspondence)
    tied.sum()
    own = {name: getattr(model, name).grad for name, ranks in PLACES.items() if rank in ranks}
    if rank == 2:
        model.own.grad = torch.full_like(model.own, 5.0)
    clipper = GradientClipper(state.correspondence, math.inf)
    norm, summed = clipper.clip(), {name: None if grad is None else grad.clone() for name, grad in own.items()}
    GradientClipper(state.correspondence, float(norm) / 2).clip()
    scaled = {name: None if grad is None else grad.clone() for name, grad in own.items()}
    values = state.state_dict()
    compare_all(state.correspondence, None, random=False, repair=False)
    if rank == 3:
        model.second.data[0, 0] = 7.0
    with pytest.raises(slapo.RankMismatchError) as error:
        state.check_replicas()
    with pytest.warns(UserWarning, match="the first rank's values"):
        state.check_replicas(repair=True)
    loaded = {name: tensor + 1 for name, tensor in values.items()}
    state.load_state_dict(loaded)
    sparse = TiedGradients(state.correspondence)
    model.first.grad = torch.ones(3, 2, dtype=torch.float64).to_sparse() if rank == 3 else None
    told = None
    for _ in range(2):
        if rank in PLACES["first"]:
            with pytest.raises(slapo.BuildError) as refused:
                sparse.sum()
            told = str(refused.value)
        else:
            sparse.sum()
    return {
        "summed": summed,
        "norm": norm,
        "scaled": scaled,
        "values": values,
        "differing": str(error.value),
        "repaired": model.second.data[0, 0].item(),
        "loaded": all(bool(tensor.isnan().any()) for tensor in _not_here(model, rank))
        and all(torch.equal(getattr(model, name).data, loaded[name]) for name in own),
        "sparse": told,
    }


def _not_here(model: nn.Module, rank: int) -> list[torch.Tensor]:
    return [getattr(model, name).data for name, ranks in PLACES.items() if rank not in ranks]


@pytest.mark.ranks
def test_ties_of_some_stages_are_summed_counted_compared_and_kept_there(message: Messages) -> None:
    sums = {"first": 1001.0, "second": 1001.0, "low": 1001.0, "all": 1111.0}
    expected = math.sqrt(6 * (3 * 1001.0**2 + 1111.0**2 + 5.0**2))
    results = run_ranks(on_four, world_size=4)
    for rank, result in enumerate(results):
        for name, gradient in result["summed"].items():
            if name in ("none", "own"):
                assert gradient is None
            else:
                value = torch.tensor(sums[name], dtype=gradient.dtype)
                assert torch.equal(gradient, value.expand(3, 2)), name
        assert result["norm"].item() == pytest.approx(expected, rel=1e-3)  # one of them is bfloat16
        assert result["norm"].dtype == torch.float64
        for name, gradient in result["scaled"].items():
            if gradient is not None and name != "low":
                torch.testing.assert_close(gradient, torch.full((3, 2), (sums | {"own": 5.0})[name]).double() / 2)
        assert list(result["values"]) == list(PLACES)
        for number, tensor in enumerate(result["values"].values()):
            assert torch.equal(tensor, torch.full_like(tensor, float(number)))
        first, *ranks = result["differing"].splitlines()
        assert first.startswith("replicas of 'second' differ")
        assert [line.split(":")[0] for line in ranks if "  rank" in line] == ["  rank 0", "  rank 1", "  rank 3"]
        if rank in PLACES["second"]:
            assert result["repaired"] == 2.0
        assert result["loaded"]
    [sparse] = {results[rank]["sparse"] for rank in PLACES["first"]}
    message(sparse, "'first'", "sparse")


def sharded() -> dict[str, Any]:
    """A weight in pieces along ``tp``, each of which two stages hold."""
    model = nn.Sequential(nn.Linear(4, 6, bias=False)).double()
    sch = slapo.create_schedule(model, mesh={"pp": 2, "tp": 2})
    sch["0"].apply(Split(("weight",), axis=1))
    Internals(sch).tree.tensors.placement = Placement({"0.weight": (0, 1)})
    state = ModelState.of(sch)
    pp, tp = sch.mesh.rank("pp"), sch.mesh.rank("tp")
    full = torch.arange(24.0, dtype=torch.float64).view(6, 4)
    piece = full.chunk(2, dim=1)[tp]
    model[0].weight.grad = piece.clone() if pp == 0 else (100 * piece).clone()
    TiedGradients(state.correspondence).sum()
    equal = torch.equal(model[0].weight.grad, 101 * piece)
    norm = GradientClipper(state.correspondence, math.inf).clip()
    return {"equal": equal, "norm": norm.item(), "expected": torch.linalg.vector_norm(101 * full).item()}


@pytest.mark.ranks
def test_gradient_shards_of_a_tied_weight_are_summed() -> None:
    for result in run_ranks(sharded, world_size=4):
        assert result["equal"]
        assert result["norm"] == pytest.approx(result["expected"], rel=1e-14)
