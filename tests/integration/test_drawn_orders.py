"""Schedules drawn at random are equal to the reference model, or refused at a step: a sample of tools/orders.py."""

from __future__ import annotations

import pytest

import slapo_core as slapo
from slapo_testing import ModelSnapshot, assert_bit_identical
from tests.integration.orders.drawing import Undo, draw
from tests.integration.orders.families import FAMILIES, batch_of, family, model_of
from tests.integration.orders.pairs import MUST_WORK, NAMES, pairs
from tests.integration.orders.running import applied, preload, run

preload()

SEEDS = range(20)


@pytest.mark.breadth
@pytest.mark.ranks
def test_drawn_schedules_are_verified_or_refused_at_a_step() -> None:
    draws = [draw(seed, most=5, sizes=(1, 2), without="compile") for seed in SEEDS]  # it takes seconds
    results = list(run(draws, at_once=len(SEEDS)))
    assert [result for result in results if result.outcome not in ("verified", "refused")] == []
    assert sum(result.outcome == "verified" for result in results) >= 0.75 * len(SEEDS)


def test_draws_are_the_same_every_time_and_have_everything_in_them() -> None:
    draws = [draw(seed) for seed in range(200)]
    assert draws == [draw(seed) for seed in range(200)]
    calls = [call for each in draws for call in each.calls]
    steps = {call.call for call in calls if not isinstance(call, Undo)}
    assert {each.family for each in draws} == set(FAMILIES)
    assert {each.tp for each in draws} == {1, 2, 4}
    assert any(isinstance(call, Undo) for call in calls)
    assert steps == {
        "bind", "checkpoint", "compile", "cudagraphify", "decompose", "fork_rng", "fuse", "merge", "pipeline_split",
        "quantize", "replace", "shard", "shard_attribute", "sync", "sync_gradient", "trace",
    }  # fmt: skip


def test_pairs_whose_order_may_not_matter_are_accepted() -> None:
    found = [pair for pair in pairs() if (pair.first, pair.second) in _SAMPLE]
    assert _SAMPLE <= MUST_WORK
    assert {name for pair in found for name in (pair.first, pair.second)} < set(NAMES)
    assert {type(applied(pair.draw)).__name__ for pair in found} == {"Applied"}


_SAMPLE = {
    ("decompose", "shard column"),
    ("merge", "shard column"),
    ("replace(match)", "shard row"),
    ("checkpoint", "shard row"),
    ("trace", "shard_attribute"),
    ("shard column", "trace"),
}


@pytest.mark.parametrize(
    "order",
    [("checkpoint", "trace", "fuse"), ("trace", "checkpoint", "fuse"), ("trace", "fuse", "checkpoint")],
    ids=", ".join,
)
def test_wrapped_parts_of_a_flat_graph_get_their_own_graph(order: tuple[str, ...]) -> None:
    at, model, batch = FAMILIES["bert"], model_of("bert"), batch_of("bert")
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model, example_inputs=batch)
    for each in order:
        if each == "checkpoint":
            sch[str(at.mlp)].checkpoint()
        elif each == "trace":
            sch[at.layer].trace(flatten=True)
        else:
            sch[at.layer].fuse("fusion.bias_gelu", compiler="eager")
    assert "fused" in str(sch[str(at.mlp)].graph)
    assert "fused" not in str(sch[at.layer].graph)
    assert slapo.verify(sch, optimizer_steps=0).steps_verified == 3
    sch.undo(to=0)
    assert_bit_identical(before, model)


def test_a_module_that_cannot_run_between_the_steps_of_a_split_is_traced_there() -> None:
    at, units = FAMILIES["opt"], family("opt")
    column, *others = units["shard mlp"].steps
    sch = slapo.create_schedule(model_of("opt"), mesh={"tp": 2}, example_inputs=batch_of("opt"))
    column.apply(sch)
    sch[at.layer].trace(flatten=True)
    sch[at.layer].replace(match="fusion.sdpa")
    assert "all_reduce" not in str(sch[at.layer].graph)
    for each in others:
        each.apply(sch)
    assert "all_reduce" in str(sch[at.layer].graph)
    assert "sdpa" in str(sch[at.layer].graph)


def test_a_quantized_layer_stays_a_call_when_it_is_split_and_synchronized() -> None:
    at, units = FAMILIES["opt"], family("opt")
    sch = slapo.create_schedule(model_of("opt"), mesh={"tp": 2}, example_inputs=batch_of("opt"))
    sch[at.ups[0]].quantize()
    for each in units["shard mlp"].steps:
        each.apply(sch)
    sch[at.layer].trace(flatten=True)
    assert "self.fc1(" in str(sch[at.layer].graph)
