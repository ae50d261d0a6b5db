"""Options that silently did nothing in training systems, planted on small models: each is caught."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import slapo_core as slapo
from slapo_core.effects import Casts
from slapo_core.observers import happened
from slapo_runtime.launcher import run_ranks


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    """Four layers.

    Attributes:
        call: calls a layer.
    """

    call: Callable[[nn.Module, Tensor], Tensor] = staticmethod(lambda layer, x: layer(x))

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x


def missing(sch: Any) -> list[Any]:
    return list(slapo.observe(sch, torch.randn(3, 8, requires_grad=True)).missing)


# -- a cast that does nothing ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Upcast(slapo.Primitive):
    """Compute a linear layer in float32, of a model in bfloat16."""

    name = "bugs.upcast"
    equivalence: ClassVar[slapo.Equivalence] = slapo.Equivalence.REORDERED
    of_output: bool = False

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.wrap_forward(node, functools.partial(_upcast, of_output=self.of_output))

    def effects(self, node: slapo.Node) -> Iterator[slapo.Effect]:
        yield Casts(compute="float32")


def _upcast(forward: Any, *, of_output: bool) -> Any:
    def run(module: nn.Linear, x: Tensor) -> Tensor:
        if of_output:
            return forward(module, x).float().to(x.dtype)  # type: ignore[no-any-return]
        bias = None if module.bias is None else module.bias.float()
        return nn.functional.linear(x.float(), module.weight.float(), bias).to(x.dtype)

    return run


@pytest.mark.parametrize("of_output", [False, True])
def test_a_cast_that_does_nothing(of_output: bool) -> None:
    sch: Any = slapo.create_schedule(Model().bfloat16())
    sch["layers.3.down"].apply(Upcast(of_output=of_output))
    found = slapo.observe(sch, torch.randn(3, 8, dtype=torch.bfloat16)).missing
    assert [one.source for one in found] == [str(sch.records[0])] * of_output
    assert all("bfloat16" in one.seen for one in found)


# -- compiled past the hooks -------------------------------------------------------------------------------------------


def test_compile_around_a_module_past_its_forward() -> None:
    sch: Any = slapo.create_schedule(Model())
    sch["layers.*"].checkpoint()
    assert missing(sch) == []
    compiled = torch.compile(Layer.forward, backend="eager")
    sch.model.call = lambda layer, x: compiled(layer, x)
    assert [one.source for one in missing(sch)] == [str(record) for record in sch.records]


# -- a pattern that matches one of four layers -------------------------------------------------------------------------


def test_a_pattern_that_matches_one_of_four_layers() -> None:
    model = Model()
    for layer in model.layers[1:]:
        layer.act = nn.GELU(approximate="tanh")
    sch: Any = slapo.create_schedule(model, example_inputs=torch.randn(3, 8))
    sch["layers.*"].trace(flatten=True)
    with pytest.raises(slapo.PreconditionError, match=r"layers.1.*no match"):
        sch["layers.*"].replace(_own_gelu, match=nn.functional.gelu)
    assert len(sch.records) == 4


def _own_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / 2.0**0.5))


# -- checkpointing under no_grad ---------------------------------------------------------------------------------------


def test_checkpointing_under_no_grad() -> None:
    sch: Any = slapo.create_schedule(Model())
    sch["layers.1"].checkpoint()
    sch["layers.2"].checkpoint()

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(layer is not sch.model.layers[1]):
            return layer(x)  # type: ignore[no-any-return]

    sch.model.call = call
    assert [one.source for one in missing(sch)] == [str(sch.records[0])]


# -- collectives that no rank makes ------------------------------------------------------------------------------------


def synchronized(case: str) -> tuple[list[str], list[str]]:
    """The steps that are missing, and those that have to be."""
    mesh = {"dp": 2, "tp": 1} if case == "one rank" else {"tp": 2}
    sch: Any = slapo.create_schedule(Model(), mesh=mesh)
    for layer in sch["layers.*"]:
        layer["up"].shard("weight", axis=0).shard("bias", axis=0).sync("bwd_post", "all_reduce")
        layer["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    wanted = []
    if case == "no hook":
        sch.model.layers[2].down._forward_hooks.clear()
        wanted = [str(record) for record in sch.records if record.path == "layers.2.down" and "sync" in record.name]
    return [one.source for one in missing(sch)], wanted


def all_synchronized() -> dict[str, tuple[list[str], list[str]]]:
    return {case: synchronized(case) for case in ("right", "no hook", "one rank")}


@pytest.mark.ranks
def test_a_synchronization_without_its_hook() -> None:
    for found in run_ranks(all_synchronized, world_size=2):
        assert found["right"] == ([], [])
        assert found["no hook"][0] == found["no hook"][1] != []
        assert found["one rank"] == ([], [])  # nothing is expected of one rank


def test_a_synchronization_over_a_dimension_that_splits_nothing() -> None:
    sch: Any = slapo.create_schedule(Model(), mesh={"dp": 2, "tp": 2})
    sch["layers.0.down"].shard("weight", axis=1)
    with pytest.raises(slapo.PreconditionError, match="nothing was split over mesh_dim 'dp'"):
        sch["layers.0.down"].sync("fwd_post", "all_reduce", mesh_dim="dp")


# -- a kernel that falls back ------------------------------------------------------------------------------------------


def test_a_kernel_that_falls_back() -> None:
    sch: Any = slapo.create_schedule(Model(), example_inputs=torch.randn(3, 8))
    sch["layers.0.act"].bind(_kernel)
    assert missing(sch) == []
    sch.undo(to=0)
    sch["layers.0.act"].bind(_kernel_for_half_precision)
    (found,) = missing(sch)
    assert found.source == str(sch.records[0])
    assert "only half precision" in found.cause


def _kernel(x: Tensor) -> Tensor:
    return nn.functional.gelu(x)


def _kernel_for_half_precision(x: Tensor) -> Tensor:
    if x.dtype is torch.float32:
        happened("fallback", "only half precision")
    return nn.functional.gelu(x)
