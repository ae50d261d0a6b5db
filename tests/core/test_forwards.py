"""Promises of wrapped forwards: a base and wrappers in order, the user's own forward kept, copies that are whole."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import random
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.tree.forward import AppliedWrapper, ModuleForward
from slapo_testing import ModelSnapshot, assert_bit_identical
from tests.support.edits import Call


class Scale(nn.Module):
    """``weight * x``; a wrapped or user-set forward shows in the number."""

    def __init__(self, weight: float = 3.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def negated(module: Scale, x: torch.Tensor, *, times: float = 1.0) -> torch.Tensor:
    """What a user sets on an instance."""
    return -module.weight * x * times


class Holder:
    """A callable object, or one with a method, that holds the module."""

    def __init__(self, module: Scale) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return -self.module.weight * x

    def call(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


OWN: dict[str, Callable[[Scale], Callable[..., Any]]] = {
    "partial": lambda module: functools.partial(negated, module),
    "callable object": Holder,
    "method of another object": lambda module: Holder(module).call,
    "method of the module": lambda module: MethodType(negated, module),
}


def plus(amount: float, forward: Any) -> Any:
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs) + amount

    return functools.wraps(forward)(run)


def times(factor: float, forward: Any) -> Any:
    return lambda module, *args, **kwargs: forward(module, *args, **kwargs) * factor


def _wrap(sch: slapo.Schedule, *wrappers: Any) -> None:
    """One step for each."""
    for wrapper in wrappers:
        sch["0"].apply(Call(lambda node, edit, wrapper=wrapper: edit.wrap_forward(node, wrapper)))


def _plus(amount: float) -> Any:
    return functools.partial(plus, amount)


def _times(factor: float) -> Any:
    return functools.partial(times, factor)


def _model(own: str | None = None) -> nn.Sequential:
    model = nn.Sequential(Scale())
    if own is not None:
        model[0].forward = OWN[own](model[0])
    return model


def _ran(model: nn.Module) -> float:
    return model(torch.tensor(1.0)).item()


# -- order, and the user's own forward ------------------------------------------------------------------------------


def test_wrappers_run_in_the_order_of_the_steps_and_leave_one_object_on_the_module() -> None:
    model = _model()
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model)
    _wrap(sch, _plus(1))
    on_the_module = model[0].__dict__["forward"]
    _wrap(sch, _times(10), _plus(2))
    assert _ran(model) == (3 + 1) * 10 + 2
    assert model[0].__dict__["forward"] is on_the_module
    with sch.rewound(2):
        assert _ran(model) == (3 + 1) * 10
    with sch.reference():
        assert _ran(model) == 3
        assert_bit_identical(before, model)
    assert _ran(model) == (3 + 1) * 10 + 2
    assert model[0].__dict__["forward"] is on_the_module
    sch.undo(to=0)
    assert_bit_identical(before, model)


@pytest.mark.parametrize("own", OWN)
def test_forward_of_the_user_is_wrapped_and_comes_back_as_the_same_object(own: str) -> None:
    model = _model(own)
    users = model[0].__dict__["forward"]
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model)
    _wrap(sch, _plus(1), _times(10))
    assert _ran(model) == (-3 + 1) * 10
    with sch.reference():
        assert model[0].__dict__["forward"] is users
    assert _ran(model) == (-3 + 1) * 10
    sch.undo(to=0)
    assert model[0].__dict__["forward"] is users
    assert_bit_identical(before, model)


def test_a_wrapper_that_raises_or_gives_no_function_leaves_the_others_as_they_were() -> None:
    model = _model()
    sch = slapo.create_schedule(model)
    _wrap(sch, _plus(1))
    scheduled = ModelSnapshot(model)
    for wrong in (lambda forward: 1 / 0, lambda forward: None):
        with pytest.raises(slapo.ApplyError):
            _wrap(sch, wrong)
        assert_bit_identical(scheduled, model)
        assert _ran(model) == 4
    with pytest.raises(slapo.ApplyError):
        sch["0"].apply(Call(lambda node, edit: [edit.wrap_forward(node, _plus(5)), 1 / 0]))
    assert_bit_identical(scheduled, model)
    assert _ran(model) == 4


# -- a forward that the user sets between the steps -----------------------------------------------------------------


def _around(module: nn.Module) -> Callable[..., Any]:
    """As libraries do it: the forward that is there, wrapped, set on the instance."""
    inner = module.forward
    return lambda x: inner(x) * 1000


@pytest.mark.parametrize("calls_the_old_one", [True, False])
def test_forward_that_the_user_set_after_a_step_survives_undo(calls_the_old_one: bool) -> None:
    model = _model()
    sch = slapo.create_schedule(model)
    _wrap(sch, _plus(1))
    users = model[0].forward = _around(model[0]) if calls_the_old_one else lambda x: -x
    _wrap(sch, _times(10))
    inner = 4000 if calls_the_old_one else -1
    assert _ran(model) == 10 * inner
    with sch.rewound(1):
        assert model[0].__dict__["forward"] is users
        assert _ran(model) == inner
    assert _ran(model) == 10 * inner
    with sch.reference():
        assert model[0].__dict__["forward"] is users
        assert _ran(model) == (3000 if calls_the_old_one else -1)
    assert _ran(model) == 10 * inner
    sch.undo(to=0)
    assert model[0].__dict__["forward"] is users
    assert _ran(model) == (3000 if calls_the_old_one else -1)


def test_forward_that_the_user_set_while_the_steps_were_taken_back_is_wrapped_again() -> None:
    model = _model()
    sch = slapo.create_schedule(model)
    _wrap(sch, _plus(1), _times(10))
    with sch.reference():
        users = model[0].forward = _around(model[0])
    assert _ran(model) == (3000 + 1) * 10
    with sch.rewound(1):
        assert _ran(model) == 3001
        last = model[0].forward = _around(model[0])
    assert _ran(model) == 3001 * 1000 * 10
    sch.undo()
    assert model[0].__dict__["forward"] is last
    assert _ran(model) == 3001 * 1000
    sch.undo()
    assert model[0].__dict__["forward"] is last
    model[0].forward = users
    assert _ran(model) == 3000


def test_forward_that_the_user_takes_away_stays_away() -> None:
    model = _model()
    sch = slapo.create_schedule(model)
    _wrap(sch, _plus(1))
    del model[0].forward
    assert _ran(model) == 3
    _wrap(sch, _times(10))
    assert _ran(model) == 30
    sch.undo(to=0)
    assert "forward" not in model[0].__dict__


def test_last_forward_of_the_user_survives_any_order_of_steps() -> None:
    for seed in range(150):
        draw, model = random.Random(seed), _model(random.Random(seed).choice([None, *OWN]))
        module, sch = model[0], slapo.create_schedule(model)
        last = module.__dict__.get("forward")

        def intervene(draw: random.Random = draw, module: nn.Module = module) -> Any:
            choice = draw.random()
            if choice < 0.3:
                module.__dict__.pop("forward", None)
                return None
            module.forward = _around(module) if choice < 0.7 else lambda x: -x
            return module.forward

        for _ in range(draw.randint(2, 8)):
            choice = draw.random()
            if choice < 0.5:
                _wrap(sch, _plus(draw.randint(1, 9)))
            elif choice < 0.6 and sch.records:
                sch.undo()
            elif choice < 0.8 and sch.records:
                with sch.rewound(draw.randint(0, len(sch.records))):
                    if draw.random() < 0.7:
                        last = intervene()
                    _ran(model)
            else:
                last = intervene()
            _ran(copy.deepcopy(model))
        if sch.records:
            sch.undo(to=0)
        assert module.__dict__.get("forward") is last, seed
        _ran(model)


# -- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", OWN)
def test_deep_copy_runs_on_itself_whatever_forward_the_user_had_set(own: str) -> None:
    model = _model(own)
    sch = slapo.create_schedule(model)
    _wrap(sch, _plus(1), _times(10))
    twin = copy.deepcopy(model)
    assert _ran(twin) == _ran(model) == -20
    with torch.no_grad():
        twin[0].weight.fill_(5)
    assert _ran(twin) == (-5 + 1) * 10
    assert _ran(model) == -20
    with torch.no_grad():
        model[0].weight.fill_(7)
    assert _ran(twin) == -40
    twin(torch.tensor(1.0)).backward()
    assert twin[0].weight.grad is not None
    assert model[0].weight.grad is None
    assert _ran(copy.deepcopy(twin)) == -40
    sch.undo(to=0)
    assert _ran(twin) == -40


@pytest.mark.parametrize("own", ["partial", "callable object", "method of another object"])
def test_a_saved_model_comes_back_on_itself_whatever_forward_the_user_had_set(own: str) -> None:
    model = _model(own)
    _wrap(slapo.create_schedule(model), _plus(1), _times(10))
    loaded = pickle.loads(pickle.dumps(model))
    assert _ran(loaded) == -20
    with torch.no_grad():
        loaded[0].weight.fill_(5)
    assert _ran(loaded) == -40
    assert _ran(model) == -20


def test_pickle_refuses_a_wrapper_without_a_qualified_name() -> None:
    model = _model()
    sch = slapo.create_schedule(model)
    _wrap(sch, lambda forward: forward, _plus(1))
    with pytest.raises(
        slapo.SerializationError, match=r"wrapped by tests\.core\.test_forwards\.test_pickle_refuses.*<lambda>"
    ):
        pickle.dumps(model)
    sch.undo(to=0)
    _wrap(sch, _plus(1))
    assert _ran(pickle.loads(pickle.dumps(model))) == 4


class Branchy(nn.Module):
    """Its ``act`` is called by a forward that the user set: in the copies that ``verify`` makes, by the copy's."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Identity()
        self.forward = functools.partial(through_act, self)  # type: ignore[method-assign]


class BrokenInTraining(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if self.training else x


def through_act(module: Branchy, x: torch.Tensor) -> torch.Tensor:
    return module.act(x)


def test_verify_runs_its_copy_and_not_the_users_model_behind_a_forward_of_the_user() -> None:
    """The model is in evaluation mode, its copies train: a copy that called the original would not see the mistake."""
    model = nn.Sequential(nn.Linear(4, 4), Branchy()).eval()
    sch = slapo.create_schedule(model)
    sch["1.act"].replace(BrokenInTraining())
    sch["1"].checkpoint()
    with pytest.raises(slapo.VerifyError, match="differs from the reference model"):
        slapo.verify(sch, torch.randn(2, 4))
    sch.undo(to=0)
    sch["1.act"].replace(nn.Identity())
    sch["1"].checkpoint()
    slapo.verify(sch, torch.randn(2, 4))


def test_verify_agrees_on_a_sound_schedule_around_a_forward_of_the_user() -> None:
    model = _model("partial")
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    before = ModelSnapshot(model)
    slapo.verify(sch, torch.randn(3))
    assert_bit_identical(before, model)


# -- like a bound method --------------------------------------------------------------------------------------------


def test_wrapped_forward_has_the_signature_of_its_base() -> None:
    for own, text in ((None, "(x: 'torch.Tensor')"), ("partial", "(x: 'torch.Tensor', *, times: 'float' = 1.0)")):
        model = _model(own)
        _wrap(slapo.create_schedule(model), _plus(1), _plus(2))
        assert str(inspect.signature(model[0].forward)).startswith(text)
        assert model[0].forward.__self__ is model[0]
        assert model[0].forward.__func__(model[0], torch.tensor(0.0)).item() == 3
        twin = copy.deepcopy(model)
        assert str(inspect.signature(twin[0].forward)).startswith(text)


@pytest.mark.parametrize("own", [None, "partial", "method of the module"])
def test_wrapped_model_compiles_in_one_graph_and_again_after_undo(own: str | None) -> None:
    model, x = _model(own), torch.randn(3)
    sch = slapo.create_schedule(model)
    _wrap(sch, _plus(1), _times(10))
    expected = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    sch.undo()
    assert torch.equal(compiled(x), model(x))
    assert not torch.equal(model(x), expected)
    sch.undo()
    assert torch.equal(compiled(x), model(x))
    torch._dynamo.reset()


# -- another base ---------------------------------------------------------------------------------------------------


def test_another_base_comes_under_the_wrappers_and_goes_again() -> None:
    model = _model("partial")
    users = model[0].__dict__["forward"]
    sch = slapo.create_schedule(model)
    _wrap(sch, _plus(1), _times(10))
    forward = ModuleForward.of(model[0])
    assert forward is model[0].__dict__["forward"]
    assert forward.base is users
    scheduled = ModelSnapshot(model)
    graph = MethodType(lambda module, x: module.weight * x * 100, model[0])
    assert forward.set_base(graph) is users
    assert _ran(model) == (300 + 1) * 10
    assert [wrapper.args for wrapper in forward.wrappers] == [(1,), (10,)]
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.fill_(5)
    assert _ran(twin) == (500 + 1) * 10
    assert _ran(model) == (300 + 1) * 10
    assert forward.set_base(users) is graph
    assert scheduled.differences(model) == []
    assert _ran(model) == (-3 + 1) * 10
    forward.set_base(None)
    assert _ran(model) == (3 + 1) * 10
    forward.set_base(users)
    sch.undo(to=0)
    assert model[0].__dict__["forward"] is users


def test_a_base_of_its_own_stays_when_the_last_wrapper_goes() -> None:
    model = _model()
    before = ModelSnapshot(model)
    forward = ModuleForward.of(model[0])
    assert_bit_identical(before, model)
    forward.set_base(lambda x: 100 * x)
    sch = slapo.create_schedule(model)
    _wrap(sch, _plus(1))
    assert model[0].__dict__["forward"] is forward
    assert _ran(model) == 101
    sch.undo()
    assert _ran(model) == 100
    with pytest.raises(ZeroDivisionError):
        forward.add(AppliedWrapper(lambda inner: 1 / 0))
    assert _ran(model) == 100
    forward.set_base(None)
    assert_bit_identical(before, model)


def offset(module: Scale, x: torch.Tensor) -> torch.Tensor:
    return module.weight * x + 100


def test_a_forward_set_by_a_step_runs_within_the_wrappers_in_every_copy() -> None:
    model = Scale()
    sch = slapo.create_schedule(model)
    sch.apply(Call(lambda node, edit: edit.wrap_forward(node, functools.partial(plus, 1.0))))
    before = ModelSnapshot(model)
    sch.apply(Call(lambda node, edit: edit.set_forward(node, offset)))
    assert sch.root.forward_is_replaced
    assert sch.records[-1].edits == ("forward runs offset",)
    twin = copy.deepcopy(model)
    twin.weight.data.fill_(5.0)
    assert (model(torch.tensor(2.0)).item(), twin(torch.tensor(2.0)).item()) == (107.0, 111.0)
    sch.undo()
    assert not sch.root.forward_is_replaced
    assert_bit_identical(before, model)
    assert model(torch.tensor(2.0)).item() == 7.0


def test_the_state_that_steps_keep_for_a_module_is_undone_and_redone() -> None:
    model = nn.Sequential(Scale(), Scale())
    sch = slapo.create_schedule(model)
    node = sch["0"]
    before = ModelSnapshot(model)
    node.apply(Call(lambda node, edit: edit.set_state(node, "acme.plan", (1,))))
    node.apply(Call(lambda node, edit: edit.set_state(node, "acme.plan", (1, 2))))
    node.apply(Call(lambda node, edit: edit.set_state(node, "acme.plan", None)))
    assert "acme.plan" not in node.state
    sch.undo()
    assert (dict(node.state), dict(sch["1"].state)) == ({"acme.plan": (1, 2)}, {})
    with sch.rewound(1):
        assert node.state["acme.plan"] == (1,)
    assert node.state["acme.plan"] == (1, 2)
    with pytest.raises(TypeError):
        node.state["acme.plan"] = ()  # type: ignore[index]
    with pytest.raises(slapo.ApplyError, match="set_forward"):
        node.apply(Call(lambda node, edit: edit.set_state(node, "forward", offset)))
    sch.undo(to=0)
    assert dict(node.state) == {}
    assert_bit_identical(before, model)
