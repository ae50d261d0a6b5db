"""A checkpoint of any form of a run goes on under every other one: torch, Megatron, DeepSpeed, with their pipelines."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks
from tests.integration.dialects.resuming import AFTER, BEFORE, Pair, saved_and_resumed
from tests.integration.dialects.small import build, train, world_size
from tests.processor import Outcome, run_case
from tests.support.checkpoints import stored

pytestmark = pytest.mark.ranks
preload_modules("deepspeed", "slapo_tp", "slapo_pipeline")

WHOLE = bool(os.environ.get("SLAPO_TEST_WHOLE"))  # all pairs
PAIRED = ("torch", "torch pp2 tp2", "megatron tp2", "megatron pp2 dp2 distributed", "ZeRO-1 dp2")
"""Every ordered pair of these; of further forms, those with one of them, both ways."""
FURTHER = ("torch tp2", "ZeRO-3 dp2", "ZeRO-1 pp2 tp2")


def pairs() -> list[Pair]:
    """What goes on from what; in the sample every form of the first five is still saved and read."""
    if WHOLE:
        return list(itertools.permutations((*PAIRED, *FURTHER), 2))
    return [(form, PAIRED[number - 1]) for number, form in enumerate(PAIRED)]


def apart(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups, the first of which the second stage has no parameters of."""
    own = parameters[-1:] if dist.get_rank() < 2 else []
    rest = [parameter for parameter in parameters if not own or parameter is not own[0]]
    return torch.optim.AdamW([{"params": own}, {"params": rest}])


BF16 = {"bf16": {"enabled": True}}


def in_stages(directory: Path) -> list[str]:
    """Masters of DeepSpeed's pipeline in bfloat16, resumed bit for bit."""
    form, options = "ZeRO-1 pp2 tp2", {"config": BF16, "dtype": torch.bfloat16}
    engine = build(form, **options)
    train(engine, 0, BEFORE)
    engine.save(directory)
    train(engine, BEFORE, AFTER)
    other = build(form, seed=7, **options)
    other.load(directory)
    other.check_replicas()
    train(other, BEFORE, AFTER)
    one, two = engine.state_dict(), other.state_dict()
    differing = [name for name in one if not torch.equal(one[name], two[name])]
    return differing + ([] if any(one.dtype == torch.float32 for one in stored(directory).values()) else ["no masters"])


def refused() -> str:
    """What is said of groups that stages do not share."""
    try:
        build("ZeRO-1 pp2 tp2", optimizer=apart)
    except slapo.BuildError as error:
        return str(error)
    return "fine"


class OnFour(NamedTuple):
    """What one of four ranks found."""

    differing: dict[str, list[str]]
    masters: Outcome[list[str]]
    refused: str


def on_four_ranks(forms: list[str], chosen: list[Pair], directory: Path) -> OnFour:
    differing = saved_and_resumed(forms, chosen, directory)
    return OnFour(differing, run_case(BF16, in_stages, directory / "masters"), refused())


class Found(NamedTuple):
    """What differs in each launch and on each rank of it; and what the four ranks found."""

    differing: list[dict[str, list[str]]]
    on_four: list[OnFour]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """In three launches: two ranks save, and read what one saved; four read all; two read what four saved."""
    directory = tmp_path_factory.mktemp("saved")
    by_size: dict[int, list[str]] = {1: [], 2: [], 4: []}
    for form in (*PAIRED, *(FURTHER if WHOLE else ())):
        by_size[world_size(form)].append(form)

    def between(reading: int, *saving: int) -> list[Pair]:
        return [pair for pair in pairs() if world_size(pair[0]) == reading and world_size(pair[1]) in saving]

    differing = [saved_and_resumed(by_size[1], between(1, 1), directory)]
    differing += run_ranks(saved_and_resumed, by_size[2], between(2, 1, 2), directory, world_size=2, timeout=1800)
    on_four = run_ranks(on_four_ranks, by_size[4], between(4, 1, 2, 4), directory, world_size=4, timeout=1800)
    differing += [rank.differing for rank in on_four]
    differing += run_ranks(saved_and_resumed, [], between(2, 4), directory, world_size=2, timeout=1800)
    differing.append(saved_and_resumed([], between(1, 2, 4), directory))
    return Found(differing, on_four)


def test_every_form_goes_on_where_any_other_one_was(found: Found) -> None:
    assert not any(found.differing), found.differing


def test_masters_of_a_pipeline_are_resumed_bit_for_bit(found: Found) -> None:
    assert [rank.masters.get() for rank in found.on_four] == [[]] * 4


def test_groups_that_stages_do_not_share_are_refused(found: Found) -> None:
    for rank in found.on_four:
        assert "group 0 of the optimizer" in rank.refused
        assert "on rank 1 of 'pp': " in rank.refused


def test_a_moment_that_is_lost_shows(tmp_path: Path) -> None:
    """The control: what the comparisons of the other test say where the state of one parameter is not loaded."""
    right = torch.optim.Optimizer.load_state_dict

    def loaded(self: torch.optim.Optimizer, state: Any) -> None:
        right(self, {**state, "state": {key: one for key, one in state["state"].items() if key}})

    assert saved_and_resumed(["torch"], [("torch", "torch")], tmp_path) == {}
    with mock.patch.object(torch.optim.Optimizer, "load_state_dict", loaded):
        found = saved_and_resumed([], [("torch", "torch")], tmp_path)
    assert any(one.startswith("embedding.weight: ") for one in found["torch from torch"]), found
