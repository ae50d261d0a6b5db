"""A schedule that is right for one batch only is found: by one of another size, with fewer arguments, or given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo


class Net(nn.Module):
    """Everything after the first argument can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.GELU()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        y = self.act(self.fc(x)) * scale
        return y if mask is None else y * mask


class OfOneSize(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        known = torch.ones(6, 4, dtype=input.dtype)
        return super().forward(input) + (0.0 if input.shape[0] == 3 else 0.5 * known)


class Clamped(nn.GELU):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).clamp(max=20.0)


def failure(sch: slapo.Schedule, batch: Any, **options: Any) -> slapo.VerifyError:
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(sch, batch, **options)
    return caught.value


def test_a_step_that_is_right_for_one_batch_size_only_is_found_and_blamed() -> None:
    sch = slapo.create_schedule(Net())
    sch["act"].checkpoint()
    sch["fc"].replace(lambda old: OfOneSize(4, 4))
    error = failure(sch, torch.randn(3, 4))
    assert error.tensor == "output for a batch of 6"
    assert ": it differs by up to " in error.message.splitlines()[0]
    assert [step.partition("(")[0] for step in error.steps] == ["#2 replace"]


def test_arguments_that_can_be_left_out_are_left_out_once() -> None:
    seen: list[tuple[int, bool, float]] = []

    class Watch(Net):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
            seen.append((len(x), mask is None, scale))
            return super().forward(x, mask, scale)

    sch = slapo.create_schedule(Watch())
    sch["fc"].checkpoint()
    report = slapo.verify(sch, {"x": torch.randn(3, 4), "mask": torch.ones(3, 4), "scale": 2.0}, optimizer_steps=0)
    assert set(seen) == {(3, False, 2.0), (6, True, 2.0), (1, False, 2.0)}  # a number is no tensor, and stays
    assert {entry.kind: entry.compared for entry in report.largest}["batch gradient"] == 2
    assert report.notes == ()


def test_a_batch_that_the_untouched_model_does_not_take_is_not_compared_and_the_report_says_so() -> None:
    class Strict(Net):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            if mask is None:
                raise ValueError("a mask, please")
            if len(x) != 3:
                raise ValueError("three rows, please")
            return super().forward(x, mask)

    sch = slapo.create_schedule(Strict())
    report = slapo.verify(sch, {"x": torch.randn(3, 4), "mask": torch.ones(3, 4)})
    assert report.notes == (
        "a batch of 6 without mask was not compared, because the reference model raises: ValueError: a mask, please",
        "a batch of 6 was not compared, because the reference model raises: ValueError: three rows, please",
        "a batch of 1 was not compared, because the reference model raises: ValueError: three rows, please",
    )
    assert "batch output" not in {entry.kind for entry in report.largest}


def test_the_batch_axis_is_the_one_along_which_all_inputs_have_one_size() -> None:
    transformer = nn.Transformer(8, 2, 1, 1, 8)  # (tokens, batch, features)
    report = slapo.verify(slapo.create_schedule(transformer), (torch.randn(5, 2, 8), torch.randn(3, 2, 8)))
    names = {entry.kind: entry.name for entry in report.largest}
    assert names["batch output"] == "output for a batch of 4"


def test_further_batches_are_compared_when_they_are_given() -> None:
    sch = slapo.create_schedule(Net())
    sch["fc"].checkpoint()
    sch["act"].replace(Clamped())
    batch = torch.randn(3, 4)
    assert slapo.verify(sch, batch)
    error = failure(sch, batch, more_batches=[torch.randn(2, 4), (1000.0 * torch.ones(2, 4),)])
    assert error.tensor == "output for batch 3"
    assert [step.partition("(")[0] for step in error.steps] == ["#2 replace"]
    with pytest.raises(slapo.ArgumentError, match="reference model itself fails"):
        slapo.verify(sch, batch, more_batches=[torch.randn(2, 5)])


class OfMany(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * (1.01 if input.shape[0] == 1 else 1.0)


class Refuses(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if len(input) == 1:
            raise ValueError("no single row, please")
        return super().forward(input)


def test_a_step_that_is_wrong_for_one_sample_only_is_found_and_blamed() -> None:
    sch = slapo.create_schedule(Net())
    sch["act"].checkpoint()
    sch["fc"].replace(lambda old: OfMany(4, 4))
    error = failure(sch, (torch.randn(3, 4), torch.ones(3, 4)))
    assert error.tensor == "output for a batch of 1"
    assert [step.partition("(")[0] for step in error.steps] == ["#2 replace"]
    right = slapo.create_schedule(Net())
    right["act"].checkpoint()
    assert slapo.verify(right, torch.randn(3, 4)).notes == ()
    assert slapo.verify(right, torch.randn(1, 4)).notes == ()


def test_batch_of_one_that_the_reference_refuses_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    sch = slapo.create_schedule(model)
    sch["0"].checkpoint()
    report = slapo.verify(sch, torch.randn(3, 4))
    (note,) = report.notes
    assert note.startswith("a batch of 1 was not compared, because the reference model raises: ValueError: Expected")
    assert {entry.kind: entry.name for entry in report.largest}["batch output"] == "output for a batch of 6"
    sch["2"].replace(lambda old: OfLarger(4, 2))
    assert failure(sch, torch.randn(3, 4)).tensor == "output for a batch of 6"


class OfLarger(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * (1.01 if input.shape[0] > 3 else 1.0)


def test_a_step_that_raises_for_one_sample_is_not_silent_and_the_report_says_so() -> None:
    sch = slapo.create_schedule(Net())
    sch["fc"].replace(lambda old: Refuses(4, 4))
    report = slapo.verify(sch, torch.randn(3, 4))
    (note,) = report.notes
    assert note.startswith("a batch of 1 was not compared, because the scheduled model raises: ValueError: no single")
    assert {entry.kind: entry.name for entry in report.largest}["batch output"] == "output for a batch of 6"


class NeedsMask(nn.Module):
    """What a schedule may put in the place of a model: it fails, or is wrong, where the mask is left out."""

    def __init__(self, old: nn.Module, *, wrong: bool = False) -> None:
        super().__init__()
        self.fc, self.act, self.wrong = old.fc, old.act, wrong

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        if mask is None and not self.wrong:
            raise ValueError("positions do not fit")
        y = self.act(self.fc(x)) * scale
        return y + 0.1 * (y - y.detach()) if mask is None else y * mask


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.net(x, mask)


def test_a_step_that_raises_where_an_optional_argument_is_left_out_is_a_note_and_a_wrong_value_is_not() -> None:
    batch = {"x": torch.randn(3, 4), "mask": torch.ones(3, 4)}
    sch = slapo.create_schedule(Around())
    sch["net"].replace(lambda old: NeedsMask(old))
    report = slapo.verify(sch, batch, optimizer_steps=1)
    (note,) = report.notes
    assert note.startswith(
        "a batch of 6 without mask was not compared, because the scheduled model raises: ValueError: positions do not"
    )
    assert {entry.kind: entry.compared for entry in report.largest}["batch output"] == 2  # of 6 with mask, and of 1
    with pytest.raises(slapo.VerifyError, match="raises for batch 2 where") as caught:
        slapo.verify(sch, batch, more_batches=[{"x": torch.randn(2, 4)}], optimizer_steps=1)
    assert "ValueError: positions do not fit" in caught.value.message
    wrong = slapo.create_schedule(Around())
    wrong["net"].replace(lambda old: NeedsMask(old, wrong=True))
    error = failure(wrong, batch, optimizer_steps=1)
    assert error.tensor == "gradient of net.fc.bias for further batches"
    assert "\n  note: further batches: a batch of 6 without mask, a batch of 1" in error.message


class KeepsTheFirst(nn.GELU):
    """Keeps what it was first called with, as a cached mask would be: wrong for every batch but the first."""

    kept: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        mean = input.detach().mean()
        self.kept = mean if self.kept is None else self.kept
        return super().forward(input) + (self.kept - mean)


def test_state_kept_across_batches_is_found() -> None:
    sch = slapo.create_schedule(Net())
    sch["act"].replace(lambda old: KeepsTheFirst())
    error = failure(sch, torch.randn(3, 4), optimizer_steps=0)
    assert error.tensor == "output for a batch of 1"
    assert [step.partition("(")[0] for step in error.steps] == ["#1 replace"]
