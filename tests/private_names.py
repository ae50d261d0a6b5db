"""Private names of torch in a package: imports and attribute chains with a leading underscore."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def private_names(package: Path) -> list[str]:
    """The private names of torch that the modules of a package use, but for its ``private.py``."""
    files = sorted(file for file in package.rglob("*.py") if file.name != "private.py")
    return [f"{file.name}: {name}" for file in files for name in _names(ast.parse(file.read_text()))]


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            full = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            full = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            full = [ast.unparse(node)]
        else:
            continue
        for name in full:
            parts = name.split(".")
            if parts[0] == "torch" and any(part[:1] == "_" and part[:2] != "__" for part in parts):
                yield name
