"""Tensors that consist of others: nested ones in batches and outputs, quantized ones among parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import slapo_core as slapo
from slapo_runtime.ranks.checksums import checksum
from slapo_runtime.ranks.facts import describe_tensor


class Quantized(torch.Tensor):
    """Integers and a scale; as those of quantization libraries, for few operators only."""

    @staticmethod
    def __new__(cls, whole: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=dtype, requires_grad=False)  # type: ignore[attr-defined]

    def __init__(self, whole: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["whole", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, dtype: Any, size: Any, stride: Any) -> Any:
        return cls(inner["whole"], inner["scale"], dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return "Quantized()"

    def dequantize(self) -> torch.Tensor:
        return self.whole.to(self.dtype) * self.scale.to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            dtype = (kwargs or {}).get("dtype") or args[0].dtype
            return cls(args[0].whole.clone(), args[0].scale.clone(), dtype)
        if func in (aten.t.default, aten.mm.default, aten.addmm.default):
            return func(*tree_map(lambda each: each.dequantize() if isinstance(each, cls) else each, args))
        raise NotImplementedError(f"Quantized has no {func}")


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        whole = torch.randint(-9, 9, (4, 4), dtype=torch.int8)
        self.weight = nn.Parameter(Quantized(whole, torch.tensor([0.125]), torch.float32), requires_grad=False)


class Quarter(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_a_model_with_quantized_weights_is_verified() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Frozen(), Quarter(0.25)), torch.randn(2, 4)
    sch = slapo.create_schedule(model, example_inputs=x)
    sch["1"].checkpoint()
    report = slapo.verify(sch, optimizer_steps=1)
    assert next(each.compared for each in report.largest if each.kind == "parameter") == 4
    sch["2"].replace(lambda old: Quarter(0.375))
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(sch, optimizer_steps=1)
    assert "'2'" in caught.value.steps[0]


def test_checksums_are_of_the_parts() -> None:
    first: Any = Frozen().weight
    other = copy.deepcopy(first)
    assert checksum(first) == checksum(other)
    other.whole[0, 0] += 1
    assert checksum(first) != checksum(other)
    rows = torch.randn(3, 2)
    jagged = torch.nested.nested_tensor([rows[:1], rows[1:]], layout=torch.jagged)
    assert describe_tensor(jagged).startswith("[(1, 2), (2, 2)], torch.float32, checksum")
    assert describe_tensor(jagged) == describe_tensor(torch.nested.nested_tensor([rows[:1], rows[1:]]))
    assert describe_tensor(jagged) != describe_tensor(torch.nested.nested_tensor([rows[:2], rows[2:]]))


class Rows(nn.Module):
    """Samples of different lengths: nested, or padded."""

    def __init__(self, gives_nested: bool) -> None:
        super().__init__()
        self.gives_nested, self.up, self.last = gives_nested, nn.Linear(4, 4), Quarter(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.last(torch.relu(self.up(x)))
        return made if self.gives_nested else torch.stack([each.sum(0) for each in made.unbind()])


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("gives_nested", [True, False])
def test_nested_tensors_are_compared_sample_by_sample(layout: torch.layout, gives_nested: bool) -> None:
    torch.manual_seed(0)
    batch = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=layout)
    sch = slapo.create_schedule(Rows(gives_nested), example_inputs=batch)
    sch["last"].replace(lambda old: Quarter(0.5))
    report = slapo.verify(sch, optimizer_steps=1)
    compared = {each.kind: each.compared for each in report.largest}
    assert compared["output"] == (2 if gives_nested else 1)
    assert compared["input gradient"] == 1
    assert "nested" in report.notes[0]
    sch.undo()
    sch["last"].replace(lambda old: Quarter(0.75))
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(sch, optimizer_steps=1)
    assert caught.value.tensor == ("output[0]" if gives_nested else "output")
