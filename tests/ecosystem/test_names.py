"""A name means one thing, or the error says what to write."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from torch import nn

import slapo_core as slapo
from slapo_core.errors import AmbiguousNameError, DisabledPluginError, UnknownNameError
from slapo_core.schedule.sugar import bound_primitive
from slapo_core.spec.kinds import KINDS
from slapo_core.spec.reserved import FIRST_PARTY_NAMES, PLANNED_PRIMITIVES, RESERVED_NAMES
from slapo_core.testing.distributions import FakeDistribution, FakeEnvironment
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
    assert registry.ambiguous == {}


def test_an_ambiguous_bare_name_lists_both_providers_and_the_three_exits(
    two: FakeEnvironment, message: Messages
) -> None:
    registry = two.registry()
    with pytest.raises(AmbiguousNameError) as caught:
        registry.resolve("primitives", "pad", path="encoder.fc1")
    message(caught, "'pad'", "'acme.pad' (acme-slapo 1.0)", "'beta.pad' (beta-slapo 1.0)", "prefer =", "disable one")
    assert caught.value.path == "encoder.fc1"
    assert registry.ambiguous == {"primitives": {"pad": ("acme.pad", "beta.pad")}}
    assert registry.bare_names("primitives") == ()
    assert registry.names("primitives") == ("acme.pad", "beta.pad")


def test_each_of_the_three_exits_works(two: FakeEnvironment) -> None:
    assert two.registry().resolve("primitives", "beta.pad").distribution == "beta-slapo"
    disabled = two.registry({"SLAPO_DISABLE_PLUGINS": "beta-slapo"})
    assert disabled.resolve("primitives", "pad").distribution == "acme-slapo"
    (two.directory / "pyproject.toml").write_text('[tool.slapo]\nprefer = ["beta-slapo"]\n')
    preferring = two.registry(project=two.directory)
    assert preferring.resolve("primitives", "pad").distribution == "beta-slapo"
    assert preferring.ambiguous == {}


def test_a_failed_import_does_not_hand_its_bare_name_to_another_plugin(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme(before=("1 / 0",)), acme("beta-slapo", namespace="beta"))
    registry = fake_distributions.registry()
    with pytest.raises(Exception, match="ZeroDivisionError"):
        registry.load("acme.pad")
    with pytest.raises(AmbiguousNameError):
        registry.resolve("primitives", "pad")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pda", "did you mean 'pad'?"),
        ("acme.pda", "did you mean 'acme.pad'?"),
        ("xyz", "`slapo primitives` shows what is installed"),
        ("shard", "pip install slapo-tp"),
        ("tp.anything", "pip install slapo-tp"),
        ("fusion.anything", "pip install slapo-fusion"),
        ("pipeline_split", "pip install slapo-pipeline"),
        ("pipeline.anything", "pip install slapo-pipeline"),
        ("megatron.anything", "pip install slapo-megatron"),
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


def test_a_reserved_name_that_nothing_provides_yet_says_so(
    fake_distributions: FakeEnvironment, monkeypatch: pytest.MonkeyPatch, message: Messages
) -> None:
    monkeypatch.delitem(FIRST_PARTY_NAMES, "slapo-megatron")
    fake_distributions.install(acme())
    registry = fake_distributions.registry()
    with pytest.raises(UnknownNameError) as missing:
        registry.resolve("primitives", "megatron.anything")
    message(missing, "primitive 'megatron.anything'", "namespace 'megatron' is reserved")
    with pytest.raises(UnknownNameError) as caught:
        registry.resolve("dialects", "megatron")
    message(caught, "dialect 'megatron'", "reserved", "`slapo dialects`")


def test_an_unknown_dialect_and_an_unknown_kind_say_so(fake_distributions: FakeEnvironment, message: Messages) -> None:
    fake_distributions.install(acme())
    registry = fake_distributions.registry()
    with pytest.raises(UnknownNameError) as caught:
        registry.resolve("dialects", "deepspeed")
    message(caught, "dialect 'deepspeed'", "pip install slapo-deepspeed")
    with pytest.raises(UnknownNameError) as caught:
        registry.resolve("primitive", "pad")
    message(caught, "kind", "'primitive'", "did you mean primitives?")


def test_an_unknown_name_mentions_plugins_whose_names_could_not_be_read(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    broken = FakeDistribution("bad-slapo", files={"entry_points.txt": b"[slapo.v1.primitives]\nnonsense\n"})
    fake_distributions.install(broken)
    with pytest.raises(UnknownNameError) as caught:
        fake_distributions.registry().resolve("primitives", "pad")
    message(caught, "primitive 'pad'", "bad-slapo", "broken")


def test_a_bare_name_that_is_anothers_namespace_is_never_guessed(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme(bare="beta"), acme("beta-slapo", namespace="beta", bare="beta"))
    registry = fake_distributions.registry()
    with pytest.raises(AmbiguousNameError):
        registry.resolve("primitives", "beta")
    assert registry.resolve("primitives", "acme.beta").distribution == "acme-slapo"
    alone = fake_distributions.registry({"SLAPO_DISABLE_PLUGINS": "acme-slapo"})
    assert alone.resolve("primitives", "beta").name == "beta.beta"


def test_kinds_without_namespace_use_plain_names(fake_distributions: FakeEnvironment) -> None:
    source = "from slapo_core.native.dialect import TorchDialect\nclass Fast(TorchDialect):\n    name = 'fast'\n"
    fake_distributions.install(
        FakeDistribution("acme-fast", "1.0", {"slapo.v1.dialects": {"fast": "acme_fast:Fast"}}, {"acme_fast": source})
    )
    registry = fake_distributions.registry()
    assert registry.names("dialects") == registry.bare_names("dialects") == ("fast",)
    assert registry.load("fast", "dialects").name == "fast"


def test_what_a_user_is_told_to_install_is_what_this_repository_has() -> None:
    root = Path(__file__).parents[2]
    files = [root / "pyproject.toml", *(root / "plugins").glob("*/pyproject.toml")]
    projects = [tomllib.loads(file.read_text())["project"] for file in files]
    assert {
        project["name"]: {
            kind: tuple(sorted(name.rpartition(".")[2] if KINDS[kind].namespaced else name for name in points))
            for group, points in project["entry-points"].items()
            if (kind := group.removeprefix("slapo.v1.")) != "hooks"
        }
        for project in projects
        if "entry-points" in project
    } == FIRST_PARTY_NAMES
    provided = {name for names in FIRST_PARTY_NAMES.values() for name in names.get("primitives", ())}
    assert provided.isdisjoint(PLANNED_PRIMITIVES)


def test_the_namespace_of_a_disabled_plugin_says_so(fake_distributions: FakeEnvironment, message: Messages) -> None:
    fake_distributions.install(acme())
    registry = fake_distributions.registry({"SLAPO_DISABLE_PLUGINS": "acme-slapo"})
    with pytest.raises(DisabledPluginError) as caught:
        bound_primitive(registry, "acme", None, "fc")
    message(caught, "'acme.pad' of acme-slapo 1.0", "SLAPO_DISABLE_PLUGINS")
    with pytest.raises(UnknownNameError) as missing:
        bound_primitive(registry, "megatron", None, "fc")
    message(missing, "primitive 'megatron'", "slapo-megatron")


def _members() -> set[str]:
    """Public attributes of schedules, nodes and groups, those of instances included, also when they have been used."""
    schedule = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2)), plugins=["slapo-core"])
    schedule["0"].checkpoint()
    schedule.explain()
    with schedule.untouched():
        things = (schedule, schedule["0"], schedule["*"])
        attributes = [name for thing in things for name in (*dir(type(thing)), *getattr(thing, "__dict__", ()))]
    slapo.build(schedule)
    attributes += vars(schedule)
    assert [type(thing).__name__ for thing in things] == ["Schedule", "TreeNode", "NodeGroup"]
    return {name for name in attributes if not name.startswith("_")}


def test_no_primitive_can_hide_a_member_of_a_node_group_or_schedule() -> None:
    members = _members()
    assert {"undo", "pattern", "module", "plugins", "tree", "model"} <= members
    assert members - RESERVED_NAMES == set()


def test_a_plugin_whose_primitive_would_hide_a_member_is_rejected_when_it_is_found(
    fake_distributions: FakeEnvironment,
) -> None:
    named = {f"acme{number}-slapo": bare for number, bare in enumerate(sorted(_members()))}
    fake_distributions.install(
        *(acme(name, namespace=name.removesuffix("-slapo"), bare=bare) for name, bare in named.items())
    )
    registry = fake_distributions.registry()
    found = {name: registry.plugin(name) for name in named}
    assert {name: plugin and plugin.state for name, plugin in found.items()} == dict.fromkeys(named, "rejected")
    for name, bare in named.items():
        reason = getattr(found[name], "reason", "")
        assert f"'{name.removesuffix('-slapo')}.{bare}' is refused: '{bare}' " in reason
    assert registry.names("primitives") == ()
