"""Every operation of torch that communicates is known, whoever calls it, and so is the mesh dimension of its group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from slapo_estimate.private import (
    FakeStore,
    FakeTensorMode,
    bucket_assignment,
    flop_formulas,
)
from slapo_estimate.trackers import CollectiveTracker, ObserverMode
from slapo_estimate.values import KnownValues
from slapo_runtime import private
from slapo_runtime.launcher import run_process
from slapo_runtime.receipts.attribution import PositionTracker
from slapo_runtime.receipts.collectives import MeshGroups, collective_operations, wait_operations

MESH = {"dp": 2, "cp": 2, "tp": 4}
RANK = 6  # dp 0, cp 1, tp 2


def test_all_communicating_operations_are_listed() -> None:
    """Those that are not look at values, or run another operation of the list."""
    known = {operation._schema.name for operation in (*collective_operations(), *wait_operations())}
    there = {
        name.partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(("c10d::", "_c10d_functional::", "_c10d_functional_autograd::"))
    }
    assert there - known <= {
        "_c10d_functional::_wrap_tensor_autograd",
        "_c10d_functional_autograd::all_gather_into_tensor",
        "_c10d_functional_autograd::all_to_all_single",
        "_c10d_functional_autograd::reduce_scatter_tensor",
        "c10d::check_for_nan",
    }


@pytest.fixture(scope="module")
def listed() -> dict[str, list[tuple[str, str, int, int]]]:
    return run_process(communicate, timeout=120.0)


def communicate() -> dict[str, list[tuple[str, str, int, int]]]:
    """Each call: kind, mesh dimension, ranks and bytes of what it is seen as."""
    dist.init_process_group("fake", rank=RANK, world_size=16, store=FakeStore())
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    tp, dp, flat = mesh.get_group("tp"), mesh.get_group("dp"), mesh["dp", "cp"]._flatten().get_group()
    mine, others = dist.new_group([4, 5, 6, 7]), dist.new_group([3, 6])
    x = torch.ones(8, requires_grad=True)

    def pieces(count: int) -> list[torch.Tensor]:
        return [torch.empty(8) for _ in range(count)]

    def exchange() -> None:
        operations = [dist.P2POp(dist.isend, torch.ones(8), 4, tp), dist.P2POp(dist.irecv, torch.ones(2), 5, tp)]
        dist.batch_isend_irecv(operations)

    calls: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(8), group=tp),
        "all_gather": lambda: dist.all_gather(pieces(2), torch.ones(8), group=dp),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(32), torch.ones(8), group=tp),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(8), pieces(2), group=dp),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(8), group=tp),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(8), torch.ones(8), group=tp),
        "broadcast": lambda: dist.broadcast(torch.ones(8), 4, group=tp),
        "reduce": lambda: dist.reduce(torch.ones(8), 4, group=tp),
        "send": lambda: dist.send(torch.ones(8), 4, group=tp),
        "recv": lambda: dist.recv(torch.ones(8), 4, group=tp),
        "several": exchange,
        "barrier": lambda: dist.barrier(group=tp),
        "world": lambda: dist.all_reduce(torch.ones(8)),
        "flattened": lambda: dist.all_reduce(torch.ones(8), group=flat),
        "another of the same ranks": lambda: dist.all_reduce(torch.ones(8), group=mine),
        "of other ranks": lambda: dist.all_reduce(torch.ones(8), group=others),
        "functional": lambda: functional.all_gather_tensor(torch.ones(8), 0, tp) + 0,
        "coalesced": lambda: functional.all_reduce_coalesced([torch.ones(8), torch.ones(2)], "sum", tp),
        "autograd": lambda: functional.all_to_all_single_autograd(x, [2] * 4, [2] * 4, tp).sum().backward(),
    }
    found = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracker = CollectiveTracker(PositionTracker.of(nn.Identity()), MeshGroups(MESH, RANK))
    for name, call in calls.items():
        tracker.begin()
        with mode, ObserverMode((tracker,), KnownValues(mode)):
            call()
        found[name] = [(one.kind, one.mesh_dim, one.ranks, one.bytes) for one in tracker.collectives]
    found["ranks"] = [private.ranks_of_group(each) for each in (tp, tp.group_name, tp.boxed())]  # type: ignore[misc]
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("all_reduce", [("all_reduce", "tp", 4, 32)]),
        ("all_gather", [("all_gather", "dp", 2, 32)]),
        ("all_gather_into_tensor", [("all_gather", "tp", 4, 32)]),
        ("reduce_scatter", [("reduce_scatter", "dp", 2, 64)]),
        ("reduce_scatter_tensor", [("reduce_scatter", "tp", 4, 32)]),
        ("all_to_all_single", [("all_to_all", "tp", 4, 32)]),
        ("broadcast", [("broadcast", "tp", 4, 32)]),
        ("reduce", [("reduce", "tp", 4, 32)]),
        ("send", [("send", "tp", 4, 32)]),
        ("recv", [("recv", "tp", 4, 32)]),
        ("several", [("send", "tp", 4, 32), ("recv", "tp", 4, 8)]),
        ("barrier", [("barrier", "tp", 4, 0)]),
        ("world", [("all_reduce", "dp_cp_tp", 16, 32)]),
        ("flattened", [("all_reduce", "dp_cp", 4, 32)]),
        ("another of the same ranks", [("all_reduce", "tp", 4, 32)]),
        ("of other ranks", [("all_reduce", "", 2, 32)]),
        ("functional", [("all_gather", "tp", 4, 32)]),
        ("coalesced", [("all_reduce", "tp", 4, 40)]),
        ("autograd", [("all_to_all", "tp", 4, 32), ("all_to_all", "tp", 4, 32)]),
    ],
)
def test_each_call_is_one_collective_with_its_bytes(listed: Any, call: str, expected: Any) -> None:
    assert listed[call] == expected


@pytest.mark.ranks
def test_private_names_of_torch_have_this_meaning(listed: Any) -> None:
    assert listed["ranks"] == [(4, 5, 6, 7)] * 3
    tensors = [torch.empty(size, dtype=dtype) for size in (60, 50, 30) for dtype in (torch.float32, torch.float64)]
    assert sorted(bucket_assignment(tensors, 400)) == [[0, 2], [1], [3], [4], [5]]
    assert flop_formulas()[torch.ops.aten.mm](torch.empty(2, 3), torch.empty(3, 5), out_val=torch.empty(2, 5)) == 60
