"""`slapo doctor` names every problem with the command that mends it, and is silent where there is none."""

from __future__ import annotations

import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from slapo_core import Fact, Problem
from slapo_core.cli.doctor import diagnose
from slapo_testing.distributions import FakeDistribution, FakeEnvironment
from tests.dists.healthy import acme, with_hooks
from tests.messages import Messages
from tests.support.overlay import Overlay

SICK = """
from slapo_core import Fact, Problem

@hookimpl
def slapo_doctor():
    yield Fact("network", "eth0")
    yield Problem("the network is slow", hint="pip install fast-network")
"""
OTHERS = "slapo-deepspeed, slapo-fusion, slapo-megatron, slapo-pipeline, slapo-tp, slapo-tune"
RAISING = "@hookimpl\ndef slapo_doctor():\n    raise OSError('no such device')\n"


@pytest.fixture(autouse=True)
def sane_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(platform, "platform", lambda: "Linux")  # which asks a process


def problems(environment: FakeEnvironment, *, ask: tuple[str, ...] = (), **options: Any) -> tuple[Problem, ...]:
    return diagnose(environment.registry(with_installed=False, core="0.1.0", **options), ask=ask).problems


def told(problem: Problem) -> str:
    """With its hint."""
    return f"{problem.message}\n  hint: {problem.hint}"


@pytest.mark.slow
def test_a_healthy_environment_has_no_problems_and_exit_status_0(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme())
    done = fake_distributions.slapo("doctor", environ={"SLAPO_DISABLE_PLUGINS": OTHERS})
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("\nnothing is wrong\n")
    shown = done.stdout.partition("\n\n")[0].splitlines()
    facts = dict(re.split(r" {2,}", line, maxsplit=1) for line in shown)
    assert set(facts) >= {
        *("python", "platform", "slapo-core", "torch", "devices"),
        *("backends", "cpus", "threads", "disabled plugins", "plugin acme-slapo"),
    }
    assert "gloo" in facts["backends"]
    assert facts["disabled plugins"] == OTHERS
    assert facts["plugin acme-slapo"] == f"1.0 ok ({fake_distributions.directory}/acme_slapo-1.0.dist-info)"


@pytest.mark.slow
def test_json_has_the_same_facts_and_problems_and_exit_status_1(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(FakeDistribution("bad-slapo", None, {"slapo.v1.primitives": {"bad.x": "b:X"}}))
    done = fake_distributions.slapo("doctor", "--json", environ={"OMP_NUM_THREADS": "999999"})
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert done.stdout == json.dumps(report, indent=2, sort_keys=True) + "\n"
    assert set(report) == {"facts", "problems"}
    facts = {fact["what"]: fact["value"] for fact in report["facts"]}
    assert facts["plugin bad-slapo"] == f"- unusable ({fake_distributions.directory}/bad_slapo-0.dist-info)"
    assert facts["threads"] == "OMP_NUM_THREADS=999999"
    hinted = {problem["hint"]: problem["message"] for problem in report["problems"]}
    assert "bad-slapo is unusable" in hinted["pip install --force-reinstall bad-slapo"]
    assert "OMP_NUM_THREADS=999999" in hinted[f"export OMP_NUM_THREADS={facts['cpus']}"]


def test_each_bad_plugin_is_a_problem(fake_distributions: FakeEnvironment, message: Messages) -> None:
    fake_distributions.install(
        acme("new-slapo", namespace="new", bare="fresh", requires=("slapo-core>=9",)),
        acme("evil-slapo", namespace="tp"),
    )
    foreign, incompatible = problems(fake_distributions)
    message(told(incompatible), "new-slapo 1.0", "slapo-core>=9", "slapo-core 0.1.0", 'pip install "slapo-core>=9"')
    message(told(foreign), "evil-slapo 1.0", "belongs to slapo-tp", "pip uninstall evil-slapo")


def test_a_disabled_plugin_is_no_problem_and_a_wrong_setting_is(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    fake_distributions.install(acme())
    assert problems(fake_distributions, environ={"SLAPO_DISABLE_PLUGINS": "acme-slapo"}) == ()
    (problem,) = problems(fake_distributions, environ={"SLAPO_DISABLE_PLUGINS": "acme-slappo"})
    message(told(problem), "SLAPO_DISABLE_PLUGINS", "'acme-slappo'", "did you mean acme-slapo?")


def test_only_plugins_that_are_named_are_asked(fake_distributions: FakeEnvironment, message: Messages) -> None:
    fake_distributions.install(with_hooks("sick-slapo", SICK), with_hooks("odd-slapo", RAISING))
    assert problems(fake_distributions) == ()
    odd, sick, missing = problems(fake_distributions, ask=("odd-slapo", "sick-slapo", "no-slapo"))
    message(told(odd), "slapo_doctor of odd-slapo 1.0", "OSError: no such device", "SLAPO_DISABLE_PLUGINS=odd-slapo")
    assert sick == Problem("sick-slapo: the network is slow", "pip install fast-network")
    message(told(missing), "'no-slapo'", "did you mean odd-slapo or sick-slapo?")


def test_a_plugin_of_the_project_that_is_not_installed_is_answered_with_its_command(
    fake_distributions: FakeEnvironment,
) -> None:
    fake_distributions.install(acme("slapo-deepspeeds"))
    (problem,) = problems(fake_distributions, ask=("slapo-deepspeed",))
    assert problem == Problem("no plugin 'slapo-deepspeed' is installed", "pip install slapo-deepspeed")


FACT = "from slapo_core import Fact\n@hookimpl\ndef slapo_doctor():\n    return [Fact('network', 'eth0')]\n"


@pytest.mark.slow
def test_a_fact_of_a_plugin_is_no_problem(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(with_hooks("well-slapo", FACT), with_hooks("sick-slapo", SICK))
    environ = {"SLAPO_DISABLE_PLUGINS": OTHERS}
    well = fake_distributions.slapo("doctor", "--ask", "well-slapo", environ=environ)
    assert well.returncode == 0, well.stdout
    assert re.search(r"^well-slapo: network +eth0\n\nnothing is wrong\n\Z", well.stdout, re.MULTILINE), well.stdout
    sick = fake_distributions.slapo("doctor", "--ask", "sick-slapo", environ=environ)
    assert sick.returncode == 1
    facts, _, problems = sick.stdout.partition("\n\n")
    assert re.search(r"^sick-slapo: network +eth0\Z", facts, re.MULTILINE), facts
    assert problems == "1 problem:\n1. sick-slapo: the network is slow\n   fix: pip install fast-network\n"


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        ("'no network'", "'no network'"),
        ("['no network']", "'no network'"),
        ("iter([Fact('network', 'eth0'), 'slow'])", "'slow'"),
        ("5", "5"),
        ("[None]", "None"),
        ("{'network': 'eth0'}", "{'network': 'eth0'}"),
    ],
)
def test_doctor_answer_of_another_class_is_refused_with_the_correct_line(
    fake_distributions: FakeEnvironment, answer: str, got: str, message: Messages
) -> None:
    source = f"from slapo_core import Fact\n@hookimpl\ndef slapo_doctor():\n    return {answer}\n"
    fake_distributions.install(with_hooks("odd-slapo", source))
    report = diagnose(fake_distributions.registry(core="0.1.0"), ask=("odd-slapo",))
    (problem,) = report.problems
    message(problem.message, "slapo_doctor of odd-slapo", f"got {got}")
    assert problem.hint == 'yield slapo_core.Problem("the problem", hint="the command that fixes it")'
    assert Fact("odd-slapo: network", "eth0") not in report.facts


@pytest.mark.parametrize("value", ["", "0", "two"])
def test_a_malformed_number_of_threads_is_a_problem(
    fake_distributions: FakeEnvironment, monkeypatch: pytest.MonkeyPatch, value: str, message: Messages
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    (problem,) = problems(fake_distributions)
    message(told(problem), "OMP_NUM_THREADS", f"got {value!r}", "export OMP_NUM_THREADS=1")


@pytest.mark.slow
def test_an_environment_without_torch_is_reported_and_not_a_crash(tmp_path: Path) -> None:
    overlay = Overlay(tmp_path / "env")
    (overlay.site_packages / "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')\n")
    done = overlay.slapo("doctor", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "1. torch cannot be imported: libcudart.so.13" in done.stdout
    assert "   fix: pip install --force-reinstall torch" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "offered"), [("slapo pl", "plugins"), ("slapo plugins l", "list"), ("slapo verify --m", "--mesh")]
)
def test_the_shell_completes_commands(fake_distributions: FakeEnvironment, words: str, offered: str) -> None:
    command = str(Path(sys.executable).with_name("slapo"))
    by_name = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # of the shell, not by the parent process
    script = fake_distributions.run(command, "--show-completion", "bash", environ=by_name)
    assert script.returncode == 0, script.stderr
    assert "_SLAPO_COMPLETE=complete_bash" in script.stdout
    asked = {"_SLAPO_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = fake_distributions.run(command, environ=asked)
    assert offered in done.stdout.split(), done.stderr
