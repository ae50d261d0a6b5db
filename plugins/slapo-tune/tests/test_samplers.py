"""Samplers as a kind of plugin object: names, and what the kit holds every sampler to."""

from __future__ import annotations

import pytest

from slapo_core.errors import UnknownNameError
from slapo_testing.conformance import check_plugin
from slapo_testing.distributions import FakeEnvironment
from slapo_tune.cases import sampler_checks
from tests.dists.healthy import acme, with_sampler
from tests.messages import Messages

LAST = "tried = [trial.point for trial in history]\nleft = [point for point in space.points() if point not in tried]\n"
HEALTHY = LAST + "return left[-1] if left else None"


def outcomes(environment: FakeEnvironment) -> dict[str, str]:
    """The violation that each check of the sampler found; empty where it passed."""
    cls = environment.registry(with_installed=True).load("acme.last", "samplers")
    found = {}
    for name, check in sampler_checks(cls):
        try:
            check()
        except AssertionError as error:
            found[name] = str(error).partition("\n")[0]
        else:
            found[name] = ""
    return found


@pytest.mark.slow
def test_sampler_is_listed_shown_and_checked_as_a_plugin(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(with_sampler(HEALTHY))
    listed = fake_distributions.slapo("plugins", "list", "--kind", "samplers")
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.splitlines()[1].split() == ["acme-slapo", "1.0", "ok", "acme.last"]
    assert "samplers  acme.last  acme_slapo:Thing" in fake_distributions.slapo("plugins", "show", "acme-slapo").stdout
    registry = fake_distributions.registry(with_installed=True)
    found = list(check_plugin(registry.plugin("acme-slapo"), registry))
    assert [(one.check, one.outcome) for one in found if one.subject == "acme.last"] == [
        ("load", "passed"),
        ("proposes_points_of_the_space_once", "passed"),
        ("same_arguments_same_proposal", "passed"),
    ]


def test_name_with_a_family_is_one_name_without_namespace(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(with_sampler(HEALTHY, name="acme.last"), acme("other-slapo", namespace="other"))
    registry = fake_distributions.registry(with_installed=True)
    assert registry.bare_names("samplers") == registry.names("samplers")
    assert "acme.last" in registry.names("samplers")
    assert "other" in registry.namespaces()
    assert "acme" not in registry.namespaces()
    assert registry.load("acme.last", "samplers").name == "acme.last"
    with pytest.raises(AttributeError, match="sampler 'last'"):
        registry.resolve("samplers", "last")


def test_undeclared_kind_has_no_names_and_its_plugin_stays_usable(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    fake_distributions.install(with_sampler(HEALTHY))
    registry = fake_distributions.registry()
    assert [plugin.state for plugin in registry.plugins] == ["ok"]
    assert registry.names("samplers") == registry.bare_names("samplers") == ()
    with pytest.raises(UnknownNameError) as caught:
        registry.load("acme.last", "samplers")
    message(caught, "sampler 'acme.last'", "nothing here uses samplers")


FAULTS = {
    "repeats": ("return next(iter(space.points()))", "a point of the history"),
    "elsewhere": ("return {'batch': 7}", "not a point of the space"),
    "half": (LAST + "return dict([*left[0].items()][:1]) if left else None", "not a point of the space"),
    "failures forgotten": (
        "tried = [trial.point for trial in history if trial.status == 'ok']\n"
        "left = [point for point in space.points() if point not in tried]\nreturn left[0] if left else None",
        "a point of the history",
    ),
    "counts itself": (
        LAST + "self.calls = getattr(self, 'calls', 0) + 1\nreturn left[self.calls % len(left)] if left else None",
        "is not a function of its arguments",
    ),
    "global random": (
        "import random\n" + LAST + "return random.choice(left) if left else None",
        "is not a function of its arguments",
    ),
    "changes history": (
        LAST + "history.pop() if len(history) > 1 else None\nreturn left[0] if left else None",
        "is not a function of its arguments",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_kit_catches(fake_distributions: FakeEnvironment, fault: str) -> None:
    body, says = FAULTS[fault]
    fake_distributions.install(with_sampler(body))
    found = [text for text in outcomes(fake_distributions).values() if text]
    assert any(says in text for text in found), found


@pytest.mark.slow
def test_sampler_without_its_library_is_skipped(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(with_sampler("import a_library_that_is_not_there"))
    registry = fake_distributions.registry(with_installed=True)
    found = list(check_plugin(registry.plugin("acme-slapo"), registry))
    skipped = [one.message for one in found if one.outcome == "skipped"]
    assert skipped == ["No module named 'a_library_that_is_not_there'"] * 2
    assert {one.outcome for one in found} == {"passed", "skipped"}
