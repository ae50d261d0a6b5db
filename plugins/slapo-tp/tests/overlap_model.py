"""A model with a layer to overlap, and what runs in its backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import slapo_core as slapo

from .checks import rand


class Mlp(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 8, bias=bias), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.first(x))))


def split(sch: slapo.Schedule, *, overlap: bool) -> None:
    transposed = type(sch["up"].module).__name__ == "Conv1D"
    names = [name for name in ("weight", "bias") if name in sch["up"].parameters]
    sch["up"].shard(names, axis=int(transposed)).sync("bwd_post", "all_reduce", overlap=overlap)
    sch["down"].shard("weight", axis=int(not transposed)).sync("fwd_post", "all_reduce")


class Events(TorchDispatchMode):
    """Write down the collectives and the matrix products that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.see(func)
        return func(*args, **(kwargs or {}))

    def see(self, operator: Any) -> None:
        name = operator._schema.name.rpartition("::")[2]
        if name in ("all_reduce", "all_reduce_", "reduce_scatter_tensor"):
            self.seen.append("start")
        elif name in ("wait_tensor", "mm"):
            self.seen.append("wait" if name == "wait_tensor" else "mm")

    def see_graph(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        """Write down those of a graph, in place of those that run."""
        from torch._functorch.aot_autograd import make_boxed_func

        for node in graph.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                self.see(node.target)
        return make_boxed_func(graph.forward)

    @property
    def overlapped(self) -> int:
        """The number of collectives that a matrix product ran beside."""
        return " ".join(self.seen).count("start mm wait")


Scenario = Callable[[nn.Module, Tensor], list[Any]]


def gradients(model: nn.Module, x: Tensor, *, run: Callable[[nn.Module], Any] = lambda model: model) -> list[Any]:
    y = run(model)(x)
    (y * torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view_as(y)).sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def outcome(
    build: Callable[[], nn.Module],
    run: Scenario,
    overlap: bool,
    *,
    apply: Any = split,
    axis: int | None = None,
    watch: bool = True,
) -> tuple[list[Any], Events, slapo.Schedule]:
    torch.manual_seed(0)
    model = build().double()
    sch = slapo.create_schedule(model, mesh={"tp": dist.get_world_size()}, example_inputs=rand(2, 4, 6))
    apply(sch, overlap=overlap)
    x = rand(2, 4, 6)
    x = x if axis is None else x.chunk(dist.get_world_size(), axis)[dist.get_rank()].clone()
    events = Events()
    with events if watch else contextlib.nullcontext():
        found = run(model, x.requires_grad_())
    return found, events, sch


def assert_same(one: list[Any], other: list[Any], name: str) -> None:
    assert len(one) == len(other), name
    for number, (left, right) in enumerate(zip(one, other, strict=True)):
        assert (left is None) == (right is None), f"{name}: {number}"
        if name == "kept input":  # the two parts of its gradient are summed over the ranks one by one
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14)
        else:
            assert left is None or torch.equal(left, right), f"{name}: {number}: {(left - right).abs().max()}"
