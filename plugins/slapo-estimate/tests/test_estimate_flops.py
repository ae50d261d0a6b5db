"""Floating-point operations and seconds, held to torch's count and to numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import slapo_core as slapo
from slapo_core.errors import ArgumentError
from slapo_core.observers import ONE_KERNEL, run_from
from slapo_estimate.device import DeviceSpec, Link
from slapo_estimate.private import FakeTensorMode
from slapo_estimate.roofline import collective_seconds, link_of
from slapo_estimate.simulation import RankResult, Request, simulate
from slapo_estimate.source import Functions
from slapo_estimate.trackers import FlopTracker, ObserverMode
from slapo_estimate.values import KnownValues
from tests.messages import Messages


def counted(run: Callable[[], Any]) -> int:
    """By our tracker, without memory; a gradient is asked of everything."""
    tracker = FlopTracker()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, ObserverMode((tracker,), KnownValues(mode)):
        tracker.begin()
        run().sum().backward()
    return tracker.total


def tensor(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, requires_grad=True)


def images() -> torch.Tensor:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, stride=2))
    return layers(tensor(2, 3, 10, 10))


def recomputed() -> torch.Tensor:
    layers = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6), nn.Tanh())
    return checkpoint(layers, tensor(4, 6), use_reentrant=False)


def products() -> torch.Tensor:
    return torch.einsum("bij,bjk->bik", tensor(3, 4, 5), tensor(3, 5, 6)).baddbmm(tensor(3, 4, 7), tensor(3, 7, 6))


@pytest.mark.parametrize("run", [images, recomputed, products])
def test_flops_equal_torchs_counter(run: Callable[[], Any]) -> None:
    with FlopCounterMode(display=False) as judge:
        run().sum().backward()
    assert counted(run) == judge.get_total_flops() > 0


def test_recomputed_flops_count_twice() -> None:
    product = 2 * 4 * 6 * 10
    assert counted(recomputed) == 2 * product + 2 * product + 4 * product


def test_attention_on_the_cpu_counts() -> None:
    """Scores and values: two products forward; five backward, with the scores again. Torch counts none of them."""
    batch, heads, length, size = 2, 3, 8, 16

    def run() -> torch.Tensor:
        return F.scaled_dot_product_attention(*(tensor(batch, heads, length, size) for _ in range(3)))

    assert counted(run) == (2 + 5) * 2 * batch * heads * length * length * size


def test_grouped_convolutions_count_by_groups() -> None:
    forward = 2 * 2 * 10 * 10 * 8 * (4 // 2) * 3 * 3
    conv = nn.Conv2d(4, 8, 3, padding=1, groups=2)
    assert counted(lambda: conv(tensor(2, 4, 10, 10))) == 3 * forward


def test_grouped_products_count() -> None:
    def run() -> torch.Tensor:
        offsets = torch.tensor([16, 48, 64], dtype=torch.int32)
        a, b = torch.ones(64, 32, dtype=torch.bfloat16), torch.ones(3, 32, 16, dtype=torch.bfloat16)
        return torch._grouped_mm(a, b, offs=offsets).float() * tensor(1)

    assert counted(run) == 2 * 64 * 32 * 16


def test_products_in_place_count() -> None:
    def run() -> torch.Tensor:
        sums, batches = torch.ones(3, 5), torch.ones(2, 3, 5)
        sums.addmm_(torch.ones(3, 4), torch.ones(4, 5)).addbmm_(torch.ones(2, 3, 4), torch.ones(2, 4, 5))
        batches.baddbmm_(torch.ones(2, 3, 4), torch.ones(2, 4, 5))
        return sums[0].addmv_(torch.ones(5, 7), torch.ones(7)).sum() + batches.sum() * tensor(1)

    assert counted(run) == 2 * (1 + 2 + 2) * 3 * 4 * 5 + 2 * 5 * 7


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.bias = nn.Linear(8, 8), nn.Parameter(torch.zeros(1, 1, 64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.proj(x), x, x, self.bias).sum()


def test_attention_is_estimated_by_kernels_of_the_device() -> None:
    """On a CPU a bias that needs a gradient takes scores, weights and their products one by one, and keeps matrices."""
    matrix = 4 * 2 * 3 * 64 * 64
    kept = {}
    for kind in ("cpu", "cuda"):
        device = DeviceSpec("f", {"float32": 1e9}, bandwidth=1e9, launch=0.0, type=kind)
        request = Request(Functions(Attention, nothing), None, 0, (0,), torch.ones(2, 3, 64, 8), None, itself, device)
        played = simulate(request)
        assert isinstance(played, RankResult)
        kept[kind] = played.estimate.memory.activations
        assert ("memory-efficient" in " ".join(played.assumptions)) == (kind == "cuda")
    assert kept["cuda"] < matrix < kept["cpu"]


def nothing(sch: slapo.Schedule) -> None:
    """No step."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).sum()


def itself(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output


def seconds(device: DeviceSpec, **options: Any) -> float:
    sch = slapo.create_schedule(Layer(), example_inputs=torch.ones(8, 32), **options)
    time = slapo.estimate(sch, loss=itself, device=device).time
    assert time is not None
    return time


@pytest.mark.ranks
def test_seconds_are_the_maximum_of_products_and_memory() -> None:
    product = 2 * 8 * 32 * 64
    slow_products = DeviceSpec("a", {"float32": 1e6}, bandwidth=1e30, launch=0.0)
    assert seconds(slow_products) == pytest.approx(2 * product / 1e6)  # forward, and the gradient of the weight
    slow_memory = DeviceSpec("b", {"float32": 1e30}, bandwidth=1e6, launch=0.0)
    x, weight, y = 8 * 32 * 4, 32 * 64 * 4, 8 * 64 * 4
    # product, sum; ones for the loss; product with the gradient of y, one element spread out
    moved = (x + weight + y) + (y + 4) + (4 + 4) + (4 + x + weight)
    assert seconds(slow_memory) == pytest.approx(moved / 1e6)
    quick = DeviceSpec("a", {"float32": 1e6, "tf32": 4e6}, bandwidth=1e30, launch=0.0)
    assert seconds(quick) == pytest.approx(2 * product / 1e6)
    torch.set_float32_matmul_precision("high")
    try:
        assert seconds(quick) == pytest.approx(2 * product / 4e6)
    finally:
        torch.set_float32_matmul_precision("highest")
    slow_launch = DeviceSpec("c", {"float32": 1e30}, bandwidth=1e30, launch=1.0)
    assert seconds(slow_launch) == pytest.approx(4.0)


class Sums(nn.Module):
    """A product of bfloat16 that is summed in float32, as a GPU can do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 32).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            sums = torch.empty(8, 64)
            torch.ops.aten.addmm.dtype_out(sums, x.bfloat16(), self.weight.t(), torch.float32, out=sums)
        return (self.weight * 2).sum()


def test_a_product_takes_the_rate_of_its_factors_and_moves_its_result_once() -> None:
    request = Request(Functions(Sums, nothing), None, 0, (0,), torch.ones(8, 32).bfloat16(), None, itself)
    times = {}
    for name, rate, bandwidth in (("products", 1e6, 1e30), ("memory", 1e30, 1e6)):
        device = DeviceSpec("a", {"bfloat16": rate}, bandwidth=bandwidth, launch=0.0, type="cuda")
        played = simulate(dataclasses.replace(request, device=device))
        assert isinstance(played, RankResult)
        times[name] = played.estimate.time
    assert times["products"] == pytest.approx(2 * 8 * 32 * 64 / 1e6)
    x, weight, sums = 8 * 32 * 2, 64 * 32 * 2, 8 * 64 * 4
    # product, read and written; weight * 2, its sum; ones for the loss, the gradient times 2
    assert times["memory"] == pytest.approx((x + weight + 2 * sums + 2 * weight + weight + 2 + 4 + 2 + weight) / 1e6)


class Region(nn.Module):
    """What `fuse` makes of a bias and an activation, and the module of another in it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.act = nn.Parameter(torch.zeros(32)), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run_from(ONE_KERNEL, lambda: self.act(x[:, :32] + self.bias)).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_fused_region_takes_the_time_of_one_kernel_on_a_gpu(kind: str) -> None:
    request = Request(Functions(Region, nothing), None, 0, (0,), torch.ones(8, 64), None, itself)
    times = {}
    for name, launch, bandwidth in (("launches", 1.0, 1e30), ("memory", 0.0, 1e6)):
        device = DeviceSpec("a", {"float32": 1e30}, bandwidth=bandwidth, launch=launch, type=kind)
        played = simulate(dataclasses.replace(request, device=device))
        assert isinstance(played, RankResult)
        times[name] = played.estimate.time
    whole, bias, one = 8 * 32 * 4, 32 * 4, 4
    if kind == "cuda":
        # one kernel, with the sum that its backward keeps; the model's sum; ones for the loss; one kernel backward
        assert times["launches"] == pytest.approx(4)
        moved = (whole + bias + 2 * whole) + (whole + one) + 2 * one + (one + whole + bias)
    else:  # sum and activation; the derivative of the activation, and the gradient of the bias
        assert times["launches"] == pytest.approx(6)
        moved = (2 * whole + bias) + 2 * whole + (whole + one) + 2 * one + (one + 2 * whole) + (whole + bias)
    assert times["memory"] == pytest.approx(moved / 1e6)


@pytest.mark.ranks
def test_gradient_exchange_overlaps_the_backward_pass_only() -> None:
    """One bucket of 8 KiB over two ranks: a half there and a half back, after the only gradient."""
    device = DeviceSpec("d", {"float32": 1e30}, bandwidth=1e30, launch=0.0, links={"dp": Link(1e3, 0.5)})
    assert seconds(device, mesh={"dp": 2}) == pytest.approx(2 * 0.5 + 32 * 64 * 4 / 1e3)


def test_collectives_take_the_time_of_a_ring() -> None:
    link = Link(bandwidth=100.0, latency=0.5)
    assert collective_seconds("all_reduce", 800, 4, link) == pytest.approx(6 * 0.5 + 1.5 * 800 / 100)
    assert collective_seconds("all_gather", 200, 4, link) == pytest.approx(3 * 0.5 + 3 * 200 / 100)
    assert collective_seconds("reduce_scatter", 800, 4, link) == pytest.approx(3 * 0.5 + 0.75 * 800 / 100)
    assert collective_seconds("send", 800, 4, link) == pytest.approx(0.5 + 8)
    assert collective_seconds("all_reduce", 800, 1, link) == 0.0


def test_missing_links_and_dtypes_of_a_device_are_named(message: Messages) -> None:
    device = DeviceSpec("e", {"float32": 1e9}, 1e9, 0.0, links={"tp": Link(1e9, 0.0), "dp": Link(1e8, 0.0)})
    assert link_of(device, "dp_tp") == ("dp", Link(1e8, 0.0))
    with pytest.raises(ArgumentError) as caught:
        link_of(device, "cp")
    message(caught, "'cp'", "it has 'tp', 'dp'")
