"""A distribution that grows over its budget of code lines fails `make check`, which says how to raise it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.budget import ROOT, TABLE, code_lines, main, packages, read_budgets

SOURCE = '''\
"""A docstring."""

from __future__ import annotations

import os
from typing import (
    Any,
)

__all__ = [
    "count",
]

LIMIT = 3  # a comment beside code
"""What the limit is: a string, not a docstring of the language."""


class Counter:
    """Count."""

    def count(self, value: Any) -> int:
        """Count
        lines."""
        # a comment

        return len(
            """two
            lines"""
        )
'''


def test_code_lines_leave_out_docstrings_comments_blanks_imports_and_all() -> None:
    assert code_lines(SOURCE) == 8
    assert code_lines('"""Only a docstring."""\n# and a comment\n\nimport os\n') == 0


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A work tree with core and one plugin, of 2 and 50 code lines, and their budgets."""
    for name, lines in (("slapo_core", 2), ("plugins/slapo-acme/slapo_acme", 50)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("x = 1\n" * lines)
    (tmp_path / "plugins/slapo-acme/pyproject.toml").touch()
    (tmp_path / "plugins/slapo-acme/tests").mkdir()
    (tmp_path / "plugins/slapo-acme/tests/test_acme.py").write_text("x = 1\n" * 99)
    (tmp_path / "tools").mkdir()
    assert main(["--root", str(tmp_path), "--update"]) == 0
    return tmp_path


def test_a_line_over_the_budget_is_an_error_until_the_budget_is_raised(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = ["--root", str(tree)]
    assert read_budgets(tree) == {"slapo-core": 50, "slapo-acme": 50}
    assert main(root) == 0
    (tree / "plugins/slapo-acme/slapo_acme/more.py").write_text("x = 1\n")
    capsys.readouterr()
    assert main(root) == 1
    printed = capsys.readouterr()
    assert "slapo-acme is 1 over its budget: 51 of 50 code lines" in printed.err
    assert (
        "hint: remove code, or raise the budget and say why: python tools/budget.py --update slapo-acme" in printed.err
    )
    assert [line.split() for line in printed.out.splitlines()][2] == ["slapo-acme", "2", "51", "50", "-1"]
    assert main([*root, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [(row["distribution"], row["lines"], row["ok"]) for row in rows] == [
        ("slapo-core", 2, True),
        ("slapo-acme", 51, False),
    ]
    assert main([*root, "--update", "slapo-core"]) == 0  # of another distribution: nothing changes
    assert main(root) == 1
    assert main([*root, "--update", "slapo-acme"]) == 0
    assert read_budgets(tree) == {"slapo-core": 50, "slapo-acme": 100}
    assert main(root) == 0


def test_a_distribution_without_a_row_and_a_row_without_a_distribution_are_errors(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / TABLE).write_text("slapo-core = 50\nslapo-gone = 50\n")
    assert main(["--root", str(tree)]) == 1
    printed = capsys.readouterr().err
    assert "slapo-acme has no budget" in printed
    assert "a budget for 'slapo-gone'" in printed


def test_each_distribution_has_a_budget_and_make_check_compares_it() -> None:
    assert read_budgets(ROOT).keys() == packages(ROOT).keys()
    assert all(budget % 50 == 0 for budget in read_budgets(ROOT).values())
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    assert "tools/budget.py" in lint
