"""Promise of ``annotate``: the mark follows the parameter through every later step, and goes with ``undo``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import PreconditionError
from slapo_testing import ModelSnapshot, assert_bit_identical
from slapo_testing.models import MLP, Tied
from tests.messages import Messages
from tests.support.edits import Halve


def test_mark_survives_sharding_replacing_and_tying() -> None:
    model = Tied()
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model)
    sch["out"].annotate("weight", "no_weight_decay", True)
    assert model.embed.weight.no_weight_decay is True
    sch["embed"].apply(Halve())
    sch["out"].replace(with_the_same_weight)
    sch["embed"].apply(Halve() if model.embed.weight.shape[0] % 2 == 0 else slapo_mark())
    assert model.out.weight is model.embed.weight
    assert model.out.weight.no_weight_decay is True
    sch.undo(to=1)
    assert model.out.weight.no_weight_decay is True
    sch.undo()
    assert not hasattr(model.out.weight, "no_weight_decay")
    assert_bit_identical(before, model)


def with_the_same_weight(old: nn.Linear) -> nn.Linear:
    new = nn.Linear(8, 5, bias=False)
    new.weight = old.weight
    return new


def slapo_mark() -> slapo.Primitive:
    from slapo_core.primitives.annotate import Annotate

    return Annotate("weight", "another", 1)


def test_marking_again_changes_the_mark_and_undo_gives_the_first_back() -> None:
    model = MLP()
    sch = slapo.create_schedule(model)
    sch["head"].annotate("weight", "group", "a").annotate("weight", "group", "b")
    assert model.head.weight.group == "b"
    assert [record.edits for record in sch.records] == [("weight.group = 'a'",), ("weight.group = 'b'",)]
    sch.undo()
    assert model.head.weight.group == "a"


def test_lists_become_tuples_and_dictionaries_are_the_records_own() -> None:
    model = MLP()
    sch = slapo.create_schedule(model)
    given = {"axes": [0, 1]}
    sch["head"].annotate("weight", "sizes", [1, [2]]).annotate("bias", "info", given)
    given["axes"] = []
    assert model.head.weight.sizes == (1, (2,))
    assert model.head.bias.info == {"axes": (0, 1)}
    again = slapo.replay(MLP(), sch.to_json())
    assert again.records == sch.records


@pytest.mark.parametrize(
    ("path", "arguments", "word"),
    [
        ("head", ("w", "k", 1), "it has 'weight', 'bias'"),
        ("layers.0", ("w", "k", 1), "none of its own"),
        ("head", ("weight", "a b", 1), "got 'a b'"),
        ("head", ("weight", "class", 1), "got 'class'"),
        ("head", ("weight", "grad", 1), "'my_grad'"),
        ("head", ("weight", "__dict__", 1), "'__dict__'"),
        ("head", ("weight", "data", 1), "'my_data'"),
    ],
)
def test_refused_marks(path: str, arguments: tuple[str, str, int], word: str, message: Messages) -> None:
    model = MLP()
    sch = slapo.create_schedule(model)
    before = ModelSnapshot(model)
    with pytest.raises(PreconditionError) as caught:
        sch[path].annotate(*arguments)
    message(caught, word)
    assert_bit_identical(before, model)


def test_every_violation_is_listed(message: Messages) -> None:
    sch = slapo.create_schedule(MLP())
    with pytest.raises(PreconditionError) as caught:
        sch["head"].annotate("w", "grad", 1)
    message(caught, "'w'", "'my_grad'")
    assert len(caught.value.violations) == 2


def test_mark_moves_with_the_model() -> None:
    model = MLP()
    slapo.create_schedule(model)["head"].annotate("weight", "mark", 1)
    assert model.to(torch.float64).head.weight.mark == 1
