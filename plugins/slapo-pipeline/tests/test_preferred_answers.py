"""Two plugins that answer one hook: an error, unless one of the answers is a default; a schedule names one of them."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator

import pytest

import slapo_core as slapo
from slapo_core.errors import HookError
from slapo_core.internals import Internals
from slapo_core.plugins import LOCAL_VERSION, use_registry
from slapo_testing.conformance import check_plugin
from slapo_testing.distributions import FakeEnvironment
from tests.dists.cutting import LIVENESS, batch, cutter, liveness, reader
from tests.dists.healthy import with_hooks
from tests.messages import Messages

COUNTING = LIVENESS.replace("    last =", "    ASKED.append(partition)\n    last =") + "ASKED = []\n"


@pytest.fixture(autouse=True)
def installed(fake_distributions: FakeEnvironment) -> Iterator[None]:
    """A partition of its own, and three that say what passes: two, and slapo-pipeline by default."""
    fake_distributions.install(
        cutter(),
        liveness("acme-slapo", COUNTING),
        liveness("beta-slapo", LIVENESS),
        with_hooks("mute-slapo", "@hookimpl\ndef slapo_doctor(): return []\n"),
    )
    with use_registry(fake_distributions.registry(with_installed=True)):
        yield


def cut(**arguments: object) -> slapo.Schedule:
    schedule = slapo.create_schedule(reader(), **{"plugins": ["cut-slapo", "slapo-pipeline"], **arguments})  # type: ignore[arg-type]
    schedule["blocks.1"].after()
    return schedule


def verified(schedule: slapo.Schedule) -> int:
    """How often acme-slapo was asked meanwhile."""
    sys.modules["acme_slapo_hooks"].ASKED.clear() if "acme_slapo_hooks" in sys.modules else None
    slapo.verify(schedule, batch(), optimizer_steps=0)
    return len(sys.modules["acme_slapo_hooks"].ASKED) if "acme_slapo_hooks" in sys.modules else 0


def test_each_of_the_two_hooks_can_be_a_third_partys() -> None:
    assert verified(cut()) == 0  # partition of cut-slapo, liveness of slapo-pipeline
    assert verified(cut(plugins=["cut-slapo", "acme-slapo"])) > 0
    own = slapo.create_schedule(reader(), plugins=["acme-slapo"])  # partition of slapo-pipeline
    own["blocks.1"].pipeline_split()
    assert verified(own) > 0


PARTITION = """
from slapo_core import hookimpl

ASKED = []

@hookimpl
def slapo_partition(schedule, inputs, batch_axes):
    from slapo_pipeline.partition.hook import slapo_partition as default

    ASKED.append(schedule)
    found = default(schedule, inputs, batch_axes)
    return None if LEFT else found

LEFT = []
"""


def test_a_partition_of_a_third_party_replaces_the_default(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(with_hooks("part-slapo", PARTITION), with_hooks("more-slapo", PARTITION))
    with use_registry(fake_distributions.registry(with_installed=True)):
        own = slapo.create_schedule(reader(), plugins=["part-slapo"])
        own["blocks.1"].pipeline_split()
        verified(own)
        theirs = sys.modules["part_slapo_hooks"]
        assert theirs.ASKED
        theirs.LEFT.append(True)  # it leaves this model to slapo-pipeline
        verified(own)
        both = slapo.create_schedule(reader(), plugins=["part-slapo", "more-slapo"])
        both["blocks.1"].pipeline_split()
        theirs.LEFT.clear()
        with pytest.raises(HookError, match=r"by more-slapo .* and by part-slapo"):
            slapo.verify(both, batch())


def test_two_answers_to_a_hook_are_refused(message: Messages) -> None:
    schedule = cut(plugins=["cut-slapo", "acme-slapo", "beta-slapo", "slapo-pipeline"])
    with pytest.raises(HookError) as caught:
        slapo.verify(schedule, batch())
    message(caught.value.message, "acme-slapo 1.0 and by beta-slapo 1.0")
    message(caught.value.hint, "create_schedule(plugins=...)", "SLAPO_DISABLE_PLUGINS=beta-slapo")
    for other, asked in (("acme-slapo", True), ("beta-slapo", False)):
        chosen = cut(plugins=[other, "slapo-pipeline"])
        assert (verified(chosen) > 0) is asked


def test_a_schedule_saved_with_a_choice_is_replayed_without_it() -> None:
    document = json.loads(cut().to_json()) | {"prefer": {"slapo_liveness": "acme-slapo"}}
    again = slapo.replay(reader(), document)
    assert Internals(again).hooks.active == ("cut-slapo",)
    assert again.document() == cut().document() | {"records": again.document()["records"]}
    named = slapo.replay(reader(), document, plugins=["acme-slapo"])
    assert verified(named) > 0


@pytest.mark.slow
def test_plugins_check_checks_partition_and_liveness(fake_distributions: FakeEnvironment) -> None:
    wrong = LIVENESS.replace("max(value.consumers", "min(value.consumers")
    always = "@hookimpl\ndef slapo_partition(schedule): return 1\n"
    silent = "@hookimpl\ndef slapo_liveness(partition): return None\n"
    fake_distributions.install(
        liveness("wrong-slapo", wrong), with_hooks("always-slapo", always), with_hooks("silent-slapo", silent)
    )
    registry = fake_distributions.registry(with_installed=True)
    found = {}
    for plugin in registry.plugins:
        if plugin.name in ("wrong-slapo", "always-slapo", "silent-slapo", "acme-slapo", "cut-slapo", "slapo-pipeline"):
            checked = check_plugin(dataclasses.replace(plugin, version=LOCAL_VERSION), registry)
            found.update({(plugin.name, each.check): each for each in checked if each.check.startswith("slapo_")})
    outcomes = {key: each.outcome for key, each in found.items()}
    assert outcomes == {
        ("acme-slapo", "slapo_liveness"): "passed",
        ("always-slapo", "slapo_partition"): "failed",
        ("cut-slapo", "slapo_partition"): "passed",
        ("silent-slapo", "slapo_liveness"): "skipped",
        ("slapo-pipeline", "slapo_liveness"): "passed",
        ("slapo-pipeline", "slapo_partition"): "passed",
        ("wrong-slapo", "slapo_liveness"): "failed",
    }
    assert "stage 2 reads 'mask'" in found["wrong-slapo", "slapo_liveness"].message
    assert "cuts a model" in found["always-slapo", "slapo_partition"].message
