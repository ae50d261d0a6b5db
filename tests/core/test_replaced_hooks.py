"""Hooks registered on a module that a step replaces: handles, options, order and functions stay, and go back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import ModelSnapshot, assert_bit_identical
from tests.support.edits import Call


def _noted(calls: list[str], what: str, changed: Any = None) -> Callable[..., Any]:
    def hook(*args: Any) -> Any:
        calls.append(what)
        return changed

    return hook


def test_handles_options_and_order_of_the_users_hooks_survive_replace_and_undo() -> None:
    model, x, calls = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(1, 4, requires_grad=True), []  # type: ignore[var-annotated]
    old = model[0]
    handles = {
        "pre": old.register_forward_pre_hook(_noted(calls, "pre")),
        "post": old.register_forward_hook(_noted(calls, "post"), with_kwargs=True),
        "first": old.register_forward_hook(_noted(calls, "first"), prepend=True),
        "always": old.register_forward_hook(_noted(calls, "always"), always_call=True),
        "backward_pre": old.register_full_backward_pre_hook(_noted(calls, "backward_pre")),
        "backward": old.register_full_backward_hook(_noted(calls, "backward")),
        "saved": old.register_state_dict_post_hook(_noted(calls, "saved")),
        "save": old.register_state_dict_pre_hook(_noted(calls, "save")),
        "load": old.register_load_state_dict_pre_hook(lambda module, *_: calls.append(f"load {module.mark}")),
        "loaded": old.register_load_state_dict_post_hook(_noted(calls, "loaded")),
    }

    def ran() -> list[str]:
        calls.clear()
        model(x).sum().backward()
        model.zero_grad()
        model.load_state_dict(model.state_dict())
        return calls[:]

    old.mark = "old"
    before = ran()
    assert before == [
        "pre",
        "first",
        "post",
        "always",
        "backward_pre",
        "backward",
        "save",
        "saved",
        "load old",
        "loaded",
    ]
    same = ModelSnapshot(model)
    sch = slapo.create_schedule(model)
    new = nn.Linear(4, 4)
    new.mark = "new"
    sch["0"].replace(new)
    assert ran() == [what.replace("old", "new") for what in before]
    assert sch["0"].hooks == (), "those of the user are not those of steps"
    sch.undo()
    assert_bit_identical(same, model)
    sch["0"].replace(new)
    with sch.reference():
        assert ran() == before
    for what in ("pre", "post", "backward", "saved", "load"):
        handles[what].remove()
    model[0].register_forward_hook(_noted(calls, "late"))
    left = ["first", "always", "late", "backward_pre", "save", "loaded"]
    assert ran() == left
    sch.undo()
    assert model[0] is old
    assert ran() == left, "what came and went meanwhile has come and gone"
    assert (len(new._forward_hooks), len(new._state_dict_pre_hooks), new._is_full_backward_hook) == (0, 0, None)
    for what in ("first", "always", "backward_pre", "save", "loaded"):
        handles[what].remove()
    assert ran() == ["late"]


def test_a_hook_that_is_always_called_is_so_on_the_new_module() -> None:
    class Failing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    model, calls = nn.Sequential(nn.Linear(2, 2)), []  # type: ignore[var-annotated]
    model[0].register_forward_hook(_noted(calls, "always"), always_call=True)
    slapo.create_schedule(model)["0"].replace(Failing(2, 2))
    with pytest.raises(ValueError):
        model(torch.ones(1, 2))
    assert calls == ["always"]


def _twice(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def test_a_replaced_module_with_hooks_is_pickled_and_copied() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    model[0].register_forward_hook(_twice)
    expected = model(x)
    slapo.create_schedule(model)["0"].replace(nn.Linear(4, 4))
    assert [*model[0]._forward_hooks.values()] == [_twice]
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(twin(x), expected)


class Renaming(nn.Linear):
    """Registers hooks of its own, as many classes do in their constructors."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.calls = 0
        self.register_load_state_dict_pre_hook(self._count)
        self.register_state_dict_post_hook(_mark)
        self.register_forward_hook(_twice)

    def _count(self, module: nn.Module, *_: Any) -> None:
        assert module is self
        self.calls += 1


def _mark(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}marks"] = state.get(f"{prefix}marks", 0) + 1


def test_hooks_of_the_classes_own_run_once_and_beside_those_of_the_user() -> None:
    model, x = nn.Sequential(Renaming(2, 2)), torch.ones(1, 2)
    old, new = model[0], Renaming(2, 2)
    old._forward_hooks.clear()
    handle = old.register_forward_hook(lambda module, args, output: output + 1)
    expected = 2 * (model(x) - 1) + 1  # the new module's own hook, and then the user's
    sch = slapo.create_schedule(model)
    sch["0"].replace(new)
    state = model.state_dict()
    assert state.pop("0.marks") == 1
    model.load_state_dict(state)
    assert (old.calls, new.calls) == (0, 1)
    torch.testing.assert_close(model(x), expected)
    handle.remove()
    torch.testing.assert_close(model(x), expected - 1)
    sch.undo()
    model.load_state_dict(state)
    assert (old.calls, new.calls) == (1, 1)
    assert (len(old._forward_hooks), len(new._forward_hooks)) == (0, 1)
    assert all(len(module._load_state_dict_pre_hooks) == len(module._state_dict_hooks) == 1 for module in (old, new))


def test_hooks_of_steps_move_along_once_and_back() -> None:
    model, calls = nn.Sequential(nn.Linear(2, 2)), []  # type: ignore[var-annotated]
    old, new = model[0], nn.Linear(2, 2)
    old.register_forward_hook(_noted(calls, "user"))
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model)

    def step(what: str) -> None:
        sch["0"].apply(Call(lambda node, edit: edit.add_hook(node, "forward", _noted(calls, what))))

    step("first")
    sch["0"].replace(new)
    step("second")
    sch["0"].replace(nn.Linear(2, 2))
    sch["0"].replace(old)  # and the first one again
    model(torch.ones(1, 2))
    assert calls == ["user", "first", "second"]
    assert len(sch["0"].hooks) == 2
    with sch.rewound(2):
        calls.clear()
        model(torch.ones(1, 2))
        assert calls == ["user", "first"]
        assert len(sch["0"].hooks) == 1
    sch.undo(to=1)
    assert len(sch["0"].hooks) == 1
    sch.undo()
    assert_bit_identical(before, model)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_backward_hooks_of_the_deprecated_kind_move_unless_the_new_module_has_the_other_kind() -> None:
    model, calls = nn.Sequential(nn.Linear(2, 2)), []  # type: ignore[var-annotated]
    handle = model[0].register_backward_hook(_noted(calls, "backward"))
    before = ModelSnapshot(model)
    sch, hooked = slapo.create_schedule(model), nn.Linear(2, 2)
    hooked.register_full_backward_hook(_noted(calls, "full"))
    with pytest.raises(slapo.PreconditionError, match="one kind"):
        sch["0"].replace(hooked)
    sch["0"].replace(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert calls == ["backward"]
    model.zero_grad()
    sch.undo()
    assert_bit_identical(before, model)
    sch["0"].replace(nn.Linear(2, 2))
    handle.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert calls == ["backward"]
