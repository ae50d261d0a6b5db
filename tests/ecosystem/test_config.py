"""Settings do what they say, and a mistake in one is an error, not a shrug."""

from __future__ import annotations

from pathlib import Path

import pytest

from slapo_core.errors import DisabledPluginError, PluginConfigError
from slapo_core.plugins.config import nearest_pyproject, read_settings
from slapo_core.testing.distributions import FakeEnvironment
from tests.dists.healthy import acme


@pytest.fixture
def two(fake_distributions: FakeEnvironment) -> FakeEnvironment:
    fake_distributions.install(acme(), acme("beta-slapo", namespace="beta", bare="cut"))
    return fake_distributions


def test_the_allow_list_switches_off_everything_else(two: FakeEnvironment) -> None:
    registry = two.registry({"SLAPO_PLUGINS": "beta-slapo"})
    assert registry.names("primitives") == ("beta.cut",)
    with pytest.raises(DisabledPluginError) as caught:
        registry.resolve("primitives", "pad")
    assert caught.value.message == (
        "primitive 'acme.pad' of acme-slapo 1.0 is installed but disabled: SLAPO_PLUGINS does not name it"
    )
    assert caught.value.hint == "add acme-slapo to SLAPO_PLUGINS"


def test_naming_only_core_switches_off_every_plugin(two: FakeEnvironment) -> None:
    registry = two.registry({"SLAPO_PLUGINS": "slapo-core"})
    registry.check_settings()
    assert {plugin.state for plugin in registry.plugins} == {"disabled"}


def test_an_empty_variable_is_an_unset_one(two: FakeEnvironment) -> None:
    registry = two.registry({"SLAPO_PLUGINS": "", "SLAPO_DISABLE_PLUGINS": " ", "SLAPO_STRICT_PLUGINS": ""})
    registry.check_settings()
    assert registry.names("primitives") == ("acme.pad", "beta.cut")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"SLAPO_PLUGINS": "acme-slapo, beta-slpo"},
            "SLAPO_PLUGINS names 'beta-slpo', but no plugin of that name is installed\n"
            "  hint: did you mean beta-slapo or acme-slapo?",
        ),
        (
            {"SLAPO_DISABLE_PLUGINS": "acme"},
            "SLAPO_DISABLE_PLUGINS names 'acme', but no plugin of that name is installed\n"
            "  hint: did you mean acme-slapo?",
        ),
        (
            {"SLAPO_DISABLE_PLUGINS": "zzz"},
            "SLAPO_DISABLE_PLUGINS names 'zzz', but no plugin of that name is installed\n"
            "  hint: `slapo plugins list` shows what is",
        ),
        (
            {"SLAPO_DISABLE_PLUGINS": "slapo-core"},
            "SLAPO_DISABLE_PLUGINS names slapo-core, which cannot be disabled\n"
            "  hint: remove it; SLAPO_PLUGINS=slapo-core switches off everything else",
        ),
        (
            {"SLAPO_STRICT_PLUGINS": "yes"},
            "SLAPO_STRICT_PLUGINS must be 0 or 1 (got 'yes')\n  hint: SLAPO_STRICT_PLUGINS=1",
        ),
    ],
)
def test_a_wrong_variable_is_an_error_at_first_use(two: FakeEnvironment, environ: dict[str, str], message: str) -> None:
    registry = two.registry(environ)
    assert len(registry.plugins) == 2
    for use in (lambda: registry.resolve("primitives", "pad"), lambda: registry.load("pad"), registry.check_settings):
        with pytest.raises(PluginConfigError) as caught:
            use()
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('require = ["acme-slapo>=2"]', "needs acme-slapo>=2; installed is acme-slapo 1.0"),
        ('require = ["gamma-slapo"]', "needs gamma-slapo, which is not installed"),
        ('require = ["what is this"]', "'what is this' is not a requirement"),
        ('require = "acme-slapo"', "must be a list of distributions (got 'acme-slapo')"),
        ('prefer = ["acme-slpo"]', "names 'acme-slpo', but no plugin of that name is installed"),
        ("prefer = [1]", "must be a list of distributions (got [1])"),
        ("prefers = []", "has no key 'prefers'"),
        ("require = [", "cannot be read"),
    ],
)
def test_a_wrong_table_is_an_error_that_names_the_file(two: FakeEnvironment, text: str, message: str) -> None:
    file = two.directory / "pyproject.toml"
    file.write_text(f"[tool.slapo]\n{text}\n")
    with pytest.raises(PluginConfigError) as caught:
        two.registry(project=two.directory).check_settings()
    assert message in caught.value.message
    assert str(file) in caught.value.message
    assert caught.value.hint


def test_a_required_plugin_that_is_disabled_is_an_error(two: FakeEnvironment) -> None:
    (two.directory / "pyproject.toml").write_text('[tool.slapo]\nrequire = ["acme-slapo>=1"]\n')
    two.registry(project=two.directory).check_settings()
    with pytest.raises(
        PluginConfigError, match="needs acme-slapo>=1, which is disabled: SLAPO_DISABLE_PLUGINS names it"
    ):
        two.registry({"SLAPO_DISABLE_PLUGINS": "acme-slapo"}, project=two.directory).check_settings()


def test_the_nearest_pyproject_above_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.slapo]\nprefer = ["Outer_Dist"]\n')
    assert read_settings({}, inner).prefer == ("outer-dist",)
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'slapo-user'\n")
    assert nearest_pyproject(inner) == tmp_path / "a" / "pyproject.toml"
    assert read_settings({}, inner).prefer == ()
    assert read_settings({}, None).prefer == ()
