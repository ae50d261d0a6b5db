"""In-place writes and shared memory across a cut: as in the reference model, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slapo_core import TraceError
from tests.messages import Messages

from .staging import compare, cut


class Model(nn.Module):
    """Cut after ``a`` (and ``b``); what happens between is each test's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)


class WithBuffer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))


class WritesReceived(Model):
    def forward(self, x: Any) -> Any:
        h = self.a(x)
        h += 1  # a leaf of the second stage
        return self.b(h)


class WritesThroughAView(Model):
    def forward(self, x: Any) -> Any:
        h = self.a(x)
        h[:, 0] = 2.0
        h.view(-1)[::2].mul_(3)
        return self.b(h)


class WritesBeforeTheCut(Model):
    def forward(self, x: Any) -> Any:
        h = self.a(x)
        view = h[:, :2]
        h.mul_(2)
        h[:, 3] = 0
        g = self.b(h)
        return self.c(h) + g + view.sum()


class WritesInAModule(Model):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        return self.b(self.act(self.a(x)))


class WritesAFreshTensor(Model):
    def forward(self, x: Any) -> Any:
        filled = torch.zeros(x.shape[0], 4, dtype=x.dtype)
        filled[:, 1] = 5
        h = self.a(x)
        return self.b(h + filled)


class WritesReceivedIntegers(Model):
    def forward(self, x: Any) -> Any:
        mask = (x > 0).long().cumsum(-1)
        h = self.a(x)
        mask[:, 0] = 7
        return self.b(h) * mask


class ViewAndBase(Model):
    def forward(self, x: Any) -> Any:
        h = self.a(x)
        view = h[:, :2]
        h = h.view(-1, 4)
        g = self.b(h)
        return g.sum() + (view * h[:, :2]).sum()


class WrittenAndReadLater(Model):
    def forward(self, x: Any) -> Any:
        h = self.a(x)
        g = self.b(h.detach() * 1)
        h += 1
        g = self.c(g)
        return h * g, h


class WritesTheBatch(Model):
    def forward(self, x: Any) -> Any:
        x.mul_(2)
        return self.b(self.a(x)) * x


class WritesABuffer(WithBuffer):
    def forward(self, x: Any) -> Any:
        self.table.add_(1)
        return self.b(self.a(x)) * self.table


RIGHT = [
    (WritesReceived, ["a"]), (WritesThroughAView, ["a"]), (WritesBeforeTheCut, ["b"]), (WritesInAModule, ["a"]),
    (WritesAFreshTensor, ["a"]), (WritesReceivedIntegers, ["a"]), (ViewAndBase, ["a", "b"]),
    (WrittenAndReadLater, ["b", "c"]), (WritesTheBatch, ["a"]), (WritesABuffer, ["a"]),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "cuts"), RIGHT)
def test_writes_inside_one_stage_are_right(cls: Any, cuts: list[str]) -> None:
    torch.manual_seed(0)
    compare(cls().double(), cuts, torch.randn(3, 4, dtype=torch.float64))


class PartsWrittenAndReadLater(Model):
    def forward(self, x: Any) -> Any:
        h = self.a(x)
        g = self.b(h.detach())
        h[:, 0] = 1
        g = self.c(g)
        return h * g


class ViewIsSentBesideItsBase(Model):
    def forward(self, x: Any) -> Any:
        h = self.a(x)
        view = h[:, :2]
        g = self.b(h)
        h.mul_(2)
        return g.sum() + view.sum() + h.sum()


class ViewOfTheBatch(Model):
    def forward(self, x: Any) -> Any:
        h = self.a(x)
        x[:, 0] = 0
        g = self.b(h)
        return g * x


class WritesPartsOfABuffer(WithBuffer):
    def forward(self, x: Any) -> Any:
        self.table[0] = 4
        return self.b(self.a(x)) * self.table


class WritesABufferReadBefore(WithBuffer):
    def forward(self, x: Any) -> Any:
        h = self.a(x + self.table)
        self.table.add_(1)
        return self.b(h)


class ReturnsWhatIsWrittenLater(Model):
    def forward(self, x: Any) -> Any:
        h = self.a(x)
        g = self.b(h.detach())
        h[:, 0] = 1
        return g, h


class WritesWhatMayBeEither(Model):
    """The written value lies in memory of two that are received: the first stage's own is one of them."""

    def forward(self, x: Any) -> Any:
        h = self.a(x)
        view = h.view(-1, 2, 2)
        g = self.b(h)
        view[:, 0].mul_(2)
        return g.sum() + h.sum()


REFUSED = [
    (PartsWrittenAndReadLater, ["b", "c"], ("stage 1 writes to 'a'", "'a' is read in stage 2")),
    (ViewIsSentBesideItsBase, ["b"], ("stage 1 writes to 'a'", "'getitem' shares its memory")),
    (ViewOfTheBatch, ["a", "b"], ("stage 1 writes to 'x'", "'x' is read in stage 2")),
    (WritesPartsOfABuffer, ["a"], ("stage 0 writes to 'table'", "'table' is read in stage 1")),
    (WritesABufferReadBefore, ["a"], ("stage 1 writes to 'table'", "'table' is read in stage 0")),
    (ReturnsWhatIsWrittenLater, ["b"], ("stage 1 writes to 'a'", "'a' is returned")),
    (WritesWhatMayBeEither, ["b"], ("in place", "'a' shares its memory")),
]


@pytest.mark.parametrize(("cls", "cuts", "words"), REFUSED)
def test_writes_visible_to_another_stage_are_refused(
    cls: Any, cuts: list[str], words: tuple[str, ...], message: Messages
) -> None:
    with pytest.raises(TraceError) as caught:
        cut(cls().double(), cuts, torch.randn(3, 4, dtype=torch.float64))
    message(caught, "cannot cut after", *words, "test_pipeline_writes.py:")


class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.norm(self.b(self.norm(self.a(x))))


def test_a_module_called_on_both_sides_may_not_write_its_buffers(message: Messages) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    with pytest.raises(TraceError) as caught:
        cut(SharedNorm().double(), ["b"], x)
    message(caught, "'norm.running_mean'", "called on")
    compare(SharedNorm().double().eval(), ["b"], x)  # nothing is written there
    compare(SharedNorm().double(), ["a"], x)  # both calls are in one stage


class ReadsStatistics(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm, self.a, self.name = nn.BatchNorm1d(4), nn.Linear(4, 4), name

    def forward(self, x: Any) -> Any:
        h = self.a(self.norm(x))
        return h - (self.norm.running_mean if self.name == "running_mean" else self.norm.num_batches_tracked)


@pytest.mark.parametrize("name", ["running_mean", "num_batches_tracked"])
def test_a_buffer_written_in_one_stage_and_read_in_another_is_refused(name: str, message: Messages) -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    with pytest.raises(TraceError) as caught:
        cut(ReadsStatistics(name).double(), ["norm"], x)
    message(caught, f"'norm.{name}'", "one side", "read")
    compare(ReadsStatistics(name).double().eval(), ["norm"], x)
