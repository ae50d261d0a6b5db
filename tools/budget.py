"""Compare the code lines of each distribution with its budget in tools/budget.toml.

python tools/budget.py                          # a table; exit status 1 where a distribution is over its budget
python tools/budget.py --json                   # the same for programs
python tools/budget.py --update slapo-graph     # set its budget to its code lines, rounded up to 50
python tools/budget.py --update                 # set every budget

Code lines are those of the package, without tests: no docstrings, comments, blank lines, imports and `__all__`.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = "tools/budget.toml"
STEP = 50

HEAD = """\
# Code lines that a distribution may have: no docstrings, comments, blank lines, imports and `__all__`.
# `make check` compares them. A larger number is a decision: its commit says what the lines buy.
# python tools/budget.py --update slapo-graph    # its code lines, rounded up to 50

"""

_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Row:
    """A distribution: its code lines, and how many it may have.

    Attributes:
        budget: None where the table has no row.
    """

    distribution: str
    files: int
    lines: int
    budget: int | None

    @property
    def is_ok(self) -> bool:
        return self.budget is not None and self.lines <= self.budget


def code_lines(source: str) -> int:
    """Count the code lines of a Python file."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            left_out |= _lines(node.body[0])
        elif isinstance(node, (ast.Import, ast.ImportFrom)) or (
            isinstance(node, ast.Assign) and any(ast.unparse(target) == "__all__" for target in node.targets)
        ):
            left_out |= _lines(node)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = (token for token in tokens if token.type not in _NO_CODE)
    return len({line for token in code for line in range(token.start[0], token.end[0] + 1)} - left_out)


def _lines(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def packages(root: Path) -> dict[str, Path]:
    """Find the package of each distribution below ``root``: ``{"slapo-tp": .../slapo_tp}``."""
    plugins = sorted(project.parent for project in root.glob("plugins/*/pyproject.toml"))
    return {"slapo-core": root / "slapo_core", **{one.name: one / one.name.replace("-", "_") for one in plugins}}


def measure(root: Path) -> list[Row]:
    """Count every distribution below ``root`` and put its budget beside it."""
    budgets = read_budgets(root)
    rows = []
    for name, package in packages(root).items():
        files = sorted(package.rglob("*.py"))
        lines = sum(code_lines(file.read_text(encoding="utf-8")) for file in files)
        rows.append(Row(name, len(files), lines, budgets.get(name)))
    return rows


def read_budgets(root: Path) -> dict[str, int]:
    """Read the committed table; empty where there is none."""
    table = root / TABLE
    return tomllib.loads(table.read_text(encoding="utf-8")) if table.exists() else {}


def problems(rows: list[Row], budgets: Mapping[str, int]) -> list[str]:
    """Say which distributions are over their budgets, and which rows are missing or left over."""
    found = []
    for row in rows:
        raising = f"python tools/budget.py --update {row.distribution}"
        hint = f"\n  hint: remove code, or raise the budget and say why: {raising}"
        if row.budget is None:
            found.append(f"{row.distribution} has no budget in {TABLE}: {row.lines:,} code lines{hint}")
        elif not row.is_ok:
            over = row.lines - row.budget
            found.append(
                f"{row.distribution} is {over} over its budget: {row.lines:,} of {row.budget:,} code lines{hint}"
            )
    left_over = sorted(budgets.keys() - {row.distribution for row in rows})
    return [
        *found,
        *(f"{TABLE} has a budget for '{name}', not a distribution\n  hint: remove it" for name in left_over),
    ]


def update(root: Path, names: list[str]) -> None:
    """Write the budgets of some distributions, all where none is named, and drop those of no distribution."""
    old = read_budgets(root)
    rows = [
        (row.distribution, -(-row.lines // STEP) * STEP if not names or row.distribution in names else row.budget)
        for row in measure(root)
    ]
    for name, budget in rows:
        if budget is not None and budget != old.get(name):
            print(f"{name}: {old.get(name, 'no budget')} -> {budget}")
    table = "".join(f"{name} = {budget}\n" for name, budget in rows if budget is not None)
    (root / TABLE).write_text(HEAD + table, encoding="utf-8")


def table(rows: list[Row]) -> str:
    """One row for each distribution, and the sum."""
    total = Row("all", *(sum(getattr(row, field) or 0 for row in rows) for field in ("files", "lines", "budget")))
    lines = [f"{'distribution':<18}{'files':>7}{'code lines':>12}{'budget':>9}{'free':>7}"]
    for row in (*rows, total):
        budget, free = ("-", "-") if row.budget is None else (f"{row.budget:,}", str(row.budget - row.lines))
        lines.append(f"{row.distribution:<18}{row.files:>7}{row.lines:>12,}{budget:>9}{free:>7}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the table and what is over; or write the budgets."""
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list, a row for each distribution")
    parser.add_argument("--update", nargs="*", metavar="DIST", help="write the budgets of these distributions (all)")
    parser.add_argument("--root", type=Path, default=ROOT, help="the work tree (default: that of this file)")
    options = parser.parse_args(arguments)
    root: Path = options.root
    if options.update is not None:
        if unknown := sorted(set(options.update) - packages(root).keys()):
            parser.error(f"no distribution {', '.join(unknown)}; there are {', '.join(packages(root))}")
        update(root, options.update)
        return 0
    rows = measure(root)
    found = problems(rows, read_budgets(root))
    print(json.dumps([{**asdict(row), "ok": row.is_ok} for row in rows], indent=1) if options.json else table(rows))
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
