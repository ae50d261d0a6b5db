"""The rules of verification by themselves: tolerances, leaves of outputs, comparison, and the search for the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

import slapo_core as slapo
from slapo_core import Node
from slapo_core.internals import Edit
from slapo_core.primitive import Change, Suggestion
from slapo_verify.blame import find_steps
from slapo_verify.compare import Tolerance, compare
from slapo_verify.copies import Counterparts
from slapo_verify.phases import Observation, output_leaves
from slapo_verify.search import Failed, TrialOutcome

EXACT, REORDERED, RANDOM = slapo.Equivalence.EXACT, slapo.Equivalence.REORDERED, slapo.Equivalence.RANDOM


@pytest.mark.parametrize(
    ("dtype", "exact", "reordered"),
    [
        (torch.float64, 3.6e-15, 1e-10),
        (torch.float32, 1.9e-6, 2e-5),
        (torch.float16, 8e-3, 8e-3),
        (torch.bfloat16, 4e-2, 4e-2),
    ],
)
def test_the_tolerance_follows_from_the_type_and_the_weakest_promise(
    dtype: torch.dtype, exact: float, reordered: float
) -> None:
    def rtol(*promises: slapo.Equivalence) -> float:
        return Tolerance.of(dtype, promises, rtol=None, atol=None).rtol

    assert rtol() == rtol(EXACT) == pytest.approx(exact, rel=0.03)
    assert rtol(EXACT, REORDERED) == rtol(RANDOM, EXACT) == reordered
    approximate = slapo.Equivalence.APPROXIMATE(0.25, 0.5)
    assert rtol(approximate, REORDERED) == pytest.approx(reordered + 0.25)
    assert Tolerance.of(dtype, [approximate], rtol=None, atol=None).atol == 0.5
    given = Tolerance.of(dtype, [REORDERED], rtol=0.125, atol=0.0)
    assert given.allowed("gradient", largest=2.0, largest_of_kind=100.0) == 0.25


def test_the_floor_never_grows_with_a_huge_value_in_another_output_or_buffer() -> None:
    tolerance = Tolerance.of(torch.float32, [REORDERED], rtol=None, atol=None)
    for kind in ("output", "evaluation output", "buffer"):
        assert tolerance.allowed(kind, largest=0.0, largest_of_kind=3e38) < 1e-5
    assert tolerance.allowed("gradient", largest=0.0, largest_of_kind=10.0) == pytest.approx(1.9e-5, rel=0.03)


def differences(before: object, after: object, kind: str = "output", allowed: float = 0.0) -> list[str]:
    tolerance = Tolerance(torch.float64, REORDERED, rtol=0.0, atol=allowed, floor=0.0)
    nothing = Counterparts()
    found = compare(Observation({kind: {"x": before}}), Observation({kind: {"x": after}}), nothing, tolerance)
    return [difference.problem for difference in found.differences]


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("before", "after", "problems"),
    [
        ([1.0, NAN, INF, -INF], [1.0, NAN, INF, -INF], []),
        ([1.0, 2.0], [1.0, NAN], ["at [1] it is nan, not 2.0"]),
        ([1.0, NAN], [1.0, 2.0], ["at [1] it is 2.0, not nan"]),
        ([1.0, INF], [1.0, -INF], ["at [1] it is -inf, not inf"]),
        ([1.0, 2.0], [1.0, 2.25], []),
        (
            [1.0, 2.0],
            [1.0, 2.75],
            ["it differs by up to 0.75 where 0.5 is allowed: at [1] it is 2.75, not 2 (largest element 2)"],
        ),
        ([[]], [[]], []),
    ],
)
def test_values_that_are_not_finite_must_stand_at_the_same_places(
    before: list[float], after: list[float], problems: list[str]
) -> None:
    assert differences(torch.tensor(before), torch.tensor(after), allowed=0.5) == problems


def test_whole_numbers_types_shapes_and_plain_values_are_compared_exactly() -> None:
    assert differences(torch.tensor([1, 2]), torch.tensor([1, 3]), allowed=9.0) == [
        "1 of 2 elements differ; at [1] it is 3, not 2"
    ]
    assert differences(torch.ones(2), torch.ones(2).double(), allowed=9.0) == ["its type is float64, not float32"]
    assert differences(torch.ones(2, 4), torch.ones(2, 2), allowed=9.0) == ["its shape is (2, 2), not (2, 4)"]
    assert differences("a", "b") == ["it is 'b', not 'a'"]
    assert differences(None, torch.ones(1)) == ["it is a Tensor, not a NoneType"]
    assert differences(1.0, 1.0 + 1e-9, allowed=1e-8) == differences(None, None) == []
    assert len(differences(1.0, 1.1, allowed=1e-8)) == 1


def test_output_leaves_have_python_names() -> None:
    from collections import OrderedDict

    @dataclass
    class Data:
        loss: int

    class Attributes(OrderedDict[str, object]):
        pass

    odd = object()
    output = (1, [2.0, {"a": None, 3: "s"}], Data(4), Attributes(logits=5), odd)
    assert list(output_leaves(output)) == [
        ("output[0]", 1),
        ("output[1][0]", 2.0),
        ("output[1][1]['a']", None),
        ("output[1][1][3]", "s"),
        ("output[2].loss", 4),
        ("output[3].logits", 5),
        ("output[4]", odd),
    ]


@dataclass(frozen=True)
class Step(slapo.Primitive):
    name = "rules.step"
    equivalence = EXACT

    def apply(self, node: Node, edit: Edit) -> None:
        raise NotImplementedError


def records(*paths: str) -> list[slapo.Record]:
    return [slapo.Record(i, Step(), path, "tests", "local") for i, path in enumerate(paths, start=1)]


LAYER = ("attention.query", "attention.output", "mlp.up", "mlp.down")


def search(steps: list[slapo.Record], guilty: set[int], *, units: Sequence[set[int]] = (), near: str | None = None):
    """Search where ``guilty`` steps differ together; a part of a unit without the rest of it runs into an exception."""

    def try_steps(part: Sequence[slapo.Record]) -> TrialOutcome:
        present = {record.index for record in part}
        if any(present & unit and not unit <= present for unit in units):
            return Failed("other", "")
        return Failed("output", "") if guilty <= present else "agrees"

    return find_steps(steps, try_steps, near=near)


def test_the_search_goes_down_to_one_step_among_many() -> None:
    steps = records(*(f"layer.{index}.{path}" for index in range(24) for path in LAYER))
    blame = search(steps, {50})
    assert [record.index for record in blame.records] == [50]
    assert blame.proven
    assert blame.trials <= 30


def test_the_search_does_not_cut_through_steps_that_belong_together() -> None:
    steps = records(*(f"layer.{index}.{path}" for index in range(3) for path in LAYER))
    blame = search(steps, {5}, units=[{1, 2}, {5, 6}, {9, 10}])
    assert [record.path for record in blame.records] == ["layer.1.attention.query", "layer.1.attention.output"]


def test_the_search_leaves_out_what_the_failure_does_not_need() -> None:
    steps = records("layer.0.attention.query", "layer.0.attention.output", "layer.0.up", "layer.0.down")
    blame = search(steps, {3}, units=[{1, 2}, {3, 4}])
    assert [record.path for record in blame.records] == ["layer.0.up", "layer.0.down"]


def test_the_same_mistake_in_every_layer_is_named_once() -> None:
    steps = records(*(f"layer.{index}.fc" for index in range(3)))
    blame = find_steps(steps, lambda part: Failed("output", ""), near=None)
    assert [record.index for record in blame.records] == [1]
    assert blame.likewise == ("layer.1", "layer.2")


def test_steps_that_fail_only_together_are_blamed_together() -> None:
    steps = records("encoder.a", "encoder.b", "decoder.c", "decoder.d")
    assert [record.index for record in search(steps, {1, 2}).records] == [1, 2]
    blame = search(steps, {1, 3}, near="decoder.c")
    assert ([record.index for record in blame.records], blame.proven) == ([1, 3], True)
    steps = records("encoder.a", "encoder.b", "decoder.c", "decoder.d", "head")
    blame = search(steps, {1, 2, 3, 4}, near="decoder.c")
    assert ([record.index for record in blame.records], blame.proven, blame.among) == ([3], False, 4)
    assert "no single step explains it: 4 steps are wrong only in combination, or there " in str(blame)


def sized(
    guilty: dict[int, float], *, units: Sequence[set[int]] = ()
) -> Callable[[Sequence[slapo.Record]], TrialOutcome]:
    """Each guilty step adds to the difference in the output; a part of a unit without the rest of it adds 7.77."""

    def try_steps(part: Sequence[slapo.Record]) -> TrialOutcome:
        present = {record.index for record in part}
        size = sum(guilty.get(index, 0.0) for index in present)
        size += sum(7.77 for unit in units if present & unit and not unit <= present)
        return Failed("output", "output", size) if size else "agrees"

    return try_steps


def test_a_part_that_fails_with_other_numbers_is_not_followed() -> None:
    steps = records("layer.0.a", "layer.1.a", "layer.2.a", "layer.2.b")
    blame = find_steps(steps, sized({3: 0.25}, units=[{1, 2}]), near=None)
    assert [record.index for record in blame.records] == [3]
    assert blame.likewise == ()


def test_steps_that_are_coupled_over_all_blocks_are_followed_across_them() -> None:
    kinds = ("attention.query", "attention.key", "attention.output", "mlp.up", "mlp.down")
    steps = records(*(f"layer.{index}.{kind}" for index in range(3) for kind in kinds))
    attention = {record.index for record in steps if ".attention." in record.path}
    blame = find_steps(steps, sized({7: 0.5}, units=[attention]), near="layer.1.attention.key")
    assert ([record.index for record in blame.records], blame.proven, blame.among) == ([7], False, 9)


def test_agreeing_suggestion_of_a_plugin_is_shown() -> None:
    steps = records("layer.0.a", "layer.0.b", "layer.0.c", "layer.0.d")

    def try_steps(part: Sequence[slapo.Record]) -> TrialOutcome:
        wrong = {1, 2, 3, 4} <= {record.index for record in part}
        cured = any(record.path == "layer.0.norm" for record in part)
        return Failed("gradient", "x", 1.0) if wrong and not cured else "agrees"

    wrong, right = (Suggestion((Change(path, Step()),)) for path in ("layer.0.e", "layer.0.norm"))
    blame = find_steps(steps, try_steps, near=None, suggest=lambda: [wrong, right])
    assert "a step is missing" in str(blame).splitlines()[0]
    assert str(blame).splitlines()[-1].endswith("add sch['layer.0.norm'].step()")
    assert find_steps(steps, try_steps, near=None, suggest=lambda: [wrong]).suggestion is None


def test_the_number_of_trials_is_bounded() -> None:
    steps = records(*(f"part{index}" for index in range(500)))
    blame = search(steps, {1, 499}, near="part3")
    assert blame.trials == 40
    assert ([record.path for record in blame.records], blame.proven) == (["part3"], False)


def test_steps_that_agree_on_a_fresh_copy_are_not_blamed() -> None:
    blame = find_steps(records("a", "b"), lambda part: "agrees", near="a")
    assert blame.records == ()
    assert str(blame).strip().startswith("no step causes it: ")


@pytest.mark.parametrize(("share", "found"), [(0.0, 1), (0.05, 1), (0.2, 0)])
def test_jump_in_one_element_counts_by_its_share_of_the_norm(share: float, found: int) -> None:
    before = torch.ones(100, dtype=torch.bfloat16)
    after = before.clone()
    after[3] = 2.0  # a tenth of the norm
    tolerance = Tolerance(torch.bfloat16, REORDERED, rtol=0.04, atol=0.0, floor=0.0, of_norm=share)
    seen = [Observation({"own output": {"x": value}}) for value in (before, after)]
    assert len(compare(*seen, Counterparts(), tolerance).differences) == found


@pytest.mark.parametrize(
    ("promise", "wrong", "found"), [(REORDERED, 5e-10, 0), (REORDERED, 1e-8, 1), (EXACT, 5e-10, 1)]
)
def test_ill_conditioned_gradients_in_float64_count_by_their_norm(
    promise: slapo.Equivalence, wrong: float, found: int
) -> None:
    before = torch.tensor([4.35, 1.41, 0.5], dtype=torch.float64)
    after = before + torch.tensor([0.0, 4.35 * wrong, 0.0], dtype=torch.float64)
    tolerance = Tolerance.of(torch.float64, [promise], rtol=None, atol=None)
    seen = [Observation({"output": {"x": value}}) for value in (before, after)]
    assert len(compare(*seen, Counterparts(), tolerance).differences) == found
