"""A broken plugin of any kind breaks nothing but itself, at the first call as at the second, and doctor lists it."""

from __future__ import annotations

import platform
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.cli.doctor import diagnose
from slapo_core.errors import UnusablePluginError
from slapo_core.plugins import use_registry
from slapo_core.plugins.registry import Registry
from slapo_testing.distributions import FakeDistribution, FakeEnvironment
from tests.messages import Messages

KINDS = (
    *("primitives", "dialects", "commands", "queries", "selectors", "codecs", "guards", "hooks", "hookspecs", "kinds"),
    *("compilers", "patterns", "tracers", "samplers", "kits", "cases"),
)
SOURCES = {
    "newer": "raise KeyboardInterrupt('was imported, though it is for another slapo-core')\n",
    "absent": "import no_such_module\n",
    "raising": "raise SystemExit('at import')\n",
    "wrong": "Thing = 5\n",
    "lazy": "class Thing:\n    name = '{name}'\n    def __init__(self):\n        raise ValueError('when made')\n",
}


BROKEN = ("absent", "raising", "wrong", "newer")
"""Those that are so whatever is asked of them; a "lazy" one has no base class, which only some kinds require."""


def _broken(kind: str, how: str) -> FakeDistribution:
    distribution = f"{how}-{kind}"
    module = distribution.replace("-", "_")
    name = f"{module}.thing" if kind in ("primitives", "patterns") else module
    value = module if kind in ("hooks", "hookspecs") and how != "wrong" else f"{module}:Thing"
    modules, requires = {module: SOURCES[how].format(name=name)}, ("slapo-core>=9",) if how == "newer" else ()
    return FakeDistribution(distribution, "1.0", {f"slapo.v1.{kind}": {name: value}}, modules, requires)


def _day() -> list[Any]:
    """What a user does: steps, matches looked for, saved, replayed, undone."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))

    batch = torch.ones(1, 2)
    sch = slapo.create_schedule(model(), example_inputs=batch)
    sch["0"].replace(nn.Linear(2, 2))
    sch.undo()
    sch.trace(flatten=True)
    sch.checkpoint(match="gelu")
    again = slapo.replay(model(), sch.document(), example_inputs=batch)
    assert "shard" in dir(sch["0"])
    results = [str(sch), str(again.records), sch.explain()]
    sch.undo(to=0)
    return results


@pytest.fixture
def environment(fake_distributions: FakeEnvironment) -> FakeEnvironment:
    fake_distributions.install(*(_broken(kind, how) for kind in KINDS for how in SOURCES))
    return fake_distributions


def _left_out(caught: list[warnings.WarningMessage]) -> set[str]:
    left_out = [one for one in caught if "left out" in str(one.message)]
    assert {one.filename for one in left_out} == {__file__}, "the line of the user's call"
    texts = [str(one.message) for one in left_out]
    assert len(texts) == len(set(texts)), "each is told once"
    return {text.split("'")[1] for text in texts}


def test_broken_plugins_of_every_kind_change_no_result(environment: FakeEnvironment) -> None:
    expected = _day()
    with use_registry(environment.registry(with_installed=True)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert _day() == expected
        told = _left_out(caught)
        assert _day() == expected
    assert _left_out(caught) == told
    asked = ("guards", "hookspecs", "selectors", "codecs")
    assert told >= {f"{how}_{kind}" for kind in asked[:3] for how in SOURCES if how != "newer"}
    assert {name.partition("_")[2] for name in told} == {*asked}


def _ask(node: Any, kind: str, name: str) -> Any:
    if kind == "hooks":
        return slapo.create_schedule(nn.Linear(1, 1), plugins=[name])
    if kind in ("primitives", "queries"):
        found = getattr(node, name)
        return found.thing() if kind == "primitives" else found
    return node.plugin(kind, f"{name}.thing" if kind == "patterns" else name)


@pytest.mark.filterwarnings("ignore:.*left out")
def test_asked_for_by_name_each_raises_the_same_at_every_call(environment: FakeEnvironment) -> None:
    with use_registry(environment.registry(with_installed=True)):
        node = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2)))["0"]
        for kind in (kind for kind in KINDS if kind not in ("hookspecs", "kinds")):
            for how in BROKEN:
                messages = set()
                for _ in range(2):
                    with pytest.raises(UnusablePluginError) as caught:
                        _ask(node, kind, f"{how}_{kind}")
                    assert caught.value.plugin == f"{how}-{kind} 1.0"
                    messages.add(str(caught.value))
                assert len(messages) == 1


def test_doctor_lists_all_of_them(environment: FakeEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "platform", lambda: "Linux")  # which asks a process
    registry = environment.registry(with_installed=True, core="0.1.0")
    listed = "\n".join(problem.message for problem in diagnose(registry).problems)
    for kind in KINDS:
        for how in BROKEN:
            assert f"plugin {how}-{kind} 1.0 is unusable" in listed
    assert all(f"plugin {name} " not in listed for name in ("slapo-core", "slapo-graph", "slapo-tp"))


ANSWERS = {
    "selectors": "from slapo_core.primitive import Selector\nclass Thing(Selector):\n    name = 'acme'\n"
    "    def given(self, value): {given}\n    def select(self, node, value): {select}\n",
    "codecs": "from slapo_core.schedule.records import Codec\nclass Thing(Codec):\n    name = 'acme'\n"
    "    def encode(self, *args): raise KeyError(1)\n    def decode(self, *args, where): raise KeyError(1)\n",
    "guards": "class Thing:\n    name = 'acme'\n    @classmethod\n    def of(cls, schedule): return cls()\n",
}


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("selectors", ANSWERS["selectors"].format(given="return 'x'", select="return None"), "must answer with"),
        ("selectors", ANSWERS["selectors"].format(given="return None", select="raise KeyError(1)"), "KeyError: 1"),
        ("codecs", ANSWERS["codecs"], "KeyError: 1"),
        ("guards", ANSWERS["guards"], "follow()"),
    ],
    ids=["a wrong answer", "an error", "an error of a codec", "a wrong object"],
)
def test_plugin_that_raises_when_asked_is_left_out(
    fake_distributions: FakeEnvironment, kind: str, source: str, reason: str
) -> None:
    point = {f"slapo.v1.{kind}": {"acme": "acme_slapo:Thing"}}
    fake_distributions.install(FakeDistribution("acme-slapo", "1.0", point, {"acme_slapo": source}))
    expected = _day()
    registry = fake_distributions.registry(with_installed=True)
    with use_registry(registry), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [_day(), _day()] == [expected] * 2
    (told,) = [str(one.message) for one in caught if "left out" in str(one.message)]
    assert reason in told
    assert registry.plugin("acme-slapo").state == "unusable"
    assert registry.plugin("slapo-graph").state == "ok"


def test_a_query_without_a_target_is_refused(fake_distributions: FakeEnvironment, message: Messages) -> None:
    point = {"slapo.v1.queries": {"acme": "acme_slapo:acme"}}
    fake_distributions.install(FakeDistribution("acme-slapo", "1.0", point, {"acme_slapo": "def acme(): pass\n"}))
    with pytest.raises(UnusablePluginError) as caught:
        fake_distributions.registry().load("acme", "queries")
    message(caught, "query 'acme'", "first parameter", "schedule, node, nodes")


def test_a_healthy_registry_has_nothing_to_leave_out() -> None:
    registry = Registry.discover(environ={})
    registry.load_all()
    assert [plugin.reason for plugin in registry.plugins if plugin.state != "ok"] == []
