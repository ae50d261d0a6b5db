"""`build` gives each rank along ``pp`` its own tensors and no others, and refuses what does not go together."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.internals import Internals
from slapo_core.layout import Layout
from slapo_runtime.initialization import Initializer
from slapo_runtime.launcher import run_ranks
from slapo_runtime.weights.sources import MappingSource
from slapo_testing import ModelSnapshot, assert_bit_identical
from tests.messages import Messages
from tests.support.staged import Chain, InTurn, Sparse, batch, build, chain, grouped, in_turn, scheduled


class Counting(MappingSource):
    """Notes what is read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.read_names: list[str] = []

    def read(self, name: str, layout: Layout, mesh: Any) -> torch.Tensor:
        self.read_names.append(name)
        return super().read(name, layout, mesh)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Chain().double()


def own_names(engine: Any) -> list[str]:
    return sorted(one.name for one in engine.state.tensors() if one.is_local)


def materialized() -> dict[str, Any]:
    """What a rank reads, and what it initializes, of a model on the meta device."""
    source = Counting(chain(3).state_dict())
    with pytest.MonkeyPatch.context() as patch:
        read = build(scheduled({"pp": 2}, model=on_meta()), weights=source)
        made: list[str] = []
        piece = Initializer.shard
        patch.setattr(Initializer, "shard", lambda self, name, *rest: made.append(name) or piece(self, name, *rest))
        initialized = build(scheduled({"pp": 2}, model=on_meta()))
    return {
        "own": own_names(read),
        "read": sorted(source.read_names),
        "made": sorted(made),
        "from files": read.state.state_dict(),
        "initial": initialized.state.state_dict(),
        "one object": read.module.head.weight is read.module.embed.weight,
        "freed": real_tensors_go(),
        "bytes": sum(one.tensor.nbytes for one in read.state.tensors() if not one.tensor.is_meta),
    }


def real_tensors_go() -> bool:
    """Whether nothing holds the tensors of other stages any more, where they had values."""
    model = chain()
    sch = scheduled({"pp": 2}, model=model)
    elsewhere = model.blocks[0 if sch.mesh is not None and sch.mesh.rank("pp") else 3]
    elsewhere.up.weight.grad = torch.ones_like(elsewhere.up.weight)
    references = [weakref.ref(elsewhere.up.weight), weakref.ref(elsewhere.up.weight.grad)]
    build(sch)
    gc.collect()
    return elsewhere.up.weight.is_meta and [reference() for reference in references] == [None, None]


def failing() -> dict[str, Any]:
    """A build that fails when all is in place, of a real model; and the next one, of the same schedule."""
    model = chain()
    model.embed.weight.note = "kept"
    calls: list[int] = []
    model.blocks[3].up.weight.register_hook(lambda gradient: calls.append(1))
    model.blocks[0].up.weight.register_hook(lambda gradient: calls.append(0))
    sch = scheduled({"pp": 2}, model=model)
    before, tensors = ModelSnapshot(model), [*model.parameters(), *model.buffers()]
    InTurn.fails = True
    with pytest.raises(slapo.BuildError, match="it does not want to"):
        build(sch)
    assert_bit_identical(before, model)
    same = all(a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()], strict=True))
    InTurn.fails = False
    engine = build(sch)
    loss = engine.gradients(batch(0))
    state = engine.state.state_dict()
    return {
        "same": same,
        "placed": Internals(sch).tree.tensors.placement is not None,
        "loss": loss,
        "hooks": calls,
        "note": engine.module.embed.weight.note,
        "state": all(torch.equal(tensor, state[name]) for name, tensor in chain().state_dict().items()),
    }


def lost_parameters() -> list[str]:
    """Factories that do not go by the parameters that they are given, and optimizers that need all of them."""
    told = []
    factories = {
        "the model's own": lambda model: lambda params: torch.optim.SGD(model.parameters(), lr=0.1),
        "all at once": lambda model: lambda params: torch.optim.LBFGS(params),
        "by a norm": lambda model: lambda params: ByNorm(params),
        "other groups": lambda model: lambda params: torch.optim.SGD([{"params": [one]} for one in params], lr=0.1),
        "other settings": lambda model: lambda params: torch.optim.SGD(params, lr=0.1 * len(params)),
        "left out": lambda model: lambda params: torch.optim.SGD(params[1:], lr=0.1),
    }
    for make in factories.values():
        model = Sequence4()
        sch = slapo.create_schedule(model, mesh={"pp": 2}, example_inputs=(torch.ones(2, 4),))
        sch["0"].pipeline_split()
        with pytest.raises(slapo.SlapoError) as error:
            build(sch, optimizer=make(model))
        told.append(str(error.value))
    return told


class Sequence4(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


class ByNorm(torch.optim.Optimizer):
    """Divides every update by the norm of all gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in parameters]).norm()
        for one in parameters:
            one.sub_(one.grad / norm, alpha=0.1)


def other_cuts() -> str:
    from torch import distributed as dist

    sch = slapo.create_schedule(chain(), mesh={"pp": 2}, example_inputs=batch(0))
    sch[f"blocks.{dist.get_rank()}"].pipeline_split()
    with pytest.raises(slapo.RankMismatchError) as error:
        build(sch)
    return str(error.value)


def refused() -> list[str]:
    """What a mesh with ``pp`` needs."""
    told = []
    for make in (
        lambda: slapo.create_schedule(chain(), mesh={"pp": 2}),
        lambda: slapo.create_schedule(chain(), mesh={"pp": 2}, example_inputs=batch(0)),
        lambda: scheduled({"pp": 2}, cuts=3),
    ):
        with pytest.raises(slapo.BuildError) as error:
            build(make())
        told.append(str(error.value))
    InTurn.ranks = staticmethod(lambda stages, pp: (0,) * stages)
    with pytest.raises(slapo.BuildError) as error:
        build(scheduled({"pp": 2}))
    told.append(str(error.value))
    InTurn.ranks = None
    return told


@in_turn()
def on_two() -> dict[str, Any]:
    return {
        "materialized": materialized(),
        "failing": failing(),
        "lost": lost_parameters(),
        "cuts": other_cuts(),
        "refused": refused(),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(on_two, world_size=2)


@pytest.mark.ranks
def test_no_rank_reads_or_makes_the_tensors_of_another_stage(results: list[dict[str, Any]]) -> None:
    with in_turn():
        plain = build(slapo.create_schedule(on_meta())).state.state_dict()
    for rank, result in enumerate(result["materialized"] for result in results):
        own = [name for name in result["own"] if name != "head.weight"]
        assert result["read"] == result["made"] == own
        assert ("embed.weight" in own, "scale" in own) == (True, True)
        assert ("blocks.0.up.weight" in own, "blocks.3.up.weight" in own, "frozen" in own) == (
            rank == 0,
            rank == 1,
            rank == 0,
        )
        assert result["one object"]
        assert result["freed"]
        assert list(result["initial"]) == list(plain)
        for name, tensor in plain.items():
            assert torch.equal(result["initial"][name], tensor), name
            assert torch.equal(result["from files"][name], chain(3).state_dict()[name]), name
    total = sum(tensor.nbytes for tensor in [*chain().parameters(), *chain().buffers()])
    assert max(result["materialized"]["bytes"] for result in results) < 0.7 * total


@pytest.mark.ranks
def test_a_failed_build_gives_every_tensor_back_and_the_next_one_works(results: list[dict[str, Any]]) -> None:
    model = chain()
    for rank, result in enumerate(result["failing"] for result in results):
        assert result["same"]
        assert result["placed"]
        assert torch.equal(result["loss"], model(**batch(0)).detach())
        assert result["hooks"] == [rank]
        assert result["note"] == "kept"
        assert result["state"]


@pytest.mark.ranks
def test_optimizers_that_do_not_go_with_stages_are_refused(results: list[dict[str, Any]], message: Messages) -> None:
    for rank, result in enumerate(results):
        own, at_once, by_norm, groups, settings, left_out = result["lost"]
        foreign = ("'0.weight'", "'1.weight'")[1 - rank]
        assert f"{foreign} of another pipeline stage" in own
        message(at_once, "LBFGS", "'closure'")
        message(by_norm, "ByNorm", "pipeline stage")
        message(groups, "number of groups", "rank 0: 2\n  rank 1: 4")
        message(settings, "'lr' of group 0", "rank 0: 0.2\n  rank 1: 0.4")
        message(left_out, "does not hold 1 parameters")


@pytest.mark.ranks
def test_a_mesh_with_stages_needs_cuts_that_fit_and_example_inputs(
    results: list[dict[str, Any]], message: Messages
) -> None:
    [cuts], *refused = (
        set(told) for told in zip(*([result["cuts"], *result["refused"]] for result in results), strict=True)
    )
    message(cuts, "step 1")
    words = (
        "no example inputs",
        "no step cuts",
        "3 stages (after 'blocks.0', 'blocks.1')",
        "got (0, 0)",
    )
    for told, word in zip(refused, words, strict=True):
        message(*told, word)


@pytest.mark.parametrize("mesh", [None, {"pp": 1}])
@in_turn()
def test_a_cut_without_ranks_for_the_stages_is_refused(mesh: dict[str, int] | None, message: Messages) -> None:
    with pytest.raises(slapo.BuildError) as error:
        build(scheduled(mesh, cuts=2))
    message(error, "2 stages (after 'blocks.1')", "no mesh" if mesh is None else str(mesh))
    sch = slapo.create_schedule(chain(), mesh=mesh)
    sch["blocks.1"].pipeline_split()
    with pytest.raises(slapo.BuildError, match="cut into stages"):
        build(sch)


@in_turn()
def without_parameters() -> dict[str, Any]:
    torch.manual_seed(0)
    sch = slapo.create_schedule(Sparse().double(), mesh={"pp": 4}, example_inputs=(torch.ones(2, 4).double(),))
    for path in ("fc1", "act", "fc2"):
        sch[path].pipeline_split()
    engine = build(sch, max_grad_norm=1e-2)
    norm = engine.train_step((torch.ones(2, 4).double(),))
    groups = [len(group["params"]) for group in engine.optimizer.param_groups]
    return {"norm": norm, "state": engine.state.state_dict(), "groups": groups}


@pytest.mark.ranks
def test_a_rank_without_parameters_steps_with_empty_groups() -> None:
    torch.manual_seed(0)
    model = Sparse().double()
    optimizer = grouped(list(model.parameters()))
    model(torch.ones(2, 4).double()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    optimizer.step()
    for rank, result in enumerate(run_ranks(without_parameters, world_size=4)):
        assert result["groups"] == ([1, 1] if rank in (0, 2) else [0, 0])
        torch.testing.assert_close(result["norm"], norm, rtol=1e-13, atol=0)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(result["state"][name], tensor, rtol=1e-12, atol=1e-14)
