"""The cells of Megatron's matrix: a family on a mesh under one of Megatron's optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import slapo_core as slapo
from tests.integration.dialects.cells import DialectCell, Watched
from tests.integration.dialects.subjects import EPSILON, LEARNING_RATE, WEIGHT_DECAY

__all__ = ["MegatronCell", "cells", "sequence_cells"]


@dataclass(frozen=True)
class MegatronCell(DialectCell):
    """One run.

    Args:
        distributed: whether the optimizer is Megatron's distributed one.
        virtual: how many stages a rank has.
        pieces: whether ranks along ``tp`` have pieces of the sequence between layers; of LLaMA.
    """

    distributed: bool = False
    virtual: int = 1
    pieces: bool = False

    def __str__(self) -> str:
        kind = "distributed" if self.distributed else "plain"
        return (
            f"{self.family}, {self.mesh}, {kind} optimizer, stages a rank: {self.virtual}, "
            f"{self.micro_batches} micro-batches{', pieces of the sequence' if self.pieces else ''}"
        )

    def split(self, sch: slapo.Schedule) -> None:
        if self.pieces:
            self.subject.sequence_parallel(sch)
        else:
            self.subject.tensor_parallel(sch)

    def build(self) -> tuple[slapo.Schedule, Any]:
        from tests.support.cpu_megatron import install

        install()
        sch = self.schedule(self.virtual * self.sizes.get("pp", 1))
        engine = slapo.build(
            sch,
            target="megatron",
            optimizer_config={
                "lr": LEARNING_RATE,
                "adam_eps": EPSILON,
                "weight_decay": WEIGHT_DECAY,
                "clip_grad": self.max_grad_norm,
                "use_distributed_optimizer": self.distributed,
            },
            ddp_config={"use_distributed_optimizer": self.distributed},
            microbatches=self.micro_batches,
        )
        return sch, engine

    def watch(self, sch: slapo.Schedule, engine: Any) -> Watched:
        return _Gradients(sch, engine)

    def norm(self, engine: Any, result: slapo.StepResult) -> Any:
        assert result.grad_norm is not None
        return result.grad_norm


def cells(family: str) -> list[MegatronCell]:
    """All runs of a family."""
    ways = [
        *(("dp 2", 1, 1 + distributed, distributed) for distributed in (False, True)),
        *(("tp 2", 1, 2 - distributed, distributed) for distributed in (False, True)),
        *(("pp 2", 1, 2 + distributed, distributed) for distributed in (False, True)),
        *(("pp 2", 2, 4 - 2 * distributed, distributed) for distributed in (False, True)),
        *(("pp 2, tp 2", 1, 2, distributed) for distributed in (False, True)),
        *(("pp 2, dp 2", 1, 2, distributed) for distributed in (False, True)),
        ("dp 2, tp 2", 1, 2, True),
    ]
    return [
        MegatronCell(family, mesh, virtual=virtual, micro_batches=count, distributed=distributed)
        for mesh, virtual, count, distributed in ways
    ]


def sequence_cells() -> list[MegatronCell]:
    """Sequence parallelism, alone and over stages."""
    return [
        MegatronCell("llama", "tp 2", pieces=True),
        MegatronCell("llama", "tp 2", micro_batches=2, distributed=True, pieces=True),
        MegatronCell("llama", "pp 2, tp 2", micro_batches=2, pieces=True),
        MegatronCell("llama", "dp 2, tp 2", distributed=True, pieces=True),
    ]


class _Gradients(Watched):
    """The main gradients that Megatron's optimizer gets: means over replicas; of a distributed one, the own pieces."""

    def __init__(self, sch: slapo.Schedule, engine: Any) -> None:
        super().__init__(sch)
        self._engine, self._step = engine, engine.megatron.optimizer.step
        engine.megatron.optimizer.step = self._watched

    def _watched(self, *arguments: Any, **options: Any) -> Any:
        self.last = []
        pieces = _pieces(self._engine.megatron.optimizer)
        for name, parameter in self._engine.module.named_parameters():
            if parameter.is_meta:  # of another stage
                continue
            if pieces is None:
                self.see(name, parameter.main_grad)
            elif parameter in pieces:
                first, last = piece = pieces[parameter]
                self.see(name, parameter.main_grad.flatten()[first:last], piece)
        return self._step(*arguments, **options)


def _pieces(optimizer: Any) -> dict[Any, tuple[int, int]] | None:
    """Which elements of each parameter a distributed optimizer has on this rank; None for another one."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    found: dict[Any, tuple[int, int]] = {}
    for one in optimizer.chained_optimizers:
        if not isinstance(one, DistributedOptimizer):
            return None
        for parameter in one.model_param_gbuf_map:
            kept = one._get_model_param_range_map(parameter)["param"]
            found[parameter] = kept.start, kept.end
    return found
