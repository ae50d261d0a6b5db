"""One cell of the matrix: a family on a mesh under a ZeRO stage, against the same training without either."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import slapo_core as slapo
from tests.integration.deepspeed.closeness import GRADIENT, about_gradients, about_number, about_weights
from tests.integration.deepspeed.subjects import MAX_GRAD_NORM, STEPS, SUBJECTS, adamw, train_plain

__all__ = ["Cell", "cells", "differences"]


@dataclass(frozen=True)
class Cell:
    """One run.

    Args:
        family: a name of ``SUBJECTS``.
        mesh: sizes, as text, e.g. ``"pp 2, tp 2"``.
        zero: DeepSpeed's ZeRO stage.
        micro_batches: that a step accumulates, or that go through the pipeline.
        max_grad_norm: that DeepSpeed is to clip to; that of the untouched model.
    """

    family: str
    mesh: str
    zero: int
    micro_batches: int = 1
    max_grad_norm: float = MAX_GRAD_NORM

    @property
    def sizes(self) -> dict[str, int]:
        return {name: int(size) for name, size in (part.split() for part in self.mesh.split(", "))}

    @property
    def world_size(self) -> int:
        found = 1
        for size in self.sizes.values():
            found *= size
        return found

    def __str__(self) -> str:
        return f"{self.family}, {self.mesh}, ZeRO-{self.zero}, {self.micro_batches} micro-batches"

    def config(self) -> dict[str, Any]:
        """As a user of DeepSpeed writes it."""
        return {
            "zero_optimization": {"stage": self.zero},
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": self.max_grad_norm,
        }

    def build(self) -> tuple[slapo.Schedule, Any]:
        subject = SUBJECTS[self.family]
        example = subject.batch(0, 0, samples=4 // self.micro_batches)
        sch = slapo.create_schedule(subject.make(), mesh=self.sizes, example_inputs=example)
        if "tp" in self.sizes:
            subject.tensor_parallel(sch)
        for path in subject.cuts(self.sizes.get("pp", 1)):
            sch[path].pipeline_split()
        return sch, slapo.build(sch, target="deepspeed", config=self.config(), optimizer=adamw)


def cells(family: str) -> list[Cell]:
    """All runs of a family."""
    return [
        *(Cell(family, "dp 2", zero, 1 + zero % 2) for zero in range(4)),
        Cell(family, "tp 2", 0),
        Cell(family, "tp 2", 1, 2),
        Cell(family, "pp 2", 1, 2),
        Cell(family, "dp 2, tp 2", 1, 2),
        Cell(family, "dp 2, tp 2", 2),
        Cell(family, "dp 2, tp 2", 3, 2),
        Cell(family, "pp 2, tp 2", 1, 2),
        Cell(family, "pp 2, dp 2", 1, 2),
    ]


def differences(cell: Cell) -> Iterator[str]:
    """What this rank's engine does otherwise than the untouched model; every rank of the mesh calls it."""
    sch, engine = cell.build()
    assert sch.mesh is not None
    replicas, own = sch.mesh.size("dp"), sch.mesh.rank("dp")
    subject, plain = (
        SUBJECTS[cell.family],
        train_plain(cell.family, replicas=replicas, micro_batches=cell.micro_batches),
    )
    watched = _Gradients(sch, engine)
    for step in range(STEPS):
        loss = engine.train_step(subject.batch(step, own)).loss
        yield from about_number(f"the loss of step {step}", loss, plain.losses[step][own])
        norm = engine.deepspeed.get_global_grad_norm()
        if norm is not None:  # in float32, DeepSpeed gives it out under ZeRO only
            yield from about_number(f"the norm of the gradients of step {step}", norm, plain.norms[step], GRADIENT)
        elif cell.zero:
            yield f"DeepSpeed gives out no norm of the gradients of step {step}"
        yield from about_gradients(step, watched.last, plain.gradients[step])
    yield from watched.left_out({name for name, _ in subject.make().named_parameters()})
    yield from about_number(
        "the evaluated loss", engine.eval_step(subject.batch(STEPS, own)).loss, plain.evaluated[own]
    )
    yield from about_weights(engine.state_dict(), plain.state)
    engine.close()


class _Gradients:
    """What DeepSpeed gives out of each step's gradients, before it clips them: this rank's pieces, whole along ``dp``.

    Args:
        sch: what the engine was built of.
        engine: built, and not trained.
    """

    def __init__(self, sch: slapo.Schedule, engine: Any) -> None:
        self._sch, self._engine = sch, engine
        self._step = engine.deepspeed._take_model_step
        self.last: list[tuple[slapo.Layout, slapo.Mesh, torch.Tensor | None]] = []
        engine.deepspeed._take_model_step = self._watched

    def _watched(self, *arguments: Any, **options: Any) -> Any:
        from deepspeed.utils import safe_get_full_grad

        self.last = []
        for name, parameter in self._engine.module.named_parameters():
            if parameter.is_meta:  # of another stage
                continue
            path, _, own_name = name.rpartition(".")
            gradient = safe_get_full_grad(parameter)
            layout = self._sch[path].layout(own_name)
            self.last.append((layout, self._sch.mesh, None if gradient is None else gradient.detach().clone()))
        return self._step(*arguments, **options)

    def left_out(self, names: set[str]) -> Iterator[str]:
        """What no rank has seen a gradient of; every rank calls it.

        Args:
            names: of the untouched model's parameters.
        """
        own = {layout.origin for layout, _, _ in self.last}
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, own)
        for name in sorted(names.difference(*everywhere)):
            yield f"no rank has seen a gradient of '{name}'"
