"""The tables of tested versions: of torch, which `slapo doctor` names, and of hosts, which distributions require."""

from __future__ import annotations

import json
import platform
from importlib import metadata

import pytest
import torch
from packaging.version import Version

from slapo_core import Fact
from slapo_core.cli.doctor import TESTED_TORCH, diagnose
from slapo_testing.distributions import FakeEnvironment
from tools import host_versions, torch_versions

REPORT = """<testsuites><testsuite>
<testcase file="tests/core/test_a.py" classname="tests.core.test_a" name="test_one"/>
<testcase file="tests/core/test_a.py" classname="tests.core.test_a" name="test_two[x]"><failure/></testcase>
<testcase file="tests/core/test_a.py" classname="tests.core.test_a" name="test_two[x]"/>
<testcase file="tests/core/test_a.py" classname="tests.core.test_a" name="test_three"><skipped/></testcase>
<testcase file="tests/core/test_b.py" classname="tests.core.test_b" name="test_four"><error/></testcase>
</testsuite></testsuites>"""
ROW = {
    "torch": "2.15.0",
    "python": "3.11.7",
    "suite": "core",
    "passed": 5,
    "skipped": 1,
    "failed": ["test_a.py::test_one"],
}


def differs(rows: list[torch_versions.Row]) -> str | None:
    found = rows[0]["torch"], rows[-1]["torch"]
    return (
        None
        if found == TESTED_TORCH
        else f"the table goes from {found[0]} to {found[1]}, TESTED_TORCH is {TESTED_TORCH}"
    )


def test_the_table_goes_from_the_oldest_to_the_newest_tested_version() -> None:
    rows = json.loads(torch_versions.ROWS.read_text())
    assert differs(rows) is None
    assert torch_versions.PAGE.read_text() == torch_versions.page(rows)
    assert f"versions {' to '.join(TESTED_TORCH)}" in (torch_versions.ROOT / "docs" / "install.md").read_text()
    assert differs(torch_versions.with_row(rows, {**ROW, "torch": "99.0.0"})) is not None
    assert differs(torch_versions.with_row(rows, {**ROW, "torch": "2.9.0"})) is not None
    assert differs(rows[1:]) is not None


@pytest.mark.parametrize(
    ("version", "is_newer"),
    [
        ("2.11.0", False),
        (f"{TESTED_TORCH[1]}+cu132", False),
        ("99.0.0", True),
        ("99.0.0.dev20270101+cpu", True),
    ],
)
def test_a_version_newer_than_tested_is_warned_about_and_no_problem(
    fake_distributions: FakeEnvironment, monkeypatch: pytest.MonkeyPatch, version: str, is_newer: bool
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(platform, "platform", lambda: "Linux")  # which asks a process
    report = diagnose(fake_distributions.registry(with_installed=False, core="0.1.0"))
    oldest, newest = TESTED_TORCH
    assert Fact("tested torch", f"{oldest} to {newest}") in report.facts
    warning = Fact("warning", f"torch {version} is newer than {newest}, the newest version tested")
    assert (warning in report.facts) is is_newer
    assert report.problems == ()


def test_a_report_is_counted_and_a_version_keeps_its_last_run() -> None:
    counted = torch_versions.counts(REPORT)
    failed = ["tests/core/test_a.py::test_two[x]", "tests/core/test_b.py::test_four"]
    assert counted == {"passed": 1, "skipped": 1, "failed": failed}
    rows = torch_versions.with_row([ROW], {**ROW, "torch": "2.9.0"})
    rows = torch_versions.with_row(rows, {**ROW, "suite": "sampled", "failed": []})
    assert [(row["torch"], row["suite"]) for row in rows] == [("2.9.0", "core"), ("2.15.0", "sampled")]
    lines = torch_versions.page(rows).splitlines()
    assert "| 2.9.0 | 3.11.7 | core | 5 | 1 | 1 |" in lines
    assert "| 2.15.0 | 3.11.7 | sampled | 5 | 1 | 0 |" in lines
    assert lines[-1] == "- torch 2.9.0: `test_a.py::test_one`"


def test_pins_that_torch_contradicts_are_left_out() -> None:
    constraints = "# Development versions.\nnumpy==2.4.6\nsetuptools==84.2.1\nsympy==1.14.0\ntorch==2.13.0\n"
    requirements = ["setuptools<82", "sympy>=1.13.3", 'numpy<2; extra == "old"']
    kept = torch_versions.kept_pins(constraints, "2.11.0", requirements)
    assert kept == "numpy==2.4.6\nsympy==1.14.0\ntorch==2.11.0\n"


def test_the_oldest_hosts_that_were_tested_are_those_that_are_required() -> None:
    rows = json.loads(host_versions.ROWS.read_text())
    assert host_versions.PAGE.read_text() == host_versions.page(rows)
    for name, requirement in host_versions.required().items():
        assert Version(rows["oldest"][name]) == Version(host_versions.oldest(requirement)), name
        assert requirement.specifier.contains(rows["newest"][name]), name
        assert Version(rows["newest"][name]) >= Version(metadata.version(name)), name
