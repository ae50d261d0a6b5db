"""``slapo doctor --ask slapo-deepspeed``: the version, the accelerator, and builds that were killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from slapo_core.hookspecs import Fact, Problem
from slapo_deepspeed import runtime
from slapo_runtime import installed
from tests.messages import Messages


def examined() -> tuple[dict[str, str], Sequence[Problem]]:
    found = list(runtime.examine())
    facts = {item.what: item.value for item in found if isinstance(item, Fact)}
    return facts, [item for item in found if isinstance(item, Problem)]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(runtime, "_device", lambda: "cpu")


def test_an_accelerator_that_is_not_there_is_a_problem(monkeypatch: pytest.MonkeyPatch, message: Messages) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    facts, (problem,) = examined()
    assert facts["accelerator"] == "cuda (DS_ACCELERATOR=cuda)"
    message(problem.message, "DS_ACCELERATOR=cuda", "finds cpu")
    message(problem.hint, "unset DS_ACCELERATOR", "DS_ACCELERATOR=cpu")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert examined()[1] == []


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "deepspeed is not installed"),
        ("0.18.1", "installed is 0.18.1"),
        ("0.20.0", "0.20.0 is newer than the newest version that slapo-deepspeed is tested with, 0.19"),
    ],
)
def test_another_deepspeed_is_a_problem(monkeypatch: pytest.MonkeyPatch, found: str | None, message: str) -> None:
    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(installed, "version", version)
    monkeypatch.setattr(installed, "requires", lambda name: ["deepspeed>=0.19"])
    facts, (problem,) = examined()
    assert facts["deepspeed"] == (found or "not installed")
    assert message in problem.message


def test_a_build_that_was_killed_is_a_problem(tmp_path: Path, message: Messages) -> None:
    (tmp_path / "py311_cpu" / "deepspeed_shm_comm").mkdir(parents=True)
    assert examined()[1] == []
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.touch()
    (problem,) = examined()[1]
    message(problem.message, "deepspeed_shm_comm", "killed")
    assert problem.hint is not None
    assert problem.hint.startswith(f"rm {lock} ")


@pytest.mark.ranks
def test_the_command_prints_it_without_importing_deepspeed() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from slapo_core.cli.main import make_app\n"
        "done = CliRunner().invoke(make_app(), ['doctor', '--ask', 'slapo-deepspeed'])\n"
        "print(done.output); assert 'deepspeed' not in sys.modules"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "slapo-deepspeed: deepspeed " in printed
    assert "slapo-deepspeed: accelerator " in printed
