"""Schedules are found by the model's class; ``slapo models`` lists and shows them; third parties add theirs."""

from __future__ import annotations

import inspect
import json
import sys

import pytest
from torch import nn
from typer.testing import CliRunner

import slapo_core as slapo
import slapo_models
from slapo_core.plugins import use_registry
from slapo_models.families import ModelCommands
from slapo_testing.distributions import FakeDistribution, FakeEnvironment
from tests.messages import Messages

from .families import FAMILIES

ACME = "def acme(sch, *, stages=1):\n    '''Schedule it.'''\n    sch.root.checkpoint()\n"


def acme(name: str = "acme-slapo", *, model: str = "acme_nets.Net") -> FakeDistribution:
    module = name.replace("-", "_")
    return FakeDistribution(name, "1.0", {"slapo.v1.models": {model: f"{module}:acme"}}, {module: ACME})


def network(package: str, *, base: type[nn.Module] = nn.Module) -> nn.Module:
    """An instance of a class ``Net`` of a package that is not there."""
    return type("Net", (base,), {"__module__": f"{package}.models"})()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_schedule_of_every_family_is_found_by_class(name: str) -> None:
    family = FAMILIES[name]
    if name == "wide_resnet":
        model: nn.Module = type("ResNet", (nn.Module,), {"__module__": "torchvision.models.resnet"})()
    else:
        model = family.make()
    assert slapo_models.schedule_for(model) is family.schedule


def test_a_subclass_has_the_schedule_of_its_base_and_other_libraries_classes_have_none(message: Messages) -> None:
    llama = type(FAMILIES["llama"].make())
    mine = type("MyLlama", (llama,), {"__module__": "__main__"})
    assert slapo_models.schedule_for(mine.__new__(mine)) is slapo_models.llama
    other = type("LlamaForCausalLM", (nn.Module,), {"__module__": "other.models"})
    with pytest.raises(slapo.UnknownNameError) as unknown:
        slapo_models.schedule_for(other())
    message(unknown, "other.LlamaForCausalLM")


def test_a_third_party_registers_its_own_which_is_imported_when_it_is_asked_for(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    fake_distributions.install(acme(), acme("rival-slapo", model="acme_nets.Other"))
    fake_distributions.install(acme("wrong-slapo", model="transformers.LlamaForCausalLM"))
    with use_registry(fake_distributions.registry(with_installed=True)) as registry:
        runner, app = CliRunner(), ModelCommands().app()
        listed = json.loads(runner.invoke(app, ["list", "--json"]).stdout)
        assert {"acme_nets.Net", "acme_nets.Other"} < {each["model"] for each in listed}
        assert not {"acme_slapo", "rival_slapo"} & sys.modules.keys()
        function = slapo_models.schedule_for(network("acme_nets"))
        assert inspect.getsource(function) == ACME
        assert "rival_slapo" not in sys.modules
        # The project's own names stay, as in every other group.
        assert slapo_models.schedule_for(FAMILIES["llama"].make()) is slapo_models.llama
        assert registry.plugin("wrong-slapo").state == "conflict"

        shown = runner.invoke(app, ["show", "Net"]).stdout
        assert shown.startswith("acme  (acme-slapo 1.0, acme_slapo:acme)\nfor acme_nets.Net\n")
        assert ACME.rstrip() in shown
        ambiguous = runner.invoke(app, ["show", "acme"]).exception
        assert isinstance(ambiguous, slapo.UnknownNameError)
        message(ambiguous, "acme_nets.Net or acme_nets.Other")


def test_two_third_parties_with_one_class_are_a_conflict_and_neither_is_used(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    fake_distributions.install(acme(), acme("rival-slapo"))
    with use_registry(fake_distributions.registry(with_installed=True)):
        with pytest.raises(slapo.UnusablePluginError) as conflict:
            slapo_models.schedule_for(network("acme_nets"))
        message(conflict, "acme-slapo 1.0 and rival-slapo 1.0")


@pytest.mark.parametrize("name", ["Net", "acme.nets.Net", "acme_nets.Net-1"])
def test_names_are_a_package_and_a_class(name: str, fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme(model=name))
    plugin = fake_distributions.registry(with_installed=True).plugin("acme-slapo")
    assert plugin.state == "unusable"
    assert "'<package>.<Class>'" in str(plugin.reason)


def test_the_command_lists_every_schedule_and_shows_the_source_of_one() -> None:
    runner, app = CliRunner(), ModelCommands().app()
    rows = [line.split() for line in runner.invoke(app, ["list"]).stdout.splitlines()]
    assert rows[0] == ["SCHEDULE", "MODEL", "PLUGIN"]
    assert {row[0] for row in rows[1:]} == FAMILIES.keys()
    shown = json.loads(runner.invoke(app, ["show", "qwen3", "--json"]).stdout)
    assert shown["models"] == ["transformers.Qwen3ForCausalLM"]
    assert shown["source"] == inspect.getsource(slapo_models.qwen3)
    assert shown["documentation"] == inspect.getdoc(slapo_models.qwen3)
