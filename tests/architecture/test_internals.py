"""The other distributions reach core by its public modules and `slapo_core.internals`, which holds what they use."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from slapo_core import internals

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "slapo_core",
    *(
        f"slapo_core.{name}"
        for name in (
            "cli",
            "dialect",
            "effects",
            "errors",
            "hookspecs",
            "internals",
            "layout",
            "observers",
            "plugins",
            "primitive",
        )
    ),
}
COMMANDS = {"slapo_core.cli.main", "slapo_core.cli.doctor"}
"""What tests of the command line start."""


def detours(source: str) -> Iterator[str]:
    """Yield each import of a private module of core, also for type checkers, and each use of a schedule's core."""
    for node in ast.walk(ast.parse(source)):
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and node.attr == "_core":
            yield ast.unparse(node)
        yield from (name for name in modules if name.partition(".")[0] == "slapo_core" and name not in PUBLIC)


def names_used(source: str) -> Iterator[str]:
    """Yield the names that a file imports from `slapo_core.internals`, and the members of `Internals` that it uses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "slapo_core.internals":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr


@functools.cache
def users() -> dict[str, set[str]]:
    """Return the files outside of core that use each name."""
    found: dict[str, set[str]] = {}
    for file in ROOT.glob("plugins/*/slapo_*/**/*.py"):
        source = file.read_text()
        for name in names_used(source) if "slapo_core.internals" in source else ():
            found.setdefault(name, set()).add(file.name)
    return found


MEMBERS = [name for name in vars(internals.Internals) if not name.startswith("_")]


@pytest.mark.parametrize("name", [*internals.__all__, *MEMBERS])
def test_each_name_has_a_user(name: str) -> None:
    assert users().get(name)


@pytest.mark.parametrize("name", MEMBERS)
def test_each_member_is_typed_and_documented(name: str) -> None:
    member = vars(internals.Internals)[name]
    function = member.fget if isinstance(member, property) else member
    assert function.__doc__
    assert "return" in function.__annotations__


def test_the_architecture_page_lists_each_member() -> None:
    page = (ROOT / "docs" / "how" / "architecture.md").read_text()
    missing = [name for name in MEMBERS if f"`{name}`" not in page]
    assert not missing


@pytest.mark.parametrize("folder", ["plugins/*/slapo_*", "plugins/*/tests", "tests/*", "benchmarks", "examples"])
def test_distributions_and_tests_do_not_go_around(folder: str) -> None:
    found = {
        f"{file.relative_to(ROOT)}: {detour}"
        for file in ROOT.glob(f"{folder}/**/*.py")
        if not file.is_relative_to(ROOT / "tests" / "core")
        if "slapo_core." in (source := file.read_text()) or "._core" in source  # others are not parsed
        for detour in detours(source)
        if detour not in COMMANDS or "slapo_" in folder
    }
    assert not found


@pytest.mark.parametrize(
    ("source", "detour"),
    [
        ("from slapo_core.tree.node import Node", "slapo_core.tree.node"),
        ("import slapo_core.schedule", "slapo_core.schedule"),
        ("if TYPE_CHECKING:\n    from slapo_core.plugins.registry import Registry", "slapo_core.plugins.registry"),
        ("def f(sch):\n    return sch._core.tree", "sch._core"),
    ],
)
def test_a_detour_is_found(source: str, detour: str) -> None:
    assert list(detours(source)) == [detour]


def test_public_names_and_internals_are_no_detour() -> None:
    source = "import slapo_core as slapo\nfrom slapo_core.internals import Internals\nimport slapo_core.errors\n"
    assert list(detours(source)) == []
