"""Every plugin has one of four states, with its reason and its remedy, before anything is imported."""

from __future__ import annotations

import pytest
from torch import nn

from slapo_core.errors import UnusablePluginError
from slapo_core.plugins.metadata import Plugin
from slapo_core.schedule.schedule import Schedule
from slapo_testing.distributions import FakeDistribution, FakeEnvironment
from tests.dists.healthy import acme
from tests.messages import Messages


def only(environment: FakeEnvironment, **options: object) -> Plugin:
    (plugin,) = environment.registry(**options).plugins  # type: ignore[arg-type]
    return plugin


@pytest.mark.parametrize(
    ("line", "fits"),
    [
        ("slapo-core", True),
        ("slapo-core>=0.1", True),
        ("slapo_core (>=0.1,<1)", True),
        ("SLAPO.core<0.1", False),
        ("slapo-core>=2; python_version < '3'", True),
        ("slapo-core>=2; extra == 'test'", True),
        ("slapo-core-extras>=9", True),
        ("slapo-core[test]>=9", False),
    ],
)
def test_the_required_range_is_held_against_core(fake_distributions: FakeEnvironment, line: str, fits: bool) -> None:
    fake_distributions.install(acme(requires=(line,)))
    assert only(fake_distributions, core="0.1.0").state == ("ok" if fits else "unusable")


def test_a_prerelease_of_core_satisfies_the_range(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme(requires=("slapo-core>=0.1",)))
    assert only(fake_distributions, core="0.2.0rc1").state == "ok"


def test_an_incompatible_plugin_says_what_it_needs_when_it_is_used(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    fake_distributions.install(acme(requires=("slapo-core>=2",), before=("raise SystemExit('was imported')",)))
    registry = fake_distributions.registry(core="0.1.0")
    with pytest.raises(UnusablePluginError) as caught:
        registry.load("pad")
    message(caught, "'acme.pad' of acme-slapo 1.0", "slapo-core 0.1.0", 'pip install "slapo-core>=2"')


def test_a_disabled_plugin_says_which_setting_disabled_it(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    fake_distributions.install(acme())
    registry = fake_distributions.registry({"SLAPO_DISABLE_PLUGINS": "Acme_Slapo"})
    with pytest.raises(UnusablePluginError) as caught:
        registry.resolve("primitives", "pad")
    message(caught, "'acme.pad' of acme-slapo 1.0", "disabled", "remove acme-slapo from SLAPO_DISABLE_PLUGINS")
    assert registry.names("primitives") == ()
    assert registry.namespaces() == ()


def test_asking_whether_a_node_has_a_primitive_raises_nothing(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme())
    registry = fake_distributions.registry({"SLAPO_DISABLE_PLUGINS": "acme-slapo"})
    sch = Schedule(nn.Linear(1, 1), registry=registry)
    assert not hasattr(sch, "pad")
    assert not hasattr(sch.root, "pad")
    assert not hasattr(Schedule.__new__(Schedule), "mesh")


def test_a_plugin_says_which_rule_it_breaks(fake_distributions: FakeEnvironment, message: Messages) -> None:
    fake_distributions.install(acme(bare="lambda"))
    with pytest.raises(UnusablePluginError) as caught:
        fake_distributions.registry().resolve("primitives", "acme.lambda")
    message(caught, "'acme.lambda' of acme-slapo 1.0", "must be '<namespace>.<name>'", "pip uninstall acme-slapo")


def test_disabling_silences_an_unreadable_plugin(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(FakeDistribution("acme-slapo", None, {"slapo.v1.primitives": {"acme.pad": "a:B"}}))
    assert only(fake_distributions).state == "unusable"
    assert only(fake_distributions, environ={"SLAPO_DISABLE_PLUGINS": "acme-slapo"}).state == "disabled"


def test_a_broken_import_changes_the_state_and_spares_the_other_names(fake_distributions: FakeEnvironment) -> None:
    good = acme()
    points = {"slapo.v1.primitives": {"acme.pad": "acme_slapo:Thing", "acme.cut": "acme_cut:Cut"}}
    fake_distributions.install(
        FakeDistribution("acme-slapo", "1.0", points, {**good.modules, "acme_cut": "import acme_nothing"})
    )
    registry = fake_distributions.registry()
    with pytest.raises(UnusablePluginError):
        registry.load("cut")
    (plugin,) = registry.plugins
    assert plugin.state == "unusable"
    assert plugin.reason.startswith("primitive 'acme.cut': ModuleNotFoundError: ")
    assert registry.names("primitives") == ("acme.pad",)
    assert registry.load("pad").name == "acme.pad"
