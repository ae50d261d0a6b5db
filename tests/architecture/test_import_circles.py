"""No module imports itself through others: not in functions, and not for type checkers either."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("plugins/slapo-graph/slapo_graph",)


def imported_modules(source: str, known: set[str]) -> set[str]:
    """Return the modules among ``known`` that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & known or {str(node.module)} & known
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
    return found


def import_circle(package: Path) -> list[str] | None:
    """Return the modules of a circle, each imported by the next one; None if there is no circle."""
    files = {}
    for file in package.rglob("*.py"):
        names = file.relative_to(package.parent).with_suffix("").parts
        files[".".join(names[:-1] if names[-1] == "__init__" else names)] = file
    graph = {name: imported_modules(file.read_text("utf-8"), set(files)) - {name} for name, file in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return None


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_import_each_other_in_no_circle(package: str) -> None:
    assert import_circle(ROOT / package) is None


@pytest.mark.parametrize(
    "line",
    [
        "import shop.tools.saw",
        "from shop.tools import saw",
        "if TYPE_CHECKING:\n    from shop.tools.saw import Saw",
        "def cut():\n    from shop.tools.saw import Saw",
    ],
)
def test_import_circle_is_found_wherever_the_import_stands(tmp_path: Path, line: str) -> None:
    tools = tmp_path / "shop" / "tools"
    tools.mkdir(parents=True)
    for init in (tmp_path / "shop", tools):
        (init / "__init__.py").touch()
    (tmp_path / "shop" / "bench.py").write_text("import torch\n")
    (tools / "saw.py").write_text("from shop.bench import Bench\n")
    assert import_circle(tmp_path / "shop") is None
    (tmp_path / "shop" / "bench.py").write_text(f"{line}\n")
    assert set(import_circle(tmp_path / "shop") or ()) == {"shop.bench", "shop.tools.saw"}
