"""What slapo-runtime offers to others, and who uses it."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import slapo_core
import slapo_runtime
import slapo_torch

_ROOT = Path(slapo_runtime.__file__).parent
_ENTRY_POINTS = {"guards", "hookspecs"}  # loaded by slapo-core, by the names in pyproject.toml
_OF_SCRIPTS = {"data"}
_PACKAGES = {"correspondence", "guards", "initialization", "ranks", "stages"}
_OTHER_PLACES = {
    "partition": "stages.partition",
    "stage_runner": "stages.runner",
    "storage": "correspondence.storage",
}
"""Modules from which plugins also import names -> where these are."""


def _imported(file: Path) -> Iterator[str]:
    """Yield ``module.name`` for every name that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _public_modules() -> set[str]:
    return {file.stem for file in _ROOT.glob("[!_]*.py")} - {"private", *_OTHER_PLACES} | _PACKAGES


@functools.cache
def _imports() -> list[tuple[str, str]]:
    """Each module of slapo-runtime that a file outside of it imports, with the distribution of the file."""
    packages = {"core": Path(slapo_core.__file__).parent}
    packages |= {
        file.parent.name.removeprefix("slapo_"): file.parent for file in _ROOT.parents[1].glob("*/slapo_*/py.typed")
    }
    found = []
    for name, package in packages.items():
        for file in package.rglob("*.py"):
            for imported in _imported(file) if "slapo_runtime" in file.read_text() else ():
                root, _, rest = imported.partition(".")
                module = rest.partition(".")[0]
                own = file == _ROOT / f"{module}.py" or file.is_relative_to(_ROOT / module)
                if root == "slapo_runtime" and not own:
                    found.append((module, name))
    return found


def _users(modules: Iterable[str]) -> dict[str, set[str]]:
    """Module -> the distributions that import it."""
    return {module: {name for imported, name in _imports() if imported == module} for module in modules}


def _documented() -> dict[str, list[str]]:
    """The names of the docstring that a dialect author meets, by module."""
    text = slapo_runtime.__doc__ or ""
    core = re.search(r"``slapo_core``: (.*?); and these", text, re.DOTALL)
    assert core is not None
    names = [name for name in re.findall(r"``(\w+)``", core[1]) if name != "dialect"]
    rows = {"slapo_core.dialect": names[-1:], "slapo_core": names[:-1]}
    for module, names in re.findall(r"^- ``([\w.]+)``: (.*)$", text, re.MULTILINE):
        rows[f"slapo_runtime.{module}"] = re.findall(r"``(\w+)``", names)
    return rows


def _single_users(modules: Iterable[str]) -> list[str]:
    """Return the modules that neither target "torch" nor two distributions use, nor a dialect author meets."""
    met = {module.rpartition(".")[2] for module in _documented()}
    users = _users(modules)
    return sorted(
        module
        for module, names in users.items()
        if "torch" not in names and len(names) < 2 and module not in met | _ENTRY_POINTS | _OF_SCRIPTS
    )


def test_every_public_module_is_used_by_target_torch_or_by_two_distributions() -> None:
    if not (_ROOT.parents[1] / "slapo-megatron").is_dir():
        pytest.skip("needs the sources of the other distributions")
    assert _single_users(_public_modules()) == []


@pytest.mark.parametrize("module", _OTHER_PLACES)
def test_names_that_plugins_import_have_both_places(module: str) -> None:
    other = importlib.import_module(f"slapo_runtime.{module}")
    own = importlib.import_module(f"slapo_runtime.{_OTHER_PLACES[module]}")
    names = [name for name in vars(other) if not name.startswith("_")]
    assert set(names) >= set(_documented()[f"slapo_runtime.{_OTHER_PLACES[module]}"])
    assert all(getattr(other, name) is getattr(own, name) for name in names)


def test_a_module_with_one_user_is_found() -> None:
    assert _single_users({"weights", "nobody_uses_this"}) == ["nobody_uses_this"]
    assert "torch" in _users({"engine"})["engine"]


def test_a_dialect_author_meets_at_most_25_names() -> None:
    rows = _documented()
    assert sum(map(len, rows.values())) <= 25
    for module, names in rows.items():
        for name in names:
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def _forbidden(imported: str) -> bool:
    """Return whether a dialect may not import a name: only public modules here, and public names of slapo_core."""
    root, _, rest = imported.partition(".")
    if root == "slapo_runtime":
        return rest.partition(".")[0] not in _public_modules()
    if root == "slapo_core":
        return rest.removeprefix("effects.") not in (*slapo_core.__all__, *slapo_core.effects.__all__)
    return root.startswith("slapo_") and root != "slapo_torch"


def test_target_torch_imports_what_any_dialect_may() -> None:
    imported = {name: file.name for file in Path(slapo_torch.__file__).parent.rglob("*.py") for name in _imported(file)}
    assert "slapo_runtime.engine.StatefulEngine" in imported
    assert [(file, name) for name, file in imported.items() if _forbidden(name)] == []


@pytest.mark.parametrize(
    "imported",
    [
        "slapo_runtime.weights.saving.save_checkpoint",
        "slapo_runtime.private.storage_id",
        "slapo_core.schedule.schedule.Schedule",
        "slapo_core.errors.BuildError",
        "slapo_verify.verify",
    ],
)
def test_a_forbidden_import_of_a_dialect_is_found(imported: str) -> None:
    assert _forbidden(imported)
    assert not _forbidden("slapo_core.BuildError")
    assert not _forbidden("slapo_runtime.engine.StatefulEngine")
