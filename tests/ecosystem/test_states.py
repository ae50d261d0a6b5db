"""Every plugin has one of six states, with its reason and its remedy, before anything is imported."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from slapo_core.errors import (
    BrokenPluginError,
    DisabledPluginError,
    IncompatiblePluginError,
    RejectedPluginError,
    UnknownNameError,
)
from slapo_core.plugins.compat import check_majors, check_requirement, parse_group, readable_majors
from slapo_core.plugins.model import Entry, Plugin
from slapo_core.plugins.rules import name_violation
from slapo_core.schedule.schedule import Schedule
from slapo_core.testing.distributions import FakeDistribution, FakeEnvironment
from tests.dists.healthy import acme
from tests.messages import Messages


def only(environment: FakeEnvironment, **options: object) -> Plugin:
    (plugin,) = environment.registry(**options).plugins  # type: ignore[arg-type]
    return plugin


def test_a_core_reads_its_own_api_and_the_one_before() -> None:
    assert readable_majors(1) == (1,)
    assert readable_majors(3) == (3, 2)


@pytest.mark.parametrize(
    ("major", "api_major", "state"), [(1, 1, "ok"), (1, 2, "ok"), (1, 3, "incompatible"), (2, 1, "incompatible")]
)
def test_the_group_name_says_the_api(
    fake_distributions: FakeEnvironment, major: int, api_major: int, state: str
) -> None:
    fake_distributions.install(
        FakeDistribution("acme-slapo", entry_points={f"slapo.v{major}.primitives": {"acme.pad": "a:B"}})
    )
    assert only(fake_distributions, api_major=api_major).state == state


def test_a_plugin_for_two_apis_is_read_in_the_newest_that_core_reads(fake_distributions: FakeEnvironment) -> None:
    points = {f"slapo.v{major}.primitives": {"acme.pad": f"acme_v{major}:Pad"} for major in (1, 2, 9)}
    fake_distributions.install(FakeDistribution("acme-slapo", entry_points=points))
    assert [entry.value for entry in only(fake_distributions, api_major=2).entries] == ["acme_v2:Pad"]
    assert [entry.value for entry in only(fake_distributions, api_major=1).entries] == ["acme_v1:Pad"]


def test_the_remedy_upgrades_whichever_side_is_old(message: Messages) -> None:
    for majors, api_major, core, words, remedy in (
        ([2], 1, "0.1", ("API v2", "slapo-core 0.1 reads v1"), "pip install --upgrade slapo-core"),
        ([1], 3, "3.0", ("API v1", "slapo-core 3.0 reads v3 and v2"), "pip install --upgrade acme"),
    ):
        found = check_majors(majors, plugin="acme", api_major=api_major, core=core)
        assert found is not None
        state, reason, told = found
        message(reason, *words)
        assert (state, told) == ("incompatible", remedy)


@pytest.mark.parametrize(
    "group", ["slapo.v0.primitives", "slapo.v1", "slapo.1.primitives", "slapo.v1.Primitives", "slapo.v01.x"]
)
def test_other_group_names_are_not_groups(group: str) -> None:
    assert parse_group(group) is None


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
def test_the_required_range_is_held_against_core(line: str, fits: bool) -> None:
    assert (check_requirement([line], plugin="acme", core="0.1.0") is None) == fits


def test_a_prerelease_of_core_satisfies_the_range() -> None:
    assert check_requirement(["slapo-core>=0.1"], plugin="acme", core="0.2.0rc1") is None


def test_an_incompatible_plugin_says_what_it_needs_when_it_is_used(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    fake_distributions.install(acme(requires=("slapo-core>=2",), before=("raise SystemExit('was imported')",)))
    registry = fake_distributions.registry(core="0.1.0")
    with pytest.raises(IncompatiblePluginError) as caught:
        registry.load("pad")
    message(caught, "'acme.pad' of acme-slapo 1.0", "slapo-core 0.1.0", 'pip install "slapo-core>=2"')


def test_a_disabled_plugin_says_which_setting_disabled_it(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    fake_distributions.install(acme())
    registry = fake_distributions.registry({"SLAPO_DISABLE_PLUGINS": "Acme_Slapo"})
    with pytest.raises(DisabledPluginError) as caught:
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


def test_a_rejected_plugin_says_which_rule_it_breaks(fake_distributions: FakeEnvironment, message: Messages) -> None:
    fake_distributions.install(acme(bare="undo"))
    with pytest.raises(RejectedPluginError) as caught:
        fake_distributions.registry().resolve("primitives", "acme.undo")
    message(caught, "'acme.undo' of acme-slapo 1.0", "'undo' would hide", "pip uninstall acme-slapo")


def test_disabling_silences_a_broken_plugin(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(FakeDistribution("acme-slapo", None, {"slapo.v1.primitives": {"acme.pad": "a:B"}}))
    assert only(fake_distributions).state == "broken"
    assert only(fake_distributions, environ={"SLAPO_DISABLE_PLUGINS": "acme-slapo"}).state == "disabled"


def test_a_broken_import_changes_the_state_and_spares_the_other_names(fake_distributions: FakeEnvironment) -> None:
    good = acme()
    points = {"slapo.v1.primitives": {"acme.pad": "acme_slapo:Thing", "acme.cut": "acme_cut:Cut"}}
    fake_distributions.install(
        FakeDistribution("acme-slapo", "1.0", points, {**good.modules, "acme_cut": "import acme_nothing"})
    )
    registry = fake_distributions.registry()
    with pytest.raises(BrokenPluginError):
        registry.load("cut")
    (plugin,) = registry.plugins
    assert plugin.state == "broken"
    assert plugin.reason.startswith("primitive 'acme.cut': ModuleNotFoundError: ")
    assert registry.names("primitives") == ("acme.pad",)
    assert registry.load("pad").name == "acme.pad"


NOT_USED = {"templates": None, "gizmos": "pip install --upgrade slapo-core"}


@pytest.mark.parametrize("kind", NOT_USED)
def test_what_a_plugin_provides_of_a_kind_not_in_use_is_told_and_the_rest_works(
    fake_distributions: FakeEnvironment, kind: str, message: Messages
) -> None:
    points = {"slapo.v1.primitives": {"acme.pad": "acme_slapo:Thing"}, f"slapo.v1.{kind}": {"x": "acme_slapo:X"}}
    fake_distributions.install(FakeDistribution("acme-slapo", "1.0", points, acme().modules))
    registry = fake_distributions.registry(core="0.1.0")
    (plugin,) = registry.plugins
    assert (plugin.state, plugin.remedy) == ("ok", NOT_USED[kind])
    message(plugin.reason, kind, "slapo-core 0.1.0")
    assert plugin.provides(kind) == ("x",)
    assert registry.load("pad").name == "acme.pad"
    assert fake_distributions.registry({"SLAPO_STRICT_PLUGINS": "1"}).load("pad").name == "acme.pad"


def test_an_object_of_a_kind_not_in_use_cannot_be_had(fake_distributions: FakeEnvironment, message: Messages) -> None:
    points = {"slapo.v1.templates": {"fast": "acme_fast:Fast"}, "slapo.v1.gizmos": {"x": "acme_fast:Fast"}}
    modules = {"acme_fast": "raise SystemExit('was imported')\n"}
    fake_distributions.install(FakeDistribution("acme-fast", "1.0", points, modules))
    registry = fake_distributions.registry(core="0.1.0")
    (plugin,) = registry.plugins
    gizmo, template = plugin.entries
    uses: list[Callable[[], object]] = [
        lambda: registry.load("fast", "templates"),
        lambda: registry.load(template),
        lambda: registry.resolve("templates", "fast"),
    ]
    for use in uses:
        with pytest.raises(UnknownNameError) as caught:
            use()
        message(caught, "slapo-core 0.1.0", "kind 'templates'", "primitives, dialects")
    with pytest.raises(UnknownNameError, match="'gizmos'"):
        registry.load(gizmo)
    assert registry.names("templates") == registry.bare_names("templates") == ()
    with pytest.raises(RejectedPluginError) as rejected:
        registry.register(object, kind="templates")
    message(rejected, "kind 'templates'")


def test_two_plugins_may_provide_one_name_of_a_kind_not_in_use(fake_distributions: FakeEnvironment) -> None:
    points = {"slapo.v1.templates": {"fast": "x:Y"}}
    fake_distributions.install(FakeDistribution("one", "1", points), FakeDistribution("two", "1", points))
    assert [plugin.state for plugin in fake_distributions.registry().plugins] == ["ok", "ok"]


def test_a_misspelt_kind_not_in_use_is_still_misspelt(fake_distributions: FakeEnvironment, message: Messages) -> None:
    fake_distributions.install(FakeDistribution("one", "1", {"slapo.v1.template": {"fast": "x:Y"}}))
    (plugin,) = fake_distributions.registry().plugins
    assert plugin.state == "rejected"
    message(plugin.reason, "'template'", "did you mean 'templates'?")


def test_nobody_can_take_a_name_of_core() -> None:
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]
    own = [(group.rpartition(".")[2], name) for group, points in declared.items() for name in points]
    assert len(own) >= 4
    for kind, name in own:
        assert name_violation(Entry(kind, name, "x:Y", "slapo-core", "1")) is None
        assert (name_violation(Entry(kind, name, "x:Y", "evil", "1")) or "").endswith(" is reserved for slapo-core")
