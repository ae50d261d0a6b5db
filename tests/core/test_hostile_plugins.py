"""A bad plugin never breaks anything but itself, and always says so: all the hostile ones installed at once."""

from __future__ import annotations

import json
import sys
import warnings

import pytest

from slapo_core.errors import PluginError, UnusablePluginError
from slapo_core.plugins import Registry
from slapo_testing.distributions import FakeEnvironment
from tests.dists.healthy import acme
from tests.dists.hostile import Hostile, hostile_distributions

HOSTILE = hostile_distributions()
RAISING = ("mod_exit.thing", "mod_generator.thing", "mod_several.thing", "mod_custom.thing")


@pytest.fixture
def everything(fake_distributions: FakeEnvironment) -> Registry:
    fake_distributions.install(acme(), *(item.distribution for item in HOSTILE))
    for odd in ("no_files-1.0.dist-info", "nameless.dist-info", "-.dist-info", ".dist-info"):
        (fake_distributions.directory / odd).mkdir()
    (fake_distributions.directory / "file-1.0.dist-info").write_text("not a directory")
    return fake_distributions.registry(core="0.1.0")


def test_there_are_at_least_thirty_hostile_plugins() -> None:
    assert len(HOSTILE) >= 30
    assert len({item.distribution.name for item in HOSTILE}) == len(HOSTILE)


def test_every_hostile_plugin_is_listed_with_its_state_and_reason(everything: Registry) -> None:
    plugins = {plugin.name: plugin for plugin in everything.plugins}
    assert set(plugins) == {"acme-slapo", *(item.distribution.name for item in HOSTILE)}
    assert {item.distribution.name: item.listed for item in HOSTILE} == {
        name: plugin.state for name, plugin in plugins.items() if name != "acme-slapo"
    }
    for item in HOSTILE:
        plugin = plugins[item.distribution.name]
        assert item.says in (plugin.reason or ""), plugin
        assert (plugin.remedy is None) == (plugin.state == "ok"), plugin


def test_discovery_imports_no_hostile_module(everything: Registry) -> None:
    modules = {module for item in HOSTILE for module in item.distribution.modules}
    assert len(modules) >= 18
    assert modules.isdisjoint(sys.modules)
    assert everything.names("primitives")[0] == "acme.pad"


@pytest.mark.parametrize(
    "item", [item for item in HOSTILE if item.name], ids=lambda item: item.distribution.name.removeprefix("mod-")
)
def test_using_a_hostile_plugin_names_it_and_spares_the_healthy_one(everything: Registry, item: Hostile) -> None:
    assert item.used is not None
    label = f"{item.distribution.name} 1.0"
    with pytest.raises(UnusablePluginError) as caught:
        everything.load(item.name)
    error = caught.value
    assert error.plugin == label
    assert error.state == item.used
    (entry,) = everything.plugin(item.distribution.name).entries
    assert f"primitive '{item.name}' of {label} ({entry.value})" in error.message
    assert item.says_when_used in error.message
    assert error.hint == (
        f"pip install --upgrade --force-reinstall {item.distribution.name}, "
        f"or SLAPO_DISABLE_PLUGINS={item.distribution.name}"
    )
    assert (error.__cause__ is not None) == ("Error: " in item.says_when_used or item.name in RAISING)
    plugin = everything.plugin(item.distribution.name)
    assert plugin.state == item.used
    assert item.says_when_used in (plugin.reason or "")
    assert item.name not in everything.names("primitives")
    assert everything.load("pad").name == "acme.pad"


def test_all_hostile_plugins_used_in_turn_leave_the_healthy_one_whole(everything: Registry) -> None:
    for item in HOSTILE:
        for name in everything.plugin(item.distribution.name).provides("primitives"):
            with pytest.raises(PluginError):
                everything.load(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert everything.load("acme.pad").name == "acme.pad"
    assert everything.names("primitives") == ("acme.pad",)


def test_a_failed_import_fails_the_same_way_every_time(everything: Registry) -> None:
    with pytest.raises(UnusablePluginError) as first:
        everything.load("mod_raise.thing")
    with pytest.raises(UnusablePluginError) as second:
        everything.resolve("primitives", "mod_raise.thing")
    assert str(first.value) == str(second.value)
    assert first.value is not second.value
    assert isinstance(second.value.__cause__, RuntimeError)


@pytest.mark.slow
def test_the_command_line_lists_all_of_them(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme(), *(item.distribution for item in HOSTILE))
    done = fake_distributions.slapo("plugins", "list", "--json")
    assert done.returncode == 0, done.stderr
    listed = {plugin["name"]: plugin for plugin in json.loads(done.stdout)["plugins"]}
    for item in HOSTILE:
        assert listed[item.distribution.name]["state"] == item.listed
        assert item.says in (listed[item.distribution.name]["reason"] or "")
    assert listed["acme-slapo"]["state"] == "ok"
    table = fake_distributions.slapo("plugins", "list")
    assert table.returncode == 0, table.stderr
    assert all(item.distribution.name in table.stdout for item in HOSTILE)
    assert fake_distributions.slapo("primitives", "pad").returncode == 0
