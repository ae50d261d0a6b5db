"""A family on a mesh, trained by a runtime, against the same training of the reference model by torch alone."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import slapo_core as slapo
from tests.integration.cells import Cell
from tests.integration.dialects.closeness import GRADIENT, Given, about_gradients, about_number, about_weights
from tests.integration.dialects.subjects import MAX_GRAD_NORM, STEPS, SUBJECTS, Subject, train_plain

__all__ = ["DialectCell", "Watched"]


class Watched:
    """The gradients of the last step of an engine, before they are clipped.

    Args:
        sch: what the engine was built of.
    """

    def __init__(self, sch: slapo.Schedule) -> None:
        self._sch = sch
        self.last: list[Given] = []

    def see(self, name: str, gradient: Any, piece: tuple[int, int] | None = None) -> None:
        """Keep one.

        Args:
            name: of the parameter in the scheduled model.
            gradient: this rank's; None where the runtime has none.
            piece: which elements, where a replica has only some of them.
        """
        path, _, own_name = name.rpartition(".")
        layout = self._sch[path].layout(own_name)
        assert self._sch.mesh is not None
        self.last.append(Given(layout, self._sch.mesh, None if gradient is None else gradient.detach().clone(), piece))

    def left_out(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """What the ranks together have not seen the whole gradient of; every rank calls it.

        Args:
            sizes: of the reference model's parameters, in elements.
        """
        own: Counter[str] = Counter()
        for one in self.last:
            own[one.layout.origin] += 0 if one.gradient is None else one.gradient.numel()
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, own)
        for name, size in sizes.items():
            seen = sum(found[name] for found in everywhere)
            if seen < size:
                yield f"of the gradient of '{name}', the ranks have seen {seen} of {size} elements"


@dataclass(frozen=True)
class DialectCell(Cell):
    """One run by a runtime.

    Args:
        family: a name of ``SUBJECTS``.
        mesh: sizes, as text, e.g. ``"pp 2, tp 2"``.
        micro_batches: that a step accumulates, or that go through the pipeline.
        max_grad_norm: that the runtime is to clip to; that of the reference model.
    """

    micro_batches: int = 1
    max_grad_norm: float = MAX_GRAD_NORM

    @property
    def subject(self) -> Subject:
        return SUBJECTS[self.family]

    def schedule(self, stages: int | None = None) -> slapo.Schedule:
        """The model, tensor-parallel and cut as the mesh says.

        Args:
            stages: of the model; None for one on each rank along ``pp``.
        """
        subject, sizes = self.subject, self.sizes
        example = subject.batch(0, 0, samples=subject.samples(self.micro_batches) // self.micro_batches)
        sch = slapo.create_schedule(subject.make(), mesh=sizes, example_inputs=example)
        if "tp" in sizes:
            self.split(sch)
        for path in subject.cuts(stages or sizes.get("pp", 1)):
            sch[path].pipeline_split()
        return sch

    def split(self, sch: slapo.Schedule) -> None:
        """Over ``tp``."""
        self.subject.tensor_parallel(sch)

    @abstractmethod
    def build(self) -> tuple[slapo.Schedule, Any]:
        """The schedule and the engine."""

    @abstractmethod
    def watch(self, sch: slapo.Schedule, engine: Any) -> Watched:
        """What sees the gradients of every step that follows."""

    @abstractmethod
    def norm(self, engine: Any, result: slapo.StepResult) -> Any:
        """That of all gradients in the last step; None where the runtime gives none out, and need not."""

    def differences(self) -> Iterator[str]:
        """What the engine does otherwise than the reference model."""
        sch, engine = self.build()
        assert sch.mesh is not None
        replicas, own = sch.mesh.size("dp"), sch.mesh.rank("dp")
        subject, samples = self.subject, self.subject.samples(self.micro_batches)
        plain = train_plain(subject, replicas=replicas, micro_batches=self.micro_batches, samples=samples)
        watched = self.watch(sch, engine)
        for step in range(STEPS):
            result = engine.train_step(subject.batch(step, own, samples))
            yield from about_number(f"the loss of step {step}", result.loss, plain.losses[step][own])
            norm = self.norm(engine, result)
            if norm is not None:
                yield from about_number(f"the norm of the gradients of step {step}", norm, plain.norms[step], GRADIENT)
            yield from about_gradients(step, watched.last, plain.gradients[step])
        yield from watched.left_out({name: one.numel() for name, one in subject.make().named_parameters()})
        evaluated = engine.eval_step(subject.batch(STEPS, own, samples))
        yield from about_number("the evaluated loss", evaluated.loss, plain.evaluated[own])
        yield from about_weights(engine.state_dict(), plain.state)
        engine.close()
