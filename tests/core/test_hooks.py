"""Hooks: installed is vocabulary, named is effect; every answer and every fault has an owner."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import pluggy
import pytest
import torch

import slapo_core as slapo
from slapo_core import hookspecs
from slapo_core.errors import HookError, UnknownNameError, UnusablePluginError
from slapo_core.plugins import use_registry
from slapo_core.plugins.manager import HookManager
from slapo_runtime import hookspecs as runtime_hookspecs
from slapo_testing.distributions import FakeDistribution, FakeEnvironment
from tests.dists.healthy import acme, with_hooks
from tests.messages import Messages

DOCTOR = "@hookimpl\ndef slapo_doctor():\n    return ['{}']\n"
MATERIALIZE = "@hookimpl\ndef slapo_initialize(path):\n    return {}\n"
TENSOR = {"path": "fc", "name": "weight", "shape": (2, 3), "dtype": None}


def hooks_of(environment: FakeEnvironment, source: str) -> HookManager:
    """A manager in which the plugin ``acme-hooks`` is active, with that source."""
    environment.install(with_hooks("acme-hooks", source))
    manager = HookManager(environment.registry())
    manager.activate("acme-hooks")
    return manager


def test_the_hooks_are_those_of_the_design_and_fully_described() -> None:
    modules = (hookspecs, runtime_hookspecs)
    hooks = {name: module for module in modules for name in vars(module) if name.startswith("slapo_")}
    assert sorted(hooks) == [
        "slapo_check",
        "slapo_doctor",
        "slapo_from_reference",
        "slapo_full_matrix",
        "slapo_gather_output",
        "slapo_initialize",
        "slapo_liveness",
        "slapo_partition",
        "slapo_preconditions",
        "slapo_suggest",
        "slapo_to_reference",
    ]
    for name, module in hooks.items():
        function = getattr(module, name)
        options = pluggy.PluginManager("slapo").parse_hookspec_opts(module, name)
        assert options is not None, f"{name} is not decorated with @hookspec"
        text = function.__doc__ or ""
        assert text.startswith("Called when ")
        assert f"First result: {'yes' if options['firstresult'] else 'no'}" in text
        assert "Returns:" in text
        for argument in inspect.signature(function).parameters:
            assert f"\n        {argument}: " in text, (name, argument)


def test_an_installed_plugin_has_no_effect_until_it_is_named(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(with_hooks("acme-hooks", DOCTOR.format("acme")))
    manager = HookManager(fake_distributions.registry())
    assert manager.call("slapo_doctor") == []
    assert manager.call("slapo_initialize", **TENSOR) is None
    assert "acme_hooks_hooks" not in sys.modules
    manager.activate("Acme_Hooks")
    manager.activate("acme-hooks")
    assert manager.active == ("acme-hooks",)
    assert manager.call("slapo_doctor") == [["acme"]]
    manager.deactivate("acme-hooks")
    assert manager.call("slapo_doctor") == []
    assert manager.active == ()
    manager.activate("acme-hooks")
    assert manager.call("slapo_doctor") == [["acme"]]


def test_of_several_hooks_modules_all_are_active_or_none(fake_distributions: FakeEnvironment) -> None:
    points = {"slapo.v1.hooks": {"two.doctor": "two_doctor", "two.wrong": "two_wrong"}}
    doctor = "from slapo_core import hookimpl\n" + DOCTOR.format("two")
    modules = {"two_doctor": doctor, "two_wrong": doctor.replace("()", "(node)")}
    fake_distributions.install(FakeDistribution("two-slapo", "1.0", points, modules))
    manager = HookManager(fake_distributions.registry())
    with pytest.raises(HookError, match="two_wrong"):
        manager.activate("two-slapo")
    assert (manager.active, manager.call("slapo_doctor"), manager.has("slapo_doctor")) == ((), [], False)
    manager = HookManager(fake_distributions.registry({"SLAPO_DISABLE_PLUGINS": "two_slapo:two.wrong"}))
    manager.activate("two-slapo")
    assert manager.call("slapo_doctor") == [["two"]]
    manager.deactivate("two-slapo")
    assert not manager.has("slapo_doctor")


def test_a_default_is_asked_only_where_no_other_plugin_answers(fake_distributions: FakeEnvironment) -> None:
    counting = "ASKED = []\n@hookimpl\ndef slapo_initialize(path):\n    ASKED.append(path)\n"
    default = MATERIALIZE.replace("@hookimpl", "@hookimpl(trylast=True)").format(1)
    fake_distributions.install(
        with_hooks("mute-slapo", counting),
        with_hooks("full-slapo", MATERIALIZE.format(0)),
        with_hooks("also-slapo", default),
    )
    manager = HookManager(fake_distributions.registry())
    manager.activate("also-slapo")
    manager.activate("mute-slapo")
    assert manager.single("slapo_initialize", **TENSOR) == ("also-slapo 1.0", 1)
    assert len(sys.modules["mute_slapo_hooks"].ASKED) == 1
    manager.activate("full-slapo")
    assert manager.single("slapo_initialize", **TENSOR) == ("full-slapo 1.0", 0)
    assert len(sys.modules["mute_slapo_hooks"].ASKED) == 2


@pytest.mark.slow
def test_finding_plugins_imports_no_pluggy(fake_distributions: FakeEnvironment) -> None:
    code = (
        "import sys; from slapo_core.plugins import Registry\n"
        "assert Registry.discover(environ={}).plugins\nassert 'pluggy' not in sys.modules\n"
        "from slapo_core import hookimpl\nassert 'pluggy' in sys.modules\n"
    )
    done = fake_distributions.run("-c", code)
    assert done.returncode == 0, done.stderr


def test_two_schedules_do_not_share_what_is_active(fake_distributions: FakeEnvironment) -> None:
    fake_distributions.install(with_hooks("acme-hooks", DOCTOR.format("acme")))
    registry = fake_distributions.registry()
    one, other = HookManager(registry), HookManager(registry)
    one.activate("acme-hooks")
    assert one.call("slapo_doctor") == [["acme"]]
    assert other.call("slapo_doctor") == []


def test_a_plugin_without_hooks_and_code_of_this_process_are_only_remembered(
    fake_distributions: FakeEnvironment,
) -> None:
    fake_distributions.install(acme())
    manager = HookManager(fake_distributions.registry())
    manager.activate("acme-slapo")
    manager.activate("__main__", version="local")
    assert manager.active == ("__main__", "acme-slapo")
    assert manager.call("slapo_doctor") == []
    manager.deactivate("__main__")
    assert manager.active == ("acme-slapo",)
    assert "acme_slapo" not in sys.modules


def test_activating_what_is_not_installed_or_disabled_is_an_error(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    fake_distributions.install(with_hooks("acme-hooks", DOCTOR.format("acme")))
    with pytest.raises(UnknownNameError) as caught:
        HookManager(fake_distributions.registry()).activate("acme-hoks")
    message(caught, "no plugin 'acme-hoks' is installed", "did you mean acme-hooks?")
    disabled = HookManager(fake_distributions.registry({"SLAPO_DISABLE_PLUGINS": "acme-hooks"}))
    with pytest.raises(UnusablePluginError) as off:
        disabled.activate("acme-hooks")
    message(off, "acme-hooks 1.0", "disabled")
    assert "acme_hooks_hooks" not in sys.modules


def test_an_unusable_plugin_cannot_be_named_although_it_has_no_hooks(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    fake_distributions.install(acme(bare="lambda"))
    manager = HookManager(fake_distributions.registry())
    with pytest.raises(UnusablePluginError) as caught:
        manager.activate("acme-slapo")
    message(caught, "acme-slapo 1.0", "'acme.lambda'", "pip uninstall acme-slapo")
    assert manager.active == ()


def test_hooks_module_shared_by_two_distributions_is_refused(fake_distributions: FakeEnvironment) -> None:
    one = with_hooks("acme-hooks", DOCTOR.format("x"))
    fake_distributions.install(one, FakeDistribution("beta-hooks", "1.0", one.entry_points))
    manager = HookManager(fake_distributions.registry())
    manager.activate("acme-hooks")
    with pytest.raises(HookError, match=r"beta-hooks 1\.0 \(acme_hooks_hooks\)") as caught:
        manager.activate("beta-hooks")
    assert caught.value.plugin == "beta-hooks 1.0"
    assert manager.active == ("acme-hooks",)
    assert manager.call_each("slapo_doctor") == [("acme-hooks", ["x"])]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("@hookimpl\ndef slapo_chekc(schedule): pass\n", ("unknown hook 'slapo_chekc'",)),
        ("@hookimpl\ndef doctor(): pass\n", ("unknown hook 'doctor'",)),
        ("def slapo_doctor(): pass\n", ("'slapo_doctor'", "not decorated")),
        (
            "@hookimpl\ndef slapo_initialize(path, names): pass\n",
            ("'slapo_initialize'", "{'names'}"),
        ),
        ("@hookimpl(wrapper=True)\ndef slapo_doctor(): return (yield)\n", ("'slapo_doctor'", "wrapper")),
        ("@hookimpl\ndef slapo_doctor(node): pass\n", ("'slapo_doctor'", "{'node'}")),
    ],
    ids=("misspelt", "no prefix", "not decorated", "misspelt argument", "wrapper", "another argument"),
)
def test_a_hook_that_would_never_be_called_is_refused(
    fake_distributions: FakeEnvironment, source: str, words: tuple[str, ...], message: Messages
) -> None:
    with pytest.raises(HookError) as caught:
        hooks_of(fake_distributions, source)
    message(caught, "acme-hooks 1.0 (acme_hooks_hooks)", *words)
    assert caught.value.plugin == "acme-hooks 1.0"


def test_an_implementation_may_take_fewer_arguments_and_another_function_name(
    fake_distributions: FakeEnvironment,
) -> None:
    source = (
        "import slapo_core\nslapo_cache = {}\n@hookimpl(specname='slapo_initialize')\ndef fill(name): return name\n"
    )
    assert hooks_of(fake_distributions, source).call("slapo_initialize", **TENSOR) == "weight"


@pytest.mark.parametrize(
    "body", ["raise ValueError('no')", "raise SystemExit('no')", "yield 1; raise ValueError('no')"]
)
def test_an_exception_carries_the_hook_and_the_plugin(
    fake_distributions: FakeEnvironment, body: str, message: Messages
) -> None:
    manager = hooks_of(fake_distributions, f"@hookimpl\ndef slapo_doctor():\n    {body}\n")
    with pytest.raises(HookError) as caught:
        manager.call("slapo_doctor")
    kind = "SystemExit" if "Exit" in body else "ValueError"
    message(caught, "slapo_doctor", "acme-hooks 1.0", f"{kind}: no", "SLAPO_DISABLE_PLUGINS=acme-hooks")
    assert type(caught.value.__cause__).__name__ == kind


def test_an_answer_belongs_to_its_plugin_whatever_its_function_is_called(fake_distributions: FakeEnvironment) -> None:
    other = "@hookimpl(specname='slapo_doctor')\ndef look(): return ['beta']\n"
    fake_distributions.install(with_hooks("acme-hooks", DOCTOR.format("acme")), with_hooks("beta-hooks", other))
    manager = HookManager(fake_distributions.registry())
    manager.activate("acme-hooks")
    manager.activate("beta-hooks")
    assert manager.call_each("slapo_doctor") == [("acme-hooks", ["acme"]), ("beta-hooks", ["beta"])]


def test_two_answers_to_a_first_result_hook_are_an_error_naming_both(
    fake_distributions: FakeEnvironment, message: Messages
) -> None:
    for name, answer in (("acme-hooks", "1"), ("beta-hooks", "2"), ("gamma-hooks", "None")):
        fake_distributions.install(with_hooks(name, MATERIALIZE.format(answer)))
    manager = HookManager(fake_distributions.registry())
    manager.activate("gamma-hooks")
    assert manager.call("slapo_initialize", **TENSOR) is None
    manager.activate("beta-hooks")
    assert manager.call("slapo_initialize", **TENSOR) == 2
    manager.activate("acme-hooks")
    with pytest.raises(HookError) as caught:
        manager.call("slapo_initialize", **TENSOR)
    call = "slapo_initialize(path='fc', name='weight', shape=(2, 3), dtype=None)"
    message(caught, call, "acme-hooks 1.0", "beta-hooks 1.0", "SLAPO_DISABLE_PLUGINS=beta-hooks")


def test_a_false_answer_is_an_answer(fake_distributions: FakeEnvironment) -> None:
    assert hooks_of(fake_distributions, MATERIALIZE.format("0")).call("slapo_initialize", **TENSOR) == 0


def test_the_order_of_activation_has_no_meaning(fake_distributions: FakeEnvironment) -> None:
    names = ["acme-hooks", "beta-hooks", "gamma-hooks"]
    fake_distributions.install(*(with_hooks(name, DOCTOR.format(name)) for name in names))
    registry = fake_distributions.registry()
    answers = []
    for order in (names, names[::-1]):
        manager = HookManager(registry)
        for name in order:
            manager.activate(name)
        answers.append(manager.call_each("slapo_doctor"))
    assert answers[0] == answers[1] == [(name, [name]) for name in names]


def test_calling_a_hook_wrongly_is_an_error(fake_distributions: FakeEnvironment) -> None:
    with pytest.raises(AttributeError, match="slapo_doktor"):
        HookManager(fake_distributions.registry()).call("slapo_doktor")
    manager = hooks_of(fake_distributions, "@hookimpl\ndef slapo_preconditions(node, primitive): pass\n")
    with pytest.raises(KeyError, match="primitive"):
        manager.call("slapo_preconditions", node=None)


CHECK = "from slapo_core import Violation\n@hookimpl\ndef slapo_check(schedule):\n    {}\n"


@pytest.fixture
def complaining(fake_distributions: FakeEnvironment) -> Callable[[str], slapo.Schedule]:
    def schedule(body: str) -> slapo.Schedule:
        fake_distributions.install(with_hooks("acme-hooks", CHECK.format(body)))
        with use_registry(fake_distributions.registry(with_installed=True)):
            return slapo.create_schedule(torch.nn.Linear(2, 2), plugins=["acme-hooks"])

    return schedule


def test_build_refuses_what_plugins_say_is_missing(
    complaining: Callable[[str], slapo.Schedule], message: Messages
) -> None:
    sch = complaining("yield Violation('the sum is not reduced', 'add sum()'); yield Violation('no bias')")
    with pytest.raises(slapo.BuildError) as refused:
        slapo.build(sch)
    message(refused, ":\n  - the sum is not reduced; add sum()\n  - no bias")
    assert not sch.is_sealed


def test_a_check_that_gives_no_violations_is_blamed(
    complaining: Callable[[str], slapo.Schedule], message: Messages
) -> None:
    with pytest.raises(HookError) as refused:
        slapo.build(complaining("return ['the sum is not reduced']"))
    message(refused, "slapo_check of acme-hooks", "Violation", "got 'the sum is not reduced'")


def test_suggestions_that_are_none_are_blamed(fake_distributions: FakeEnvironment, message: Messages) -> None:
    body = "from slapo_core import Violation\n@hookimpl\ndef slapo_suggest(schedule):\n    return ['sum it']\n"
    fake_distributions.install(with_hooks("acme-hooks", body))
    with use_registry(fake_distributions.registry(with_installed=True)):
        sch = slapo.create_schedule(torch.nn.Sequential(torch.nn.Linear(2, 2)), plugins=["acme-hooks"])
    sch["0"].replace(torch.nn.Linear(2, 2).requires_grad_(False), drop=("weight", "bias"))
    with pytest.raises(HookError) as refused:
        slapo.verify(sch, torch.ones(1, 2))
    message(refused, "slapo_suggest of acme-hooks", "Suggestion", "got 'sum it'")


def test_plugin_answering_twice_is_an_error(fake_distributions: FakeEnvironment) -> None:
    twice = f"{MATERIALIZE.format(1)}@hookimpl(specname='slapo_initialize')\ndef more(name): return 2\n"
    with pytest.raises(HookError, match=r"acme-hooks 1\.0 and by acme-hooks 1\.0"):
        hooks_of(fake_distributions, twice).call("slapo_initialize", **TENSOR)
