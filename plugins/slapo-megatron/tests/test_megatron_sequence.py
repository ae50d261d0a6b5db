"""Sequence parallelism by a schedule's syncs, clipped: each gradient of a norm is summed over ``tp`` by exactly one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_testing import run_ranks
from tests.messages import Messages
from tests.support import tied_model

from .against import Steps, same, stepped, untouched

pytestmark = pytest.mark.ranks

WORDS, WIDTH, LENGTH = 12, 8, 6
NORMS = ("norm", "last")
SUMMED_BY_MEGATRON = {"model_parallel_config": {"sequence_parallel": True}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(self.last(x)).flatten(0, 1), labels.flatten())


def make() -> Net:
    torch.manual_seed(4)
    return Net()


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(0, WORDS, (3, LENGTH), generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels}


def split(sch: slapo.Schedule) -> None:
    """Between the pairs, each rank has its part of the sequence."""
    sch["embedding"].shard("weight", axis=0).sync("fwd_post", "reduce_scatter", axis=1)
    sch["up"].shard(["weight", "bias"], axis=0).sync("fwd_pre", "all_gather", axis=1)
    sch["down"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
    sch["head"].shard("weight", axis=0).sync("fwd_pre", "all_gather", axis=1).sync("fwd_post", "all_gather")


def summed(sch: slapo.Schedule) -> None:
    for name in NORMS:
        sch[name].sync_gradient(["weight", "bias"])


def marked(name: str) -> Callable[[slapo.Schedule], None]:
    """As the norms of Megatron's own layers mark their parameters."""

    def mark(sch: slapo.Schedule) -> None:
        for norm in NORMS:
            for parameter in sch[norm].module.parameters():
                setattr(parameter, name, True)

    return mark


BY_MARK, MEAN = marked("sequence_parallel"), marked("average_gradients_across_tp_domain")
CASES: dict[str, tuple[list[Callable[[slapo.Schedule], None]], dict[str, Any]]] = {
    "by the schedule": ([summed], {}),
    "by the schedule, and Megatron knows": ([summed], SUMMED_BY_MEGATRON),
    "by the schedule, distributed": (
        [summed],
        {
            "ddp_config": {"use_distributed_optimizer": True},
            "optimizer_config": {"use_distributed_optimizer": True},
        },
    ),
    "by Megatron": ([BY_MARK], SUMMED_BY_MEGATRON),
    "by nobody": ([], {}),
    "averaged": ([MEAN], {}),
    "by Megatron without sequence_parallel": ([BY_MARK], {}),
    "by both": ([summed, BY_MARK], SUMMED_BY_MEGATRON),
}
REFUSED = ("by Megatron without sequence_parallel", "by both")


def trained(steps: list[Callable[[slapo.Schedule], None]], options: dict[str, Any]) -> Any:
    sch = slapo.create_schedule(make(), mesh={"tp": 2}, example_inputs=batch(0))
    for step in (split, *steps):
        step(sch)
    try:
        engine = slapo.build(
            sch, target="megatron", optimizer=tied_model.adamw, max_grad_norm=tied_model.CLIP, **options
        )
    except slapo.BuildError as error:
        return str(error)
    if not steps:
        found = stepped(sch, engine, batch=batch, weights=False)
        try:
            engine.state_dict()
        except slapo.RankMismatchError as error:
            return found, str(error)
    return stepped(sch, engine, batch=batch, gradients="ddp_config" not in options)


def on_rank() -> dict[str, Any]:
    from tests.support.cpu_megatron import install

    install()
    return {name: trained(*case) for name, case in CASES.items()}


@functools.cache
def found() -> list[dict[str, Any]]:
    return run_ranks(on_rank, world_size=2)


@functools.cache
def wanted() -> Steps:
    return untouched(make, batch=batch)


@pytest.mark.parametrize("name", list(CASES)[:4])
def test_training_equals_the_reference_model(name: str) -> None:
    same([rank[name] for rank in found()], wanted())


def test_without_a_sum_each_rank_has_a_part_of_the_gradient_and_trains_wrongly() -> None:
    for rank in found():
        steps, said = rank["by nobody"]
        assert steps.norms[0] != pytest.approx(wanted().norms[0], rel=1e-3)
        assert "replicas of 'norm.weight' differ" in said


def test_a_mean_over_tensor_parallel_ranks_is_taken_where_a_parameter_is_marked_so() -> None:
    for rank in found():
        steps = rank["averaged"]
        scale = wanted().norms[0] / steps.norms[0]  # each is clipped by its own norm
        for norm in NORMS:
            half = wanted().gradients[0][f"{norm}.weight"] / 2
            torch.testing.assert_close(steps.gradients[0][f"{norm}.weight"] / scale, half, rtol=1e-4, atol=1e-6)


def test_gradients_summed_twice_and_unread_marks_are_refused(message: Messages) -> None:
    (unread,) = {rank["by Megatron without sequence_parallel"] for rank in found()}
    message(unread, "'last.bias'", 'model_parallel_config={"sequence_parallel": True}')
    (twice,) = {rank["by both"] for rank in found()}
    message(twice, "gradient of 'norm.bias'", "sum it again")
