"""A recording changes nothing that a later call would see, and takes nothing for granted that may change."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import random
import threading
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_testing.models import Enclosing

X, Y = torch.randn(2, 6, 8), torch.randn(3, 4, 8)


def pair(below: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A reference model, and a copy whose block is traced."""
    plain = Enclosing(below)
    twin = copy.deepcopy(plain)
    slapo.create_schedule(twin)["below"].trace(example_inputs=(X,), **options)
    return plain, twin


# -- what modules below do ---------------------------------------------------------------------------------------


class Remembers(nn.Module):
    """Keeps its table of positions, as rotary embeddings did; and an average, as quantized layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=torch.float32)[:, None]
        self.mean = self.mean * 0.5 + x.mean().detach()
        return self.table[: x.shape[1]] + self.mean


@functools.lru_cache(maxsize=4)
def remembered(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32)[:, None]


class Positions(nn.Module):
    @staticmethod
    @functools.lru_cache(maxsize=4)
    def static(length: int) -> Tensor:
        return torch.arange(length, dtype=torch.float32)[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return remembered(int(x.shape[1])) + self.static(int(x.shape[1]))


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class Adds(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return x + self.child(x)


@pytest.mark.parametrize("child", [Remembers, Positions, Draws])
def test_state_of_called_modules_is_restored_after_recording(child: Callable[[], nn.Module]) -> None:
    remembered.cache_clear(), Positions.static.cache_clear()
    random.seed(3)
    plain, twin = pair(Adds(child()))
    state = random.getstate()
    random.seed(3)
    assert random.getstate() == state
    for x in (Y, X, X[:, :3]):
        random.seed(1)
        expected = plain(x)
        random.seed(1)
        mine = twin(x)
        assert type(mine) is type(expected) is Tensor
        assert torch.equal(mine, expected)
    assert [type(buffer) for buffer in twin.buffers()] == [type(buffer) for buffer in plain.buffers()]


collected: ContextVar[list[Tensor] | None] = ContextVar("collected", default=None)


def test_output_collectors_see_no_recording() -> None:
    plain, twin = pair(Adds(nn.Linear(8, 8)))

    def collect(module: nn.Module, args: Any, out: Tensor) -> None:
        into = collected.get()
        if into is not None:
            into.append(out)

    for model in (plain, twin):
        model.get_submodule("below.child").register_forward_hook(collect)
    token = collected.set([])
    try:
        for mode in (True, False):
            assert torch.equal(twin.train(mode)(X), plain.train(mode)(X))
        kept = collected.get()
    finally:
        collected.reset(token)
    assert kept is not None
    assert [type(tensor) for tensor in kept] == [Tensor] * 4


class Cache:
    """Keys of earlier calls, as transformers hand it down."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def update(self, keys: Tensor) -> Tensor:
        self.keys.append(keys)
        return torch.cat(self.keys, 1)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        keys = self.child(x)
        return x + (keys if cache is None else cache.update(keys)).sum(1, keepdim=True)


class HandsDown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attends()

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        return self.attention(x * 2, cache=cache)


class Generates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HandsDown() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        cache = Cache()
        for part in (x, x[:, :1]):
            for layer in self.layers:
                part = layer(part, cache)
        return part, len(cache.keys)


def test_a_cache_that_is_handed_down_is_filled_by_calls_only() -> None:
    plain = Generates()
    twin = copy.deepcopy(plain)
    sch = slapo.create_schedule(twin, example_inputs=(X,))
    sch["layers.*"].trace()
    for x in (X, Y):
        mine, expected = twin(x), plain(x)
        assert mine[1] == expected[1] == 4
        assert torch.equal(mine[0], expected[0])


# -- what a block reads ------------------------------------------------------------------------------------------


class Mode(enum.Enum):
    DOUBLE = 2.0
    TRIPLE = 3.0


class Pair(collections.namedtuple("Pair", "factor")):
    __slots__ = ()


@dataclasses.dataclass(slots=True)
class Slotted:
    factor: float


class Reads(nn.Module):
    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.read, self.child = read, nn.Dropout(0.5)
        self.mode, self.pair, self.slotted = Mode.DOUBLE, Pair(2.0), Slotted(2.0)
        self.space = types.SimpleNamespace(factor=2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, x)


def reads_member(self: Any, x: Tensor) -> Tensor:
    return x * (2 if self.mode is Mode.DOUBLE else 3)


def reads_pair(self: Any, x: Tensor) -> Tensor:
    return x * self.pair.factor


def reads_slots(self: Any, x: Tensor) -> Tensor:
    return x * self.slotted.factor


def reads_space(self: Any, x: Tensor) -> Tensor:
    return x * self.space.factor


def reads_child(self: Any, x: Tensor) -> Tensor:
    return F.dropout(x, self.child.p, self.training)


def reads_mode_of_child(self: Any, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, self.child.training)


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (reads_member, lambda m: setattr(m, "mode", Mode.TRIPLE)),
        (reads_pair, lambda m: setattr(m, "pair", Pair(3.0))),
        (reads_slots, lambda m: setattr(m.slotted, "factor", 3.0)),
        (reads_space, lambda m: setattr(m.space, "factor", 3.0)),
        (reads_child, lambda m: setattr(m.child, "p", 0.0)),
        (reads_mode_of_child, lambda m: m.child.eval() and None),
    ],
)
def test_a_setting_that_changes_counts(read: Any, change: Callable[[Any], None]) -> None:
    plain, twin = pair(Reads(read))
    torch.manual_seed(0)
    expected = plain(X)
    torch.manual_seed(0)
    assert torch.equal(twin(X), expected)
    change(plain.below), change(twin.below)
    torch.manual_seed(0)
    expected = plain(X)
    torch.manual_seed(0)
    assert torch.equal(twin(X), expected)


# -- what is refused ---------------------------------------------------------------------------------------------


def draws(self: Any, x: Tensor) -> Tensor:
    return x * random.random()


def registers(self: Any, x: Tensor) -> Tensor:
    self.register_buffer("late", torch.arange(x.shape[1], dtype=torch.float32)[:, None], persistent=False)
    return x * self.late


@pytest.mark.parametrize(
    ("read", "problem"),
    [(draws, "uses an RNG other than torch's"), (registers, "changes the .* of self in place")],
)
def test_side_effects_of_recorded_code_are_refused(read: Any, problem: str) -> None:
    below = Reads(read)
    sch = slapo.create_schedule(Enclosing(below), example_inputs=(X,))
    state = random.getstate()
    with pytest.raises(slapo.TraceError, match=problem):
        sch["below"].trace()
    assert random.getstate() == state
    assert not list(below.buffers())


# -- other threads -----------------------------------------------------------------------------------------------

REACHED, DONE = threading.Event(), threading.Event()


class Waits(nn.Module):
    """Runs only once another thread has worked on it."""

    step, scale = 0, 2.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        REACHED.set()
        assert DONE.wait(timeout=60)
        return x


def test_another_thread_sets_attributes_while_a_variant_is_recorded_in_a_step() -> None:
    DONE.set()
    _, model = pair(Waits())
    below = model.below
    assert isinstance(below, Waits)
    REACHED.clear(), DONE.clear()
    table, raised = torch.ones(2), []

    def work() -> None:
        try:
            assert REACHED.wait(timeout=60)
            below.step = below.step + 1
            below.name = "later"  # type: ignore[assignment]
            below.table = table
        except Exception as error:  # noqa: BLE001 - of the thread, told to the test
            raised.append(error)
        finally:
            DONE.set()

    other = threading.Thread(target=work)
    other.start()
    with torch.no_grad():
        model(X)  # without gradients it is another variant
    other.join()
    assert raised == []
    assert (below.step, below.name, below.table is table) == (1, "later", True)
