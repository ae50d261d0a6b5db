"""One cell of the matrix: a family on a mesh under a ZeRO stage, against the same training without either."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import slapo_core as slapo
from tests.integration.deepspeed.subjects import MAX_GRAD_NORM, STEPS, SUBJECTS, Trained, adamw, train_plain

__all__ = ["Cell", "cells", "differences", "run_cells"]

LOSS, GRADIENT, WEIGHT = 2e-6, 2e-5, 1e-5
"""Tolerances, each about five times what a sum in another order makes of float32, relative to the largest element.

Of a gradient: of that tensor, or a thousandth of that of all gradients where this is more: gradients that are zero but
for rounding have no size of their own. Of a weight: of that tensor, or the learning rate, by which a step moves it.
"""
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Cell:
    """One run.

    Args:
        family: a name of ``SUBJECTS``.
        mesh: sizes, as text, e.g. ``"pp 2, tp 2"``.
        zero: DeepSpeed's ZeRO stage.
        micro_batches: that a step accumulates, or that go through the pipeline.
    """

    family: str
    mesh: str
    zero: int
    micro_batches: int = 1

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
            "gradient_clipping": MAX_GRAD_NORM,
        }

    def build(self) -> tuple[slapo.Schedule, Any]:
        subject = SUBJECTS[self.family]
        sch = slapo.create_schedule(subject.make(), mesh=self.sizes, example_inputs=subject.batch(0, 0))
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


def run_cells(chosen: Sequence[Cell]) -> list[tuple[list[str], float]]:
    """On every rank: what differs in each of them, and its seconds of CPU time."""
    torch.set_num_threads(1)
    found = []
    for cell in chosen:
        start = time.process_time()
        try:
            differing = list(differences(cell))
        except slapo.SlapoError as error:
            differing = [f"{type(error).__name__}: {error}"]
        found.append((differing, time.process_time() - start))
    return found


def differences(cell: Cell) -> Iterator[str]:
    """What this rank's engine does otherwise than the untouched model; every rank of the mesh calls it."""
    sch, engine = cell.build()
    assert sch.mesh is not None
    replicas, own = sch.mesh.size("dp"), sch.mesh.rank("dp")
    subject, plain = SUBJECTS[cell.family], train_plain(cell.family, replicas=replicas, micro_batches=cell.micro_batches)
    watched = _Gradients(sch, engine)
    for step in range(STEPS):
        loss = engine.train_step(subject.batch(step, own)).loss
        yield from _number(f"the loss of step {step}", loss, plain.losses[step][own])
        norm = engine.deepspeed.get_global_grad_norm()
        if norm is not None:  # in float32, DeepSpeed gives it out under ZeRO only
            yield from _number(f"the norm of the gradients of step {step}", norm, plain.norms[step])
        elif cell.zero:
            yield f"DeepSpeed gives out no norm of the gradients of step {step}"
        yield from _gradients(step, watched.last, plain)
    yield from _number("the evaluated loss", engine.eval_step(subject.batch(STEPS, own)).loss, plain.evaluated[own])
    yield from _weights(engine.state_dict(), plain)
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


def _gradients(step: int, given: list[Any], plain: Trained) -> Iterator[str]:
    wanted = plain.gradients[step]
    floor = 1e-3 * max(float(one.abs().max()) for one in wanted.values())
    if not given:
        yield f"no gradient of step {step} was seen"
    for layout, mesh, gradient in given:
        if gradient is None:
            yield f"the gradient of '{layout.origin}' in step {step} is not given out"
        else:
            whole = wanted[layout.origin]
            scale = max(float(whole.abs().max()), floor)
            piece = layout.local(whole, mesh)
            yield from _tensor(f"the gradient of '{layout.origin}' in step {step}", gradient, piece, GRADIENT * scale)


def _weights(state: dict[str, torch.Tensor], plain: Trained) -> Iterator[str]:
    if list(state) != list(plain.state):
        yield f"the state dict has other names: {sorted(state.keys() ^ plain.state.keys()) or 'another order'}"
        return
    for name, wanted in plain.state.items():
        scale = max(float(wanted.abs().max()), LEARNING_RATE)
        yield from _tensor(f"'{name}' after training", state[name], wanted, WEIGHT * scale)


def _number(what: str, one: Any, other: float) -> Iterator[str]:
    if not abs(float(one) - other) <= LOSS * abs(other):
        yield f"{what} is {float(one):.8g} instead of {other:.8g}"


def _tensor(what: str, one: torch.Tensor, other: torch.Tensor, allowed: float) -> Iterator[str]:
    if one.shape != other.shape or one.dtype != other.dtype:
        yield f"{what} is {one.dtype} {tuple(one.shape)} instead of {other.dtype} {tuple(other.shape)}"
    elif not float((one.double() - other.double()).abs().max()) <= allowed:
        yield f"{what} differs by {float((one - other).abs().max()):.1e}, more than {allowed:.1e}"
