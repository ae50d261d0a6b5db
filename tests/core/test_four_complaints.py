"""The four complaints that plugin systems get most."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from slapo_core.errors import UnusablePluginError
from slapo_core.plugins.manager import HookManager
from slapo_testing.distributions import FakeDistribution, FakeEnvironment, primitive_source
from tests.dists.healthy import acme


@pytest.mark.slow
def test_broken_plugin_leaves_others_usable(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme(), acme("sick-slapo", namespace="sick", bare="cut", before=("exit(3)",)))
    assert fake_distributions.slapo("primitives", "pad").returncode == 0
    registry = fake_distributions.registry()
    with pytest.raises(UnusablePluginError):
        registry.load("cut")
    assert registry.load("pad").name == "acme.pad"


def test_a_failure_is_not_swallowed(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme(before=("raise ImportError('libcudart.so.99: not found')",)))
    registry = fake_distributions.registry()
    with pytest.raises(UnusablePluginError, match=r"ImportError: libcudart.so.99: not found") as caught:
        registry.load("pad")
    assert isinstance(caught.value.__cause__, ImportError)
    (plugin,) = registry.plugins
    assert (plugin.state, plugin.reason) == (
        "unusable",
        "primitive 'acme.pad': ImportError: libcudart.so.99: not found",
    )


def test_names_never_clash_silently(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme())
    registry = fake_distributions.registry()
    assert registry.resolve("primitives", "pad").distribution == "acme-slapo"
    fake_distributions.install(acme("aaa-slapo", namespace="aaa"))
    with pytest.raises(UnusablePluginError):
        fake_distributions.registry().resolve("primitives", "pad")


@pytest.mark.slow
def test_a_disabled_plugin_does_not_run(fake_distributions: FakeEnvironment, tmp_path: Path) -> None:
    mark = f"open({str(tmp_path / 'ran')!r}, 'w').close()"
    points = {
        "slapo.v1.primitives": {"acme.pad": "acme_slapo:Thing"},
        "slapo.v1.hooks": {"acme": "acme_hooks"},
    }
    modules = {"acme_slapo": primitive_source("acme.pad", before=[mark]), "acme_hooks": mark}
    fake_distributions.install(FakeDistribution("acme-slapo", "1.0", points, modules))
    environ = {"SLAPO_DISABLE_PLUGINS": "acme-slapo"}
    registry = fake_distributions.registry(environ)
    with pytest.raises(UnusablePluginError):
        registry.load("pad")
    with pytest.raises(UnusablePluginError):
        registry.load("acme", "hooks")
    with pytest.raises(UnusablePluginError):
        HookManager(registry).activate("acme-slapo")
    enabled = fake_distributions.registry().resolve("primitives", "pad")
    with pytest.raises(UnusablePluginError):
        registry.load(enabled)
    assert fake_distributions.slapo("primitives", environ=environ).returncode == 0
    assert not (tmp_path / "ran").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fake_distributions.registry().load("pad")
    assert (tmp_path / "ran").exists()
