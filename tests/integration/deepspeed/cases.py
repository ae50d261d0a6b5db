"""The cells of DeepSpeed's matrix: a family on a mesh under a ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import slapo_core as slapo
from tests.integration.dialects.cells import DialectCell, Watched
from tests.integration.dialects.subjects import adamw

__all__ = ["DeepSpeedCell", "cells", "configuration"]


def configuration(zero: int, micro_batches: int, max_grad_norm: float) -> dict[str, Any]:
    """As a user of DeepSpeed writes it."""
    return {
        "zero_optimization": {"stage": zero},
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": max_grad_norm,
    }


@dataclass(frozen=True)
class DeepSpeedCell(DialectCell):
    """One run.

    Args:
        zero: DeepSpeed's ZeRO stage.
    """

    zero: int = 0

    def __str__(self) -> str:
        return f"{self.family}, {self.mesh}, ZeRO-{self.zero}, {self.micro_batches} micro-batches"

    def build(self) -> tuple[slapo.Schedule, Any]:
        sch = self.schedule()
        config = configuration(self.zero, self.micro_batches, self.max_grad_norm)
        return sch, slapo.build(sch, target="deepspeed", config=config, optimizer=adamw)

    def watch(self, sch: slapo.Schedule, engine: Any) -> Watched:
        return _Gradients(sch, engine)

    def norm(self, engine: Any, result: slapo.StepResult) -> Any:
        norm = engine.deepspeed.get_global_grad_norm()
        assert norm is not None or self.zero == 0, "in float32, DeepSpeed gives it out under ZeRO"
        return norm


def cells(family: str) -> list[DeepSpeedCell]:
    """All runs of a family."""
    ways = [
        *(("dp 2", zero, 1 + zero % 2) for zero in range(4)),
        ("tp 2", 0, 1),
        ("tp 2", 1, 2),
        ("pp 2", 1, 2),
        ("dp 2, tp 2", 1, 2),
        ("dp 2, tp 2", 2, 1),
        ("dp 2, tp 2", 3, 2),
        ("pp 2, tp 2", 1, 2),
        ("pp 2, dp 2", 1, 2),
    ]
    return [DeepSpeedCell(family, mesh, zero=zero, micro_batches=count) for mesh, zero, count in ways]


class _Gradients(Watched):
    """What DeepSpeed gives out of each step's gradients: this rank's pieces, whole along ``dp``."""

    def __init__(self, sch: slapo.Schedule, engine: Any) -> None:
        super().__init__(sch)
        self._engine, self._step = engine, engine.deepspeed._take_model_step
        engine.deepspeed._take_model_step = self._watched

    def _watched(self, *arguments: Any, **options: Any) -> Any:
        from deepspeed.utils import safe_get_full_grad

        self.last = []
        for name, parameter in self._engine.module.named_parameters():
            if not parameter.is_meta:  # of another stage
                self.see(name, safe_get_full_grad(parameter))
        return self._step(*arguments, **options)
