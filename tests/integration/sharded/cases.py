"""Which models are sharded over replicas, on which meshes, and beside which steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import slapo_core as slapo
import slapo_models
from slapo_runtime.storage import sharded_over
from tests.integration.cells import Cell
from tests.integration.sharded.models import MAX_GRAD_NORM, STEPS, SUBJECTS, Batch, Subject, adamw, train_plain
from tests.integration.zoo.tensor_parallel import split

__all__ = ["ShardedCell", "cells"]

SCHEDULES: dict[str, Any] = {
    "bert": slapo_models.bert,
    "gpt2": slapo_models.gpt,
    "llama": slapo_models.llama,
    "t5": slapo_models.t5,
    "wide_resnet": slapo_models.wide_resnet,
}


@dataclass(frozen=True)
class ShardedCell(Cell):
    """One run.

    Args:
        family: one of ``SUBJECTS``.
        mesh: sizes, as text, e.g. ``"pp 2, dp 2"``.
        steps: beside those of the mesh, e.g. ``"checkpoint, kernels"``.
        parameters: ``"tied"`` or ``"frozen"``, or both.
        count: of micro-batches, accumulated or in the pipeline.
        clips: whether gradients are clipped.
        pads: whether samples have unequal numbers of tokens.
    """

    steps: str = "-"
    parameters: str = "-"
    count: int = 1
    clips: bool = True
    pads: bool = False

    def __str__(self) -> str:
        return f"{self.family}, {self.mesh}, {self.steps}, {self.parameters}, {self.count}"

    @property
    def subject(self) -> Subject:
        is_text = self.family not in ("vit", "wide_resnet")
        return Subject(
            self.family,
            is_tied=is_text and "tied" in self.parameters,
            is_frozen="frozen" in self.parameters,
            labels=is_text and "fused head" in self.steps,
            is_padded=is_text and self.pads,
        )

    @property
    def replicas(self) -> int:
        return self.sizes.get("dp_replicate", 1) * self.sizes["dp"]

    def schedule(self) -> slapo.Schedule:
        subject, stages = self.subject, self.sizes.get("pp", 1)
        example = {name: one[: 16 // self.replicas] for name, one in subject.inputs(subject.batch(0)).items()}
        sch = slapo.create_schedule(
            subject.make(), mesh={**self.sizes, "tp": self.sizes.get("tp", 1)}, example_inputs=example
        )
        if self.family == "vit":
            if "tp" in self.sizes:
                split(sch)
            if "kernels" in self.steps:
                sch["vit.layers.*"].trace()
            if "checkpoint" in self.steps:
                sch["vit.layers.[02]"].checkpoint()
            if stages > 1:
                sch["vit.layers.1"].pipeline_split()
        else:
            compiler = {} if self.family == "t5" else {"compiler": "eager"}
            SCHEDULES[self.family](
                sch,
                kernels="kernels" in self.steps,
                checkpoint=0.5 if "checkpoint" in self.steps else 0.0,
                embeddings="fused head" in self.steps,
                stages=stages,
                **compiler,
            )
        if "marks" in self.steps:
            for number, path in enumerate(subject.blocks):
                sch[path].fully_shard(reshard_after_forward=(None, False, True)[number % 3])
        return sch

    def build(self) -> tuple[slapo.Schedule, Any]:
        sch, subject = self.schedule(), self.subject
        options: dict[str, Any] = {"microbatches" if "pp" in self.sizes else "accumulate": self.count}
        if not subject.labels:
            options["loss"] = subject.loss
        if subject.is_padded:
            options["loss_weight"] = subject.tokens
        norm = MAX_GRAD_NORM if self.clips else None
        return sch, slapo.build(sch, data_parallel="fsdp", optimizer=adamw, max_grad_norm=norm, **options)

    def share(self, mesh: slapo.Mesh, batch: Batch) -> Batch:
        own = mesh.rank("dp_replicate") * mesh.size("dp") + mesh.rank("dp")
        return {name: tensor.chunk(self.replicas)[own] for name, tensor in batch.items()}

    def differences(self) -> Iterator[str]:
        """What the engine does otherwise than one process."""
        sch, engine = self.build()
        mesh, subject = sch.mesh, self.subject
        assert mesh is not None
        whole = [name for name, one in engine.module.named_parameters() if not sharded_over(one)]
        if whole:
            yield f"{whole} are not sharded"
        plain = train_plain(subject, self.replicas, self.count, clips=self.clips)
        tolerance = 2e-6 if subject.labels or "kernels" in self.steps else 1e-9
        for step in range(STEPS):
            own = self.share(mesh, subject.batch(step))
            result = engine.train_step(own)
            yield from _compare(f"the loss of step {step}", _mean(result.loss), plain.losses[step], tolerance)
            if self.clips:
                yield from _compare(f"the norm of step {step}", result.grad_norm, plain.norms[step], tolerance)
            evaluated = _mean(engine.eval_step(own).loss)
            yield from _compare(f"the loss after step {step}", evaluated, plain.evaluated[step], tolerance)
        engine.check_replicas()
        state = engine.state_dict()
        wanted = plain.states[mesh.rank("dp_replicate") * mesh.size("dp") + mesh.rank("dp")]
        if list(state) != list(wanted):
            yield f"the state dict has other names: {sorted(state.keys() ^ wanted.keys()) or 'another order'}"
        for name in wanted.keys() & state.keys():
            yield from _compare(f"'{name}' after training", state[name], wanted[name], tolerance)
        engine.close()


def _mean(loss: torch.Tensor) -> torch.Tensor:
    """Over all replicas: ranks of one have the same."""
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _compare(what: str, one: Any, other: Any, tolerance: float) -> Iterator[str]:
    one, other = (torch.as_tensor(value, dtype=torch.float64) for value in (one, other))
    if one.shape != other.shape:
        yield f"{what} has shape {tuple(one.shape)} instead of {tuple(other.shape)}"
    elif not bool(((one - other).abs() <= tolerance * other.abs().clamp(min=1.0)).all()):
        yield f"{what} differs by {float((one - other).abs().max()):.1e}"


WAYS: tuple[tuple[str, str, str, int, bool, bool], ...] = (
    ("dp 2", "checkpoint", "tied", 1, True, True),
    ("dp 2", "kernels, marks", "frozen", 4, True, False),
    ("dp 4", "kernels, fused head", "tied", 1, True, False),
    ("dp 4", "checkpoint, marks", "tied, frozen", 4, False, True),
    ("dp_replicate 2, dp 2", "checkpoint, kernels", "frozen", 1, True, True),
    ("dp_replicate 2, dp 2", "fused head, marks", "tied", 4, True, True),
    ("dp 2, tp 2", "checkpoint, kernels, fused head", "tied", 1, True, True),
    ("dp 2, tp 2", "marks", "frozen", 4, True, True),
    ("pp 2, dp 2", "checkpoint, kernels", "tied", 4, True, True),
    ("pp 2, dp 2", "fused head", "tied, frozen", 2, True, False),
    ("pp 2, dp 2", "marks, checkpoint", "-", 4, False, True),
)
"""Mesh, steps, parameters, micro-batches, whether gradients are clipped, and whether samples are padded."""


def cells(family: str) -> list[ShardedCell]:
    """All runs of a family."""
    assert family in SUBJECTS
    return [ShardedCell(family, *way) for way in WAYS]
