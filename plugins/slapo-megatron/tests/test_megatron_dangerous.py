"""What the fields that a plan refuses would do: nothing of what they say, or another thing in an evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_testing import run_ranks

pytestmark = pytest.mark.ranks


class Watched(nn.Module):
    """A layer that notes the shape of what it is given, and the type of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        self.seen.append((tuple(x.shape), str(output.dtype)))
        return output


def seen_with(**options: Any) -> dict[str, Any]:
    """What the layer sees in a training step and in an evaluation, the size of its weight, and the loss."""
    torch.manual_seed(0)
    schedule = slapo.create_schedule(Watched(), mesh={"dp": 2})
    engine = slapo.build(
        schedule,
        target="megatron",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=lambda output, batch: (output.float() - batch).square().mean(),
        **options,
    )
    loss = float(engine.train_step(torch.ones(2, 6, 4)).loss)
    engine.eval_step(torch.ones(2, 6, 4))
    found = {"seen": list(engine.module.seen), "size": engine.module.linear.weight.numel(), "loss": loss}
    engine.close()
    return found


def on_two() -> dict[str, Any]:
    from tests.support.cpu_megatron import install

    install()
    from megatron.core.pipeline_parallel import schedules

    from slapo_megatron.config import DANGERS

    DANGERS.clear()
    schedules.torch.autocast = lambda _, **options: torch.autocast("cpu", **options)
    autocast = {"enable_autocast": True, "autocast_dtype": torch.bfloat16}
    return {
        "plain": seen_with(),
        "context": seen_with(model_parallel_config={"context_parallel_size": 2}),
        "fsdp": seen_with(ddp_config={"use_megatron_fsdp": True}),
        "autocast": seen_with(model_parallel_config=autocast),
    }


def test_refused_fields_would_do_nothing_or_something_else() -> None:
    for rank in run_ranks(on_two, world_size=2):
        step = ((2, 6, 4), "torch.float32")
        assert rank["plain"]["seen"] == [step, step]
        assert rank["context"] == rank["plain"], "every rank sees the whole sequence"
        assert rank["fsdp"] == rank["plain"], "every rank holds the whole weight"
        assert rank["autocast"]["seen"] == [((2, 6, 4), "torch.bfloat16"), step], "an evaluation is another model"
