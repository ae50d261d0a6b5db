"""One schedule file with every kind of step, run under every target, step by step."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

import slapo_core as slapo
from tests.integration.cells import Cell
from tests.integration.deepspeed.cases import configuration
from tests.integration.dialects.closeness import about_number, about_weights
from tests.integration.dialects.subjects import MAX_GRAD_NORM, STEPS, SUBJECTS, Subject, adamw, train_plain

__all__ = ["FileCell", "file_cells", "schedule_file"]

SUBJECT = Subject("bert", SUBJECTS["bert"].family, depth=2)
TARGETS = ("torch", "deepspeed", "megatron")


@dataclass(frozen=True)
class FileCell(Cell):
    """The same file under every target.

    Args:
        zero: DeepSpeed's ZeRO stage.
        micro_batches: that a step accumulates, or that go through the pipeline.
    """

    zero: int = 0
    micro_batches: int = 1

    def __str__(self) -> str:
        return f"one file, {self.mesh}, ZeRO-{self.zero}, {self.micro_batches} micro-batches"

    def differences(self) -> Iterator[str]:
        """What the targets do differently, and from the reference model."""
        from tests.support.cpu_megatron import install

        install()
        text = schedule_file(self.sizes)
        losses: dict[str, list[float]] = {}
        states, own, replicas = {}, 0, 1
        for target in TARGETS:
            sch = slapo.replay(make(), text, mesh=self.sizes, example_inputs=SUBJECT.batch(0, 0, samples=2))
            assert sch.mesh is not None
            own, replicas = sch.mesh.rank("dp"), sch.mesh.size("dp")
            engine = slapo.build(sch, target=target, optimizer=adamw, **self._options(target))
            losses[target] = [float(engine.train_step(SUBJECT.batch(step, own)).loss) for step in range(STEPS)]
            states[target] = engine.state_dict()
            engine.close()
        plain = train_plain(SUBJECT, replicas=replicas, micro_batches=self.micro_batches)
        for target in TARGETS:
            for step in range(STEPS):
                what = f"the loss of step {step} by {target}"
                yield from about_number(what, losses[target][step], losses["torch"][step])
                yield from about_number(what, losses[target][step], plain.losses[step][own])
            said = about_weights(states[target], plain.state if target == "torch" else states["torch"])
            yield from (f"by {target}: {one}" for one in said)

    def _options(self, target: str) -> dict[str, Any]:
        if target == "deepspeed":
            return {"config": configuration(self.zero, self.micro_batches, MAX_GRAD_NORM)}
        if target == "torch" and "pp" not in self.sizes:
            return {"max_grad_norm": MAX_GRAD_NORM, "accumulate": self.micro_batches}
        schedule = {"pipeline_schedule": "1f1b"} if target == "torch" else {}
        return {"max_grad_norm": MAX_GRAD_NORM, "microbatches": self.micro_batches, **schedule}


def file_cells() -> list[FileCell]:
    """The meshes on which the file is run."""
    return [
        FileCell("bert", "dp 2, tp 1", zero=3),
        FileCell("bert", "dp 2, tp 2", zero=2, micro_batches=2),
        FileCell("bert", "pp 2, tp 2", zero=1, micro_batches=2),
    ]


def make() -> nn.Module:
    """The subject with its attention written out, as the pattern finds it."""
    model: Any = SUBJECT.make()
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    other = type(model)(config).train()
    other.load_state_dict(model.state_dict())
    return other


def schedule_file(sizes: Mapping[str, int]) -> str:
    """Tensor parallelism, replaced and fused parts of graphs, recomputed blocks, a cut; as JSON."""
    sch = slapo.create_schedule(make(), mesh=dict(sizes), example_inputs=SUBJECT.batch(0, 0, samples=2))
    for layer in sch["bert.encoder.layer.*"]:
        for name in ("query", "key", "value"):
            layer[f"attention.self.{name}"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        layer["intermediate.dense"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
        for name in ("attention.output.dense", "output.dense"):
            layer[name].shard("weight", axis=1).sync("fwd_post", "all_reduce")
        layer["intermediate.dense"].decompose()
    layer = sch["bert.encoder.layer.1"]
    layer.trace(flatten=True)
    layer.replace(match="fusion.sdpa")
    layer.fuse("fusion.bias_gelu", compiler="eager", name="bias_gelu")
    sch["bert.encoder.layer.0"].checkpoint()
    for path in SUBJECT.cuts(sizes.get("pp", 1)):
        sch[path].pipeline_split()
    return sch.to_json()
