"""Verification over real ranks: every rank compares its own pieces, and all give the same answer."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Shard as OnAxis

import slapo_core as slapo
from slapo_core import Node
from slapo_core.internals import Edit
from slapo_core.layout import Layout
from slapo_runtime.launcher import run_ranks
from slapo_verify import VerifyReport
from tests.messages import Messages

pytestmark = pytest.mark.ranks


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.ModuleList(Mlp() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layer:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Split(slapo.Primitive):
    """Keep this rank's piece of parameters."""

    name = "mini.split"
    equivalence = slapo.Equivalence.REORDERED
    names: tuple[str, ...]
    axis: int

    def apply(self, node: Node, edit: Edit) -> None:
        for name in self.names:
            full = node.parameters[name]
            layout = Layout(node.layout(name).origin, tuple(full.shape), (("tp", OnAxis(self.axis)),))
            edit.set_parameter(node, name, layout.local(full, node.mesh), layout=layout)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: bool, backward: bool) -> torch.Tensor:
        ctx.backward_sum = backward
        x = x.clone()
        if forward:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone()
        if ctx.backward_sum:
            dist.all_reduce(grad)
        return grad, None, None


@dataclass(frozen=True)
class Reduce(slapo.Primitive):
    """Sum the output over the ranks in forward, or the input's gradient in backward."""

    name = "mini.reduce"
    equivalence = slapo.Equivalence.REORDERED
    direction: str

    def apply(self, node: Node, edit: Edit) -> None:
        if self.direction == "forward":
            edit.add_hook(node, "forward", lambda m, args, kwargs, output: _Sum.apply(output, True, False))
        else:
            edit.add_hook(node, "forward_pre", lambda m, args, kwargs: ((_Sum.apply(args[0], False, True),), kwargs))


class Handle:
    """Something of this process only, as its repr tells."""

    def __repr__(self) -> str:
        return f"<a handle of process {os.getpid()}>"


@dataclass(frozen=True)
class Remember(slapo.Primitive):
    """Change nothing."""

    name = "mini.remember"
    equivalence = slapo.Equivalence.EXACT
    handle: Any

    def apply(self, node: Node, edit: Edit) -> None:
        edit.note("nothing to change")


IDS = torch.arange(10).reshape(2, 5)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def tensor_parallel(sch: slapo.Schedule, *, without: str = "") -> slapo.Schedule:
    for index in range(3):
        layer = sch[f"layer.{index}"]
        layer["up"].apply(Split(("weight", "bias"), axis=0))
        layer["down"].apply(Split(("weight",), axis=1))
        if without != f"{index}.backward":
            layer["up"].apply(Reduce("backward"))
        if without != f"{index}.forward":
            layer["down"].apply(Reduce("forward"))
    if without == "gather":
        sch["head"].apply(Split(("weight", "bias"), axis=0))
    return sch


def outcome(sch: slapo.Schedule, inputs: Any, **options: Any) -> Any:
    """The report, or the error with its fields; both travel."""
    try:
        return slapo.verify(sch, inputs, **options)
    except slapo.SlapoError as error:
        error.__cause__ = None
        return error


def verify_on_rank(without: str = "", differ: str = "", meta: bool = False) -> Any:
    rank = dist.get_rank()
    model = net(rank if differ == "weights" else 0)
    if meta:
        with torch.device("meta"):
            model = Net()
    sch = tensor_parallel(slapo.create_schedule(model, mesh={"tp": 2}), without=without)
    if differ == "steps" and rank == 1:
        sch.undo()
    if differ == "handles":
        sch.apply(Remember(Handle()))
    inputs = IDS + rank if differ == "inputs" else IDS
    if differ == "missing inputs" and rank == 1:
        inputs = None
    if differ == "one rank's weight" and rank == 1:
        with torch.no_grad():
            sch["layer.1.up"].parameters["weight"][2, 3] += 0.25
    return outcome(sch, inputs, optimizer_steps=rank if differ == "options" else 3)


CASES: dict[str, dict[str, Any]] = {
    "right": {},
    "meta": {"meta": True},
    "no forward reduction": {"without": "1.forward"},
    "no backward reduction": {"without": "2.backward"},
    "no gather": {"without": "gather"},
    "wrong piece": {"differ": "one rank's weight"},
    "inputs": {"differ": "inputs"},
    "weights": {"differ": "weights"},
    "steps": {"differ": "steps"},
    "options": {"differ": "options"},
    "handles": {"differ": "handles"},
    "missing inputs": {"differ": "missing inputs"},
}


def every_case() -> dict[str, Any]:
    return {name: verify_on_rank(**options) for name, options in CASES.items()}


@pytest.fixture(scope="module")
def cases() -> dict[str, tuple[Any, Any]]:
    """What both ranks got, case by case; one after the other in the same two processes."""
    first, second = run_ranks(every_case, world_size=2)
    return {name: (first[name], second[name]) for name in CASES}


def test_tensor_parallel_agrees_and_each_rank_gives_the_same_report(cases: dict[str, tuple[Any, Any]]) -> None:
    first, second = cases["right"]
    assert first == second
    assert (first.world_size, first.dtype, first.not_compared, first.notes) == (2, "float64", (), ())
    assert {entry.kind: entry.compared for entry in first.largest}["gradient"] == 12
    assert "first" not in str(first)


def test_a_model_on_the_meta_device_is_verified_with_the_values_of_its_own_initialization(
    cases: dict[str, tuple[Any, Any]],
) -> None:
    first, second = cases["meta"]
    assert first == second
    assert {entry.kind: entry.compared for entry in first.largest}["parameter"] == 12
    assert all(entry.allowed > 0 for entry in first.largest if entry.compared)


def test_a_missing_forward_reduction_is_found_and_its_layer_is_named(cases: dict[str, tuple[Any, Any]]) -> None:
    first, second = cases["no forward reduction"]
    assert isinstance(first, slapo.VerifyError)
    assert (first.message, first.rank, first.tensor) == (second.message, 0, "output")
    lines = first.message.splitlines()
    assert "a step is missing" in lines[2]
    assert lines[3].startswith("    #6 split(('weight',), axis=1) at 'layer.1.down'  (")
    assert "test_verification_ranks.py:" in lines[3]
    [suggestion] = lines[4:]
    assert suggestion.endswith("add sch['layer.1.down'].reduce('forward')")  # the other layers have it


def test_a_missing_backward_reduction_is_found_in_the_gradients_below_it(cases: dict[str, tuple[Any, Any]]) -> None:
    first, second = cases["no backward reduction"]
    assert isinstance(first, slapo.VerifyError)
    assert first.message == second.message
    assert first.tensor == "gradient of layer.1.down.weight"
    assert "'layer.2.up'" in first.message
    assert "'layer.0.up'" not in first.message


def test_a_missing_gather_is_found_by_the_shape_of_the_output(
    cases: dict[str, tuple[Any, Any]], message: Messages
) -> None:
    first, _ = cases["no gather"]
    assert (first.rank, first.tensor) == (0, "output")
    message(
        first, "(2, 5, 2), not (2, 5, 4)", "#13 split(('weight', 'bias'), axis=0) at 'head'", "gather along axis -1"
    )


def test_a_piece_that_is_wrong_on_one_rank_only_is_told_to_all(cases: dict[str, tuple[Any, Any]]) -> None:
    first, second = cases["wrong piece"]
    assert isinstance(first, slapo.VerifyError)
    assert first.message == second.message
    assert "no step causes it" in first.message.splitlines()[-1]


@pytest.mark.parametrize(
    ("differ", "words"),
    [
        ("inputs", ("'0'", "rank 0: (2, 5), torch.int64, checksum")),
        ("weights", ("'embed.weight'", "rank 0: (11, 8), torch.float32, checksum")),
        ("steps", ("step 12", "rank 0: mini.reduce(direction='forward') at 'layer.2.down'", "rank 1: (nothing)")),
        ("options", ("optimizer_steps", "rank 0: 0\n  rank 1: 1")),
    ],
)
def test_ranks_that_disagree_are_told_so_on_every_rank(
    differ: str, words: tuple[str, ...], cases: dict[str, tuple[Any, Any]], message: Messages
) -> None:
    first, second = cases[differ]
    assert isinstance(first, slapo.RankMismatchError)
    assert first.message == second.message
    message(re.sub(r"checksum \w+", "checksum", str(first)), *words)


def test_an_argument_that_every_process_shows_in_its_own_way_is_no_disagreement(
    cases: dict[str, tuple[Any, Any]],
) -> None:
    first, second = cases["handles"]
    assert isinstance(first, VerifyReport), first
    assert first == second
    assert first.steps_verified == 13


def verify_on_a_part_of_the_processes() -> list[Any]:
    parts = [DeviceMesh("cpu", ranks, mesh_dim_names=("tp",)) for ranks in ([0], [1, 2])]
    if dist.get_rank() == 0:
        return []
    found: list[Any] = []
    for differ in (False, False, True):
        torch.manual_seed(dist.get_rank() if differ else 0)
        sch = slapo.create_schedule(nn.Linear(3, 2), mesh=parts[1])
        found.append(outcome(sch, torch.ones(4, 3), optimizer_steps=0))
    return found


def test_a_mesh_over_a_part_of_the_processes_is_verified_as_often_as_one_likes() -> None:
    outside, first, second = run_ranks(verify_on_a_part_of_the_processes, world_size=3, timeout=60)
    assert outside == []
    assert first[:2] == second[:2]
    assert [report.world_size for report in first[:2]] == [2, 2]
    assert first[2].message == second[2].message
    assert "\n  rank 1: (2, 3), torch.float32, checksum " in first[2].message
    assert "\n  rank 2: (2, 3), torch.float32, checksum " in first[2].message


def test_a_rank_without_inputs_stops_the_others_too(cases: dict[str, tuple[Any, Any]]) -> None:
    first, second = cases["missing inputs"]
    assert isinstance(first, slapo.VerifyError)
    assert first.message.startswith("rank 1 could not start: ArgumentError: ")
    assert isinstance(second, slapo.ArgumentError)


def test_a_declared_mesh_starts_its_processes_and_finds_the_same() -> None:
    sch = tensor_parallel(slapo.create_schedule(net(), mesh={"tp": 2}))
    before = {name: parameter.clone() for name, parameter in sch.model.named_parameters()}
    report = slapo.verify(sch, IDS)
    assert report.world_size == 2
    assert {entry.kind: entry.compared for entry in report.largest}["gradient"] == 12
    assert all(torch.equal(before[name], parameter) for name, parameter in sch.model.named_parameters())
    assert not dist.is_initialized()

    wrong = tensor_parallel(slapo.create_schedule(net(), mesh={"tp": 2}), without="1.forward")
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(wrong, IDS)
    assert caught.value.tensor == "output"
    assert "#6 split(('weight',), axis=1) at 'layer.1.down'" in caught.value.message


def test_a_declared_mesh_and_a_step_that_cannot_be_sent_says_what_to_launch(message: Messages) -> None:
    sch = slapo.create_schedule(net(), mesh={"tp": 2})
    sch["layer.0.act"].replace(lambda old: nn.ReLU())
    with pytest.raises(slapo.SerializationError) as caught:
        slapo.verify(sch, IDS)
    for word in ("2 processes", "argument 'new_module' of #1 replace(", " cannot be sent to another process: "):
        assert word in caught.value.message  # with pickle's reason
    message(caught.value.hint, "<locals>.<lambda> at the top level", "`torchrun --nproc-per-node 2 your_script.py`")


def test_a_declared_mesh_verifies_a_model_with_tensors_on_the_meta_device_and_real_ones() -> None:
    model = net()
    with torch.device("meta"):
        model.layer[1] = Mlp()  # its values come later
    sch = tensor_parallel(slapo.create_schedule(model, mesh={"tp": 2}))
    assert slapo.verify(sch, torch.arange(6).reshape(2, 3)).world_size == 2
    assert model.layer[1].up.weight.is_meta
    assert not model.layer[0].up.weight.is_meta
