"""Cases of `PipelineSplit` and the kit of the stage hooks, for ``slapo plugins check``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from slapo_core import create_schedule
from slapo_core.internals import HookManager
from slapo_core.plugins import Entry, Registry
from slapo_pipeline.split import PipelineSplit
from slapo_runtime.stages import check_liveness
from slapo_runtime.stages.partition import Output, Partition, Stage, StageModule, Value
from slapo_testing import Case, CheckError, NotApplicable
from slapo_testing.kit import Kit

_STAGES_HOOKS = ("slapo_partition", "slapo_liveness")

_CHAIN: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "hidden": (0, (1,)), "skip": (0, (3,)), "mask": (0, (1, 2, 3)), "middle": (1, (2,)), "aside": (1, ()),
    "late": (2, (3,)), "logits": (3, ()),
}  # fmt: skip
"""Value -> its producer and its consumers, of four stages."""


def slapo_cases() -> list[Case]:
    """Return the cases of the primitives of slapo-pipeline."""

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def batch() -> tuple[torch.Tensor]:
        return (torch.randn(5, 6),)

    rejects = [("", PipelineSplit()), ("1", PipelineSplit(balance="flops"))]
    too_many = [("", PipelineSplit(stages=5)), ("1", PipelineSplit(stages=2)), ("", PipelineSplit(stages=0))]
    return [
        Case(PipelineSplit(), path="1", model=model, inputs=batch, rejects=rejects),
        Case(PipelineSplit(stages=3), path="", model=model, inputs=batch, rejects=too_many),
    ]


class StagesKit(Kit):
    """Check a plugin's `slapo_partition` and `slapo_liveness` on small stages."""

    name = "hooks"

    def checks(self, loaded: Any, entry: Entry, registry: Registry) -> Iterator[tuple[str, Callable[[], None]]]:
        manager = HookManager(registry)
        manager.activate(entry.distribution)
        for hook, check in zip(_STAGES_HOOKS, (_check_partition, _check_liveness), strict=True):
            if hasattr(loaded, hook):
                yield hook, functools.partial(check, entry.distribution, manager)


def sample_partitions() -> Iterator[tuple[Partition, tuple[str, ...]]]:
    """Yield partitions whose modules compute nothing, each with required outputs."""
    for count in (2, 3, 4):
        last = count - 1
        values = {
            name: Value(
                name,
                min(made, last),
                tuple(dict.fromkeys(stage for stage in (min(each, last) for each in read) if stage > min(made, last))),
                (2, 3),
                torch.bool if name == "mask" else torch.float32,
                name != "mask",
            )
            for name, (made, read) in _CHAIN.items()
        }
        stages = tuple(
            Stage(
                index,
                _UncalledStage(),
                ("ids",) if index == 0 else (),
                tuple(name for name, value in values.items() if index in value.consumers),
                tuple(name for name, value in values.items() if value.producer == index),
                f"block{index}" if index < last else None,
            )
            for index in range(count)
        )
        for outputs in ((), ("logits",), ("logits", "hidden", "aside")):
            yield Partition(stages, values, (), Output(("logits", "hidden", "aside"), lambda outputs: outputs)), outputs


class _UncalledStage(StageModule):
    def forward(
        self, inputs: Mapping[str, object], values: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:  # pragma: no cover - never called
        raise NotImplementedError


def _check_partition(distribution: str, manager: HookManager) -> None:
    schedule = create_schedule(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), plugins=[distribution])
    inputs = {"input": torch.zeros(2, 2)}
    answer = manager.single("slapo_partition", schedule=schedule, inputs=inputs, batch_axes={})
    if answer is not None:
        raise CheckError(
            "it cuts a model without a step that cuts",
            required="None unless a step of the schedule cuts the model",
            got=repr(answer[1]),
            hint="return None unless schedule.records holds a step that cuts",
        )


def _check_liveness(distribution: str, manager: HookManager) -> None:
    answers = 0
    for partition, outputs in sample_partitions():
        answer = manager.single("slapo_liveness", partition=partition, outputs=outputs)
        if answer is not None:
            check_liveness(answer[1], partition, outputs, answer[0])
            answers += 1
    if not answers:
        raise NotApplicable("it answers None for four simple stages")
