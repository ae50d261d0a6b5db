"""Private names of torch that this plugin uses do what it takes them for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from slapo_core.layout import simulated_device
from slapo_loss.private import add_product, assert_on_device, is_cast, product


def test_a_cast_is_told_from_other_operations() -> None:
    half, single = torch.empty(1, 1).bfloat16(), torch.empty(1, 1)
    assert is_cast(Tensor.float, half) == (torch.float32, True)
    assert is_cast(Tensor.float, single) == (torch.float32, True)
    assert is_cast(Tensor.double, single) == (torch.float64, True)
    assert is_cast(Tensor.float, single.double()) == (torch.float32, False)  # to a smaller one
    assert is_cast(lambda z: z.float() / 2, half) == (torch.float32, False)
    assert is_cast(lambda z: (z / 2).float(), half) == (torch.float32, False)
    assert is_cast(lambda z: z.half().float(), half) == (torch.float32, False)


def test_an_assertion_raises_at_once_on_a_cpu() -> None:
    assert_on_device(torch.tensor(True), "all is well")
    with pytest.raises(RuntimeError, match="what is wrong"):
        assert_on_device(torch.tensor(False), "what is wrong")


def test_products_are_summed_in_the_type_of_the_sums() -> None:
    torch.manual_seed(0)
    left, right, sums = torch.randn(50, 7).bfloat16(), torch.randn(50, 3).bfloat16(), torch.ones(7, 3)
    expected = 1 + left.double().t() @ right.double()
    add_product(sums, left, right, 400)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.ops.aten.addmm.dtype_out._schema.arguments[3].name == "out_dtype"  # what a GPU is asked for


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
def test_a_gpu_s_products_have_sums_of_any_larger_type(given: torch.dtype, dtype: torch.dtype) -> None:
    """Its own operators sum in float32 only, and a model may cast its logits to float64."""
    with FakeTensorMode(), simulated_device("cuda"):
        left, right = torch.ones(50, 7, dtype=given), torch.ones(50, 3, dtype=given)
        sums, factors = torch.zeros(7, 3, dtype=dtype), torch.ones(50, 1, dtype=dtype)
        add_product(sums, left, right, 400)
        assert product(left, torch.ones(7, 3, dtype=given), factors).shape == (50, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [3, 50, 5000])
def test_a_softmax_may_be_written_over_its_input(dtype: torch.dtype, classes: int) -> None:
    values = torch.randn(9, classes, dtype=dtype) * 5
    expected = values.softmax(1)
    assert torch.equal(torch.softmax(values, 1, out=values), expected)
