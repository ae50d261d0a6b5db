"""A primitive made of others: each is checked, sees those before it, and all are one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from torch import nn

import slapo_core as slapo
from slapo_core.spec.preconditions import After


@dataclass(frozen=True)
class First(slapo.Primitive):
    """Note something.

    rewrite: x -> x
    """

    name = "test.first"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.note("first")


@dataclass(frozen=True)
class Second(slapo.Primitive):
    """Needs the first.

    rewrite: x -> x
    """

    name = "test.second"
    equivalence = slapo.Equivalence.EXACT

    def preconditions(self, node: slapo.Node) -> Iterator[slapo.Violation]:
        yield from After("test.first", "first()")(node)

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        edit.note("second")


@dataclass(frozen=True)
class Both(slapo.Primitive):
    """The first below, then the second here.

    rewrite: x -> x
    """

    name = "test.both"
    equivalence = slapo.Equivalence.EXACT
    in_order: bool = True

    def apply(self, node: slapo.Node, edit: slapo.Edit) -> None:
        if self.in_order:
            edit.apply(node["0"], First())
        edit.apply(node, Second())


def test_inner_primitives_see_those_before_them_and_are_one_step() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2)))
    sch.apply(Both())
    assert [str(record) for record in sch.records] == ["#1 both() at the root"]
    assert sch.records[0].effects == ("first", "second")
    with pytest.raises(slapo.PreconditionError):  # what was inside of a step is no step of its own
        sch.apply(Second())


def test_an_inner_primitive_that_is_refused_takes_the_outer_one_along() -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(slapo.PreconditionError, match=r"needs a \.first\(\)"):
        sch.apply(Both(in_order=False))
    assert sch.records == ()
    with pytest.raises(slapo.PreconditionError):
        sch.apply(Second())
