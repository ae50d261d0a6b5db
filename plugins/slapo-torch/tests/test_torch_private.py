"""The private names of torch exist, and behave as slapo_torch expects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from slapo_testing import run_ranks
from slapo_torch import private
from tests.support.private_names import private_names


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    """But for where schedules infer shapes: test_pipeline_torch.py checks that with all that they call."""
    found = private_names(Path(private.__file__).parent)
    assert found == ["torch_pipelining.py: '_initialize_stages'", "torch_pipelining.py: '_initialize_stage'"]


def test_compiled_modules_and_hooks_of_saved_tensors_are_seen() -> None:
    module = nn.Linear(2, 2)
    assert not private.is_compiled(module)
    module.compile()
    assert private.is_compiled(module)
    assert private.top_saved_tensors_hooks(True) is None
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        assert private.top_saved_tensors_hooks(True) is not None


def test_views_share_the_identity_of_their_storage() -> None:
    x = torch.zeros(4)
    assert private.storage_id(x[1:]) == private.storage_id(x) != private.storage_id(torch.zeros(4))
    sparse = x.to_sparse()
    assert private.storage_id(sparse) == id(sparse)


def test_gradient_hooks_are_seen() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        parameter = nn.Parameter(torch.zeros(2))
        assert not private.has_gradient_hooks(parameter)
        getattr(parameter, register)(lambda _: None)
        assert private.has_gradient_hooks(parameter)


def accumulated() -> list[list[float]]:
    """Gradients of units that accumulated two backward passes: one that is called, and one whose weight is read."""
    found = []
    for is_reduced in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        inner = [fully_shard(unit, mesh=mesh, reshard_after_forward=False) for unit in model]
        units: list[Any] = [fully_shard(model, mesh=mesh, reshard_after_forward=False), *inner]
        private.begin(units)
        for unit in units:
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_requires_gradient_sync(False)
            unit.set_reshard_after_backward(False)
            unit.set_is_last_backward(False)
            unit.unshard()
        for number in (1.0, 2.0):
            x = torch.full((1, 2), number + dist.get_rank())
            nn.functional.linear(inner[0](x), inner[1].weight).sum().backward()
        for unit in units:
            unit.set_requires_gradient_sync(is_reduced)
        private.reduce_accumulated(units)
        for unit in units:
            unit.reshard()
        gradients = [unit.weight.grad for unit in inner]
        found += [[] if one is None else one.full_tensor().flatten().tolist() for one in gradients]
    return found


@pytest.mark.ranks
def test_accumulated_gradients_are_reduced() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    for number in (1.0, 2.0, 2.0, 3.0):
        (nn.functional.linear(model[0](torch.full((1, 2), number)), model[1].weight).sum() / 2).backward()
    expected = [unit.weight.grad.flatten().tolist() for unit in model]
    for found in run_ranks(accumulated, world_size=2):
        assert found[0] == pytest.approx(expected[0])
        assert found[1] == pytest.approx(expected[1])
        assert found[2:] == [[], []]
