"""Signatures of forwards and of batches: read once, and other ones where something changed."""

from __future__ import annotations

import enum
import inspect
import types
import warnings
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_runtime.batches import bound_batch
from slapo_runtime.stages import signatures
from slapo_runtime.stages.signatures import InputSignature, StagedModels


class Kind(enum.Enum):
    SUM = 1
    MEAN = 2


class Reads(nn.Module):
    def forward(self, x: torch.Tensor, kind: Any = None) -> torch.Tensor:
        return x


def test_the_signature_of_a_forward_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor, y: int = 1) -> torch.Tensor:
            return x * y

    read: list[Any] = []
    original = inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda function: (read.append(function), original(function))[1])
    x = torch.ones(1)
    for model in (Own(), Own()):
        for _ in range(2):
            assert bound_batch(model, {"x": x, "other": 2}, for_loss=True) == {"x": x}
            assert bound_batch(model, (x, 3)) == {"x": x, "y": 3}
    assert len(read) == 1


def test_a_forward_that_was_exchanged_has_its_own_signature() -> None:
    def plain(x: torch.Tensor, z: int) -> torch.Tensor:
        return x * z

    model, x = Reads(), torch.ones(1)
    assert bound_batch(model, (x,)) == {"x": x}
    model.forward = plain  # type: ignore[assignment, method-assign]
    assert bound_batch(model, (x, 2)) == {"x": x, "z": 2}
    model.forward = types.MethodType(plain, x)  # type: ignore[method-assign]
    assert bound_batch(model, (2,)) == {"z": 2}

    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, w: int) -> int:
            return w

    model.forward = Unhashable()  # type: ignore[assignment, method-assign]
    assert bound_batch(model, (2,)) == {"w": 2}
    del model.forward
    assert bound_batch(model, (x,)) == {"x": x}
    with pytest.raises(slapo.ArgumentError, match="forward of Reads"):
        bound_batch(model, {"z": 2})


def asked(monkeypatch: pytest.MonkeyPatch, arguments: list[Any]) -> int:
    """How often the model is cut for these arguments, one after the other."""
    count: list[Any] = []
    monkeypatch.setattr(signatures, "ask", lambda *_: count.append(1))
    stages = StagedModels(slapo.create_schedule(Reads()))
    for one in arguments:
        stages.of({"x": torch.ones(1), "kind": one}, training=True, outputs=None, batch_axes=None)
    return len(count)


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (Kind.SUM, Kind.SUM, Kind.MEAN),
        (numpy.float32(2), numpy.float32(2), numpy.float32(3)),
        (slice(1, 2), slice(1, 2), slice(1, 3)),
        ("sum", "sum", 1),
    ],
    ids=str,
)
def test_equal_values_have_the_same_stages(monkeypatch: pytest.MonkeyPatch, one: Any, same: Any, other: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asked(monkeypatch, [one, same, same]) == 1
        assert asked(monkeypatch, [one, other, same, other]) == 2
    assert InputSignature({"x": one}, []) == InputSignature({"x": same}, []) != InputSignature({"x": other}, [])


@pytest.mark.parametrize("value", [numpy.ones(2), object()], ids=["array", "object"])
def test_mutable_arguments_recut_the_model_with_a_warning(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    with pytest.warns(UserWarning, match="again in every step") as told:
        assert asked(monkeypatch, [value] * 3) == 3
    assert len(told) == 1
    assert type(value).__name__ in str(told[0].message)


def test_signature_includes_trained_parameters_and_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    count: list[Any] = []
    monkeypatch.setattr(signatures, "ask", lambda *_: count.append(1))
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    stages = StagedModels(slapo.create_schedule(model))
    for change in (
        lambda: None,
        lambda: model[0].bias.requires_grad_(False),
        lambda: model[1].eval(),
        lambda: model.double(),
        lambda: None,
    ):
        change()
        stages.of({"input": torch.ones(1)}, training=True, outputs=None, batch_axes=None)
    assert len(count) == 4
