"""Settings do what they say, and a mistake in one is an error, not a shrug."""

from __future__ import annotations

from pathlib import Path

import pytest

from slapo_core.errors import DisabledPluginError, PluginConfigError
from slapo_core.plugins.config import nearest_pyproject, read_settings
from slapo_core.testing.distributions import FakeEnvironment
from tests.dists.healthy import acme
from tests.messages import Messages


@pytest.fixture
def two(fake_distributions: FakeEnvironment) -> FakeEnvironment:
    fake_distributions.install(acme(), acme("beta-slapo", namespace="beta", bare="cut"))
    return fake_distributions


def test_the_allow_list_switches_off_everything_else(two: FakeEnvironment, message: Messages) -> None:
    registry = two.registry({"SLAPO_PLUGINS": "beta-slapo"})
    assert registry.names("primitives") == ("beta.cut",)
    with pytest.raises(DisabledPluginError) as caught:
        registry.resolve("primitives", "pad")
    message(caught, "'acme.pad' of acme-slapo 1.0", "SLAPO_PLUGINS")
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
    ("environ", "word", "hint"),
    [
        ({"SLAPO_PLUGINS": "acme-slapo, beta-slpo"}, "'beta-slpo'", "did you mean beta-slapo or acme-slapo?"),
        ({"SLAPO_DISABLE_PLUGINS": "acme"}, "'acme'", "did you mean acme-slapo?"),
        ({"SLAPO_DISABLE_PLUGINS": "zzz"}, "'zzz'", "`slapo plugins list`"),
        ({"SLAPO_DISABLE_PLUGINS": "slapo-core"}, "slapo-core", "SLAPO_PLUGINS=slapo-core"),
        ({"SLAPO_STRICT_PLUGINS": "yes"}, "got 'yes'", "SLAPO_STRICT_PLUGINS=1"),
    ],
)
def test_a_wrong_variable_is_an_error_at_first_use(
    two: FakeEnvironment, environ: dict[str, str], word: str, hint: str, message: Messages
) -> None:
    registry = two.registry(environ)
    assert len(registry.plugins) == 2
    texts = set()
    for use in (lambda: registry.resolve("primitives", "pad"), lambda: registry.load("pad"), registry.check_settings):
        with pytest.raises(PluginConfigError) as caught:
            use()
        assert hint in str(caught.value.hint)
        texts.add(str(caught.value))
    (text,) = texts
    message(text, next(iter(environ)), word)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('require = ["acme-slapo>=2"]', "acme-slapo>=2; installed is acme-slapo 1.0"),
        ('require = ["gamma-slapo"]', "gamma-slapo"),
        ('require = ["what is this"]', "'what is this'"),
        ('require = "acme-slapo"', "got 'acme-slapo'"),
        ('prefer = ["acme-slpo"]', "'acme-slpo'"),
        ("prefer = [1]", "got [1]"),
        ("prefers = []", "no key 'prefers'"),
    ],
)
def test_a_wrong_table_is_an_error_that_names_the_file(
    two: FakeEnvironment, text: str, word: str, message: Messages
) -> None:
    file = two.directory / "pyproject.toml"
    file.write_text(f"[tool.slapo]\n{text}\n")
    with pytest.raises(PluginConfigError) as caught:
        two.registry(project=two.directory).check_settings()
    message(caught, word)
    assert str(file) in caught.value.message
    assert caught.value.hint


def test_a_file_that_is_no_toml_is_an_error_that_names_it(two: FakeEnvironment) -> None:
    """With a reason in words of Python's, which differ from version to version."""
    file = two.directory / "pyproject.toml"
    file.write_text("[tool.slapo]\nrequire = [\n")
    with pytest.raises(PluginConfigError, match="cannot be read") as caught:
        two.registry(project=two.directory).check_settings()
    assert str(file) in caught.value.message
    assert caught.value.hint


def test_a_required_plugin_that_is_disabled_is_an_error(two: FakeEnvironment, message: Messages) -> None:
    (two.directory / "pyproject.toml").write_text('[tool.slapo]\nrequire = ["acme-slapo>=1"]\n')
    two.registry(project=two.directory).check_settings()
    with pytest.raises(PluginConfigError) as caught:
        two.registry({"SLAPO_DISABLE_PLUGINS": "acme-slapo"}, project=two.directory).check_settings()
    message(caught, "acme-slapo>=1", "SLAPO_DISABLE_PLUGINS")


def test_the_nearest_pyproject_above_counts(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.slapo]\nprefer = ["Outer_Dist"]\n')
    assert read_settings({}, inner).prefer == ("outer-dist",)
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\nname = 'slapo-user'\n")
    assert nearest_pyproject(inner) == tmp_path / "a" / "pyproject.toml"
    assert read_settings({}, inner).prefer == ()
    assert read_settings({}, None).prefer == ()
