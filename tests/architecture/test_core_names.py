"""Core names no other distribution of the project, but in ``slapo_core/__init__.py``: it knows them by rule alone."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import slapo_core

ROOT = Path(slapo_core.__file__).parent
OTHERS = [name for name in slapo_core.DISTRIBUTIONS if name != "slapo-core"]
NAME = re.compile("|".join(rf"\b{name.replace('-', '[-_]')}\b" for name in OTHERS))


def named(source: str) -> list[str]:
    """The names of the project's other distributions and packages in a text, comments and docstrings included."""
    return NAME.findall(source)


def test_core_names_no_other_distribution() -> None:
    files = [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]
    assert len(files) >= 30
    found = {str(path.relative_to(ROOT)): names for path in files if (names := named(path.read_text("utf-8")))}
    assert found == {}


def test_a_name_is_found() -> None:
    source = '"""As slapo-tp does."""\nfrom slapo_graph.match import Match\nhint = "pip install slapo-verify"\n'
    assert named(source) == ["slapo-tp", "slapo_graph", "slapo-verify"]
    assert named((ROOT / "__init__.py").read_text("utf-8"))
    assert named('"slapo-core", "slapo_core.plugins", "acme-slapo", "slapo.v1.patterns", "slapo-tps"') == []


def test_names_outside_of_a_namespace_are_known_by_their_owners() -> None:
    """So that a script whose distribution is missing is told which to install."""
    provided: dict[tuple[str, str], str] = {}
    for name in OTHERS:
        project = tomllib.loads((ROOT.parent / "plugins" / name / "pyproject.toml").read_text("utf-8"))["project"]
        groups = project.get("entry-points", {})
        own = name.removeprefix("slapo-")
        for kind in ("commands", "dialects", "primitives"):
            for entry in groups.get(f"slapo.v1.{kind}", {}):
                short = entry.partition(".")[2] if kind == "primitives" else entry
                if short != own:
                    provided[kind, short] = name
        for query in groups.get("slapo.v1.queries", {}):
            if query != own:
                provided["primitives", query] = name
        for group, entries in groups.items():  # a loss 'torch' of slapo-loss, which is no name of slapo-torch
            for entry in entries if group != "slapo.v1.models" else ():  # whose names are of classes
                if f"slapo-{entry.partition('.')[0]}" in set(OTHERS) - {name}:
                    provided[group.removeprefix("slapo.v1."), entry] = name
    assert provided == slapo_core.OWNERS
