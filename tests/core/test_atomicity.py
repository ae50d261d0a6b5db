"""Promise: a primitive that fails, at any point inside, leaves the model bit-identical to before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import ApplyError, HookError, PostconditionError, PreconditionError, SlapoError
from slapo_core.plugins import use_registry
from slapo_core.primitives.annotate import Annotate
from slapo_core.primitives.checkpoint import Checkpoint
from slapo_core.primitives.replace import Replace
from slapo_testing import ModelSnapshot, assert_bit_identical
from slapo_testing.distributions import FakeDistribution, FakeEnvironment, primitive_source
from slapo_testing.models import CNN, MLP, Frozen, Odd, Tied, bert
from tests.messages import Messages
from tests.support.edits import Call, Everything, Fault, Halve, HookAll, fault_after, pre_hook


def odd() -> nn.Module:
    torch.manual_seed(0)
    return Odd()


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


# -- faults after the k-th edit -----------------------------------------------------------------------------------


def _replacement() -> Replace:
    new = nn.Linear(8, 8)
    new.weight.mark = "of the new module"  # type: ignore[attr-defined]
    new.eval()
    return Replace(new)


CASES: dict[str, tuple[Callable[[], nn.Module], str, Callable[[], slapo.Primitive]]] = {
    "checkpoint": (lambda: MLP(), "layers.0", Checkpoint),
    "checkpoint of a user-set forward": (odd, "own", Checkpoint),
    "annotate": (tied, "out", lambda: Annotate("weight", "mark", True)),
    "replace, with hooks": (odd, "hooked", _replacement),
    "replace of a shared module's child": (tied, "shared.0", _replacement),
    "replace of a shared module": (tied, "shared", lambda: Replace(lambda old: nn.Sequential(old, nn.Tanh()))),
    "halve, tied": (tied, "embed", Halve),
    "halve, LSTM": (odd, "lstm", Halve),
    "halve, attention": (odd, "attention", Halve),
    "halve, parametrized": (odd, "normed.parametrizations.weight", Halve),
    "halve, own __setattr__": (odd, "counting", Halve),
    "halve, batch norm": (CNN, "blocks.0.bn1", Halve),
    "hooks": (odd, "hooked", HookAll),
    "hooks, in front": (odd, "hooked", lambda: HookAll(prepend=True)),
    "everything, LSTM": (odd, "lstm", Everything),
    "everything, attention": (odd, "attention", Everything),
    "everything, parametrized": (odd, "normed", Everything),
    "everything, own __setattr__": (odd, "counting", Everything),
    "everything, user-set forward": (odd, "own", Everything),
    "everything, root": (odd, "", Everything),
    "everything, tied": (tied, "out", Everything),
    "everything, batch norm": (CNN, "blocks.0.bn1", Everything),
    "property": (odd, "counting", lambda: Call(lambda node, edit: edit.set_attribute(node, "half", 2))),
}


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("case", CASES)
def test_fault_after_any_edit_leaves_model_bit_identical(case: str, error: type[BaseException]) -> None:
    make_model, path, make_primitive = CASES[case]
    model = make_model()
    sch = slapo.create_schedule(model)
    before = ModelSnapshot(model)
    raised = ApplyError if error is Fault else error
    edits = 0
    while True:
        try:
            sch._core.apply_at(
                sch._core.tree.node(path), make_primitive(), after_edit=fault_after(edits + 1, error("injected"))
            )
        except raised:
            edits += 1
            assert_bit_identical(before, model)
            assert sch.records == ()
            assert sch._core.tree.layouts == {}
            continue
        break
    assert edits >= 1
    assert before.differences(model)
    sch.undo()
    assert_bit_identical(before, model)


def test_every_edit_is_reached_by_the_injected_faults() -> None:
    """The loop above would be hollow if ``after_edit`` were called once only."""
    sch = slapo.create_schedule(odd())
    counts: list[int] = []
    sch._core.apply_at(sch["lstm"], Everything(), after_edit=counts.append)
    assert counts == list(range(1, 1 + 2 + 1 + 4 * 4 + 4 + 1))


def test_apply_error_chains_the_cause_and_names_the_place(message: Messages) -> None:
    sch = slapo.create_schedule(MLP())
    with pytest.raises(ApplyError) as caught:
        sch._core.apply_at(sch["layers.0"], Checkpoint(), after_edit=fault_after(1))
    message(caught, "'layers.0'", "Fault: after edit 1")
    assert isinstance(caught.value.__cause__, Fault)
    assert caught.value.path == "layers.0"
    assert caught.value.plugin is not None
    assert caught.value.plugin.startswith("slapo-core ")


# -- other ways to fail -------------------------------------------------------------------------------------------


def _refused(primitive: slapo.Primitive, error: type[BaseException], model: nn.Module, path: str) -> BaseException:
    sch = slapo.create_schedule(model)
    before = ModelSnapshot(model)
    with pytest.raises(error) as caught:
        sch._core.apply_at(sch._core.tree.node(path), primitive)
    assert_bit_identical(before, model)
    assert sch.records == ()
    return caught.value


def test_broken_postcondition_rolls_back_and_lists_every_violation(message: Messages) -> None:
    def after(node: slapo.Node) -> Iterator[slapo.Violation]:
        yield slapo.Violation("first thing", "do this")
        yield slapo.Violation("second thing")

    primitive = Call(lambda node, edit: edit.set_parameter(node, "weight", torch.zeros(1)), after)
    error = _refused(primitive, PostconditionError, MLP(), "head")
    message(error, "'head' did not take effect", "  - first thing; do this\n  - second thing")


def test_postcondition_that_raises_rolls_back() -> None:
    def after(node: slapo.Node) -> Iterator[slapo.Violation]:
        raise ZeroDivisionError("oops")

    primitive = Call(lambda node, edit: edit.set_parameter(node, "weight", torch.zeros(1)), after)
    error = _refused(primitive, ApplyError, MLP(), "head")
    assert "raised ZeroDivisionError: oops" in str(error)


def test_postcondition_that_yields_something_else_rolls_back() -> None:
    primitive = Call(lambda node, edit: edit.set_attribute(node, "a", 1), lambda node: ["not a violation"])
    error = _refused(primitive, ApplyError, MLP(), "head")
    assert "(got 'not a violation')" in str(error)


def test_primitive_without_effect_is_refused(message: Messages) -> None:
    error = _refused(Call(lambda node, edit: None), PostconditionError, MLP(), "head")
    message(error, "nothing was changed", "edit.note(reason)")


def test_primitive_that_raises_after_a_nested_one_takes_that_back_too() -> None:
    def both(node: slapo.Node, edit: slapo.Edit) -> None:
        Checkpoint().apply(node["layers.0"], edit)
        Everything().apply(node["layers.1"], edit)
        raise Fault("after the nested ones")

    error = _refused(Call(both), ApplyError, MLP(), "")
    assert "Fault: after the nested ones" in str(error)


def test_edit_is_closed_after_the_primitive(message: Messages) -> None:
    kept: list[slapo.Edit] = []
    sch = slapo.create_schedule(MLP())
    sch["head"].apply(Call(lambda node, edit: (kept.append(edit), edit.set_attribute(node, "a", 1))[2:] or None))
    with pytest.raises(ApplyError) as caught:
        kept[0].set_attribute(sch["head"], "b", 2)
    message(caught, "over", "Primitive.apply")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda n, e: e.set_parameter(n, "nope", None), "no parameter 'nope'"),
        (lambda n, e: e.set_buffer(n, "nope", None), "no buffer 'nope'"),
        (lambda n, e: e.set_attribute(n, "weight", 3), "'weight' of 'head'"),
        (lambda n, e: e.set_attribute(n, "child", nn.ReLU()), "'child' of 'head'"),
        (lambda n, e: e.annotate(n, "nope", "k", 1), "no parameter 'nope'"),
        (lambda n, e: e.add_hook(n, "sideways", pre_hook), "KeyError: 'sideways'"),
        (lambda n, e: e.wrap_forward(n, lambda forward: None), "TypeError"),
    ],
)
def test_edit_refuses_what_it_could_not_take_back(change: Callable[..., Any], word: str, message: Messages) -> None:
    error = _refused(Call(change), ApplyError, MLP(), "head")
    message(error, word)


def test_root_cannot_be_replaced_by_an_edit(message: Messages) -> None:
    error = _refused(Call(lambda n, e: e.replace_module(n, nn.ReLU())), ApplyError, MLP(), "")
    message(error, "the root")


def test_buffer_never_becomes_a_parameter(message: Messages) -> None:
    model = CNN()
    change = Call(lambda n, e: e.set_buffer(n, "running_mean", nn.Parameter(torch.zeros(4))))
    error = _refused(change, ApplyError, model, "blocks.0.bn1")
    message(error, "'running_mean' of 'blocks.0.bn1'")


def test_module_that_refuses_assignments_stays_as_it_is() -> None:
    error = _refused(Call(lambda n, e: e.set_parameter(n, "weight", torch.zeros(2))), ApplyError, Frozen(), "")
    assert "RuntimeError: frozen: weight stays as it is" in str(error)
    error = _refused(Call(lambda n, e: e.set_attribute(n, "a", 1)), ApplyError, Frozen(), "")
    assert "RuntimeError: frozen: a stays as it is" in str(error)


def test_group_is_applied_everywhere_or_nowhere(message: Messages) -> None:
    model = MLP()
    sch = slapo.create_schedule(model)
    sch["layers.2"].checkpoint()
    before = ModelSnapshot(model)
    records = sch.records
    with pytest.raises(PreconditionError) as caught:
        sch["layers.*"].checkpoint()
    message(caught, "'layers.2'", "checkpointed already")
    assert_bit_identical(before, model)
    assert sch.records == records


def test_failing_hook_of_a_plugin_changes_nothing(tmp_path: Path, message: Messages) -> None:
    environment = FakeEnvironment(tmp_path)
    hooks = "\n".join(
        [
            "from slapo_core.hookspecs import hookimpl",
            "@hookimpl",
            "def slapo_preconditions(node, primitive):",
            "    raise ValueError('I do not like ' + primitive.name)",
        ]
    )
    environment.install(
        FakeDistribution(
            "acme-slapo",
            entry_points={"slapo.v1.hooks": {"acme": "acme_hooks"}},
            modules={"acme_hooks": hooks, "acme_thing": primitive_source("acme.thing")},
        )
    )
    with pytest.MonkeyPatch.context() as patch, use_registry(environment.registry(with_installed=True)):
        patch.syspath_prepend(str(tmp_path))
        model = MLP()
        sch = slapo.create_schedule(model, plugins=["Acme_Slapo"])
        before = ModelSnapshot(model)
        with pytest.raises(HookError) as caught:
            sch["layers.0"].checkpoint()
        message(caught, "slapo_preconditions of acme-slapo 1.0", "ValueError: I do not like core.checkpoint")
        assert_bit_identical(before, model)
        assert sch.records == ()
        # A plugin named at the start stays active after a step went away, however its name was spelt.
        assert sch._core.hooks.active == ("acme-slapo",)
        with pytest.raises(HookError):
            sch["layers.1"].checkpoint()
    environment.forget_modules()


def test_refused_primitive_touches_nothing_of_bert() -> None:
    model = bert()
    sch = slapo.create_schedule(model)
    before = ModelSnapshot(model)
    for path, primitive in (
        ("bert.encoder.layer", Checkpoint()),
        ("", Replace(nn.ReLU())),
        ("cls.predictions.decoder", Replace(nn.Linear(3, 3))),
        ("cls.predictions.decoder", Annotate("weight", "grad", 1)),
    ):
        with pytest.raises(SlapoError):
            sch._core.apply_at(sch._core.tree.node(path), primitive)
        assert_bit_identical(before, model)


@pytest.mark.parametrize("value", [Checkpoint, None, "checkpoint", lambda node: node])
def test_only_primitive_values_are_applied(value: Any, message: Messages) -> None:
    sch = slapo.create_schedule(MLP())
    with pytest.raises(slapo.ArgumentError) as caught:
        sch["head"].apply(value)
    got = "class Checkpoint" if value is Checkpoint else "<lambda>" if callable(value) else repr(value)
    message(caught, got)
