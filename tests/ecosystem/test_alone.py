"""The tests of a distribution need nothing that it does not declare."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.clean import build_wheels
from tools.alone import ROOT, copy_tests, run_alone, table

pytestmark = pytest.mark.slow


@pytest.mark.breadth
def test_the_unit_tests_of_a_small_distribution_run_where_nothing_else_is_installed(tmp_path: Path) -> None:
    projects = [project.parent for project in ROOT.glob("plugins/*/pyproject.toml")]
    wheels = build_wheels([ROOT, *projects], tmp_path)
    (tmp_path / "alone").mkdir()
    result = run_alone("slapo-tune", wheels, tmp_path / "alone")
    assert result.is_ok, result.failures
    assert "slapo-graph" not in result.installed
    assert f"| slapo-tune | {', '.join(result.installed)} | {result.passed} |" in table([result])


@pytest.mark.parametrize(
    ("name", "tests"), [("slapo-tp", "plugins/slapo-tp/tests"), ("slapo-core", "tests/core")], ids=["plugin", "core"]
)
def test_the_copy_holds_no_tests_of_another_distribution(name: str, tests: str, tmp_path: Path) -> None:
    assert copy_tests(name, tmp_path) == tests
    assert {file.parent for file in tmp_path.rglob("test_*.py")} == {tmp_path / tests}
    assert (tmp_path / "tests" / "support" / "building.py").exists()
