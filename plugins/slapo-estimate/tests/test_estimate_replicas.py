"""What replicas exchange: an estimate against two real processes under DistributedDataParallel."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from tests.messages import Messages

MIB = 2**20


class Model(nn.Module):
    """Seven layers of 9 MiB, of which one has parameters of another type, one is used twice, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1536, 1536) for _ in range(7))
        self.layers[2].to(torch.float64)
        self.layers[4].requires_grad_(False)
        self.register_buffer("scale", torch.ones(5))
        self.register_buffer("count", torch.ones(3, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for position in (3, 0, 1, 2, 4, 6, 5, 6):
            layer = self.layers[position]
            x = layer(x.to(layer.weight.dtype)).float()
        return (x * self.scale[0] * self.count[0]).mean()


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            size = sum(leaf.nbytes for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor))
            self.collectives.append((func._schema.name, size))
        return func(*args, **(kwargs or {}))


def schedule() -> slapo.Schedule:
    torch.manual_seed(0)
    return slapo.create_schedule(Model(), mesh={"dp": 2}, example_inputs=torch.ones(2, 1536))


class Allocated(TorchDispatchMode):
    """Count bytes of storages that operators return, until nothing holds them: of every thread, buckets included."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf)
        self.peak = max(self.peak, sum(self.storages.values()))
        return result

    def count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) not in self.storages:
            self.storages[id(storage)] = storage.nbytes()
            weakref.finalize(storage, self.storages.pop, id(storage))


def peaks() -> dict[int, int]:
    """By micro-batches: the most bytes of tensors at one time in three steps."""
    found = {}
    for accumulate in (1, 2):
        with Allocated() as allocated:
            engine = slapo.build(schedule(), target="torch", optimizer=sgd, loss=loss, accumulate=accumulate)
            allocated.peak = 0
            for _ in range(3):
                engine.train_step(torch.ones(2, 1536))
        engine.close()
        found[accumulate] = allocated.peak
    return found


def trained() -> dict[int, tuple[list[tuple[str, int]], list[list[int]]]]:
    """By micro-batches: collectives of the third step, and the bytes of storages of gradients after each step."""
    found = {}
    for accumulate in (1, 2):
        engine = slapo.build(schedule(), target="torch", optimizer=sgd, loss=loss, accumulate=accumulate)
        held = []
        for _ in range(3):  # in the second one torch also sends the order of its new buckets
            with Seen() as seen:
                engine.train_step(torch.ones(2, 1536))
            gradients = [p.grad.untyped_storage() for p in engine.module.parameters() if p.grad is not None]
            held.append(sorted({storage.data_ptr(): storage.nbytes() for storage in gradients}.values()))
        found[accumulate] = (seen.collectives, held)
        engine.close()
    return found


def trained_and_measured() -> tuple[Any, dict[int, int]]:
    return trained(), peaks()


KINDS = {"all_reduce": "c10d::allreduce_", "broadcast": "c10d::broadcast_"}
LAYER = (1536 * 1536 + 1536) * 4


@pytest.mark.ranks
def test_buckets_equal_ddp_on_two_ranks() -> None:
    real, measured_peaks = run_ranks(trained_and_measured, world_size=2)[0]
    for accumulate in (1, 2):
        estimate = slapo.estimate(schedule(), torch.ones(2, 1536), optimizer=sgd, loss=loss, accumulate=accumulate)
        found = estimate.kinds[0].collectives
        collectives, held = real[accumulate]
        assert [(KINDS[each.kind], each.bytes) for each in found] == collectives
        assert [(each.kind, each.bytes, each.phase) for each in found] == [
            ("broadcast", 20, "forward"),
            ("broadcast", 24, "forward"),
            ("all_reduce", 3 * LAYER, "backward"),
            ("all_reduce", 2 * LAYER, "backward"),
            ("all_reduce", 2 * LAYER, "backward"),  # one layer of twice the bytes an element
        ]
        assert {(each.mesh_dim, each.ranks, each.record) for each in found} == {("dp", 2, "")}
        # One bucket for each type in the first step, those of 25 MiB afterwards; gradients are views of them.
        assert held == [[2 * LAYER, 5 * LAYER], *2 * [[2 * LAYER, 2 * LAYER, 3 * LAYER]]]
        # Buckets are there all the time; before the second forward gradients are moved to new ones, and those of
        # micro-batches before the last one lie beside them.
        assert abs(estimate.memory.total - measured_peaks[accumulate]) < 0.02 * measured_peaks[accumulate]


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).sum()


@pytest.mark.ranks
def test_parameters_without_gradient_are_reported_as_ddp_refuses_them(message: Messages) -> None:
    sch = slapo.create_schedule(HalfUsed(), mesh={"dp": 2})
    found = slapo.estimate(sch, torch.ones(2, 4), optimizer=sgd, loss=loss)
    [told] = [each for each in found.assumptions if "'unused.weight'" in each]
    message(told, "1 more", "find_unused_parameters=True")


@pytest.mark.ranks
def test_options_of_buckets_are_followed_and_others_refused(message: Messages) -> None:
    found = slapo.estimate(schedule(), torch.ones(2, 1536), optimizer=sgd, loss=loss, bucket_cap_mb=1)
    sizes = [each.bytes for each in found.kinds[0].collectives if each.kind == "all_reduce"]
    assert sorted(sizes) == [*5 * [LAYER], 2 * LAYER]
    with pytest.raises(slapo.EstimateError) as caught:
        slapo.estimate(schedule(), torch.ones(2, 1536), optimizer=sgd, loss=loss, static_graph=True)
    message(caught, "static_graph=True is not known")
