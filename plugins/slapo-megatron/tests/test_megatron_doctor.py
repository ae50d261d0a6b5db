"""``slapo doctor --ask slapo-megatron``: what is there, what is missing, and what to install."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from slapo_core.hookspecs import Fact, Problem
from slapo_megatron import runtime
from slapo_runtime.installed import Runtime
from tests.messages import Messages


def examined() -> tuple[dict[str, str], Sequence[Problem]]:
    found = list(runtime.examine())
    facts = {item.what: item.value for item in found if isinstance(item, Fact)}
    return facts, [item for item in found if isinstance(item, Problem)]


@pytest.fixture(autouse=True)
def with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


def test_an_installed_megatron_is_no_problem() -> None:
    facts, problems = examined()
    assert facts["megatron-core"].startswith("0.1")
    assert facts["GPUs"] == "8"
    assert problems == []


@pytest.mark.parametrize(
    ("found", "word"),
    [(None, "megatron-core is not installed"), ("0.15.2", "installed is 0.15.2"), ("0.20.0", "0.20.0 is newer")],
)
def test_another_megatron_is_a_problem(monkeypatch: pytest.MonkeyPatch, found: str | None, word: str) -> None:
    monkeypatch.setattr(Runtime, "version", property(lambda _: found))
    facts, (problem,) = examined()
    assert facts["megatron-core"] == (found or "not installed")
    assert word in problem.message
    assert problem.hint in (
        "pip install slapo-megatron",
        "pip install 'megatron-core>=0.16'",
        "pip install 'megatron-core==0.19.*'",
    )


def test_the_doctor_reports_the_versions_for_old_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", _Python(11))
    assert examined()[0]["Python"] == "3.11: for megatron-core 0.16; 0.17 and newer need 3.12"
    monkeypatch.setattr(sys, "version_info", _Python(12))
    assert "Python" not in examined()[0]


class _Python(tuple[int, ...]):
    major = 3

    def __new__(cls, minor: int) -> _Python:
        made = super().__new__(cls, (3, minor, 0))
        made.minor = minor  # type: ignore[attr-defined]
        return made


def test_fused_optimizers_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "find_spec", lambda name: object() if name == "apex" else None)
    facts, problems = examined()
    assert facts["Adam of Megatron"] == "apex's, fused"
    assert problems == []


def test_the_doctor_reports_a_missing_gpu(monkeypatch: pytest.MonkeyPatch, message: Messages) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts, (problem,) = examined()
    assert facts["GPUs"] == "none"
    message(problem.message, "no GPU", "plans")


@pytest.mark.ranks
def test_the_command_prints_it_without_importing_megatron() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from slapo_core.cli.main import make_app\n"
        "done = CliRunner().invoke(make_app(), ['doctor', '--ask', 'slapo-megatron'])\n"
        "print(done.output); assert not [name for name in sys.modules if name.partition('.')[0] == 'megatron']"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "slapo-megatron: megatron-core " in printed
    assert "slapo-megatron: GPUs " in printed
