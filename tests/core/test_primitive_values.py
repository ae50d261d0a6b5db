"""Promise: a primitive is a frozen, checked value; what is no such value is refused before anything happens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import ArgumentError
from slapo_core.primitives.annotate import Annotate
from slapo_core.primitives.checkpoint import Checkpoint
from slapo_core.primitives.replace import Replace
from slapo_testing.models import MLP
from tests.messages import Messages
from tests.support.edits import TestPrimitive


@dataclass(frozen=True)
class Typed(TestPrimitive):
    name = "test.typed"
    names: str | tuple[str, ...]
    axis: int = 0
    mode: Literal["a", "b"] = "a"
    rate: float = 0.5
    pairs: tuple[tuple[str, int], ...] = ()
    extra: dict[str, int] | None = None
    anything: Any = None

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.note("typed")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"names": 3}, "'names' must be str | tuple[str, ...] (got 3)"),
        ({"names": ["a", 1]}, "'names' must be str | tuple[str, ...] (got ['a', 1])"),
        ({"names": "a", "axis": "0"}, "'axis' must be int (got '0')"),
        ({"names": "a", "axis": 1.0}, "'axis' must be int (got 1.0)"),
        ({"names": "a", "axis": None}, "'axis' must be int (got None)"),
        ({"names": "a", "mode": "c"}, "'mode' must be Literal['a', 'b'] (got 'c')"),
        ({"names": "a", "rate": "fast"}, "'rate' must be float (got 'fast')"),
        ({"names": "a", "pairs": [["x"]]}, "'pairs' must be tuple[tuple[str, int], ...] (got [['x']])"),
        ({"names": "a", "extra": {"x": "y"}}, "'extra' must be dict[str, int] | None (got {'x': 'y'})"),
    ],
)
def test_argument_of_a_wrong_type_is_refused_when_the_value_is_made(
    arguments: dict[str, Any], words: str, message: Messages
) -> None:
    with pytest.raises(ArgumentError) as caught:
        Typed(**arguments)
    message(caught, "test.typed", words)
    assert isinstance(caught.value, TypeError)


def test_a_misspelled_word_is_answered_with_the_one_that_is_meant() -> None:
    @dataclass(frozen=True)
    class Worded(TestPrimitive):
        name = "test.worded"
        op: Literal["all_reduce", "all_gather"] | Callable[..., Any] | None = None

        def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
            edit.note("worded")

    with pytest.raises(ArgumentError, match=r"'op' must be .*'allreduce'") as caught:
        Worded("allreduce")  # type: ignore[arg-type]
    assert caught.value.hint == "did you mean 'all_reduce'?"


def test_lists_become_tuples_at_any_depth() -> None:
    value = Typed(["a", "b"], pairs=[["x", 1], ("y", 2)], anything=[{"k": [1]}, {2}])
    assert value.names == ("a", "b")
    assert value.pairs == (("x", 1), ("y", 2))
    assert value.anything == ({"k": (1,)}, frozenset({2}))
    assert type(value.anything[1]) is frozenset
    assert Typed(["a"]) == Typed(("a",))
    given = ("a", ("b",))
    assert Typed("a", anything=given).anything is given, "what is frozen already is not copied"


def test_value_does_not_follow_what_it_was_made_of() -> None:
    names, extra = ["a"], {"x": 1}
    value = Typed(names, extra=extra)
    names.append("b")
    extra["x"] = 2
    assert value == Typed(["a"], extra={"x": 1})


def test_equality_hash_repr_and_str() -> None:
    assert Annotate("weight", "k", 1) == Annotate("weight", "k", 1) != Annotate("weight", "k", 2)
    plain = Checkpoint(preserve_rng_state=False)
    assert len({Checkpoint(), Checkpoint(preserve_rng_state=True), plain}) == 2
    assert Checkpoint() != Typed("a")
    assert repr(Checkpoint()) == "Checkpoint(match=None, preserve_rng_state=True)"
    assert str(Checkpoint()) == "checkpoint()"
    assert str(plain) == "checkpoint(preserve_rng_state=False)"
    assert str(Typed("w", axis=1)) == "typed('w', axis=1)"
    assert str(Typed("w", axis=True)) == "typed('w', axis=True)"
    assert str(Replace(nn.Sequential(nn.ReLU()))) == "replace(Sequential(...))"
    assert str(Replace(nn.ReLU())) == "replace(ReLU())"
    assert str(Replace(_make)) == "replace(_make)"
    assert str(Replace(nn.Linear)) == "replace(Linear)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Checkpoint().preserve_rng_state = False  # type: ignore[misc]


def _make(old: nn.Module) -> nn.Module:
    return nn.Identity()


def test_text_of_a_tensor_argument_is_one_line_and_never_compares_elements() -> None:
    @dataclass(frozen=True)
    class WithTensor(TestPrimitive):
        name = "test.with_tensor"
        values: Any = field(default=torch.zeros(2, 2), compare=False)

        def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
            edit.note("nothing")

    assert str(WithTensor(torch.ones(3, 3))) == "with_tensor(Tensor(...))"


def test_keyword_only_argument_is_shown_by_name() -> None:
    @dataclass(frozen=True)
    class Only(TestPrimitive):
        name = "test.only"
        count: int = field(kw_only=True)

        def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
            edit.note("nothing")

    assert str(Only(count=3)) == "only(count=3)"


@dataclass
class Mutable(TestPrimitive):
    name = "test.mutable"
    value: int = 0

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.note("nothing")


class Bare(slapo.Primitive):
    name = "test.bare"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.note("nothing")


@dataclass(frozen=True)
class Nameless(slapo.Primitive):
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.note("nothing")


@dataclass(frozen=True)
class Promiseless(slapo.Primitive):
    name = "test.promiseless"

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.note("nothing")


@pytest.mark.parametrize(
    ("cls", "word"),
    [
        (Mutable, "class Mutable"),
        (Bare, "class Bare"),
        (Nameless, "Nameless.name must be a string"),
        (Promiseless, "Equivalence.EXACT"),
    ],
)
def test_class_that_breaks_the_rules_is_refused_when_applied(
    cls: type[slapo.Primitive], word: str, message: Messages
) -> None:
    sch = slapo.create_schedule(MLP())
    with pytest.raises(ArgumentError) as caught:
        sch["head"].apply(cls())
    message(caught, word)
    assert sch.records == ()


def test_abstract_primitive_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        TestPrimitive()  # type: ignore[abstract]


def test_author_who_annotates_a_list_is_told_that_lists_become_tuples(message: Messages) -> None:
    @dataclass(frozen=True)
    class Listed(TestPrimitive):
        name = "test.listed"
        names: Any = ()

        def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
            edit.note("nothing")

    Listed.__annotations__["names"] = "list[str]"
    with pytest.raises(ArgumentError) as caught:
        Listed(["a"])
    message(caught, "list[str]", "tuple[..., ...]")


def test_arguments_are_the_fields_in_order() -> None:
    assert Annotate("weight", "k", [1]).arguments() == {"param": "weight", "key": "k", "value": (1,)}
    assert list(Replace(nn.ReLU()).arguments()) == ["new_module", "match", "params", "drop", "rtol", "atol", "name_"]
    assert Replace(nn.ReLU(), params={"b": "c", "a": "d"}, drop="x").params == (("a", "d"), ("b", "c"))
    assert Replace(nn.ReLU(), drop="x").drop == ("x",)
