"""One schedule file with every kind of step, run under target "torch" and under target "deepspeed", step by step."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

import slapo_core as slapo
from tests.integration.deepspeed.cases import Cell
from tests.integration.deepspeed.closeness import about_number, about_weights
from tests.integration.deepspeed.subjects import MAX_GRAD_NORM, STEPS, SUBJECTS, adamw, train_plain

__all__ = ["differences_of_targets", "file_cells", "schedule_file"]

SUBJECT = SUBJECTS["bert"]


def file_cells() -> list[Cell]:
    """The meshes on which the file is run."""
    return [Cell("bert", "dp 2, tp 1", 3), Cell("bert", "dp 2, tp 2", 2, 2), Cell("bert", "pp 2, tp 2", 1, 2)]


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
    layer = sch["bert.encoder.layer.2"]
    layer.trace(flatten=True)
    layer.replace(match="fusion.sdpa")
    layer.fuse("fusion.bias_gelu", compiler="eager", name="bias_gelu")
    sch["bert.encoder.layer.[0-1]"].checkpoint()
    for path in SUBJECT.cuts(sizes.get("pp", 1)):
        sch[path].pipeline_split()
    return sch.to_json()


def differences_of_targets(cell: Cell) -> Iterator[str]:
    """What the two targets do differently, and from the untouched model; every rank of the mesh calls it."""
    text = schedule_file(cell.sizes)
    losses, states, own, replicas = [], [], 0, 1
    for target in ("torch", "deepspeed"):
        sch = slapo.replay(make(), text, mesh=cell.sizes, example_inputs=SUBJECT.batch(0, 0, samples=2))
        assert sch.mesh is not None
        own, replicas = sch.mesh.rank("dp"), sch.mesh.size("dp")
        engine = slapo.build(sch, target=target, optimizer=adamw, **_options(cell, target))
        losses.append([float(engine.train_step(SUBJECT.batch(step, own)).loss) for step in range(STEPS)])
        states.append(engine.state_dict())
        engine.close()
    plain = train_plain(SUBJECT.name, replicas=replicas, micro_batches=cell.micro_batches)
    for step, (by_torch, by_deepspeed) in enumerate(zip(*losses, strict=True)):
        yield from about_number(f"the loss of step {step} by deepspeed", by_deepspeed, by_torch)
        yield from about_number(f"the loss of step {step} by torch", by_torch, plain.losses[step][own])
    yield from about_weights(states[1], states[0])
    yield from about_weights(states[0], plain.state)


def _options(cell: Cell, target: str) -> dict[str, Any]:
    if target == "deepspeed":
        return {"config": cell.config()}
    if "pp" in cell.sizes:
        count = {"pipeline_schedule": "1f1b", "microbatches": cell.micro_batches}
    else:
        count = {"accumulate": cell.micro_batches}
    return {"max_grad_norm": MAX_GRAD_NORM, **count}
