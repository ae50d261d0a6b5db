"""A name means one thing, or the error says what to write."""

from __future__ import annotations

import pytest
from torch import nn

import slapo_core as slapo
from slapo_core.errors import UnknownNameError, UnusablePluginError
from slapo_core.plugins import Registry, use_registry
from slapo_core.plugins.metadata import FIRST_PARTY, MEMBERS
from slapo_core.schedule.sugar import bound_primitive
from slapo_testing.distributions import FakeDistribution, FakeEnvironment
from tests.dists.healthy import acme
from tests.messages import Messages


@pytest.fixture
def two(fake_distributions: FakeEnvironment) -> FakeEnvironment:
    fake_distributions.install(acme(), acme("beta-slapo", namespace="beta"))
    return fake_distributions


def test_bare_and_full_names_resolve_when_unique(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme())
    registry = fake_distributions.registry()
    assert registry.resolve("primitives", "pad") == registry.resolve("primitives", "acme.pad")


def test_an_ambiguous_bare_name_lists_both_providers_and_the_two_exits(two: FakeEnvironment, message: Messages) -> None:
    registry = two.registry()
    with pytest.raises(UnusablePluginError) as caught:
        registry.resolve("primitives", "pad", path="encoder.fc1")
    message(caught, "'pad'", "'acme.pad' (acme-slapo 1.0)", "'beta.pad' (beta-slapo 1.0)", "full name", "disable one")
    assert caught.value.state == "conflict"
    assert caught.value.path == "encoder.fc1"
    assert registry.bare_names("primitives") == ()
    assert registry.names("primitives") == ("acme.pad", "beta.pad")


def test_each_of_the_two_exits_works(two: FakeEnvironment) -> None:
    assert two.registry().resolve("primitives", "beta.pad").distribution == "beta-slapo"
    disabled = two.registry({"SLAPO_DISABLE_PLUGINS": "beta-slapo"})
    assert disabled.resolve("primitives", "pad").distribution == "acme-slapo"


def test_a_failed_import_does_not_hand_its_bare_name_to_another_plugin(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme(before=("1 / 0",)), acme("beta-slapo", namespace="beta"))
    registry = fake_distributions.registry()
    with pytest.raises(Exception, match="ZeroDivisionError"):
        registry.load("acme.pad")
    with pytest.raises(UnusablePluginError):
        registry.resolve("primitives", "pad")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pda", "did you mean 'pad'?"),
        ("acme.pda", "did you mean 'acme.pad'?"),
        ("xyz", f"`slapo primitives` shows the installed names; not installed: {', '.join(FIRST_PARTY)}"),
        ("shard", "pip install slapo-tp"),
        ("tp.anything", "pip install slapo-tp"),
        ("fusion.anything", "pip install slapo-fusion"),
        ("pipeline.anything", "pip install slapo-pipeline"),
        ("megatron.anything", "pip install slapo-megatron"),
        ("tp", "pip install slapo-tp"),
    ],
)
def test_an_unknown_name_says_what_to_do(
    fake_distributions: FakeEnvironment, name: str, hint: str, message: Messages
) -> None:
    fake_distributions.install(acme())
    with pytest.raises(UnknownNameError) as caught:
        fake_distributions.registry().resolve("primitives", name)
    message(caught, f"primitive '{name}'")
    assert caught.value.hint == hint


def test_an_unknown_dialect_says_so(fake_distributions: FakeEnvironment, message: Messages) -> None:
    fake_distributions.install(acme())
    registry = fake_distributions.registry()
    with pytest.raises(UnknownNameError) as caught:
        registry.resolve("dialects", "deepspeed")
    message(caught, "dialect 'deepspeed'", "pip install slapo-deepspeed")


def test_a_bare_name_that_is_anothers_namespace_is_never_guessed(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme(bare="beta"), acme("beta-slapo", namespace="beta", bare="beta"))
    registry = fake_distributions.registry()
    with pytest.raises(UnusablePluginError):
        registry.resolve("primitives", "beta")
    assert registry.resolve("primitives", "acme.beta").distribution == "acme-slapo"
    alone = fake_distributions.registry({"SLAPO_DISABLE_PLUGINS": "acme-slapo"})
    assert alone.resolve("primitives", "beta").name == "beta.beta"


def test_kinds_without_namespace_use_plain_names(fake_distributions: FakeEnvironment) -> None:
    source = "from slapo_torch.dialect import TorchDialect\nclass Fast(TorchDialect):\n    name = 'fast'\n"
    fake_distributions.install(
        FakeDistribution("acme-fast", "1.0", {"slapo.v1.dialects": {"fast": "acme_fast:Fast"}}, {"acme_fast": source})
    )
    registry = fake_distributions.registry()
    assert registry.names("dialects") == registry.bare_names("dialects") == ("fast",)
    assert registry.load("fast", "dialects").name == "fast"


def test_the_namespace_of_a_disabled_plugin_says_so(fake_distributions: FakeEnvironment, message: Messages) -> None:
    fake_distributions.install(acme())
    registry = fake_distributions.registry({"SLAPO_DISABLE_PLUGINS": "acme-slapo"})
    with pytest.raises(UnusablePluginError) as caught:
        bound_primitive(registry, "acme", None, "fc")
    message(caught, "'acme.pad' of acme-slapo 1.0", "SLAPO_DISABLE_PLUGINS")
    with pytest.raises(UnknownNameError) as missing:
        bound_primitive(registry, "megatron", None, "fc")
    message(missing, "primitive 'megatron'", "slapo-megatron")


def test_the_bare_name_of_a_primitive_does_not_take_the_namespace_of_another_plugin(
    fake_distributions: FakeEnvironment,
) -> None:
    fake_distributions.install(acme(bare="beta"), acme("beta-slapo", namespace="beta"))
    registry = fake_distributions.registry()
    assert str(bound_primitive(registry, "beta", None, "fc")) == "<primitives of namespace 'beta'>"


def test_members_of_nodes_and_schedules_stay_what_they_are(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme(bare="undo"))
    with use_registry(fake_distributions.registry(with_installed=True)):
        schedule = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2)))
        schedule["0"].checkpoint()
        assert [record.name for record in schedule.undo()] == ["core.checkpoint"]


def _members() -> set[str]:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(1, 1)))
    return {name for each in (sch, sch["0"], sch["*"]) for name in object.__dir__(each) if not name.startswith("_")}


def test_the_members_of_nodes_groups_and_schedules_are_taken_and_no_first_party_name_is_one() -> None:
    assert _members() == MEMBERS
    registry = Registry.discover(environ={})
    names = {*registry.names("queries"), *registry.namespaces()}
    names |= {entry.bare for plugin in registry.plugins for entry in plugin.entries if entry.kind == "primitives"}
    assert len(names) > 20
    assert names.isdisjoint(MEMBERS)


@pytest.mark.parametrize(
    ("kind", "name", "taken"),
    [
        ("primitives", "acme.walk", "walk"),
        ("primitives", "state.thing", "state"),
        ("primitives", "acme.nodes", "nodes"),
        ("primitives", "acme.undo", "undo"),
        ("queries", "records", "records"),
    ],
)
def test_a_name_that_is_a_member_is_refused(
    fake_distributions: FakeEnvironment, kind: str, name: str, taken: str, message: Messages
) -> None:
    fake_distributions.install(FakeDistribution("acme-slapo", "1.0", {f"slapo.v1.{kind}": {name: "acme_slapo:Thing"}}))
    registry = fake_distributions.registry()
    assert registry.plugin("acme-slapo").state == "unusable"
    with pytest.raises(UnusablePluginError) as caught:
        registry.resolve(kind, name)
    message(caught, f"'{name}'", f"'{taken}' is a member of nodes and schedules", "choose another name")


def test_a_query_hides_no_primitive_of_the_project(fake_distributions: FakeEnvironment) -> None:
    point = {"slapo.v1.queries": {"shard": "acme_slapo:shard"}}
    fake_distributions.install(FakeDistribution("acme-slapo", "1.0", point))
    with use_registry(fake_distributions.registry(with_installed=True)) as registry:
        assert "belongs to slapo-tp" in str(registry.plugin("acme-slapo").reason)
        assert registry.resolve("primitives", "shard").name == "tp.shard"


def test_a_primitive_named_as_a_query_has_its_full_name_only(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme(bare="estimate"))
    with use_registry(fake_distributions.registry(with_installed=True)) as registry:
        sch = slapo.create_schedule(nn.Linear(1, 1))
        assert "estimate" not in registry.bare_names("primitives")
        assert repr(sch.acme.estimate) == "<primitive acme.estimate at ''>"
        with pytest.raises(UnusablePluginError, match=r"and the query 'estimate' \(slapo-estimate"):
            registry.resolve("primitives", "estimate")
