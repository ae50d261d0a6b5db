"""The sources keep the style and the types that the project declares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def assert_passes(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
def test_sources_have_the_style() -> None:
    assert_passes("ruff", "check", ".")
    assert_passes("ruff", "format", "--check", ".")


@pytest.mark.breadth
@pytest.mark.slow
def test_sources_have_the_types() -> None:
    """As does `make check`: for a minute, where mypy has no cache."""
    assert_passes("mypy")


@pytest.mark.slow
def test_strict_types_are_asked_of_the_layers_that_others_build_on(tmp_path: Path) -> None:
    """The project's mypy settings reject an untyped function in core (and let one pass elsewhere)."""
    for name in ("slapo_core", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "tree.py").write_text("def untyped(value):\n    return value\n")
    config = ROOT / "pyproject.toml"
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(config),
        "--no-incremental",
        "slapo_core",
        "elsewhere",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:-1]] == ["slapo_core/tree.py"]
