"""The private names of torch exist, and behave as slapo_torch expects."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

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
