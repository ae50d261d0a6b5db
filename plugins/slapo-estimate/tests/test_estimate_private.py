"""The private names of torch exist, and behave as slapo_estimate expects."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._decomp import decomposition_table
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from slapo_core.layout import is_simulated, kernel_device
from slapo_core.observers import ONE_KERNEL, attributed
from slapo_estimate import private
from slapo_estimate.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeStore,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    bucket_assignment,
    flop_formulas,
    kernels_of_cuda,
    unset_fake_temporarily,
)
from slapo_estimate.roofline import _UNPACKED
from slapo_runtime.launcher import run_process
from tests.support.private_names import private_names


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    assert private_names(Path(private.__file__).parent) == []


def test_fake_tensors_raise_when_values_are_read() -> None:
    with FakeTensorMode() as mode:
        x = torch.ones(4)
        assert type(x) is FakeTensor
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
        with pytest.raises(DynamicOutputShapeException):
            x.nonzero()
        with unset_fake_temporarily():
            assert type(torch.ones(1)) is torch.Tensor
        assert mode.from_tensor(torch.ones(3)).untyped_storage().nbytes() == 12

        @torch.library.custom_op("slapo_tests::without_shape", mutates_args=())
        def without_shape(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        with pytest.raises((UnsupportedOperatorException, RuntimeError), match="without_shape"):
            without_shape(x)


@pytest.mark.parametrize("mask", ["none", "bool", "bias"])
def test_cuda_attention_keeps_no_scores_and_has_a_gradient_of_its_bias(mask: str) -> None:
    """Each head of two samples: 64 queries, 64 keys, of size 8."""
    with FakeTensorMode():
        query, key, value = (torch.randn(2, 4, 64, 8, requires_grad=True) for _ in range(3))
        bias = torch.randn(1, 4, 64, 64, requires_grad=True)
        masks = {"none": None, "bool": torch.ones(2, 1, 1, 64, dtype=torch.bool), "bias": bias}
        kept: list[tuple[int, ...]] = []
        with kernels_of_cuda(), saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
            output = F.scaled_dot_product_attention(query, key, value, masks[mask], dropout_p=0.1)
        output.sum().backward()
    assert output.shape == query.shape == query.grad.shape  # type: ignore[union-attr]
    assert (bias.grad is None) == (mask != "bias")
    assert bias.grad is None or bias.grad.shape == bias.shape
    matrices = [shape for shape in kept if shape[-2:] == (64, 64)]
    assert len(matrices) == (mask != "none")  # what is added, and nothing per score


def test_attention_of_the_cpu_is_restored_and_used_where_cudas_does_not_fit() -> None:
    query = torch.randn(2, 4, 6, 8, dtype=torch.float64, requires_grad=True)
    expected = F.scaled_dot_product_attention(query, query, query)
    with kernels_of_cuda():
        assert torch.equal(F.scaled_dot_product_attention(query, query, query), expected)
    query = query.detach().float().requires_grad_()
    assert "ForCpu" in type(F.scaled_dot_product_attention(query, query, query).grad_fn).__name__


@pytest.mark.parametrize("torch_2_11", [False, True])
def test_products_of_cuda_have_shapes_and_sum_in_a_larger_type(torch_2_11: bool) -> None:
    aten = torch.ops.aten
    wrong = {aten.addmm.dtype_out: decomposition_table[aten.addmm.default]} if torch_2_11 else {}
    with mock.patch.dict(decomposition_table, wrong), FakeTensorMode(), kernels_of_cuda():
        left, right, sums = torch.ones(3, 4).bfloat16(), torch.ones(4, 5).bfloat16(), torch.ones(3, 5)
        found = aten.mm.dtype(left, right, torch.float32)
        assert (found.shape, found.dtype) == ((3, 5), torch.float32)
        assert aten.addmm.dtype_out(sums, left, right, torch.float32, out=sums) is sums
        assert kernel_device(sums).type == "cuda"
        assert is_simulated()
    assert kernel_device(torch.ones(1)).type == "cpu"
    assert not is_simulated()


def test_a_root_mean_square_norm_of_cuda_is_one_kernel() -> None:
    kernels = []

    def note(origin: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        kernels.append(origin)
        return function(*args, **kwargs)

    x, norm = torch.randn(3, 8, requires_grad=True), nn.RMSNorm(8, eps=1e-6)
    expected = torch.autograd.grad(norm(x).sum(), [x, norm.weight])
    with attributed(note):
        with kernels_of_cuda():
            found = torch.autograd.grad(norm(x).sum(), [x, norm.weight])
        norm(x)
    assert kernels == [ONE_KERNEL]
    torch.testing.assert_close(found, expected)


@pytest.mark.ranks
def test_fake_group_has_silent_ranks() -> None:
    assert run_process(_sum_of_nobody, timeout=60.0) == (3, 8, [1.0, 1.0])


def _sum_of_nobody() -> tuple[int, int, list[float]]:
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    x = torch.ones(2)
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.tolist()


def test_flop_formulas_of_operators() -> None:
    a, b = torch.empty(3, 4, device="meta"), torch.empty(4, 5, device="meta")
    assert flop_formulas()[torch.ops.aten.mm](a, b, out_val=a @ b) == 2 * 3 * 4 * 5


def test_gradient_buckets_are_full_at_the_limit() -> None:
    tensors = [torch.empty(4) for _ in range(3)]
    assert bucket_assignment(tensors, 32) == [[0, 1], [2]]


def test_operators_without_a_formula_exist_and_have_schemas() -> None:
    operators = (*private.ATTENTION, *private.ATTENTION_BACKWARD, *private.MATRIX_PRODUCTS)
    assert not {*operators} & {*flop_formulas()}
    operators = (*operators, *private.ADDED_PRODUCTS)
    for operator in operators:
        assert private.schema_of(operator.default).arguments
        assert operator.default.overloadpacket is operator
    assert private.schema_of(len) is None


def test_storage_identity_and_sparse_tensors() -> None:
    x = torch.ones(4)
    assert private.storage_id(x[1:]) == private.storage_id(x.untyped_storage()) != private.storage_id(torch.zeros(4))
    sparse = x.to_sparse()
    assert private.storage_id(sparse) == id(sparse)
    assert [part.tolist() for part in private.sparse_parts(sparse)] == [[[0, 1, 2, 3]], [1.0] * 4]


def test_trees_are_flattened_and_mapped() -> None:
    leaves, spec = private.tree_flatten({"a": [1, (2,)]})
    assert leaves == private.tree_leaves({"a": [1, (2,)]}) == [1, 2]
    assert private.tree_unflatten([3, 4], spec) == {"a": [3, (4,)]}
    assert private.tree_map_only(int, lambda value: -value, ["x", 1]) == ["x", -1]


def test_a_replica_without_a_reducer_calls_its_module() -> None:
    group, model, calls = object(), nn.Linear(2, 2), []

    def make(module: nn.Module, of: Any, options: Any) -> Any:
        calls.append((module, of, options))
        return calls.append

    own = nn.parallel.DistributedDataParallel.__init__
    with private.replicated_through(make):
        replica = nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
        assert "find_unused_parameters" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
        x = torch.ones(1, 2)
        assert torch.equal(replica(x), model(x))
        with replica.no_sync():
            replica(x)
    assert calls == [(model, group, {"bucket_cap_mb": 1}), True, False]
    assert nn.parallel.DistributedDataParallel.__init__ is own


def test_operators_of_fully_shard_are_named() -> None:
    pack, unpack = torch.ops.fsdp.all_gather_copy_in, torch.ops.fsdp.split_with_sizes_copy
    assert (pack.default.namespace, private.schema_of(unpack.default).name) == ("fsdp", _UNPACKED)
    assert torch.ops.fsdp.chunk_cat.default.namespace == "fsdp"
