"""The kit in a plugin author's own test file: ids, failures, skips, and light imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from slapo_core import ArgumentError
from slapo_testing import CHECKS, Case, parametrize_checks
from tests.messages import Messages
from tests.support import kit_primitives as kit

FILE = '''
from dataclasses import dataclass

import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import Case, parametrize_checks


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x)


@slapo.register_primitive()
@dataclass(frozen=True)
class Mark(slapo.Primitive):
    """Set an attribute of the module.

    Args:
        text: its value.

    rewrite: ``module`` -> ``module`` with ``module.mark == text``
    """

    name = "mine.mark"
    equivalence = slapo.Equivalence.EXACT
    text: str

    def preconditions(self, node):
        if not self.text:
            yield slapo.Violation("text must not be empty", 'mark("something")')

    def apply(self, node, edit):
        edit.set_attribute(node, "mark", self.text)
        {EXTRA}


@parametrize_checks([
    Case(Mark("a"), model=Model, path="fc", inputs=lambda: torch.randn(2, 4), rejects=[Mark("")]),
    Case(Mark("b"), model=lambda: Model(), inputs=lambda: {"x": torch.randn(2, 4)}),
])
def test_mark(check):
    check()
'''


def run_pytest(directory: Path, *arguments: str, extra: str = "pass") -> subprocess.CompletedProcess[str]:
    (directory / "test_mark.py").write_text(FILE.replace("{EXTRA}", extra))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(directory), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.breadth
@pytest.mark.slow
def test_a_good_primitive_of_a_test_file_passes_each_check_of_each_case(tmp_path: Path) -> None:
    """Its directory is not on ``sys.path``: ranks and fresh processes import its classes from the file."""
    done = run_pytest(tmp_path, "-v", "-rs", "--import-mode=importlib")
    ids = [line.partition(" ")[0] for line in done.stdout.splitlines() if line.startswith("test_mark.py::")]
    assert ids == [f"test_mark.py::test_mark[{label}-{check.name}]" for label in ("mark", "mark-2") for check in CHECKS]
    assert "19 passed, 5 skipped" in done.stdout, done.stdout
    assert "the case has no rejects=" in done.stdout
    assert "'mine.mark' was registered in this process" in done.stdout


@pytest.mark.slow
def test_failure_names_check_and_mistake(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "-q", "-k", "mark-undo or mark-faults", extra="node.module.weight.data[0, 1] = 2.0")
    assert done.returncode == 1
    assert "FAILED test_mark.py::test_mark[mark-undo_is_exact]" in done.stdout, done.stdout
    assert "mark('a') at 'fc' fails undo_is_exact: " in done.stdout
    assert "fc.weight (tensor): 1 of 16 elements differ" in done.stdout
    assert "hint:     make every change through `edit`" in done.stdout


@pytest.mark.slow
def test_importing_the_kit_imports_neither_torch_nor_pytest() -> None:
    code = (
        "import sys; from slapo_testing import Case, parametrize_checks, run_ranks, FakeDistribution;"
        "print([name for name in ('torch', 'pytest', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == "[]\n", done.stderr


GOOD = {"model": kit.Net, "inputs": kit.batch}


@pytest.mark.parametrize(
    ("primitive", "options", "word", "hint"),
    [
        (kit.Good, {}, "the class Good", "Good(...)"),
        ("good", {}, "got 'good'", None),
        (kit.Good(), {"model": nn.GELU()}, "got a GELU", "model=lambda: ..."),
        (kit.Good(), {"inputs": (1, 2)}, "got a tuple", "inputs=lambda: ..."),
        (kit.Good(), {"mesh": "tp"}, "got 'tp'", 'mesh=("tp",)'),
        (kit.Good(), {"mesh": ("xp",)}, "'xp'", "use dp_replicate, dp, pp, cp, ep, tp"),
        (
            kit.Good(),
            {"before": [kit.Good()]},
            "got Good(parameter='weight')",
            'before=[("fc1", Shard("weight", axis=0))]',
        ),
        (kit.Good(), {"rejects": kit.Good("x")}, "got Good(parameter='x')", "rejects=[...]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_in_a_case_have_the_corrected_call(
    primitive: object, options: dict[str, object], word: str, hint: str | None, message: Messages
) -> None:
    with pytest.raises(ArgumentError) as caught:
        Case(primitive, **{**GOOD, **options})  # type: ignore[arg-type]
    message(caught, "Case: ", next(iter(options), "primitive"), word)
    assert hint is None or caught.value.hint == hint


def test_parametrize_checks_refuses_invalid_cases() -> None:
    good = Case(kit.Good(), model=kit.Net, inputs=kit.batch)
    with pytest.raises(ArgumentError, match="at least one Case"):
        parametrize_checks([])
    with pytest.raises(ArgumentError, match="takes Case objects"):
        parametrize_checks([kit.Good()])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="unknown check 'undo'"):
        parametrize_checks([good], checks=["undo"])
    chosen = parametrize_checks([good, good], checks=["undo_is_exact"])
    assert [parameter.id for parameter in chosen.args[1]] == ["good-undo_is_exact", "good-2-undo_is_exact"]
