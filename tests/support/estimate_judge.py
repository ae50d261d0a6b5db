"""torch's MemTracker on real tensors, in a process like that of an estimate: what peaks of memory are held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

import slapo_core as slapo
from slapo_estimate.results import Memory
from slapo_estimate.simulation import Request, estimate_rank
from slapo_estimate.source import Functions
from slapo_runtime.batches import micro_batches
from slapo_runtime.guards import Guards
from tests.support.estimate_cases import OPTIMIZERS, Case

__all__ = ["compare", "judged", "predicted", "train_two_steps"]


class _NoModules:
    """In place of MemTracker's hooks on modules: in their presence slapo-tp sums out of place, which no run does.

    Without them it also takes frozen parameters, and several forward passes of a model in one step.
    """

    parents = ("Global",)

    @property
    def is_bw(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def __enter__(self) -> None:
        return None

    def __exit__(self, *args: Any) -> None:
        return None


def judged(case: Case) -> int:
    """Bytes at the peak of two training steps on real tensors; the process must have no process group."""
    if case.tp > 1:
        dist.init_process_group("fake", rank=0, world_size=case.tp, store=FakeStore())
    torch.manual_seed(0)
    schedule = slapo.create_schedule(case.model(), mesh=case.mesh)
    case.schedule(schedule)
    schedule.seal()
    model, batch = schedule.model, case.inputs()
    optimizer = OPTIMIZERS[case.optimizer]([p for p in model.parameters() if p.requires_grad])
    tracker = MemTracker()
    if case.tp > 1 or case.accumulate > 1 or case.frozen:
        tracker._mod_tracker = _NoModules()  # type: ignore[assignment]
    tracker.track_external(model, optimizer, *batch.values())
    with tracker:
        train_two_steps(model, batch, case.accumulate, optimizer, between=tracker.reset_mod_stats)
    peak: int = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    _leave()
    return peak


def train_two_steps(
    model: nn.Module,
    batch: Any,
    accumulate: int,
    optimizer: torch.optim.Optimizer,
    between: Callable[[], Any] = lambda: None,
) -> None:
    """What the engine of target ``"torch"`` does; ``between`` is called after each step."""
    # With the fake group ranks have nothing to compare: the look at a split model's first batch is left out.
    with mock.patch.object(Guards, "_check_ranks", return_value=None):
        for _ in range(2):
            _step(model, micro_batches(batch, accumulate), optimizer)
            between()


def _step(model: nn.Module, pieces: list[Any], optimizer: torch.optim.Optimizer) -> None:
    losses = []
    for number, piece in enumerate(pieces):
        output = model(**piece)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        if number == 0:
            optimizer.zero_grad(set_to_none=True)
        (loss / len(pieces) if len(pieces) > 1 else loss).backward()
        losses.append(loss.detach())
    optimizer.step()


def _apply(sch: slapo.Schedule, case: Case) -> None:
    case.schedule(sch)


def predicted(case: Case) -> Memory:
    """The same peak, estimated in this process."""
    request = Request(
        Functions(case.model, _apply, (case,)),
        case.mesh,
        0,
        (0,),
        case.inputs(),
        OPTIMIZERS[case.optimizer],
        accumulate=case.accumulate,
    )
    found = estimate_rank(request).memory
    _leave()
    return found


def compare(cases: list[Case]) -> list[tuple[Memory, int]]:
    """Of each case the memory that is predicted, and the peak on real tensors."""
    torch.set_num_threads(1)
    return [(predicted(case), judged(case)) for case in cases]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
