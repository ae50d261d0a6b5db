"""`slapo_core.internals` stays small: two distributions use each name in it, and none goes around it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from slapo_core import internals

ROOT = Path(__file__).parents[2]


def imports(source: str) -> Iterator[tuple[str, str]]:
    """Yield ``(module, name)`` of what a file imports from slapo-core when it runs, not only for type checkers."""
    tree = ast.parse(source)
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    checked = [branch for branch in branches if "TYPE_CHECKING" in ast.unparse(branch.test)]
    skipped = {id(inner) for branch in checked for inner in ast.walk(branch)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and id(node) not in skipped
            and (node.module or "").startswith("slapo_core")
        ):
            yield from ((str(node.module), alias.name) for alias in node.names)


@functools.cache
def users() -> dict[tuple[str, str], set[str]]:
    """Return the distributions that import each name."""
    found: dict[tuple[str, str], set[str]] = {}
    for file in ROOT.glob("plugins/*/slapo_*/**/*.py"):
        source = file.read_text()
        for imported in imports(source) if "slapo_core" in source else ():
            found.setdefault(imported, set()).add(file.relative_to(ROOT).parts[1])
    return found


def test_at_most_thirteen_names() -> None:
    assert len(internals.__all__) <= 13
    assert all(hasattr(internals, name) for name in internals.__all__)


@pytest.mark.parametrize("name", internals.__all__)
def test_each_name_has_two_users(name: str) -> None:
    assert len(users().get(("slapo_core.internals", name), ())) >= 2


def test_distributions_reach_the_tree_by_public_names_and_internals_only() -> None:
    assert not [imported for imported in users() if imported[0].startswith("slapo_core.tree")]


def test_imports_for_type_checkers_are_left_out() -> None:
    source = "from slapo_core.a import b\nif TYPE_CHECKING:\n    from slapo_core.c import d\n"
    source += "def f():\n    from slapo_core.e import g\n    import torch\n"
    assert list(imports(source)) == [("slapo_core.a", "b"), ("slapo_core.e", "g")]
