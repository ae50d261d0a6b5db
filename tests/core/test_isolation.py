"""What a plugin does at import stays with that plugin."""

from __future__ import annotations

import warnings

import pytest

from slapo_core.errors import UnusablePluginError
from slapo_testing.distributions import FakeEnvironment
from tests.dists.healthy import acme
from tests.messages import Messages


def test_a_plugin_that_keeps_quiet_causes_no_warning(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fake_distributions.registry().load("pad")


def test_the_users_interrupt_is_not_contained(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme(before=("raise KeyboardInterrupt",)))
    registry = fake_distributions.registry()
    with pytest.raises(KeyboardInterrupt):
        registry.load("pad")
    assert [plugin.state for plugin in registry.plugins] == ["ok"]


def test_the_cause_of_a_failed_import_is_chained(fake_distributions: FakeEnvironment, message: Messages) -> None:
    fake_distributions.install(acme(before=("import nothing_of_that_name",)))
    with pytest.raises(UnusablePluginError) as caught:
        fake_distributions.registry().load("pad")
    message(caught, "'acme.pad' of acme-slapo 1.0 (acme_slapo:Thing)", "'nothing_of_that_name'", "--force-reinstall")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_plugin_may_use_slapo_while_it_is_imported(fake_distributions: FakeEnvironment) -> None:
    use = (
        "import slapo_core",
        "from slapo_core.plugins import current_registry",
        "current_registry().names('primitives')",
        "slapo_core.Equivalence, slapo_core.hookimpl, slapo_core.Layout, slapo_core.PluginError",
    )
    fake_distributions.install(acme(before=use))
    assert fake_distributions.registry().load("pad").name == "acme.pad"


def test_a_class_imported_past_the_registry_is_refused_when_its_plugin_is_disabled(
    fake_distributions: FakeEnvironment,
) -> None:
    fake_distributions.install(acme())
    import acme_slapo  # type: ignore[import-not-found]

    enabled = fake_distributions.registry()
    assert enabled.provider(acme_slapo.Thing()) == ("acme-slapo", "1.0")
    assert enabled.provider(acme_slapo.Thing) == ("acme-slapo", "1.0")
    with pytest.raises(UnusablePluginError):
        fake_distributions.registry({"SLAPO_DISABLE_PLUGINS": "acme-slapo"}).provider(acme_slapo.Thing)
