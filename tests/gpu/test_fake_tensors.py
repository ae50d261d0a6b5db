"""Kernels that are launched on addresses meet no tensor without memory: on a GPU that ends the process's context.

Each in a process of its own, so that the others go on if it does.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slapo_core as slapo
from tests.gpu.raw_kernels import Launching, Operating, Residual, Shifted, add
from tests.gpu.subjects import on_ranks


def model(last: nn.Module, device: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), last).to(device), torch.randn(4, 8, device=device)


def is_alive(device: str) -> bool:
    """Whether the device still computes; an illegal access shows at the latest here."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return float(torch.ones(3, device=device).sum()) == 3.0


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def refused(device: str) -> dict[str, Any]:
    """Record a forward that launches a kernel by itself, by each tracer's way into it, and estimate it."""
    found: dict[str, Any] = {}
    for name, options in {"trace": {}, "flatten": {"flatten": True}}.items():
        network, x = model(Launching(), device)
        expected = network(x)
        sch = slapo.create_schedule(network, example_inputs=x)
        try:
            (sch["1"] if name == "trace" else sch.root).trace(**options)
        except slapo.TraceError as error:
            found[name] = str(error)
        found[f"{name}: as before"] = torch.equal(network(x), expected) and not sch.records
    try:
        slapo.estimate(slapo.create_schedule(network), x, optimizer=sgd, loss=summed)
    except slapo.SlapoError as error:
        found["estimate"] = str(error)
    found["alive"] = is_alive(device)
    return found


def summed(output: Tensor, batch: Any) -> Tensor:
    return output.sum()


@pytest.mark.gpu(1)
def test_a_launch_in_a_recorded_forward_is_an_error_and_the_device_goes_on(device: torch.device) -> None:
    found = on_ranks(refused, device=device, backend="")[0]
    for name in ("trace", "flatten"):
        assert "data pointer" in found[name], found
        assert "custom operator" in found[name] or "leaves" in found[name], found
    assert "data pointer" in found["estimate"] or device.type == "cuda", found  # Triton misses the GPU before
    assert found["trace: as before"]
    assert found["flatten: as before"]
    assert found["alive"]


def allowed(device: str) -> dict[str, Any]:
    """An operator with a shape function is recorded; a module with a launch stays a call, if ``leaves`` names it."""
    network, x = model(Operating(), device)
    expected = network(x)
    sch = slapo.create_schedule(network, example_inputs=x)
    sch.root.trace(flatten=True)
    found = {"operator": "add" in str(sch.root.graph), "operator, same": torch.equal(network(x), expected)}
    found["verified"] = slapo.verify(sch).steps_verified == 1
    network = nn.Sequential(*model(Launching(), device)[0], nn.Linear(8, 8).to(device))
    with torch.no_grad():
        expected = network(x)
        sch = slapo.create_schedule(network, example_inputs=x)
        sch.root.trace(flatten=True, leaves="Launching")
        found["leaf, same"] = torch.equal(network(x), expected)
    return found | {"alive": is_alive(device)}


@pytest.mark.gpu(1)
def test_operators_with_a_shape_function_and_leaves_are_recorded_and_run(device: torch.device) -> None:
    (found,) = on_ranks(allowed, device=device, backend="")
    names = ("operator", "operator, same", "verified", "leaf, same", "alive")
    assert found == dict.fromkeys(names, True)


def replaced(device: str) -> dict[str, Any]:
    """A kernel of one's own in the place of a match, and in that of a forward."""
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    x = torch.randn(4, 8, device=device)
    for name in ("replace", "bind", "bind a match"):
        network = nn.Sequential(Shifted() if name == "bind" else Residual()).to(device)
        expected = network(x)
        expected.square().sum().backward()
        wanted = [parameter.grad.clone() for parameter in network.parameters()]
        network.zero_grad()
        sch: Any = slapo.create_schedule(network, example_inputs=x)
        if name == "bind":
            sch["0"].bind(add)
        else:
            sch["0"].trace()
            step = sch["0"].replace if name == "replace" else sch["0"].bind
            step(add, match=lambda x, y: x + y)
        output = network(x)
        output.square().sum().backward()
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close([parameter.grad for parameter in network.parameters()], wanted)
        found[name] = slapo.verify(sch).steps_verified >= 1
    return found | {"alive": is_alive(device)}


@pytest.mark.gpu(1.1)
def test_a_kernel_of_ones_own_takes_the_place_of_a_match(device: torch.device) -> None:
    found = on_ranks(replaced, device=device, backend="")[0]
    assert found == {"replace": True, "bind": True, "bind a match": True, "alive": True}


def of_others(device: str) -> dict[str, Any]:
    """A library of kernels: its norm in the place of torch's, verified; and what a recording says of it."""
    from liger_kernel.transformers.rms_norm import LigerRMSNorm

    torch.manual_seed(0)
    x = torch.randn(4, 64, device=device)
    sch: Any = slapo.create_schedule(nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64, eps=1e-6)).to(device))
    sch["1"].replace(LigerRMSNorm(64, eps=1e-6).to(device), rtol=1e-3)
    report = slapo.verify(sch, x)
    try:
        network = nn.Sequential(nn.Linear(64, 64), LigerRMSNorm(64, eps=1e-6)).to(device)
        slapo.create_schedule(network, example_inputs=x).root.trace(flatten=True)
        said = "recorded"
    except slapo.TraceError as error:
        said = str(error)
    return {"verified": report.steps_verified, "said": said, "alive": is_alive(device)}


@pytest.mark.gpu(1.2, needs="Triton")
def test_kernels_of_a_library_run_and_are_not_launched_without_memory(device: torch.device) -> None:
    if importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("liger-kernel is not installed")
    (found,) = on_ranks(of_others, device=device, backend="")
    assert found["verified"] == 1
    assert found["said"] == "recorded" or "data pointer" in found["said"]
    assert found["alive"]
