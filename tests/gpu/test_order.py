"""How tests of GPUs run, held without one: their order, their end, their results; and what they cover."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

CONFTEST = "from tests.gpu.conftest import *\n"
TESTS = """
import types

import pytest

import tests.gpu.conftest as hooks


@pytest.mark.gpu(30)
def test_last(device):
    assert device.type == "cpu"


@pytest.mark.gpu(2, needs="warp specialization")
def test_on_cuda_only():
    raise AssertionError("a rehearsal has no CUDA")


@pytest.mark.gpu(3)
def test_fails(measured):
    measured(us_per_call=1.5)
    raise ValueError("no kernel is available")


@pytest.mark.gpu(4)
def test_takes_long():
    hooks.time = types.SimpleNamespace(monotonic=lambda: float("inf"))


@pytest.mark.gpu(1)
def test_first(run):
    assert run.rehearses


def test_of_something_else():
    pass
"""


def run(tmp_path: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    """The lines of the results, and what pytest prints."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nmarkers =\n    gpu\n    slow\n")
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--gpu-results", str(results)]
    ended = subprocess.run(
        [*command, *options, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    return [json.loads(line) for line in results.read_text().splitlines()], ended.stdout + ended.stderr


def outcomes(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    found = [row for row in rows if "outcome" in row]
    return [(row["test"].partition("::")[2], row["outcome"], row["reason"].splitlines()[-1:]) for row in found]  # type: ignore[misc]


@pytest.mark.slow
def test_low_ranks_run_first_and_after_the_time_none(tmp_path: Path) -> None:
    rows, printed = run(tmp_path, "--rehearse", "--gpu-seconds", "60")
    head, *rest = rows
    assert head["device"] == "CPU (a rehearsal)"
    assert {"driver", "torch", "commit"} <= head.keys()
    assert [row["measured"] for row in rest if "measured" in row] == [{"us_per_call": 1.5}]
    names = [name for name, _, _ in outcomes(rest)]
    assert names == ["test_first", "test_on_cuda_only", "test_fails", "test_takes_long", "test_last"]
    told = {name: (outcome, *said) for name, outcome, said in outcomes(rest)}
    assert told["test_first"] == ("passed",)
    assert told["test_on_cuda_only"][:2] == ("skipped", "Skipped: not rehearsed: needs warp specialization")
    assert told["test_fails"][0] == "failed"
    assert "no kernel is available" in next(row["reason"] for row in rest if row.get("outcome") == "failed")
    assert told["test_last"][:2] == ("skipped", "Skipped: not run: 60 s are over")
    assert '"us_per_call": 1.5' in printed
    assert "1 failed, 3 passed, 2 skipped" in printed  # with the test that needs no GPU


# -- what they cover --------------------------------------------------------------------------------------------------


def marked() -> set[str]:
    """``test_x.py::test_y`` of every test that is marked."""
    found = set()
    for file in HERE.glob("test_*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and file != Path(__file__):
                found.add(f"{file.name}::{node.name}")
    return found


def test_the_page_says_what_each_test_shows() -> None:
    page = (HERE / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(test_\w+\.py::test_\w+)`", page)) == marked()


def test_every_test_here_is_marked() -> None:
    for file in HERE.glob("test_*.py"):
        if file == Path(__file__):
            continue
        source = file.read_text(encoding="utf-8")
        for name in re.findall(r"^def (test_\w+)\(", source, re.MULTILINE):
            before = source[: source.index(f"def {name}(")].rpartition("\n\n\n")[2]
            assert "pytest.mark.gpu(" in before or "_ranked(" in before, f"{file.name}::{name}"


def test_each_compiler_pattern_family_and_primitive_has_its_test() -> None:
    fusion = tomllib.loads((ROOT / "plugins" / "slapo-fusion" / "pyproject.toml").read_text())["project"]
    points = fusion["entry-points"]
    from tests.gpu import test_fusion, test_verify

    assert set(test_fusion.COMPILERS) == set(points["slapo.v1.compilers"])
    assert {f"fusion.{name}" for name in test_fusion.PATTERNS} == set(points["slapo.v1.patterns"])
    families = importlib.import_module("plugins.slapo-models.tests.families").FAMILIES
    assert set(test_verify.FAMILIES) == set(families)
    sources = "".join(file.read_text(encoding="utf-8") for file in HERE.glob("test_*.py"))
    for name in points["slapo.v1.primitives"]:
        assert f".{name.partition('.')[2]}(" in sources, name
