"""Two plugins that answer one hook: an error, unless the user chose one; the choice is a part of the schedule."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator

import pytest

import slapo_core as slapo
from slapo_core.errors import ArgumentError, HookError, ReplayError
from slapo_core.plugins.model import LOCAL_VERSION
from slapo_core.plugins.process import use_registry
from slapo_core.schedule.agreement import schedule_facts
from slapo_core.testing.conformance import check_plugin
from slapo_core.testing.distributions import FakeEnvironment
from tests.dists.cutting import LIVENESS, batch, cutter, liveness, reader
from tests.dists.healthy import with_hooks
from tests.messages import Messages

COUNTING = LIVENESS.replace("    last =", "    ASKED.append(partition)\n    last =") + "ASKED = []\n"
CHOICE = {"slapo_liveness": "acme-slapo"}


@pytest.fixture(autouse=True)
def installed(fake_distributions: FakeEnvironment) -> Iterator[None]:
    """A partition of its own, and two that say what passes: acme-slapo, and the installed slapo-pipeline."""
    fake_distributions.install(
        cutter(),
        liveness("acme-slapo", COUNTING),
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
    own = slapo.create_schedule(reader(), prefer=CHOICE)  # partition of slapo-pipeline
    own["blocks.1"].pipeline_split()
    assert verified(own) > 0


def test_two_answers_are_an_error_with_the_call_that_chooses(message: Messages) -> None:
    schedule = cut(plugins=["cut-slapo", "acme-slapo", "slapo-pipeline"])
    with pytest.raises(HookError) as caught:
        slapo.verify(schedule, batch())
    assert "acme-slapo 1.0 and by slapo-pipeline 0.1.0" in caught.value.message  # and the call, which is long
    message(caught.value.hint, 'prefer={"slapo_liveness": "acme-slapo"}')
    for other, asked in (("acme-slapo", True), ("slapo-pipeline", False)):
        chosen = cut(plugins=["acme-slapo", "slapo-pipeline"], prefer={"slapo_liveness": other})
        assert (verified(chosen) > 0) is asked


def test_the_choice_is_saved_replayed_and_agreed_about() -> None:
    schedule = cut(prefer={"slapo_liveness": "Acme_Slapo"})
    assert schedule.document()["prefer"] == CHOICE
    assert "prefer" not in cut().document()
    again = slapo.replay(reader(), schedule.to_json())
    assert again.prefer == CHOICE
    assert "acme-slapo" in again.hooks.active
    assert verified(again) > 0
    other = slapo.replay(reader(), schedule.to_json(), prefer={}, plugins=["slapo-pipeline"])
    assert other.prefer == {}
    assert verified(other) == 0
    facts = [{fact.what: fact.value for fact in schedule_facts(one)} for one in (schedule, other)]
    assert facts[0]["the preferred answers to hooks"] == "slapo_liveness: acme-slapo"
    assert facts[1]["the preferred answers to hooks"] == "none"
    document = json.loads(schedule.to_json()) | {"prefer": ["acme-slapo"]}
    with pytest.raises(ReplayError, match="no valid 'prefer'"):
        slapo.replay(reader(), document)


def test_the_chosen_plugin_stays_active_when_all_steps_are_undone() -> None:
    schedule = cut(plugins=[], prefer=CHOICE)
    schedule.undo(to=0)
    assert schedule.hooks.active == ("acme-slapo",)


@pytest.mark.parametrize(
    ("prefer", "word", "hint"),
    [
        ({"slapo_livenes": "acme-slapo"}, "'slapo_livenes'", "did you mean 'slapo_liveness'?"),
        ({"slapo_liveness": "acme-slap"}, "'acme-slap'", "did you mean acme-slapo or mute-slapo or cut-slapo?"),
        ({"slapo_check": "acme-slapo"}, "slapo_check collects", "slapo_initialize, slapo_liveness"),
        ({"slapo_liveness": "mute-slapo"}, "mute-slapo 1.0", 'prefer={"slapo_liveness": "slapo-pipeline"})'),
    ],
)
def test_a_choice_that_means_nothing_is_refused(
    prefer: dict[str, str], word: str, hint: str, message: Messages
) -> None:
    with pytest.raises(HookError) as caught:
        cut(prefer=prefer)
    message(caught, word)
    assert hint in str(caught.value.hint)


def test_a_choice_is_a_mapping(message: Messages) -> None:
    with pytest.raises(ArgumentError) as caught:
        cut(prefer=["acme-slapo"])
    message(caught, "prefer")


@pytest.mark.slow
def test_plugins_check_holds_the_two_hooks_to_what_they_say(fake_distributions: FakeEnvironment) -> None:
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
