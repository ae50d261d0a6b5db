"""Promise: ``undo`` takes steps back; after undoing all, the model is bit-identical to the reference model."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import SealedError, SlapoError, UndoError
from slapo_core.primitives.annotate import Annotate
from slapo_core.primitives.checkpoint import Checkpoint
from slapo_core.primitives.replace import Replace
from slapo_testing import ModelSnapshot, assert_bit_identical
from slapo_testing.models import MLP, MODELS, Counting, Odd, Tied, run
from tests.messages import Messages
from tests.support.edits import Call, Everything, Halve, HookAll

SEQUENCES = {"bert": 300, "gpt2": 300, "cnn": 400}


def _around(old: nn.Module) -> nn.Module:
    return nn.Sequential(old)


def _rename(node: slapo.Node, edit: slapo.Edit) -> None:
    edit.set_attribute(node, "marked_at", node.path)
    edit.note("nothing but a mark")


def _drop_bias(node: slapo.Node, edit: slapo.Edit) -> None:
    edit.set_parameter(node, "bias", None)


def _primitives(sch: slapo.Schedule) -> list[Callable[[], slapo.Primitive]]:
    makers: list[Callable[[], slapo.Primitive]] = [
        Checkpoint,
        Halve,
        HookAll,
        lambda: HookAll(prepend=True),
        Everything,
        lambda: Annotate("weight", "mark", object()),
        lambda: Annotate("bias", "mark", True),
        lambda: Replace(_around),
        lambda: Replace(nn.Identity(), drop=("weight", "bias")),
        lambda: Call(_rename),
        lambda: Call(_drop_bias),
    ]
    if importlib.util.find_spec("slapo_tp") is not None:
        makers += _tensor_parallel()
    return makers


def _tensor_parallel() -> list[Callable[[], slapo.Primitive]]:
    from slapo_tp.shard import Shard
    from slapo_tp.sync import Sync

    return [
        lambda: Shard("weight", axis=0),
        lambda: Shard(("weight", "bias"), axis=0),
        lambda: Shard("weight", axis=1),
        lambda: Sync("fwd_post", "all_reduce"),
        lambda: Sync("bwd_post", "all_reduce"),
    ]


@pytest.mark.breadth
@pytest.mark.parametrize("name", MODELS)
def test_random_sequences_end_bit_identical_after_undoing_all(name: str) -> None:
    model = MODELS[name]().double()
    run(model, name).backward()  # gradients are part of the state
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    makers = _primitives(sch)
    applied = refused = undone = 0
    names: set[str] = set()
    for seed in range(SEQUENCES[name]):
        draw = random.Random(seed)
        for _ in range(draw.randint(1, 8)):
            choice = draw.random()
            if choice < 0.7 or not sch.records:
                # Half of the steps come on top of the last one: sync needs a shard below it.
                again = sch.records and draw.random() < 0.5 and sch.records[-1].path in sch._core.tree.index.modules
                path = sch.records[-1].path if again else draw.choice(list(sch._core.tree.index.modules))
                try:
                    sch._core.apply_at(sch._core.tree.node(path), draw.choice(makers)())
                    names.add(sch.records[-1].name)
                    applied += 1
                except SlapoError:
                    refused += 1
            elif choice < 0.85:
                sch.undo()
                undone += 1
            else:
                to = draw.randint(0, len(sch.records))
                sch.undo(to=draw.choice([to, sch.records[to - 1]]) if to else 0)
                undone += 1
        if sch.records:
            sch.undo(to=0)
        assert sch._core.tree.layouts == {}
        assert_bit_identical(before, model)
    assert applied > 1.5 * SEQUENCES[name]
    assert refused > SEQUENCES[name] / 4
    assert undone > SEQUENCES[name] / 2
    assert names >= {"core.checkpoint", "core.replace", "core.annotate", "test.halve", "test.everything"}
    assert ("tp.shard" in names) == ("tp.sync" in names) == (importlib.util.find_spec("slapo_tp") is not None)
    assert run(model, name).isfinite()


def test_undo_gives_the_records_taken_back_latest_first() -> None:
    sch = slapo.create_schedule(MLP())
    sch["layers.*"].checkpoint()
    first, second, third, fourth = sch.records
    assert sch.undo() == (fourth,)
    assert sch.undo(to=first) == (third, second)
    assert sch.records == (first,)
    assert sch.undo(to=1) == ()
    assert sch.undo(to=0) == (first,)
    assert sch.records == ()


def _error(call: Callable[[], Any], error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def test_an_undo_that_fails_halfway_leaves_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that were taken back are gone, the others are there, and a new schedule of the model is refused."""
    model = MLP()
    sch = slapo.create_schedule(model)
    for number in range(3):
        sch[f"layers.{number}"].checkpoint()
    entry = next(entry for record, entry in sch._core.entries() if record.index == 2)
    monkeypatch.setattr(type(entry), "undo", _unless(entry, type(entry).undo))
    with pytest.raises(UndoError, match="step #2"):
        sch.undo(to=0)
    assert len(sch.records) == 2
    with pytest.raises(slapo.ArgumentError, match="2 steps"):
        slapo.create_schedule(model).root.checkpoint()


def _unless(refused: Any, undo: Callable[[Any], None]) -> Callable[[Any], None]:
    def raising(entry: Any) -> None:
        if entry is refused:
            raise ValueError("in the way")
        undo(entry)

    return raising


def test_undo_of_an_unknown_step_is_refused(message: Messages) -> None:
    sch = slapo.create_schedule(MLP())
    message(_error(sch.undo, UndoError), "no step", "sch.records")
    sch["head"].checkpoint()
    message(_error(lambda: sch.undo(to=7), UndoError), "step 7", "1 steps")
    assert "step -1 is not" in _error(lambda: sch.undo(to=-1), UndoError)
    other = slapo.create_schedule(MLP())
    other["layers.0"].checkpoint()
    message(_error(lambda: sch.undo(to=other.records[0]), UndoError), "#1 checkpoint() at 'layers.0'")
    for wrong in ("1", True, 1.0):
        message(_error(lambda wrong=wrong: sch.undo(to=wrong), UndoError), f"got {wrong!r}")
    assert len(sch.records) == 1


def test_sealed_schedule_changes_no_more(message: Messages) -> None:
    sch = slapo.create_schedule(MLP())
    sch["head"].checkpoint()
    scheduled = ModelSnapshot(sch.model)
    sch.seal("build()")
    for call, what in (
        (sch.undo, "undo"),
        (lambda: sch["layers.0"].checkpoint(), "apply checkpoint()"),
        (lambda: sch.reference().__enter__(), "go back"),
    ):
        message(_error(call, SealedError), f"cannot {what}", "sealed by build()")
    sch.seal()  # again is fine
    assert_bit_identical(scheduled, sch.model)
    assert len(sch.records) == 1


# -- untouched() and rewound() ------------------------------------------------------------------------------------


def _scheduled_odd() -> tuple[nn.Module, ModelSnapshot, slapo.Schedule]:
    torch.manual_seed(0)
    model = Odd()
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    sch["lstm"].apply(Halve())
    sch["hooked"].apply(HookAll())
    sch["hooked"].annotate("weight", "mark", 1)
    sch["attention"].apply(Everything())
    sch["counting"].apply(Halve())
    sch["own"].checkpoint()
    sch["own"].replace(_around)
    return model, before, sch


def test_untouched_model_is_bit_identical_inside_and_scheduled_again_after() -> None:
    model, before, sch = _scheduled_odd()
    scheduled = ModelSnapshot(model)
    layouts = dict(sch._core.tree.layouts)
    for _ in range(2):
        with sch.reference() as inside:
            assert inside is model
            assert_bit_identical(before, model)
            assert sch._core.tree.layouts == {}
        assert_bit_identical(scheduled, model)
        assert sch._core.tree.layouts == layouts
    sch.undo(to=0)
    assert_bit_identical(before, model)


def test_rewound_model_is_as_it_was_after_each_step() -> None:
    torch.manual_seed(0)
    model = Odd()
    sch = slapo.create_schedule(model)
    looks = [ModelSnapshot(model)]
    for path, primitive in (
        ("hooked", HookAll()),
        ("hooked", HookAll(prepend=True)),
        ("lstm", Everything()),
        ("own", Checkpoint()),
        ("normed.parametrizations.weight", Halve()),
    ):
        sch._core.apply_at(sch._core.tree.node(path), primitive)
        looks.append(ModelSnapshot(model))
    for step, look in enumerate(looks):
        with sch.rewound(step):
            assert_bit_identical(look, model)
        assert_bit_identical(looks[-1], model)
    with sch.rewound(sch.records[1]):
        assert_bit_identical(looks[2], model)


def test_untouched_comes_back_when_the_body_raises() -> None:
    model, _, sch = _scheduled_odd()
    scheduled = ModelSnapshot(model)
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), sch.reference():
            raise error
        assert_bit_identical(scheduled, model)


def test_nested_rewinding_comes_back_to_where_it_was() -> None:
    model, before, sch = _scheduled_odd()
    scheduled = ModelSnapshot(model)
    with sch.rewound(2):
        middle = ModelSnapshot(model)
        with sch.reference():
            assert_bit_identical(before, model)
            with sch.rewound(2):
                assert_bit_identical(middle, model)
            assert_bit_identical(before, model)
        assert_bit_identical(middle, model)
    assert_bit_identical(scheduled, model)
    sch.undo()


def test_schedule_stays_as_it_is_while_rewound(message: Messages) -> None:
    model, before, sch = _scheduled_odd()
    records = sch.records
    with sch.reference():
        for call, what in (
            (sch.undo, "undo"),
            (lambda: sch["hooked"].checkpoint(), "apply checkpoint()"),
            (sch.seal, "seal"),
        ):
            message(_error(call, SealedError), f"cannot {what}", "step 0", "sch.reference()")
        assert_bit_identical(before, model)
    assert sch.records == records
    sch.undo(to=0)
    assert_bit_identical(before, model)


def test_hooks_that_the_user_sets_between_steps_keep_their_order() -> None:
    model = MLP()
    head = model.head

    def own(letter: str, **options: bool) -> Any:
        def hook(*_: Any) -> None:
            order.append(letter)

        return head.register_forward_hook(hook, **options)

    def step(letter: str, prepend: bool = False) -> None:
        sch["head"].apply(Call(lambda node, edit: edit.add_hook(node, "forward", _Says(letter), prepend=prepend)))

    class _Says:
        def __init__(self, letter: str) -> None:
            self.letter = letter

        def __call__(self, *_: Any) -> None:
            order.append(self.letter)

    def ran() -> str:
        order.clear()
        model(torch.ones(1, 8))
        return "".join(order)

    order: list[str] = []
    sch = slapo.create_schedule(model)
    handle = own("a")
    step("B")
    own("c")
    step("D")
    own("e")
    step("F", prepend=True)
    assert ran() == "FaBcDe"
    with sch.reference():
        assert ran() == "ace"
    assert ran() == "FaBcDe"
    with sch.rewound(1):
        assert ran() == "aBce"
    with sch.reference():
        handle.remove()  # gone for good, and not put back with the steps
        own("g")
        own("h", prepend=True)
        assert ran() == "hceg"
    assert set(ran()) == set("FBcDehg")
    assert [letter for letter in ran() if letter in "BcDe"] == list("BcDe")
    sch.undo(to=0)
    assert ran() == "hceg"


def test_full_backward_hook_of_the_user_survives_undo() -> None:
    model = MLP()
    sch = slapo.create_schedule(model)
    sch["head"].apply(HookAll())
    seen: list[int] = []
    model.head.register_full_backward_hook(lambda *_: seen.append(1))
    sch.undo()
    model(torch.ones(1, 8, requires_grad=True)).sum().backward()
    assert seen == [1]


def test_undo_takes_back_attributes_carried_to_a_tensor_of_the_users_own() -> None:
    torch.manual_seed(0)
    model = MLP()
    model.head.weight.mark = "author"  # type: ignore[attr-defined]
    given = nn.Parameter(torch.zeros(4, 8))
    given.own = "kept"  # type: ignore[attr-defined]
    sch = slapo.create_schedule(model)
    sch["head"].apply(Call(lambda node, edit: edit.set_parameter(node, "weight", given)))
    assert given.__dict__ == {"own": "kept", "mark": "author"}
    sch.undo()
    assert given.__dict__ == {"own": "kept"}


def test_undo_takes_back_what_a_modules_own_setattr_did_besides() -> None:
    model = nn.Sequential(Counting())
    sch = slapo.create_schedule(model)
    before, assigned = ModelSnapshot(model), model[0].assigned
    sch["0"].apply(Call(lambda node, edit: edit.set_attribute(node, "half", 16)))
    assert model[0].width == 32
    assert model[0].assigned > assigned
    sch.undo()
    assert_bit_identical(before, model)


def test_lstm_runs_on_its_own_weights_after_undo() -> None:
    torch.manual_seed(0)
    model = Odd()
    x = torch.randn(1, 2, 8)
    expected = model.lstm(x)[0]
    sch = slapo.create_schedule(model)
    doubled = Call(lambda n, e: e.set_parameter(n, "weight_ih_l0", 2 * n.parameters["weight_ih_l0"].detach()))
    sch["lstm"].apply(doubled)
    assert not torch.equal(model.lstm(x)[0], expected)
    with sch.reference():
        assert torch.equal(model.lstm(x)[0], expected)
    assert not torch.equal(model.lstm(x)[0], expected)
    sch.undo()
    assert torch.equal(model.lstm(x)[0], expected)


def test_tied_weights_change_together_and_come_back_together() -> None:
    model = Tied()
    weight = model.embed.weight
    sch = slapo.create_schedule(model)
    sch["out"].apply(Halve())
    assert model.embed.weight is model.out.weight is not weight
    assert sch["embed"].layout("weight") == sch["out"].layout("weight")
    assert sch["embed"].ties("weight") == ("embed.weight", "out.weight")
    sch.undo()
    assert model.embed.weight is model.out.weight is weight


def test_parameters_set_by_the_user_after_the_start_are_changed_and_never_missed() -> None:
    model = MLP()
    sch = slapo.create_schedule(model)
    assert sch["head"].ties("weight") == ("head.weight",)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assigned = model.head.weight
    sch["head"].apply(Halve())
    assert model.head.weight.shape == (2, 8)
    sch.undo()
    assert model.head.weight is assigned


def test_training_after_undoing_all_equals_the_reference_model() -> None:
    for name, make in MODELS.items():
        reference, model = make().double(), make().double()
        reference.eval()
        model.eval()
        sch = slapo.create_schedule(model)
        for path in list(sch._core.tree.index.modules)[1:8]:
            sch._core.apply_at(sch._core.tree.node(path), HookAll())
        sch.undo(to=0)
        for each in (reference, model):
            run(each, name).backward()
        for (key, expected), got in zip(reference.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(expected.grad, got.grad) if expected.grad is not None else got.grad is None, key
