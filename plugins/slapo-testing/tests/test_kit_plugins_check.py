"""``slapo plugins check`` runs the kit without pytest: rules, documentation, imports, and the cases a plugin ships."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from slapo_core import DISTRIBUTIONS
from slapo_core.cli.main import make_app
from slapo_testing import CHECKS, FakeDistribution, FakeEnvironment
from slapo_testing.conformance import Finding, check_plugin
from tests.dists.healthy import acme, with_hooks
from tests.messages import Messages
from tests.tiers import sampled

MARK = '''
from dataclasses import dataclass

import slapo_core as slapo


@dataclass(frozen=True)
class Mark(slapo.Primitive):
    """Set an attribute of the module.

    Args:
        text: its value.

    rewrite: ``module`` -> ``module`` with ``module.mark == text``
    """

    name = "marks.mark"
    equivalence = slapo.Equivalence.EXACT
    text: str = "marked"

    def preconditions(self, node):
        if not self.text:
            yield slapo.Violation("text must not be empty", 'mark("something")')

    def apply(self, node, edit):
        edit.set_attribute(node, "mark", self.text)
        {EXTRA}


def slapo_cases():
    import torch
    from torch import nn

    from slapo_testing import Case

    return [Case(Mark("a"), model=lambda: nn.Linear(4, 4), inputs=lambda: (torch.randn(2, 4),), rejects=[Mark("")])]
'''


def marks(extra: str = "pass", source: str = MARK) -> FakeDistribution:
    return FakeDistribution(
        "slapo-marks",
        "2.1",
        {"slapo.v1.primitives": {"marks.mark": "slapo_marks:Mark"}},
        {"slapo_marks": source.replace("{EXTRA}", extra)},
        ("slapo-core>=0.1",),
    )


def findings(environment: FakeEnvironment, *distributions: FakeDistribution) -> list[Finding]:
    environment.install(*distributions)
    registry = environment.registry()
    return [finding for plugin in registry.plugins for finding in check_plugin(plugin, registry)]


@pytest.mark.slow
def test_a_good_plugin_passes_and_its_cases_are_run(fake_distributions: FakeEnvironment) -> None:
    told: list[str] = []
    fake_distributions.install(marks())
    registry = fake_distributions.registry()
    found = list(check_plugin(registry.plugins[0], registry, progress=told.append))
    assert [f"{item.subject}: {item.check}: {item.outcome}" for item in found] == [
        "slapo-marks: state: passed",
        "slapo-marks: light_import: passed",
        "marks.mark: load: passed",
        "marks.mark: documentation: passed",
        "marks.mark: json_of_defaults: passed",
        "marks.mark [mark]: entry_point_agrees: passed",
        "marks.mark [mark]: json_round_trip: passed",
        "marks.mark [mark]: preconditions_mutate_nothing: passed",
        "marks.mark [mark]: rejected_cases_change_nothing: passed",
        "marks.mark [mark]: faults_roll_back: passed",
        "marks.mark [mark]: undo_is_exact: passed",
        "marks.mark [mark]: deepcopy_runs_on_itself: passed",
        "marks.mark [mark]: mesh_of_one_is_free: skipped",
        "marks.mark [mark]: forward_and_gradients_on_1_rank: passed",
        "marks.mark [mark]: forward_and_gradients_on_2_ranks: passed",
    ]
    assert told[0] == "slapo-marks: imports"
    assert told[-1] == "slapo-marks: marks.mark [mark]: forward_and_gradients_on_2_ranks"


BAD = {
    "state": (
        acme(requires=("slapo-core>=99",)),
        "acme-slapo: state",
        "slapo-core>=99",
    ),
    "prints": (acme(before=("print('hello')",)), "acme-slapo: light_import", "it prints 'hello'"),
    "asks": (acme(before=("input()",)), "acme-slapo: light_import", "the import raised EOFError"),
    "patches torch": (
        acme(before=("import torch", "torch.nn.functional.linear = None")),
        "acme-slapo: light_import",
        "torch.nn.functional.linear (",
    ),
    "exits": (acme(before=("import os; os._exit(7)",)), "acme-slapo: light_import", "ended with exit code 7"),
    "class": (
        FakeDistribution(
            "acme-slapo",
            "1.0",
            {"slapo.v1.primitives": {"acme.pad": "acme_slapo:Thing"}},
            {"acme_slapo": "class Thing: pass"},
        ),
        "acme.pad: load",
        "subclass of slapo_core.primitive.Primitive",
    ),
    "names": (acme(bare="undo"), "acme-slapo: state", "choose another name"),
    "documentation": (acme(body=("size: int = 1",)), "acme.pad: documentation", "'size'"),
    "defaults": (
        acme(body=("size: object = len",)),
        "acme.pad: json_of_defaults",
        "argument 'size' of pad()",
    ),
    "hooks": (
        with_hooks("acme-slapo", "@hookimpl\ndef slapo_aplied(node):\n    pass\n"),
        "acme_slapo: hooks",
        "unknown hook 'slapo_aplied'",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(BAD))
def test_faults_of_a_plugin_are_found(fake_distributions: FakeEnvironment, name: str, message: Messages) -> None:
    distribution, where, word = BAD[name]
    failed = {
        f"{item.subject}: {item.check}": item
        for item in findings(fake_distributions, distribution)
        if item.outcome == "failed"
    }
    assert where in failed, failed
    message(failed[where].message, word)
    if name in ("class", "defaults"):
        assert "Traceback (most recent call last)" in failed[where].traceback


@pytest.mark.slow
def test_module_that_ends_its_process_is_not_imported_here(fake_distributions: FakeEnvironment) -> None:
    found = findings(fake_distributions, acme(before=("import os; os._exit(7)",)))
    assert [item.check for item in found] == ["state", "light_import"]


@pytest.mark.slow
def test_module_that_patches_torch_is_not_imported_here(fake_distributions: FakeEnvironment) -> None:
    linear = torch.nn.functional.linear
    found = findings(fake_distributions, acme(before=("import torch", "torch.nn.functional.linear = None")))
    assert [item.check for item in found] == ["state", "light_import"]
    assert torch.nn.functional.linear is linear


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "words"),
    [
        ("return ['a']", ("ArgumentError: slapo_cases()", "got 'a'")),
        ("raise OSError('no data')", ("OSError: no data",)),
    ],
)
def test_failing_cases_function_is_a_failure(
    fake_distributions: FakeEnvironment, cases: str, words: tuple[str, ...], message: Messages
) -> None:
    source = f"{MARK.partition('def slapo_cases')[0]}def slapo_cases():\n    {cases}\n"
    (failed,) = (item for item in findings(fake_distributions, marks(source=source)) if item.outcome == "failed")
    assert (failed.subject, failed.check) == ("slapo_marks.slapo_cases()", "cases")
    message(failed.message, *words)


@pytest.mark.slow
def test_cases_of_an_entry_point_replace_cases_of_modules(
    fake_distributions: FakeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slapo_testing.conformance.CHECKS", CHECKS[:1])
    code, _, cases = MARK.replace("{EXTRA}", "pass").partition("def slapo_cases")
    points = {
        "slapo.v1.primitives": {"marks.mark": "slapo_marks:Mark"},
        "slapo.v1.cases": {"marks": "slapo_marks_cases:slapo_cases"},
        "slapo.v1.unheard": {"marks": "slapo_marks:Nothing"},
    }
    modules = {
        "slapo_marks": f"{code}def slapo_cases():\n    raise OSError('not asked')\n",
        "slapo_marks_cases": f"from slapo_marks import Mark\nimport slapo_core\ndef slapo_cases{cases}",
    }
    fake_distributions.install(FakeDistribution("slapo-marks", "2.1", points, modules))
    registry = fake_distributions.registry(with_installed=True)
    found = list(check_plugin(registry.plugin("slapo-marks"), registry))
    assert [item.subject for item in found if item.outcome == "failed"] == []
    assert "marks.mark [mark]" in {item.subject for item in found}
    (unheard,) = (item for item in found if item.subject == "unheard")
    assert (unheard.outcome, unheard.message) == ("skipped", "no installed distribution uses unheard")


@pytest.mark.slow
def test_plugin_without_cases_is_reported_as_unchecked(fake_distributions: FakeEnvironment, message: Messages) -> None:
    last = findings(fake_distributions, acme())[-1]
    assert (last.subject, last.check, last.outcome) == ("acme.pad", "cases", "skipped")
    message(last.message, "acme_slapo", "slapo_cases()")


@pytest.mark.slow
def test_a_case_that_fails_is_found(fake_distributions: FakeEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = tuple(check for check in CHECKS if check.name in ("undo_is_exact", "mesh_of_one_is_free"))
    monkeypatch.setattr("slapo_testing.conformance.CHECKS", chosen)
    skipped, failed = findings(fake_distributions, marks("node.module.other = 1"))[-2:][::-1]
    assert (failed.subject, failed.check, failed.outcome) == ("marks.mark [mark]", "undo_is_exact", "failed")
    assert "(root).other: added (1)" in failed.message
    assert "CheckError" in failed.traceback
    assert (skipped.outcome, skipped.message) == ("skipped", "the case has no mesh=(...)")


@pytest.mark.slow
def test_command_prints_table_and_failures_and_exits_with_1(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme(body=("size: object = len",)), acme("other-slapo", namespace="other"))
    done = fake_distributions.slapo("plugins", "check", "acme-slapo", "--traceback")
    assert done.returncode == 1, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["PLUGIN", "WHAT", "CHECK", "RESULT", "REMARK"]
    assert ["acme-slapo", "1.0", "acme.pad", "json_of_defaults", "failed", "see", "below"] in rows
    assert "other" not in done.stdout
    assert "\nacme-slapo: acme.pad: json_of_defaults\nJSON cannot store the arguments\n  required: " in done.stdout
    assert "Traceback (most recent call last)" in done.stdout
    assert "SerializationError" in done.stdout
    assert done.stderr == "checking acme-slapo: imports\n"
    assert done.stdout.splitlines()[-1] == "6 checks of acme-slapo 1.0: 2 failed, 1 skipped"


@pytest.mark.breadth
@pytest.mark.slow
def test_command_prints_json_for_all_plugins(
    fake_distributions: FakeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slapo_testing.conformance.CHECKS", CHECKS[:1])
    broken = acme("bust-slapo", namespace="bust", before=("1 / 0",))
    fake_distributions.install(acme(), broken)
    ours = [name for name in DISTRIBUTIONS if name not in ("slapo-core", "slapo-runtime", "slapo-testing")]
    monkeypatch.setenv("SLAPO_DISABLE_PLUGINS", ",".join(ours))
    done = CliRunner().invoke(make_app(), ["plugins", "check", "--json"])
    assert done.exit_code == 1, done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"] is False
    plugins = {plugin["name"]: plugin for plugin in answer["plugins"]}
    assert {name: plugin["ok"] for name, plugin in plugins.items() if name not in ours} == {
        "acme-slapo": True,
        "bust-slapo": False,
        "slapo-core": True,
        "slapo-runtime": True,
        "slapo-testing": True,
    }
    assert plugins["acme-slapo"]["checks"][0] == {
        "check": "state",
        "message": "",
        "outcome": "passed",
        "subject": "acme-slapo",
    }
    failed = [check for check in plugins["bust-slapo"]["checks"] if check["outcome"] == "failed"]
    (text,) = (check["message"] for check in failed)
    assert "ZeroDivisionError" in text


@pytest.mark.slow
def test_an_unknown_plugin_is_an_error_with_a_suggestion(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    fake_distributions.install(acme())
    done = fake_distributions.slapo("plugins", "check", "acme-slap")
    assert (done.returncode, done.stdout) == (2, "")
    message(done.stderr, "error: no plugin 'acme-slap'", "\n  hint: did you mean acme-slapo?")
