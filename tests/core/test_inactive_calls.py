"""Promise: what a step does to calls is known on a mesh of any size; what has nothing to do there leaves no trace."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import ApplyError, PreconditionError
from slapo_core.primitives.checkpoint import Checkpoint
from slapo_testing import ModelSnapshot, assert_bit_identical
from slapo_testing.fixtures import isolated_registry  # noqa: F401 - a fixture
from slapo_testing.models import MLP, Block
from tests.messages import Messages
from tests.support.edits import Call, Fault, TestPrimitive, backward_hook, fault_after, post_hook, pre_hook

SIZES = pytest.mark.parametrize("size", [1, 2])
"""Of the mesh: on one rank the steps below have nothing to do."""


def doubled(forward: Any) -> Any:
    return lambda module, *args: 2 * forward(module, *args)


def ran(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    return output + 1


@dataclass(frozen=True)
class Collective(TestPrimitive):
    """Two hooks and a wrapper, which have nothing to do on one rank."""

    name = "test.collective"

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        active = node.mesh is not None and node.mesh.size("tp") > 1
        edit.add_hook(node, "forward", ran, active=active)
        edit.add_hook(node, "full_backward", backward_hook, prepend=True, active=active)
        edit.wrap_forward(node, doubled, active=active)


@dataclass(frozen=True)
class Hook(TestPrimitive):
    """One hook, which has nothing to do on one rank of ``mesh_dim``."""

    name = "test.hook"
    function: Any = post_hook
    kind: Any = "forward"
    mesh_dim: str = "tp"
    prepend: bool = False

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        assert node.mesh is not None
        active = node.mesh.size(self.mesh_dim) > 1
        edit.add_hook(node, self.kind, self.function, prepend=self.prepend, active=active)


def _refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(PreconditionError) as caught:
        call()
    return str(caught.value)


def _schedule(size: int, model: nn.Module | None = None) -> slapo.Schedule:
    return slapo.create_schedule(model if model is not None else MLP(), mesh={"dp": 2, "tp": size})


# -- what is there, and what is not ---------------------------------------------------------------------------------


def test_inactive_hooks_and_wrappers_leave_no_trace_and_never_run() -> None:
    model, x = MLP(), torch.randn(2, 8)
    before, expected = ModelSnapshot(model), model(x)
    sch = _schedule(1, model)
    sch["head"].apply(Collective())
    assert_bit_identical(before, model)
    assert torch.equal(model(x), expected)
    assert sch["head"].module.forward.__func__ is nn.Linear.forward
    active = MLP()
    active.load_state_dict(model.state_dict())
    _schedule(2, active)["head"].apply(Collective())
    assert torch.equal(active(x), 2 * expected + 1)


@SIZES
def test_nodes_give_the_hooks_and_wrappers_of_steps_on_a_mesh_of_any_size(size: int) -> None:
    sch = _schedule(size)
    node = sch["head"]
    node.module.register_forward_hook(lambda *_: None)  # the user's own are not among them
    node.module.forward = functools.partial(nn.Linear.forward, node.module)
    assert (node.hooks, node.wrappers) == ((), ())
    node.apply(Collective())
    assert node.hooks == (("full_backward", backward_hook), ("forward", ran))
    assert node.wrappers == (doubled,)
    node.apply(Hook(pre_hook, "forward_pre"))
    node.apply(Hook(prepend=True))
    node.checkpoint()
    everything = node.hooks, node.wrappers
    assert [function for kind, function in node.hooks if kind == "forward"] == [post_hook, ran]
    assert node.hooks[-1] == ("forward_pre", pre_hook)
    assert node.wrappers[0] is doubled
    assert [type(wrapper).__name__ for wrapper in node.wrappers[1:]] == ["Checkpointed"]
    assert sch["layers.0"].hooks == ()
    with sch.rewound(1):
        assert node.hooks == (("full_backward", backward_hook), ("forward", ran))
        assert node.wrappers == (doubled,)
        with sch.reference():
            assert (node.hooks, node.wrappers) == ((), ())
    assert (node.hooks, node.wrappers) == everything
    sch.undo(to=1)
    assert (node.hooks, node.wrappers) == ((("full_backward", backward_hook), ("forward", ran)), (doubled,))
    sch.undo()
    assert (node.hooks, node.wrappers) == ((), ())


@SIZES
def test_a_step_that_fails_leaves_no_hook_or_wrapper_behind(size: int) -> None:
    for done in (1, 2, 3):
        sch = _schedule(size)
        before = ModelSnapshot(sch.model)
        with pytest.raises(ApplyError) as caught:
            sch._core.apply_at(sch["head"], Collective(), after_edit=fault_after(done))
        assert isinstance(caught.value.__cause__, Fault)
        assert (sch["head"].hooks, sch["head"].wrappers) == ((), ())
        assert_bit_identical(before, sch.model)


def test_explain_marks_inactive_calls() -> None:
    sch = _schedule(1)
    sch["head"].apply(Collective())
    assert sch.records[0].edits == (
        "forward hook ran, inactive (nothing to do on this mesh)",
        "full_backward hook backward_hook, inactive (nothing to do on this mesh)",
        "forward wrapped by doubled, inactive (nothing to do on this mesh)",
    )
    assert "\n    forward hook ran, inactive (nothing to do on this mesh)\n" in sch.explain()
    sch = _schedule(2)
    sch["head"].apply(Collective())
    assert sch.records[0].edits == (
        "forward hook ran",
        "full_backward hook backward_hook",
        "forward wrapped by doubled",
    )


@pytest.mark.usefixtures("isolated_registry")
def test_replay_on_a_larger_mesh_activates_calls() -> None:
    slapo.register_primitive()(Collective)
    sch = _schedule(1)
    sch["head"].collective()
    for size, count in ((2, 1), (1, 0)):
        again = slapo.replay(MLP(), sch.to_json(), mesh={"dp": 2, "tp": size})
        assert (again["head"].hooks, again["head"].wrappers) == (sch["head"].hooks, sch["head"].wrappers)
        assert len(again["head"].module._forward_hooks) == count
        assert ("forward" in again["head"].module.__dict__) == bool(count)


def test_copies_keep_inactive_calls() -> None:
    model, x = MLP(), torch.randn(2, 8)
    sch = _schedule(1, model)
    sch["head"].apply(Collective())
    sch["head"].apply(Call(lambda node, edit: edit.wrap_forward(node, lambda forward: None, active=False)))
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
        assert "forward" not in twin.head.__dict__
        with torch.no_grad():
            twin.head.bias.zero_()
            twin.head.weight.zero_()
        assert not twin(x).any()
    assert torch.equal(model(x), expected)


@SIZES
def test_a_shared_module_has_its_hooks_under_every_name(size: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.again = model[0]
    sch = _schedule(size, model)
    sch["again"].apply(Collective())
    assert sch["0"].hooks == sch["again"].hooks != ()


def test_a_replaced_module_is_let_go_when_the_schedule_is_sealed() -> None:
    model = MLP()
    sch = _schedule(1, model)
    sch["head"].apply(Hook())
    sch["head"].replace(lambda old: nn.Linear(8, 4))
    old = weakref.ref(sch._core.history._steps[1].entries[0].old)  # type: ignore[attr-defined]
    assert old() is not None
    sch.seal()
    gc.collect()
    assert old() is None
    assert sch["head"].hooks == (("forward", post_hook),)


def test_a_tensor_that_was_replaced_beside_the_schedule_is_let_go_when_it_is_sealed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    old = weakref.ref(model[1].weight)
    sch = slapo.create_schedule(model)
    sch["0"].apply(Call(lambda node, edit: edit.set_parameter(node, "weight", torch.ones(2, 2))))
    model[1].weight = nn.Parameter(torch.ones(2, 2))
    assert sch["1"].layout("weight").origin == "1.weight"
    sch.seal()
    gc.collect()
    assert old() is None
    assert sch["1"].layout("weight").origin == "1.weight"


# -- replace --------------------------------------------------------------------------------------------------------


@SIZES
def test_a_wrapped_forward_is_never_lost_silently(size: int, message: Messages) -> None:
    sch = _schedule(size)
    sch["head"].apply(Collective())
    message(
        _refusal(lambda: sch["head"].replace(nn.Linear(8, 4))), "the forward of 'head'", "#1 collective() at 'head'"
    )


@SIZES
def test_hooks_and_forwards_below_are_never_lost_silently(size: int, message: Messages) -> None:
    sch = _schedule(size, nn.Sequential(Block(4), Block(4)))
    sch["0.conv1"].apply(Hook())
    sch["0.bn1"].apply(Collective())
    text = _refusal(lambda: sch["0"].replace(Block(4)))
    message(
        text,
        "drop hooks of '0.conv1' (1 set by #1 hook(",
        "drop hooks of '0.bn1' (2 set by #2 collective()",
        "the forward of '0.bn1'",
    )
    sch["0.conv1"].module.register_forward_hook(lambda *_: None)
    message(_refusal(lambda: sch["0"].replace(Block(4))), "at '0.conv1' and outside of the schedule")
    # What lives on inside of the new module is not lost, and is found there.
    sch["0"].replace(lambda old: nn.Sequential(old))
    assert sch["0.0.bn1"].wrappers == (doubled,)
    assert sch["0.0.conv1"].hooks == (("forward", post_hook),)
    sch.undo()
    assert sch["0.bn1"].wrappers == (doubled,)


def test_a_forward_or_hooks_that_no_step_set_are_the_users(message: Messages) -> None:
    model = nn.Sequential(Block(4), Block(4))
    sch = slapo.create_schedule(model)
    sch["0.conv1"].annotate("weight", "mark", 1)
    model[0].conv1.forward = functools.partial(nn.Conv2d.forward, model[0].conv1)
    model[0].conv1.register_forward_hook(lambda *_: None)
    text = _refusal(lambda: sch["0"].replace(Block(4)))
    message(text, "the forward of '0.conv1'", "drop hooks of '0.conv1' (1 set outside")


@SIZES
def test_a_forward_that_a_step_changed_from_elsewhere_is_not_lost_either(size: int, message: Messages) -> None:
    sch = _schedule(size)

    def below(node: slapo.Node, edit: slapo.Edit) -> None:
        Collective().apply(node["head"], edit)

    sch.apply(Call(below))
    message(_refusal(lambda: sch["head"].replace(nn.Linear(8, 4))), "the forward of 'head'", "at another module")


@SIZES
def test_hooks_are_carried_to_the_new_module_as_they_were(size: int) -> None:
    model = MLP()
    sch = _schedule(size, model)
    first, second, third = (functools.partial(post_hook) for _ in range(3))
    sch["head"].apply(Hook(first))
    sch["head"].apply(Hook(second, mesh_dim="dp"))
    sch["head"].apply(Hook(third))
    sch["head"].apply(Hook(pre_hook, "forward_pre"))
    before = ModelSnapshot(model)
    expected = sch["head"].hooks
    sch["head"].replace(nn.Linear(8, 4))
    assert {kind for kind, _ in sch["head"].hooks} == {"forward", "forward_pre"}
    for kind in ("forward", "forward_pre"):
        assert [f for k, f in sch["head"].hooks if k == kind] == [f for k, f in expected if k == kind]
    active = [first, second, third] if size == 2 else [second]
    assert list(model.head._forward_hooks.values()) == active
    assert list(model.head._forward_pre_hooks.values()) == ([pre_hook] if size == 2 else [])
    assert sch.records[-1].edits[0] == "module Linear -> Linear, with its 4 hooks"
    sch.undo()
    assert sch["head"].hooks == expected
    assert_bit_identical(before, model)
    # Around the old module they stay where they are.
    sch["head"].replace(lambda old: nn.Sequential(old), params={"weight": "0.weight", "bias": "0.bias"})
    assert sch["head"].hooks == ()
    assert sch["head.0"].hooks == expected


# -- checkpoint -----------------------------------------------------------------------------------------------------


def test_checkpointed_already_is_judged_by_the_module_that_stands_there(message: Messages) -> None:
    sch = slapo.create_schedule(MLP())
    sch["layers.0"].checkpoint()
    sch["layers.0"].replace(lambda old: nn.Sequential(old))
    # The new module is not checkpointed, the one inside of it is.
    message(_refusal(lambda: sch["layers.0.0"].checkpoint()), "'layers.0.0'", "checkpointed already")
    sch["layers.0"].checkpoint()
    assert "checkpointed already" in _refusal(lambda: sch["layers.0"].checkpoint())


def test_a_checkpoint_made_by_another_step_counts() -> None:
    sch = slapo.create_schedule(MLP())

    sch.apply(Call(lambda node, edit: Checkpoint().apply(node["head"], edit)))
    assert "checkpointed already" in _refusal(lambda: sch["head"].checkpoint())
    sch.undo()
    sch["head"].checkpoint()
