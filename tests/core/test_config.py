"""``SLAPO_DISABLE_PLUGINS`` does what it says, and a mistake in it is an error, not a shrug."""

from __future__ import annotations

import pytest

from slapo_core.errors import PluginError
from slapo_testing.distributions import FakeEnvironment
from tests.dists.healthy import acme
from tests.messages import Messages


@pytest.fixture
def two(fake_distributions: FakeEnvironment) -> FakeEnvironment:
    fake_distributions.install(acme(), acme("beta-slapo", namespace="beta", bare="cut"))
    return fake_distributions


def test_several_plugins_are_disabled_by_one_variable(two: FakeEnvironment) -> None:
    for named in ("acme-slapo,beta-slapo", "Acme_Slapo  beta.slapo", ", beta-slapo, acme-slapo"):
        registry = two.registry({"SLAPO_DISABLE_PLUGINS": named})
        assert registry.settings_error is None
        assert {plugin.state for plugin in registry.plugins} == {"disabled"}


def test_an_empty_variable_is_an_unset_one(two: FakeEnvironment) -> None:
    registry = two.registry({"SLAPO_DISABLE_PLUGINS": " "})
    assert registry.settings_error is None
    assert registry.names("primitives") == ("acme.pad", "beta.cut")


@pytest.mark.parametrize(
    ("environ", "word", "hint"),
    [
        ({"SLAPO_DISABLE_PLUGINS": "acme-slapo, beta-slpo"}, "'beta-slpo'", "did you mean beta-slapo or acme-slapo?"),
        ({"SLAPO_DISABLE_PLUGINS": "acme"}, "'acme'", "did you mean acme-slapo?"),
        ({"SLAPO_DISABLE_PLUGINS": "zzz"}, "'zzz'", "`slapo plugins list`"),
    ],
)
def test_a_wrong_variable_is_an_error_at_first_use(
    two: FakeEnvironment, environ: dict[str, str], word: str, hint: str, message: Messages
) -> None:
    registry = two.registry(environ)
    assert len(registry.plugins) == 2
    texts = set()
    for use in (
        lambda: registry.resolve("primitives", "pad"),
        lambda: registry.load("pad"),
        registry.check_settings,
    ):
        with pytest.raises(PluginError) as caught:
            use()
        assert hint in str(caught.value.hint)
        texts.add(str(caught.value))
    (text,) = texts
    message(text, next(iter(environ)), word)
