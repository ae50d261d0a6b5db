"""A few kills of benchmarks/checkpoint_kills.py: nothing torn is loaded, and nothing complete is lost."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "checkpoint_kills.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FILE.parent))  # processes import it by its name
    spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[FILE.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[FILE.stem]


KILLS = [
    ("save", "one rank", "rectangle", 14, 1, 1),
    ("asynchronous save", "all ranks", "manifest", 3, 0, 2),
    ("load", "all ranks", "read", 4, 1, 3),
]
"""A kill, and the step that is loaded after it."""


@pytest.mark.ranks
@pytest.mark.breadth
@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: f"{kill[0]}, {kill[1]}")
def test_a_kill_leaves_what_was_complete(benchmark: Any, kill: tuple[Any, ...]) -> None:
    *what, step = kill
    left = benchmark.left_by(benchmark.Kill(*what), benchmark.by_step())
    assert left.came
    assert left.problem == ""
    assert left.step == step
