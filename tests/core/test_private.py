"""The private names of torch exist, and behave as slapo_core expects."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from slapo_core import private
from tests.support.private_names import private_names


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    assert private_names(Path(private.__file__).parent) == []


def test_active_function_modes_are_those_entered_the_outermost_first() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    assert private.active_function_modes() == []
    with Mode() as outer, Mode() as inner:
        assert private.active_function_modes() == [outer, inner]
    assert private.active_function_modes() == []


def test_state_dict_hooks_are_in_these_tables_and_pass_their_module_weakly() -> None:
    module, other = nn.Linear(1, 1), nn.Linear(1, 1)
    seen: list[nn.Module] = []

    def note(module: nn.Module, *_: Any) -> None:
        seen.append(module)

    module.register_state_dict_pre_hook(note)
    module.register_state_dict_post_hook(note)
    module.register_load_state_dict_pre_hook(note)
    module.register_load_state_dict_post_hook(note)
    tables = [getattr(module, table) for table in private.STATE_DICT_HOOK_TABLES]
    assert [[private.function_of_hook(hook) for hook in table.values()] for table in tables] == [[note]] * 4
    for table in tables:
        for hook in table.values():
            private.pass_module(hook, other, module)  # passes another one: left alone
            private.pass_module(hook, module, other)
    module.load_state_dict(module.state_dict())
    assert seen == [module, module, other, module]


def test_modules_keep_their_tensors_and_hooks_in_these_tables() -> None:
    """What the tree, the journal and the weights read and write directly."""
    module = nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    module.add_module("child", nn.Identity())
    assert [*private.parameters_of(module)] == ["weight", "bias"]
    assert {*private.buffers_of(module)} == {"running_mean", "running_var", "num_batches_tracked", "scratch"}
    assert [*private.children_of(module)] == ["child"]
    assert private.non_persistent_buffers_of(module) == {"scratch"}
    hooks = private.hooks_of(module)
    module.register_forward_pre_hook(len, with_kwargs=True)
    module.register_forward_hook(len, with_kwargs=True)
    module.register_full_backward_pre_hook(len)
    assert private.full_backward_flag(module) is None
    module.register_full_backward_hook(len)
    assert private.full_backward_flag(module)
    private.set_full_backward_flag(module, False)
    with pytest.raises(RuntimeError, match="both regular backward hooks and full backward hooks"):
        module.register_full_backward_hook(len)
    module.register_forward_hook(len, with_kwargs=True, always_call=True)
    assert {kind: [*table.values()] for kind, table in hooks.items()} == {
        "forward_pre": [len],
        "forward": [len, len],
        "full_backward_pre": [len],
        "full_backward": [len],
    }
    found = {table: len(getattr(module, table)) for tables in private.HOOK_TABLES.values() for table in tables}
    assert [*found.values()] == [1, 1, 2, 2, 1, 1, 1]
    weight = nn.Parameter(torch.ones(2))
    private.parameters_of(module)["weight"] = weight
    assert module.weight is weight
    assert private.tables_of(module) == (module._parameters, module._buffers, module._modules)
    assert [len(table) for table in private.call_hooks_of(module)] == [2, 1, 1, 1]


def test_in_place_writes_are_counted_through_views_and_not_in_inference_mode() -> None:
    tensor = torch.zeros(3)
    before = private.write_count(tensor)
    assert private.write_count(tensor) == before
    tensor[1:].add_(1)
    assert private.write_count(tensor) != before
    with torch.inference_mode():
        assert private.write_count(torch.zeros(3)) is None


def test_tensors_keep_their_hooks_in_these_tables() -> None:
    for table, register in private.TENSOR_HOOK_TABLES.items():
        weight = nn.Parameter(torch.ones(2))
        getattr(weight, register)(len)
        assert [*getattr(weight, table).values()] == [len]


def test_calls_of_modules_go_through_a_function_in_this_thread_only() -> None:
    module, seen = nn.Identity(), []

    def call(run: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(threading.get_ident())
        return run(module, *args, **kwargs)

    x = torch.ones(1)
    with private.module_calls_through(call):
        assert module(x) is x
        other = threading.Thread(target=module, args=(x,))
        other.start()
        other.join()
    assert module(x) is x
    assert seen == [threading.get_ident()]


def test_fake_tensors_refuse_their_data_pointers_however_they_are_made() -> None:
    with private.SafeFakeTensorMode() as mode:
        x = torch.ones(2, 3, requires_grad=True)
        (x * 2).sum().backward()
        made = [x, x[1:], x.detach(), x.grad, x + torch.ones(3), torch.tensor(3.0), nn.Parameter(x)]
    made.append(mode.from_tensor(torch.ones(2)))
    for tensor in made:
        for read in (tensor.data_ptr, tensor.untyped_storage().data_ptr):
            with pytest.raises(RuntimeError) as caught:
                read()
            assert private.is_data_pointer_error(caught.value)
    assert not private.is_data_pointer_error(RuntimeError("another"))


def test_fake_modes_of_torch_give_address_zero() -> None:
    """What the class is for; once torch refuses by itself, it can go."""
    with FakeTensorMode(), warnings.catch_warnings(action="ignore"):
        assert torch.ones(2).data_ptr() == 0
