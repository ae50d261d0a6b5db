"""What a plugin does at import stays with that plugin."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch

from slapo_core.errors import BrokenPluginError, DisabledPluginError, PluginError, RejectedPluginError
from slapo_core.plugins import PluginWarning
from slapo_core.plugins.tampering import ImportGuard
from slapo_core.testing.distributions import FakeDistribution, FakeEnvironment
from tests.dists.healthy import acme
from tests.messages import Messages


def test_what_a_plugin_prints_becomes_a_warning_with_its_name(
    fake_distributions: FakeEnvironment, capsys: pytest.CaptureFixture[str], message: Messages
) -> None:
    fake_distributions.install(acme(before=("import sys", "print('buy now')", "print('!', file=sys.stderr)")))
    with pytest.warns(PluginWarning) as caught:
        fake_distributions.registry().load("pad")
    (warning,) = caught
    message(warning.message, "acme-slapo 1.0", "'acme_slapo:Thing'", "'buy now\\n!'")
    assert warning.filename == __file__
    assert capsys.readouterr() == ("", "")


def test_a_plugin_that_keeps_quiet_causes_no_warning(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fake_distributions.registry().load("pad")


def test_the_users_interrupt_is_not_contained(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme(before=("raise KeyboardInterrupt",)))
    registry = fake_distributions.registry()
    with pytest.raises(KeyboardInterrupt):
        registry.load("pad")
    assert [plugin.state for plugin in registry.plugins] == ["ok"]


def test_the_cause_of_a_failed_import_is_chained(fake_distributions: FakeEnvironment, message: Messages) -> None:
    fake_distributions.install(acme(before=("import nothing_of_that_name",)))
    with pytest.raises(BrokenPluginError) as caught:
        fake_distributions.registry().load("pad")
    message(caught, "'acme.pad' of acme-slapo 1.0 (acme_slapo:Thing)", "'nothing_of_that_name'", "--force-reinstall")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_patched_module_forward_is_put_back_and_the_whole_distribution_refused(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    call, points = torch.nn.Module.__call__, {"acme.pad": "acme_slapo:Thing", "acme.cut": "acme_cut:Thing"}
    patch = ("import torch", "torch.nn.Module.__call__ = None", "torch.nn.Module.spy = 1")
    modules = {
        **acme(before=patch).modules,
        "acme_cut": acme("acme-cut", bare="cut").modules["acme_cut"],
    }
    fake_distributions.install(FakeDistribution("acme-slapo", "1.0", {"slapo.v1.primitives": points}, modules))
    registry = fake_distributions.registry()
    assert registry.load("cut").name == "acme.cut"
    with pytest.raises(RejectedPluginError) as caught:
        registry.load("pad")
    message(caught, "torch.nn.Module.__call__ was replaced", "torch.nn.Module.spy was added")
    assert torch.nn.Module.__call__ is call
    assert not hasattr(torch.nn.Module, "spy")
    with pytest.raises(RejectedPluginError):
        registry.load("cut")
    assert registry.names("primitives") == ()


def test_an_import_that_asks_for_input_or_replaces_a_builtin_is_contained(fake_distributions: FakeEnvironment) -> None:
    asking = acme("ask-slapo", namespace="ask", before=("input('licence key? ')",))
    taking = acme("take-slapo", namespace="take", before=("import builtins", "builtins.print = None"))
    fake_distributions.install(asking, taking)
    registry, own, stdin = fake_distributions.registry(), print, sys.stdin
    with pytest.raises(BrokenPluginError, match="EOFError"), pytest.warns(PluginWarning, match="licence key"):
        registry.load("ask.pad")
    with pytest.raises(RejectedPluginError, match=r"builtins\.print was replaced"):
        registry.load("take.pad")
    assert print is own
    assert sys.stdin is stdin


def test_lazy_public_names_and_submodules_are_no_tampering() -> None:
    import slapo_core

    before = ImportGuard()
    for name in ("Violation", "hookimpl", "PathError"):
        vars(slapo_core).pop(name, None)
        getattr(slapo_core, name)
    assert before.restore() == []
    before = ImportGuard()
    vars(slapo_core).pop("Violation")
    clean = ImportGuard()
    slapo_core.Violation = object  # type: ignore[misc]
    assert clean.restore() == ["slapo_core.Violation was added"]
    assert slapo_core.Violation.__name__ == "Violation"
    assert before.restore() == []


def test_a_plugin_may_use_slapo_while_it_is_imported(fake_distributions: FakeEnvironment) -> None:
    use = (
        "import slapo_core",
        "from slapo_core.plugins import current_registry",
        "current_registry().names('primitives')",
        "slapo_core.Equivalence, slapo_core.hookimpl, slapo_core.Layout, slapo_core.PluginError",
    )
    fake_distributions.install(acme(before=use))
    assert fake_distributions.registry().load("pad").name == "acme.pad"


def test_a_class_imported_past_the_registry_is_refused_when_its_plugin_is_disabled(
    fake_distributions: FakeEnvironment,
) -> None:
    fake_distributions.install(acme())
    import acme_slapo  # type: ignore[import-not-found]

    enabled = fake_distributions.registry()
    enabled.require_usable(acme_slapo.Thing())
    assert enabled.provider(acme_slapo.Thing) == ("acme-slapo", "1.0")
    with pytest.raises(DisabledPluginError):
        fake_distributions.registry({"SLAPO_DISABLE_PLUGINS": "acme-slapo"}).require_usable(acme_slapo.Thing)


def test_strict_mode_raises_at_the_first_use_of_any_name(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(acme(), acme("sick-slapo", namespace="sick", bare="cut", before=("1 / 0",)))
    relaxed = fake_distributions.registry()
    assert relaxed.load("pad").name == "acme.pad"
    strict = fake_distributions.registry({"SLAPO_STRICT_PLUGINS": "1"})
    for _ in range(2):
        with pytest.raises(PluginError, match=r"'sick.cut' .*ZeroDivisionError"):
            strict.load("pad")
        strict = fake_distributions.registry({"SLAPO_STRICT_PLUGINS": "1"})
    both = {"SLAPO_STRICT_PLUGINS": "1", "SLAPO_DISABLE_PLUGINS": "sick-slapo"}
    assert fake_distributions.registry(both).load("pad").name == "acme.pad"


def test_strict_mode_raises_for_a_state_known_without_import(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    fake_distributions.install(acme(), acme("sick-slapo", namespace="tp", bare="cut"))
    with pytest.raises(RejectedPluginError) as caught:
        fake_distributions.registry({"SLAPO_STRICT_PLUGINS": "1"}).resolve("primitives", "pad")
    message(caught, "SLAPO_STRICT_PLUGINS=1", "sick-slapo 1.0", "namespace 'tp' of 'tp.cut'")
    assert "sick_slapo" not in sys.modules
