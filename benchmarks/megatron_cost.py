"""What target "megatron" costs against Megatron-core used by hand: a step of two replicas, and a step of two stages.

Two ranks each. By hand means Megatron's own DistributedDataParallel, optimizer, scheduler and schedule, as
``megatron_by_hand.py`` drives them; two stages are halves of the layers, whose one tensor is sent as it is. Without a
GPU both run by the stand-in for CUDA that the tests have.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from by_hand import BATCH, MICROBATCHES, Step, Way, main, stack
from megatron_by_hand import Stage, train
from step_cost import HIDDEN, LAYERS, LENGTH, loss_of
from torch import nn

import slapo_core as slapo

OPTIMIZER = {"optimizer": "adam", "lr": 1e-4, "weight_decay": 0.01, "clip_grad": 1.0}


def install() -> None:
    """Where no GPU is: Megatron runs on the CPU, for both."""
    if not torch.cuda.is_available():
        from tests.support.cpu_megatron import install

        install()


def by_schedule(x: torch.Tensor, mesh: dict[str, int], distributed: bool, micro_batches: int) -> Step:
    install()
    sch = slapo.create_schedule(stack(), mesh=mesh, example_inputs=x[: len(x) // micro_batches])
    if mesh.get("pp", 1) > 1:
        sch["encoder.layer"].pipeline_split(stages=mesh["pp"])
    engine = slapo.build(
        sch,
        target="megatron",
        loss=loss_of,
        optimizer_config={**OPTIMIZER, "use_distributed_optimizer": distributed},
        ddp_config={"use_distributed_optimizer": distributed},
        microbatches=micro_batches,
    )
    return lambda: engine.train_step(x).loss.item()


class Layers(nn.Module):
    """Of one stage."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def by_hand(x: torch.Tensor, mesh: dict[str, int], distributed: bool, micro_batches: int) -> Step:
    """Megatron's groups are there: those of our engine."""
    stages = mesh.get("pp", 1)
    place = dist.get_rank() if stages > 1 else 0
    each = LAYERS // stages
    model = Layers(stack().encoder.layer[place * each : (place + 1) * each])
    step = train(
        Stage(model, first=place == 0, last=place == stages - 1),
        x.chunk(micro_batches),
        loss_of,
        optimizer_config=OPTIMIZER,
        distributed=distributed,
        hidden=HIDDEN,
        length=LENGTH,
        samples=BATCH // micro_batches,
    )

    return lambda: None if (loss := step()) is None else loss.item()


REPLICAS, STAGES = {"dp": 2}, {"pp": 2}
WAYS = {
    f"{kind} optimizer, {what} / by hand": Way(
        by_schedule, by_hand, {"mesh": mesh, "distributed": kind == "distributed", "micro_batches": count}
    )
    for what, mesh, count, kinds in (
        ("two replicas", REPLICAS, 1, ("plain", "distributed")),
        ("two stages", STAGES, MICROBATCHES, ("plain",)),
    )
    for kind in kinds
}


if __name__ == "__main__":
    main(
        "megatron_cost",
        __doc__ or "",
        WAYS,
        "megatron-core",
        ("tests.support.cpu_megatron", "slapo_megatron.engine"),
    )
