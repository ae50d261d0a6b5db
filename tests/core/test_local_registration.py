"""Scripts and notebooks register primitives without a package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from slapo_core.errors import ArgumentError, UnknownNameError, UnusablePluginError
from slapo_core.plugins import Registry, current_registry, register_primitive, use_registry
from slapo_core.primitive import Equivalence, Primitive
from slapo_core.schedule.creation import create_schedule
from slapo_testing.distributions import FakeEnvironment
from tests.dists.healthy import acme
from tests.messages import Messages


def make(name: Any, *, qualname: str = "Freeze", module: str = "__main__") -> type[Primitive]:
    """A primitive class as a notebook cell would define it."""

    @dataclass(frozen=True)
    class Freeze(Primitive):
        equivalence = Equivalence.EXACT

        def apply(self, node: Any, edit: Any) -> None:
            return None

    Freeze.name = name
    Freeze.__qualname__, Freeze.__module__ = qualname, module
    return Freeze


def test_a_registered_primitive_is_used_like_an_installed_one(isolated_registry: Registry) -> None:
    cls = register_primitive()(make("my.freeze"))
    registry = current_registry()
    assert registry is isolated_registry
    assert registry.load("freeze") is registry.load("my.freeze") is cls
    assert registry.provider(cls()) == ("__main__", "local")
    assert "my.freeze" in registry.names("primitives")
    assert "my" in registry.namespaces()
    plugin = registry.plugin("__main__")
    assert plugin is not None
    assert (plugin.state, plugin.version, plugin.source) == ("ok", "local", "this process")


def test_running_the_cell_again_replaces_the_class(isolated_registry: Registry) -> None:
    isolated_registry.register(make("my.freeze"))
    assert isolated_registry.load("freeze").__name__ == "Freeze"
    again = make("my.freeze")
    isolated_registry.register(again)
    assert isolated_registry.load("freeze") is again


def test_another_class_cannot_take_the_name(isolated_registry: Registry, message: Messages) -> None:
    isolated_registry.register(make("my.freeze"))
    with pytest.raises(UnusablePluginError) as caught:
        isolated_registry.register(make("my.freeze", qualname="Other"))
    message(caught, "'my.freeze' (__main__:Other)", "__main__ local", "(__main__:Freeze)")


def test_an_installed_name_cannot_be_taken(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme())
    registry = fake_distributions.registry()
    with pytest.raises(UnusablePluginError, match=r"acme-slapo 1\.0"):
        registry.register(make("acme.pad"))
    assert registry.resolve("primitives", "pad").distribution == "acme-slapo"


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("freeze", "'<namespace>.<name>'"),
        ("tp.freeze", "belongs to slapo-tp"),
        (3, "'3' must be '<namespace>.<name>'"),
    ],
)
def test_the_rules_are_those_of_packages(isolated_registry: Registry, name: Any, word: str, message: Messages) -> None:
    with pytest.raises(UnusablePluginError) as caught:
        isolated_registry.register(make(name))
    message(caught, "__main__:Freeze: ", word)


def test_a_class_that_is_no_primitive_is_refused(isolated_registry: Registry) -> None:
    class Thing:
        name = "my.thing"

    with pytest.raises(UnusablePluginError, match=r"subclass of slapo_core\.primitive\.Primitive"):
        isolated_registry.register(Thing)


def test_registries_do_not_share_registrations(isolated_registry: Registry) -> None:
    isolated_registry.register(make("my.freeze"))
    with use_registry(Registry.discover(environ={})) as other:
        assert current_registry() is other
        with pytest.raises(UnknownNameError):
            other.resolve("primitives", "my.freeze")
    assert current_registry() is isolated_registry


def test_a_class_never_registered_belongs_to_its_module(isolated_registry: Registry) -> None:
    assert isolated_registry.provider(make("my.freeze", module="notebook.cell")) == ("notebook", "local")


def test_the_processs_registry_is_kept_until_its_surroundings_change(
    monkeypatch: pytest.MonkeyPatch, fake_distributions: FakeEnvironment, tmp_path: Path
) -> None:
    first = current_registry()
    assert current_registry() is first
    fake_distributions.install(acme())
    monkeypatch.syspath_prepend(str(tmp_path))
    second = current_registry()
    assert second is not first
    assert second.resolve("primitives", "pad").distribution == "acme-slapo"
    monkeypatch.setenv("SLAPO_DISABLE_PLUGINS", "acme-slapo")
    assert "acme.pad" not in current_registry().names("primitives")


def test_register_primitive_works_with_and_without_parentheses(isolated_registry: Registry) -> None:
    one, other = make("my.one", qualname="One"), make("my.other", qualname="Other")
    assert register_primitive(one) is one
    assert register_primitive()(other) is other
    assert isolated_registry.load("my.one") is one
    assert isolated_registry.load("my.other") is other


@pytest.mark.parametrize(
    ("method", "function", "required"),
    [
        ("apply", lambda self, node: None, "apply(self, node, edit)"),
        ("apply", lambda self, sch, **options: None, "apply(self, node, edit)"),
        ("apply", lambda self, node, *, edit: None, "apply(self, node, edit)"),
        ("bind", lambda self: None, "bind(self, node)"),
        ("preconditions", lambda self, node, mesh: None, "preconditions(self, node)"),
        ("postconditions", 5, "postconditions(self, node)"),
    ],
)
def test_a_method_with_a_wrong_signature_is_refused_at_registration_and_at_the_step(
    isolated_registry: Registry, method: str, function: Any, required: str
) -> None:
    cls = make("my.freeze")
    setattr(cls, method, function)
    with pytest.raises(UnusablePluginError) as caught:
        isolated_registry.register(cls)
    assert f"Freeze.{method} must be callable as {required} (got " in caught.value.message
    with pytest.raises(ArgumentError, match=f"Freeze.{method} must be callable as"):
        create_schedule(nn.Linear(1, 1)).apply(cls())


@pytest.mark.parametrize(
    "function", [lambda *args: None, lambda self, n, e, more=1: None, lambda self, n, e, **k: None]
)
def test_a_method_that_can_be_called_is_accepted(isolated_registry: Registry, function: Any) -> None:
    cls = make("my.freeze")
    cls.apply = function
    isolated_registry.register(cls)


def test_the_class_of_the_paper_is_told_its_form(isolated_registry: Registry, message: Messages) -> None:
    class UserDefinedPrimitive(Primitive):
        def __init__(self, name: str) -> None: ...

        def apply(self, sch: Any, **kwargs: Any) -> None: ...  # type: ignore[override]

    with pytest.raises(UnusablePluginError) as caught:
        register_primitive()(UserDefinedPrimitive)
    message(caught, "has no name", "apply(self, node, edit)", "@dataclass(frozen=True)", "my.userdefinedprimitive")
