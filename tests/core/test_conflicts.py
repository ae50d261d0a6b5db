"""The same full name from two distributions takes that name out of use, and nothing else."""

from __future__ import annotations

import pytest
from torch import nn

from slapo_core.errors import UnusablePluginError
from slapo_core.plugins import Registry
from slapo_core.schedule.schedule import Schedule
from slapo_testing.distributions import FakeDistribution, FakeEnvironment, primitive_source
from tests.messages import Messages


def provider(name: str, *bares: str) -> FakeDistribution:
    module = name.replace("-", "_")
    sources = {f"{module}_{bare}": primitive_source(f"acme.{bare}") for bare in bares}
    points = {f"acme.{bare}": f"{module}_{bare}:Thing" for bare in bares}
    return FakeDistribution(name, "1.0", {"slapo.v1.primitives": points}, sources)


@pytest.fixture
def registry(fake_distributions: FakeEnvironment) -> Registry:
    fake_distributions.install(provider("first", "pad", "cut"), provider("second", "pad", "join"))
    return fake_distributions.registry()


def test_conflict_names_both_plugins_and_the_entry(registry: Registry, message: Messages) -> None:
    first, second = registry.plugins
    assert (first.state, second.state) == ("conflict", "conflict")
    message(first.reason, "'acme.pad'", "second")
    message(first.remedy, "SLAPO_DISABLE_PLUGINS=first", "SLAPO_DISABLE_PLUGINS=second")


@pytest.mark.parametrize("name", ["pad", "acme.pad"])
def test_conflicting_plugins_are_not_used(registry: Registry, name: str, message: Messages) -> None:
    with pytest.raises(UnusablePluginError) as caught:
        registry.resolve("primitives", name)
    message(caught, "'acme.pad'", "first 1.0 and second 1.0", "SLAPO_DISABLE_PLUGINS=first")
    assert caught.value.state == "conflict"


def test_asking_whether_a_node_has_the_name_raises_nothing(registry: Registry) -> None:
    sch = Schedule(nn.Linear(1, 1), registry=registry)
    assert not hasattr(sch, "pad")
    assert not hasattr(sch.root, "pad")
    assert hasattr(sch.root, "cut")


def test_their_other_names_work(registry: Registry) -> None:
    assert registry.names("primitives") == ("acme.cut", "acme.join")
    assert registry.load("cut").name == "acme.cut"
    assert registry.load("acme.join").name == "acme.join"


def test_disabling_one_ends_the_conflict(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(provider("first", "pad"), provider("second", "pad"))
    registry = fake_distributions.registry({"SLAPO_DISABLE_PLUGINS": "second"})
    assert registry.resolve("primitives", "pad").distribution == "first"
    assert [plugin.state for plugin in registry.plugins] == ["ok", "disabled"]


def test_two_distributions_may_share_a_namespace(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(provider("first", "pad"), provider("second", "join"))
    registry = fake_distributions.registry()
    assert [plugin.state for plugin in registry.plugins] == ["ok", "ok"]
    assert registry.names("primitives") == ("acme.join", "acme.pad")


def test_an_installed_distribution_keeps_the_namespace_of_its_name(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    fake_distributions.install(provider("first", "pad"))
    assert [plugin.state for plugin in fake_distributions.registry().plugins] == ["ok"]
    fake_distributions.install(provider("slapo-acme", "join"))
    first, owner = fake_distributions.registry().plugins
    assert (first.state, owner.state) == ("unusable", "ok")
    message(first.reason, "namespace 'acme' of primitive 'acme.pad' belongs to slapo-acme")
