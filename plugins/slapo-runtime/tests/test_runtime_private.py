"""The private names of torch exist, and behave as the native dialect expects."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import slapo_runtime
from slapo_runtime.native import private as native
from tests.support.private_names import private_names


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    """But for where schedules infer shapes, which ``test_pipeline_torch.py`` checks with all that they call."""
    found = private_names(Path(slapo_runtime.__file__).parent)
    assert found == ["torch_pipelining.py: '_initialize_stages'", "torch_pipelining.py: '_initialize_stage'"]


def test_the_native_dialect_s_names() -> None:
    module = nn.Linear(2, 2)
    assert native.storage_id(module.weight[1:]) == native.storage_id(module.weight) != native.storage_id(module.bias)
    assert not native.is_compiled(module)
    module.compile()
    assert native.is_compiled(module)
    assert native.top_saved_tensors_hooks(True) is None
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        assert native.top_saved_tensors_hooks(True) is not None
