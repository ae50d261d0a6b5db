"""The private names of torch exist, and behave as slapo_testing expects."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from slapo_testing import private
from tests.support.private_names import private_names


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    assert private_names(Path(private.__file__).parent) == []


def test_tensors_of_modules_and_hooks_of_tensors_are_in_these_tables() -> None:
    module = nn.BatchNorm1d(2)
    assert {*private.TENSOR_TABLES} <= {*vars(module)}
    for table, register in private.TENSOR_HOOK_TABLES.items():
        weight = nn.Parameter(torch.ones(2))
        getattr(weight, register)(len)
        assert [*getattr(weight, table).values()] == [len]


def test_trees_are_mapped_and_have_leaves() -> None:
    assert private.tree_leaves({"a": [1, (2,)]}) == [1, 2]
    assert private.tree_map_only(int, lambda value: -value, ["x", 1]) == ["x", -1]
