"""What a user changes between two steps counts, or is refused: DeepSpeed keeps copies, and counts micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import slapo_core as slapo
from slapo_runtime import engine as engine_module
from slapo_testing import run_ranks
from tests.messages import Messages
from tests.support import between_steps
from tests.support.between_steps import batch, outcome, plain, told

pytestmark = pytest.mark.ranks


def by_hand(engine: Any) -> None:
    engine.deepspeed.backward(engine.deepspeed(batch(9)[:2]))
    engine.deepspeed.step()


def larger(engine: Any) -> None:
    engine.deepspeed.set_train_batch_size(engine.deepspeed.train_batch_size() * 2)


def alone(engine: Any) -> None:
    if torch.distributed.get_rank() == 0:
        between_steps.CHANGES["in place"](engine.module)


def on_module(name: str) -> Callable[[Any], Any]:
    return lambda engine: between_steps.CHANGES[name](engine.module)


STAGES = (0, 1, 3)
OF_MODULE = ("nothing", "in place", "in place, on another rank", "frozen", "unfrozen", "another one")
CHANGES: dict[str, Callable[[Any], Any]] = {
    **{name: on_module(name) for name in OF_MODULE},
    "by hand": by_hand,
    "accumulation": larger,
    "own checkpoint": lambda engine: engine.load_state_dict(engine.state_dict()),
}


def outcomes() -> dict[tuple[int, str], Any]:
    found = {}
    for stage in STAGES:
        config = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 2}
        for name, change in CHANGES.items():
            found[stage, name] = outcome(change, target="deepspeed", config=config)
    return found


@functools.cache
def found() -> Mapping[tuple[int, str], Any]:
    return told(outcomes)


COUNTS = [
    (0, "in place"),
    (0, "in place, on another rank"),
    (0, "frozen"),
    *((stage, each) for stage in STAGES for each in ("nothing", "own checkpoint")),
]


@pytest.mark.parametrize(("stage", "change"), COUNTS)
def test_settings_of_parameters_act_as_in_plain_training(stage: int, change: str) -> None:
    state = found()[stage, change]
    assert not isinstance(state, str), state
    torch.testing.assert_close(state, plain(change), atol=1e-6, rtol=1e-5)


SAYS = {
    "in place": ("'up.weight'", "in place"),
    "in place, on another rank": ("'down.bias'", "in place"),
    "frozen": ("'down.weight'", "frozen"),
    "unfrozen": ("'frozen.weight'", "unfrozen"),
    "another one": ("'up.weight'", "replaced after build()"),
    "by hand": ("1 of 2", "accumulation window"),
    "accumulation": ("accumulates 4", "runs 2 in a step"),
}


@pytest.mark.parametrize(
    ("stage", "change"), [(stage, each) for each in SAYS for stage in STAGES if (stage, each) not in COUNTS]
)
def test_changes_that_deepspeed_would_ignore_are_refused(stage: int, change: str, message: Messages) -> None:
    text = found()[stage, change]
    assert isinstance(text, str)
    message(text, *SAYS[change], "\n  hint: ")


def written_alone() -> None:
    engine_module._SECONDS = 0.5
    told = outcome(alone, target="deepspeed", config={"zero_optimization": {"stage": 1}})
    raise ValueError(told)


def test_a_write_on_one_rank_is_refused_on_all_ranks() -> None:
    with pytest.raises(slapo.RankFailedError, match=r"'up\.weight' was modified in place.*not on every replica"):
        run_ranks(written_alone, world_size=2, timeout=120)
