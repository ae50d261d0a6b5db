"""The tracker of storages: what is counted, as what, when it goes, and where the step is at the peak."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import slapo_core as slapo
from slapo_estimate.private import FakeTensorMode
from slapo_estimate.simulation import kinds_of_ranks
from slapo_estimate.trackers import ObserverMode, refuse_layout
from slapo_estimate.values import KnownValues
from slapo_runtime.receipts.attribution import PositionTracker
from slapo_runtime.receipts.collectives import wait_operations
from slapo_runtime.receipts.memory import MemoryTracker

KIB = 1024


@contextmanager
def tracked(model: nn.Module | None = None) -> Iterator[MemoryTracker]:
    """A tracker, under a mode without memory."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    position = PositionTracker.of(model or nn.Module())
    tracker = MemoryTracker(position, refuse_layout)
    tracker.position = position  # type: ignore[attr-defined]
    with mode, position.watching(), tracker.watching(), ObserverMode([tracker], KnownValues(mode)):
        yield tracker


def test_views_count_once_until_the_storage_is_freed() -> None:
    with tracked() as tracker:
        x = torch.empty(256)
        y = x.view(16, 16).t()[2:]
        assert tracker.total == KIB
        del x
        assert tracker.total == KIB
        del y
        assert tracker.total == 0
        for _ in range(50):  # addresses come again
            made = torch.empty(256)
            assert tracker.total == KIB
            del made
        assert tracker.total == 0
        assert tracker.peak.total == KIB


def test_resized_storages_count_by_their_size() -> None:
    with tracked() as tracker:
        x = torch.empty(0)
        x.resize_(512)
        assert tracker.total == 2 * KIB
        x.untyped_storage().resize_(0)  # no operation tells
        assert tracker.total == 0
        x.untyped_storage().resize_(1024)
        assert tracker.total == KIB
        del x
        assert tracker.total == 0


def test_inner_tensors_of_subclasses_count_and_sparse_ones_are_refused() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    with tracked() as tracker:
        pair = TwoTensor(torch.empty(256), torch.empty(256))
        tracker.hold([pair], "parameters")
        assert tracker.total == 2 * KIB
        del pair
        gc.collect()
        assert tracker.total == 0
        with pytest.raises(slapo.EstimateError, match="sparse_coo is unknown without its values"):
            torch.sparse_coo_tensor(torch.zeros(1, 8, dtype=torch.long), torch.empty(8, 32), (100, 32))


class Two(nn.Module):
    """A layer that is computed again, with one inside, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.once = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: Any = checkpoint(self.again, x, use_reentrant=False)
        return self.once(y).sum()


def test_each_operation_has_phase_and_module() -> None:
    model = Two()
    seen: list[tuple[str, str, str]] = []

    class See:
        def begin(self) -> None: ...

        def on_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
            if func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.tanh):
                seen.append((str(func.overloadpacket).removeprefix("aten."), position.phase, position.module))

    position = PositionTracker.of(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with position.watching(), ObserverMode([See()], KnownValues(mode)):
        position.begin("forward")
        loss = model(torch.ones(2, 8))
        position.begin("backward")
        loss.backward()
    assert seen == [
        ("addmm", "forward", "again.0"),
        ("tanh", "forward", "again.1"),
        ("addmm", "forward", "again.2"),
        ("addmm", "forward", "once"),
        ("mm", "backward", "once"),
        ("mm", "backward", "once"),
        ("addmm", "recomputation", "again.0"),
        ("tanh", "recomputation", "again.1"),
        ("mm", "backward", "again.2"),
        ("mm", "backward", "again.2"),
        ("mm", "backward", "again.0"),
    ]


def test_recomputed_tensors_of_a_checkpointed_layer_are_activations() -> None:
    model = Two()
    with tracked(model) as tracker:
        position: PositionTracker = tracker.position  # type: ignore[attr-defined]
        tracker.hold(model.parameters(), "parameters")
        x = torch.ones(1024, 8)
        tracker.hold([x], "inputs")
        tracker.begin()
        loss = model(x)
        position.begin("backward")
        loss.backward()
    peak = tracker.peak
    assert peak.phase in ("recomputation", "backward")
    assert peak.module.startswith("again")
    assert peak.activations >= 1024 * 8 * 4  # what tanh gave when it ran again
    assert (peak.parameters, peak.inputs) == (3 * (8 * 8 + 8) * 4, 1024 * 8 * 4)


def test_wait_for_a_collective_allocates_nothing() -> None:
    wait = torch.ops._c10d_functional.wait_tensor.default
    waits = wait_operations()
    assert wait in waits
    with tracked() as tracker:
        x = torch.empty(256)
        for operation in waits:
            many = isinstance(operation._schema.arguments[0].type, torch.ListType)
            waited = operation([x])[0] if many else operation(x)
            assert waited is x
        assert tracker.total == KIB
    with FakeTensorMode() as mode:  # what torch does by itself, and why the watch answers
        x = torch.empty(256)
        assert isinstance(mode, FakeTensorMode)
        assert wait(x).untyped_storage()._cdata != x.untyped_storage()._cdata


def test_ranks_differ_by_stages_only() -> None:
    assert kinds_of_ranks(None) == ((0,),)
    assert kinds_of_ranks({"dp": 2, "tp": 4}) == (tuple(range(8)),)
    assert kinds_of_ranks({"pp": 2, "dp": 2, "tp": 2}) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert kinds_of_ranks({"dp": 2, "pp": 2}) == ((0, 2), (1, 3))
