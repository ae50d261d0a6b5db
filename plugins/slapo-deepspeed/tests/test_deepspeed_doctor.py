"""``slapo doctor --ask slapo-deepspeed``: what is there, what is missing, and what to set."""

from __future__ import annotations

import shutil
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
    for name in ("DS_ACCELERATOR", "CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(runtime, "_device", lambda: "cpu")


def without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)


def test_on_cpus_a_missing_compiler_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compilers(monkeypatch)
    facts, problems = examined()
    assert facts["accelerator"] == "cpu (found)"
    assert facts["C++ compiler"] == "none"
    assert "ZeRO and pipelines run" in facts["without a C++ compiler"]
    assert problems == []


def test_on_gpus_a_missing_compiler_says_what_to_set(monkeypatch: pytest.MonkeyPatch, message: Messages) -> None:
    without_compilers(monkeypatch)
    monkeypatch.setattr(runtime, "_device", lambda: "cuda")
    facts, (problem,) = examined()
    assert facts["nvcc"] == "none"
    message(problem.message, "Adam", "C++ compiler, nvcc")
    assert problem.hint is not None
    assert "CUDA_HOME" in problem.hint
    assert '"torch_adam": true' in problem.hint


def test_compilers_that_are_there_are_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/usr/bin/{name}")
    monkeypatch.setattr(runtime, "_device", lambda: "cuda")
    facts, problems = examined()
    assert (facts["C++ compiler"], facts["nvcc"]) == ("/usr/bin/c++", "/usr/bin/nvcc")
    assert problems == []


def test_an_accelerator_that_is_not_there_is_a_problem(monkeypatch: pytest.MonkeyPatch, message: Messages) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/usr/bin/{name}")
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
