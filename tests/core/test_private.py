"""The private names of torch exist, and behave as slapo_core expects."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from slapo_core.estimation.rank_process import Request, estimate_rank
from slapo_core.estimation.source import Functions
from slapo_core.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeStore,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    active_function_modes,
    attention_of_cuda,
    bucket_assignment,
    buffers_of,
    children_of,
    current_autograd_node,
    default_store,
    flop_formulas,
    is_functorch_wrapped,
    is_traceable_wrapper_subclass,
    new_group_among,
    next_sequence_number,
    non_persistent_buffers_of,
    parameters_of,
    ranks_of_group,
    set_timeout,
    unset_fake_temporarily,
)
from slapo_core.ranks.launcher import run_process, run_ranks
from tests.estimation.models import adam, make_net, split


def test_autograd_nodes_are_numbered_in_the_order_in_which_they_are_made() -> None:
    weight = nn.Parameter(torch.ones(2))
    number = next_sequence_number()
    y = weight * 2
    assert y.grad_fn is not None
    assert (y.grad_fn._sequence_nr(), next_sequence_number()) == (number, number + 1)
    leaf = y.grad_fn.next_functions[0][0]
    assert leaf._sequence_nr() == 2**64 - 1
    assert leaf.variable is weight
    seen = []
    y.register_hook(lambda grad: seen.append(current_autograd_node()))
    y.sum().backward()
    assert current_autograd_node() is None
    assert seen[0] is not None


def test_tensors_without_memory_raise_where_values_are_asked_for() -> None:
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
def test_attention_of_cuda_keeps_no_matrix_and_gives_a_bias_its_gradient(mask: str) -> None:
    """Each head of two samples: 64 queries, 64 keys, of size 8."""
    with FakeTensorMode():
        query, key, value = (torch.randn(2, 4, 64, 8, requires_grad=True) for _ in range(3))
        bias = torch.randn(1, 4, 64, 64, requires_grad=True)
        masks = {"none": None, "bool": torch.ones(2, 1, 1, 64, dtype=torch.bool), "bias": bias}
        kept: list[tuple[int, ...]] = []
        with attention_of_cuda(), saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
            output = F.scaled_dot_product_attention(query, key, value, masks[mask], dropout_p=0.1)
        output.sum().backward()
    assert output.shape == query.shape == query.grad.shape  # type: ignore[union-attr]
    assert (bias.grad is None) == (mask != "bias")
    assert bias.grad is None or bias.grad.shape == bias.shape
    matrices = [shape for shape in kept if shape[-2:] == (64, 64)]
    assert len(matrices) == (mask != "none")  # what is added, and nothing per score


def test_attention_is_torch_s_own_behind_attention_of_cuda_and_where_its_operator_does_not_fit() -> None:
    query = torch.randn(2, 4, 6, 8, dtype=torch.float64, requires_grad=True)
    expected = F.scaled_dot_product_attention(query, query, query)
    with attention_of_cuda():
        assert torch.equal(F.scaled_dot_product_attention(query, query, query), expected)
    query = query.detach().float().requires_grad_()
    assert "ForCpu" in type(F.scaled_dot_product_attention(query, query, query).grad_fn).__name__


@pytest.mark.ranks
def test_the_fake_group_has_ranks_that_do_not_answer() -> None:
    assert run_process(_sum_of_nobody, timeout=60.0) == (3, 8, [1.0, 1.0])


def _sum_of_nobody() -> tuple[int, int, list[float]]:
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    x = torch.ones(2)
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), x.tolist()


@pytest.mark.ranks
def test_the_peak_of_a_step_is_this_number() -> None:
    """Pinned: 8320 + 8256 + 4096 parameters of a rank, their gradients, AdamW's two moments and five counts."""
    memory = run_process(_net_on_two_ranks, timeout=60.0)
    assert memory == {
        "parameters": 82688,
        "buffers": 40,
        "gradients": 82688,
        "optimizer": 165396,
        "activations": 4,
        "temporaries": 66048,
        "inputs": 4096,
        "module": "optimizer",
        "phase": "optimizer",
    }


def _net_on_two_ranks() -> dict[str, object]:
    request = Request(Functions(make_net, split), {"tp": 2}, 1, (0, 1), torch.empty(16, 64), adam)
    return dict(vars(estimate_rank(request).memory))


def test_functorch_s_wrappers_are_recognized() -> None:
    seen: list[bool] = []

    def square(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_functorch_wrapped(x))
        return x * x

    torch.func.vmap(square)(torch.ones(2))
    square(torch.ones(2))
    assert seen == [True, False]


def test_active_function_modes_are_those_entered_the_outermost_first() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    assert active_function_modes() == []
    with Mode() as outer, Mode() as inner:
        assert active_function_modes() == [outer, inner]
    assert active_function_modes() == []


def test_operators_have_formulas_of_their_operations() -> None:
    a, b = torch.empty(3, 4, device="meta"), torch.empty(4, 5, device="meta")
    assert flop_formulas()[torch.ops.aten.mm](a, b, out_val=a @ b) == 2 * 3 * 4 * 5
    assert not is_traceable_wrapper_subclass(a)


def test_buckets_of_gradients_get_full_at_the_limit() -> None:
    tensors = [torch.empty(4) for _ in range(3)]
    assert bucket_assignment(tensors, 32) == [[0, 1], [2]]


@pytest.mark.ranks
def test_a_group_is_made_by_its_members_alone() -> None:
    """Rank 2 does not call; the others reduce over their group, with another timeout, and under a reused name."""
    assert run_ranks(_group_of_two, world_size=3, timeout=60.0) == [(0, 1, 3.0), (0, 1, 3.0), None]


def _group_of_two() -> tuple[int, int, float] | None:
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return None
    for number in range(2):
        store = dist.PrefixStore(f"test {number}", default_store())
        group = new_group_among(pair, store, "again", timedelta(seconds=30))
        set_timeout(group, timedelta(seconds=20))
        x = torch.full((1,), dist.get_rank() + 1.0)
        dist.all_reduce(x, group=group)
        first, second = ranks_of_group(group)
        dist.destroy_process_group(group)
    return first, second, x.item()


def test_modules_keep_their_tensors_and_hooks_in_these_tables() -> None:
    """What the tree, the journal and the weights read and write directly."""
    module = nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    module.add_module("child", nn.Identity())
    assert [*parameters_of(module)] == ["weight", "bias"]
    assert {*buffers_of(module)} == {"running_mean", "running_var", "num_batches_tracked", "scratch"}
    assert [*children_of(module)] == ["child"]
    assert non_persistent_buffers_of(module) == {"scratch"}
    assert module._compiled_call_impl is None
    tables = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    module.register_forward_pre_hook(len, with_kwargs=True)
    module.register_forward_hook(len, with_kwargs=True)
    module.register_full_backward_pre_hook(len)
    assert not module._is_full_backward_hook
    module.register_full_backward_hook(len)
    assert module._is_full_backward_hook
    assert [[*table.values()] for table in tables] == [[len]] * 4
    assert {*module._forward_pre_hooks_with_kwargs} == {*module._forward_pre_hooks}
    assert {*module._forward_hooks_with_kwargs} == {*module._forward_hooks}
    weight = nn.Parameter(torch.ones(2))
    parameters_of(module)["weight"] = weight
    assert module.weight is weight


def test_tensors_count_their_writes_and_name_their_storage() -> None:
    x = torch.zeros(4)
    version = x._version
    x.add_(1)
    assert x._version == version + 1
    assert x[1:].untyped_storage()._cdata == x.untyped_storage()._cdata != torch.zeros(4).untyped_storage()._cdata
