"""The sources keep the style and the types that the project declares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)],
    ids=" ".join,
)
def test_sources_pass(command: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
def test_strict_types_are_asked_of_the_layers_that_others_build_on(tmp_path: Path) -> None:
    """The project's mypy settings reject an untyped function in `spec` (and let one pass elsewhere)."""
    for name in ("spec", "elsewhere"):
        package = tmp_path / "slapo_core" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("def untyped(value):\n    return value\n")
    (tmp_path / "slapo_core" / "__init__.py").write_text("")
    config = ROOT / "pyproject.toml"
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--no-incremental", "slapo_core"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()[:-1]] == ["slapo_core/spec/__init__.py"]
