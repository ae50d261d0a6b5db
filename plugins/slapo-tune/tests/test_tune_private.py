"""The names of torch that are not public mean what this plugin takes them for, and are in one module."""

from __future__ import annotations

from pathlib import Path

from slapo_tune import private
from tests.support.private_names import private_names


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    assert private_names(Path(private.__file__).parent) == []


def test_trees_are_flattened_and_mapped() -> None:
    assert private.tree_leaves({"a": [1, (2,)]}) == [1, 2]
    assert private.tree_map_only(int, lambda value: -value, ["x", 1]) == ["x", -1]
