"""What a step of the engine without a pipeline promises: buffers, the first step, failures, refusals, closing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from slapo_testing import run_ranks
from tests.messages import Messages
from tests.support import tied_model

from .single_stage_steps import half, on_rank

pytestmark = pytest.mark.ranks


@functools.cache
def found() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(on_rank, world_size=2)


def both(name: str) -> list[dict[str, Any]]:
    return [rank[name] for rank in found()]


def stepped_by_hand(*steps: int, samples: int = 8) -> dict[str, torch.Tensor]:
    model = tied_model.make()
    optimizer = tied_model.adamw(model.parameters())
    for step in steps:
        optimizer.zero_grad()
        model(**tied_model.batch(step, samples)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), tied_model.CLIP)
        optimizer.step()
    return dict(model.state_dict())


def test_the_first_step_compares_batches_and_no_later_one() -> None:
    for rank in both("first_step"):
        assert rank == dict.fromkeys(("factory", "Megatron's"), ("RankMismatchError", ""))


def test_buffers_are_treated_as_target_torch_treats_them() -> None:
    for rank in both("buffers"):
        (values, evaluated, modes), wanted = rank["megatron"], rank["torch"]
        assert values["norm.num_batches_tracked"] == 6
        assert values.keys() == wanted[0].keys()
        for name, value in values.items():
            assert value == pytest.approx(wanted[0][name], rel=1e-5), name
        assert evaluated == pytest.approx(wanted[1], rel=1e-5)
        assert modes == wanted[2]


def test_a_step_that_fails_before_its_backward_pass_leaves_nothing_and_one_in_it_closes_the_engine() -> None:
    for rank in both("failing"):
        for name in ("plain", "distributed", "overlapped"):
            (before, fine, inside, after), state, marked = rank[name]
            assert "bad sample" in before
            assert fine == ""
            assert "bad gradient" in inside
            assert after.startswith("BuildError: the engine is closed, because a step failed: ValueError: bad gradient")
            torch.testing.assert_close(state, stepped_by_hand(1), rtol=1e-5, atol=2e-6)
            assert marked == []


def test_unused_parameters_are_named_once_and_stepped_with_zeros(message: Messages) -> None:
    (told,) = {rank[f"{name} 1"][0] for rank in both("unused") for name in ("factory", "Megatron's", "distributed")}
    message(told, "training step 2", "'unused.weight', 'unused.bias'")
    for rank in both("unused"):
        for name in ("factory", "Megatron's", "distributed"):
            assert rank[f"{name} 0"] == rank[f"{name} 2"] == []
            assert len(rank[f"{name} 1"]) == 1
            for key in ("frozen.weight", "frozen.bias"):
                assert torch.equal(rank[name][key], half().state_dict()[key])
        torch.testing.assert_close(rank["factory"], rank["distributed"], rtol=1e-5, atol=2e-6)
        assert not torch.equal(rank["factory"]["unused.weight"], half().state_dict()["unused.weight"])


def test_with_overlap_megatron_refuses_a_parameter_without_gradient_and_the_engine_is_closed() -> None:
    for rank in both("unused"):
        fine, refused, closed = rank["waited for"]
        assert fine == ""
        assert refused.startswith("AssertionError: ")
        assert closed.startswith("BuildError: the engine is closed, because a step failed: AssertionError")


def test_engines_that_cannot_train_raise_the_reason(message: Messages) -> None:
    for what, *words in (
        ("no optimizer", "BuildError: ", "built without"),
        ("no gradients", "BuildError: ", "without gradients"),
        ("closed", "BuildError: ", "is closed"),
        ("closed, evaluation", "BuildError: ", "is closed"),
        ("detached", "BuildError: ", "does not require grad"),
        ("frozen", "BuildError: ", "does not require grad"),
        ("SGD, distributed", "AdamW only", "SGD"),
        ("decoupled", "embeddings"),
    ):
        (told,) = {rank[what] for rank in both("refusals")}
        message(told, *words)
    for rank in both("refusals"):
        assert "Wrapped parameters must be one of" in rank["double, distributed"]  # Megatron's words
        assert rank["double, megatron"] == pytest.approx(rank["double, torch"], rel=1e-12)
        evaluated = float(tied_model.make()(**tied_model.batch(0)).detach())
        assert rank["evaluated"] == pytest.approx(evaluated, rel=1e-6)
        one = float(tied_model.make()(**tied_model.batch(0, 1)).detach())
        assert rank["by position"] == pytest.approx(one, rel=1e-6)
        assert rank["detached, state"] == float(tied_model.make().head.weight.sum())


def test_a_build_that_fails_leaves_no_marks() -> None:
    for rank in both("marks_after_failure"):
        assert rank["same"]
        assert "Megatron's distributed optimizer" in rank["told"]


def test_a_closed_engine_leaves_a_model_that_trains_by_itself() -> None:
    wanted = stepped_by_hand(0, 1, samples=6)
    model = tied_model.make()
    model.load_state_dict(wanted)
    model(**tied_model.batch(5)).backward()
    gradients = {name: one.grad for name, one in model.named_parameters()}
    for rank in both("closing"):
        for name in ("plain", "overlapped"):
            left, own, state, values = rank[name]
            assert left == []
            torch.testing.assert_close(values, wanted, rtol=1e-5, atol=2e-6)
            torch.testing.assert_close(own, gradients, rtol=1e-4, atol=2e-5)
            assert state is None or all(torch.equal(one, values[key]) for key, one in state.items())


def test_an_evaluation_between_steps_changes_nothing() -> None:
    for rank in both("evaluation"):
        assert rank["with"][0] == rank["without"][0]
        assert all(torch.equal(one, rank["without"][1][name]) for name, one in rank["with"][1].items())
