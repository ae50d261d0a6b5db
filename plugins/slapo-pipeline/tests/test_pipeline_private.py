"""The names of torch that are not public mean what this plugin takes them for, and stand in one module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slapo_pipeline import private
from tests.support.private_names import private_names


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    assert private_names(Path(private.__file__).parent) == []


def test_a_dispatch_mode_sees_operators() -> None:
    seen = []

    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert torch.ops.aten.mm in seen


def test_trees_are_flattened_and_mapped() -> None:
    assert private.pytree.tree_leaves({"a": [1, (2,)]}) == [1, 2]
    assert private.pytree.tree_map(lambda value: value + 1, {"a": [1, (2,)]}) == {"a": [2, (3,)]}


def test_actions_of_a_schedule() -> None:
    ranks = private.schedule_actions("1F1B", 2, 4, 1)
    work = [action for rank in ranks for action in rank if action is not None]
    assert len(ranks) == 2
    assert {action.computation_type.value for action in work} == {"F", "B", "REDUCE_GRAD"}
    assert {action.stage_index for action in work} == {0, 1}
    assert all(action.sub_actions is None for action in work)
    with pytest.raises(ValueError, match="NoSuchSchedule"):
        private.schedule_actions("NoSuchSchedule", 2, 4, 1)


def test_modules_name_the_buffers_that_state_dicts_leave_out() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    module[0].register_buffer("scratch", torch.zeros(1), persistent=False)
    assert private.non_persistent_buffers_of(module[0]) == {"scratch"}


def test_modules_tell_their_hooks_and_whether_they_are_made_and_compiled() -> None:
    module = nn.BatchNorm1d(2)
    assert (private.is_initialized(module), private.is_initialized(nn.Module.__new__(nn.Module))) == (True, False)
    module.register_forward_hook(len)
    module.register_forward_pre_hook(abs)
    module.register_full_backward_hook(max)
    module.register_full_backward_pre_hook(min)
    assert [[*hooks.values()] for hooks in private.hooks_of(module)] == [[len], [abs], [max], [min]]
    assert not private.is_compiled(module)
    assert private.is_compiled(torch.compile(module))  # type: ignore[arg-type]
    module.compile()
    assert private.is_compiled(module)
    assert isinstance(module, private.NormBase)


def test_operators_without_a_public_name() -> None:
    assert private.GROUPED_MM.default.overloadpacket is private.GROUPED_MM
    assert private.FLASH_ATTENTION_OF_CPU.default.overloadpacket is private.FLASH_ATTENTION_OF_CPU
