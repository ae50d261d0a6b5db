"""Estimates of pipelines against two real ranks: what each holds at most, and what it sends."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import schedules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks

preload_modules("tests.integration.test_estimated_pipelines", "slapo_pipeline", "slapo_torch.pipeline_engine")

ADAMW: Any = functools.partial(torch.optim.AdamW, lr=1e-3, foreach=True)
SIZE, WORDS = 48, 96


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """An embedding, blocks, and a head that is the embedding again, if it is tied."""

    def __init__(self, blocks: int, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SIZE)
        self.register_buffer("scale", torch.ones(SIZE))
        self.layer = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(SIZE, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for layer in self.layer:
            x = layer(x)
        return self.head(x)


def loss_of(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[0].flatten())


@dataclass(frozen=True)
class Case:
    cut: int
    microbatches: int
    tied: bool = False
    checkpointed: int = 0
    schedule: str = "1f1b"

    def batch(self) -> tuple[torch.Tensor]:
        return (torch.zeros(16, 32, dtype=torch.long),)

    def scheduled(self) -> slapo.Schedule:
        torch.manual_seed(0)
        piece = (self.batch()[0][: 16 // self.microbatches],)
        sch = slapo.create_schedule(Words(6, tied=self.tied), mesh={"pp": 2}, example_inputs=piece)
        for number in range(self.checkpointed):
            sch[f"layer.{number}"].checkpoint()
        sch[f"layer.{self.cut}"].pipeline_split()
        return sch

    @property
    def options(self) -> dict[str, Any]:
        return {
            "optimizer": ADAMW,
            "loss": loss_of,
            "microbatches": self.microbatches,
            "pipeline_schedule": self.schedule,
        }


CASES = (
    Case(2, 4),
    Case(1, 8, checkpointed=3),
    Case(2, 2, tied=True),
    Case(2, 4, schedule="gpipe"),
)


class Held(TorchDispatchMode):
    """The most bytes of real tensors at once."""

    def __init__(self, *there: Any) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, int] = {}
        for leaf in tree_leaves(there):
            self._count(leaf)

    def _count(self, leaf: Any) -> None:
        if not isinstance(leaf, torch.Tensor) or leaf.is_meta:
            return
        storage = leaf.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self._count(leaf)
        return result


def trained(cases: tuple[Case, ...]) -> list[tuple[int, int, int]]:
    """On each rank: the peak, and the bytes and the number of messages that it sends in a step, by case."""
    found = []
    for case in cases:
        sch = case.scheduled()
        engine = slapo.build(sch, **case.options)
        batch = case.batch()
        engine.train_step(batch)
        sent: list[int] = []
        real = schedules._batch_p2p

        def counting(operations: Any, desc: str | None = None, sent: list[int] = sent, real: Any = real) -> Any:
            sent += [each.tensor.nbytes for each in operations if each.op is dist.isend]
            return real(operations, desc)

        state = [leaf for leaf in tree_leaves(list(engine.optimizer.state.values())) if isinstance(leaf, torch.Tensor)]
        here = [*engine.module.parameters(), *engine.module.buffers(), *state]
        here += [one.grad for one in engine.module.parameters() if one.grad is not None]
        schedules._batch_p2p = counting
        try:
            held = Held(batch, here)
            del here, state  # old gradients go while the step runs
            with held:
                engine.train_step(batch)
        finally:
            schedules._batch_p2p = real
        found.append((held.most, sum(sent), len(sent)))
        engine.close()
    return found


@pytest.mark.breadth
@pytest.mark.ranks
def test_each_rank_holds_and_sends_what_was_estimated() -> None:
    measured = run_ranks(trained, CASES, world_size=2, timeout=300)
    for number, case in enumerate(CASES):
        estimate = case.scheduled().estimate(case.batch(), **case.options)
        assert [kind.ranks for kind in estimate.kinds] == [(0,), (1,)]
        for kind in estimate.kinds:
            peak, sent, messages = measured[kind.rank][number]
            own = [one.bytes for one in kind.collectives if one.kind == "send" and one.phase != "optimizer"]
            ties = own[messages:]
            assert (sum(own[:messages]), len(own[:messages])) == (sent, messages), case
            assert ties == ([4 * WORDS * SIZE] if case.tied else [])  # the gradient of the one weight
            assert abs(kind.memory.total - peak) <= 0.02 * peak, (case, kind.rank, kind.memory, peak)
        # The first stage holds as many micro-batches as there are stages; the last one a single one.
        if case == CASES[0]:
            first, last = (kind.memory for kind in estimate.kinds)
            assert first.activations > 1.5 * last.activations
