"""For the tests of state over pipeline stages: models, schedules of them, and a dialect that runs stages in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_core.plugins import Registry, use_registry

Sizes = dict[str, int]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + self.down((self.up(self.norm(x)) * scale).relu())


class Chain(nn.Module):
    """Four blocks between an embedding and the output that is tied to it; what all blocks read, and what none does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((), 1.5))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 1.5)
        nn.init.zeros_(self.frozen)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.scale)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Sparse(nn.Module):
    """Stages without parameters: ``fc1 | act | fc2 | out``."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2, self.out = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.fc2(self.act(self.fc1(x)))).square().mean()


def chain(seed: int = 0) -> Chain:
    torch.manual_seed(seed)
    return Chain().double()


def batch(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randint(0, 12, (4, 5), generator=generator) for name in ("ids", "labels")}


def scheduled(mesh: Any, *, model: nn.Module | None = None, cuts: int | None = None) -> slapo.Schedule:
    """The chain on a mesh: blocks sharded over ``tp``, and cut into as many stages as there are ranks along ``pp``."""
    sch = slapo.create_schedule(model or chain(), mesh=mesh, example_inputs=batch(0))
    if sch.mesh is not None and sch.mesh.size("tp") > 1:
        for block in sch["blocks.*"]:
            block["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
            block["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    stages = cuts or (sch.mesh.size("pp") if sch.mesh is not None else 1)
    for number in range(1, stages):
        sch[f"blocks.{number * 4 // stages - 1}"].pipeline_split()
    return sch


def grouped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    rest = [parameter for parameter in parameters if parameter.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.01
    )


def build(sch: slapo.Schedule, **options: Any) -> Any:
    options.setdefault("optimizer", grouped)
    return slapo.build(sch, target="in_turn", **options)


class InTurn(slapo.Dialect):
    """One micro-batch, one stage after the other."""

    name: ClassVar[str] = "in_turn"
    supports: ClassVar[frozenset[str]] = frozenset({"dp", "pp", "tp"})
    ranks: ClassVar[Callable[[int, int], tuple[int, ...]] | None] = None
    fails: ClassVar[bool] = False

    def plan(self, schedule: Any, config: Mapping[str, Any]) -> slapo.Plan:
        return slapo.Plan(self.name, ("in turn",))

    def stage_ranks(self, plan: slapo.Plan, stages: int, pp: int) -> tuple[int, ...]:
        return self.ranks(stages, pp) if self.ranks is not None else super().stage_ranks(plan, stages, pp)

    def build(self, plan: slapo.Plan, context: Any) -> Any:
        engine = Engine(context)
        if self.fails:
            raise slapo.BuildError("it does not want to")
        return engine


class Engine:
    """What the tests use of an engine."""

    def __init__(self, context: Any) -> None:
        self.context, self.state, self.module = context, context.state, context.schedule.model
        self.mesh = context.schedule.mesh
        self.optimizer = context.make_optimizer()
        self.sums_ties = True

    def gradients(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The passes of a step: this rank's gradients, averaged over ``dp``, and the loss of the replica."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.context.training(batch):
            cut = self.context.staged(batch, 1, training=True) if self.context.stage_ranks else None
            loss = self.context.compute_loss(batch)[0] if cut is None else self._stages(cut.staged, cut.inputs[0])
            if cut is None:
                loss.backward()
        if self.sums_ties:
            self.context.sum_tied_gradients()
        replicas = self.mesh.size("dp") if self.mesh is not None else 1
        for parameter in self.module.parameters():
            if replicas > 1 and parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.mesh.group("dp"))
                parameter.grad /= replicas
        return loss.detach()

    def train_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor | None:
        self.gradients(batch)
        norm = self.context.clip_gradients()
        self.optimizer.step()
        return norm

    def _stages(self, staged: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        ranks, group = self.context.stage_ranks, self.mesh.group("pp")
        partition, liveness, here = staged.partition, staged.liveness, self.mesh.rank("pp")
        received: dict[int, dict[str, torch.Tensor]] = {}
        sent: dict[int, dict[str, torch.Tensor]] = {}
        for stage, rank in zip(partition.stages, ranks, strict=True):
            if rank != here:
                continue
            received[stage.index] = {}
            for name in liveness.received(stage.index):
                value = partition.values[name]
                if ranks[stage.index - 1] == here:
                    tensor = sent[stage.index - 1][name].detach().clone()
                else:
                    tensor = torch.empty(value.shape, dtype=value.dtype)
                    dist.recv(tensor, group=group, group_src=ranks[stage.index - 1])
                received[stage.index][name] = tensor.requires_grad_(value.requires_grad)
            made = stage.module(inputs, received[stage.index])
            sent[stage.index] = {**received[stage.index], **made}
            for name in liveness.sent(stage.index):
                if ranks[stage.index + 1] != here:
                    dist.send(
                        sent[stage.index][name].detach().contiguous(), group=group, group_dst=ranks[stage.index + 1]
                    )
        for stage, rank in reversed(list(zip(partition.stages, ranks, strict=True))):
            if rank == here:
                self._backward(stage.index, staged, received, sent)
        loss = torch.zeros((), dtype=torch.float64)
        if ranks[-1] == here:
            loss = partition.output.assemble(sent[len(ranks) - 1]).detach().clone()
        dist.broadcast(loss, group=group, group_src=ranks[-1])
        return loss

    def _backward(self, index: int, staged: Any, received: Any, sent: Any) -> None:
        ranks, group, here = self.context.stage_ranks, self.mesh.group("pp"), self.mesh.rank("pp")
        values, roots, gradients = staged.partition.values, [], []
        if index == len(ranks) - 1:
            roots, gradients = [staged.partition.output.assemble(sent[index])], [None]
        else:
            for name in staged.liveness.sent(index):
                if values[name].requires_grad:
                    gradient = torch.empty(values[name].shape, dtype=values[name].dtype)
                    if ranks[index + 1] == here:
                        gradient = received[index + 1][name].grad
                    else:
                        dist.recv(gradient, group=group, group_src=ranks[index + 1])
                    roots.append(sent[index][name])
                    gradients.append(gradient)
        torch.autograd.backward(roots, gradients)
        for name in staged.liveness.received(index):
            if values[name].requires_grad and ranks[index - 1] != here:
                gradient = received[index][name].grad
                dist.send(gradient.contiguous(), group=group, group_dst=ranks[index - 1])


@contextlib.contextmanager
def in_turn() -> Iterator[type[InTurn]]:
    """With the dialect in the registry of this process."""
    with use_registry(Registry.discover()) as registry:
        registry.register(InTurn, kind="dialects")
        try:
            yield InTurn
        finally:
            InTurn.ranks, InTurn.fails = None, False


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A step of the reference model, with gradients clipped to the norm 0.5; gives the norm."""
    optimizer.zero_grad(set_to_none=True)
    model(**batch).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return norm
