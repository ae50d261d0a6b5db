"""What passes between stages, and what need not: gradients, integers, numbers, constants, regions without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import GuardError, TraceError

from .staging import compare, cut


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.d = nn.Linear(4, 4)


class Regions(Base):
    """A region without gradients is open at the cut, and so is one of autocast inside of it."""

    def forward(self, x: Any) -> Any:
        h = self.a(x)
        with torch.no_grad():
            g = self.b(h)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                low = g @ g.T
                g = self.c(g)
                again = g @ g[:4].T
                again = again + self.d(g)
            g = g.float() * 2
        return self.d(h) * g, low.sum(), again, torch.is_grad_enabled()


@pytest.mark.parametrize("cuts", [["a"], ["b"], ["c"], ["a", "b", "c"]])
def test_regions_continue_in_the_next_stage(cuts: list[str]) -> None:
    torch.manual_seed(0)
    x = torch.rand(4, 4)
    made = compare(Regions(), cuts, x, loss=lambda out: out[0].sum())
    assert made.run({"x": x})[2].dtype == torch.bfloat16
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    gradients = {name for name, value in made.partition.values.items() if value.requires_grad}
    assert "b" not in gradients
    assert "c" not in gradients
    with torch.no_grad():
        assert not made.run({"x": x})[0].requires_grad, "gradients stay off where they are not taken outside"


class Raises(Base):
    def forward(self, x: Any) -> Any:
        h = self.a(x)
        with torch.no_grad():
            h = self.b(h)
            return self.c(h).view(7, -1)


def test_a_stage_that_raises_leaves_no_region_open() -> None:
    made = cut(Raises(), ["b"], torch.rand(7, 4))
    for stage in made.partition.stages:
        with pytest.raises(Exception, match=r"."):
            stage.module({}, dict.fromkeys(stage.uses, torch.rand(3, 4)))
        assert torch.is_grad_enabled()


class Kinds(Base):
    """Integers, booleans, a frozen part, a size that a module's result has, a number that a module returns."""

    class Count(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps, self.factor = 3, 0.5

        def forward(self, x: Any) -> Any:
            return x[:, ::2], self.steps, self.factor

    def __init__(self) -> None:
        super().__init__()
        self.count = self.Count()
        self.a.requires_grad_(requires_grad=False)

    def forward(self, x: Any, scale: Any = 1.0) -> Any:
        frozen = self.a(x)
        positive = frozen > 0
        order = frozen.argsort(-1)
        half, steps, factor = self.count(frozen)
        y = self.b(x)
        causal = torch.tril(torch.ones(x.shape[0], half.shape[1], device=x.device)).to(x.dtype)
        z = self.c(y).gather(-1, order) * positive
        z = z[:, : half.size(1)] * causal * factor * scale
        for _ in range(steps):
            z = z + half
        return {"z": z, "steps": steps, "factor": factor, "rows": half.shape[0], "x": x}


def test_kinds_of_values() -> None:
    torch.manual_seed(0)
    made = compare(Kinds().double(), ["b"], torch.rand(3, 4, dtype=torch.float64), scale=2.5)
    crossing = {name: made.partition.values[name] for name in made.liveness.sent(0)}
    assert {value.dtype for value in crossing.values()} == {torch.float64, torch.bool, torch.int64}
    assert [name for name, value in crossing.items() if value.requires_grad] == ["b"]
    assert not any(name.startswith(("tril", "ones", "to")) for name in crossing), "constants are made again"
    last = made.partition.stages[1]
    assert last.inputs == ("x", "scale")
    assert made.partition.values["x"].producer == 0


@pytest.mark.parametrize(("name", "was", "now"), [("steps", 3, 4), ("factor", 0.5, 0.25)])
def test_a_number_returned_by_a_module_is_guarded(name: str, was: Any, now: Any) -> None:
    model = Kinds()
    x = torch.rand(3, 4)
    made = cut(model, ["b"], x)
    setattr(model.count, name, now)
    with pytest.raises(GuardError) as caught:
        made.run({"x": x})
    assert str(caught.value).startswith("stage 0 ")  # and the name that torch.fx gives the value
    assert f" == {was}, " in str(caught.value)
    assert f" has {now}\n" in str(caught.value)


class Skips(Base):
    def forward(self, x: Any) -> Any:
        first = self.a(x)
        second = self.b(first)
        third = self.c(second)
        return first * third + x


def test_values_that_skip_stages_are_relayed_and_the_batch_is_not() -> None:
    torch.manual_seed(0)
    made = compare(Skips().double(), ["a", "b", "c"], torch.rand(3, 4, dtype=torch.float64))
    assert made.liveness.boundaries == (("a",), ("a", "b"), ("a", "c"))
    assert made.partition.values["a"].consumers == (1, 3)
    assert [stage.inputs for stage in made.partition.stages] == [("x",), (), (), ("x",)]


def test_tensor_passed_twice_stays_two_arguments() -> None:
    class Two(Base):
        def forward(self, x: Any, y: Any) -> Any:
            return self.b(self.a(x)) * y

    model = Two().double()
    x, y = torch.rand(2, 3, 4, dtype=torch.float64)
    made = cut(model, ["a"], x, x)
    torch.testing.assert_close(made.run({"x": x, "y": y}), model(x, y))


ADDRESSES: list[int] = []


class Launched(torch.autograd.Function):
    """A kernel that is launched on addresses, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        ADDRESSES.append(out.data_ptr())
        return out.copy_(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient


class Kernel(nn.Module):
    def forward(self, x: Any) -> Any:
        return Launched.apply(x)


class Kernels(Base):
    """Calls a kernel in a module, and one between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = Kernel()

    def forward(self, x: Any) -> Any:
        return self.c(Launched.apply(self.b(self.kernel(self.a(x)))))


def test_kernels_are_launched_on_memory_only_and_refused_without() -> None:
    ADDRESSES.clear()
    compare(Kernels(), ["a", "b"], torch.rand(3, 4), loss=torch.sum)
    with pytest.raises(TraceError, match="data pointer") as caught:
        cut(Kernels().to("meta"), ["a", "b"], torch.rand(3, 4, device="meta"))
    assert "register_fake" in str(caught.value)
    assert ADDRESSES
    assert 0 not in ADDRESSES
