"""The private names of torch exist, and behave as slapo_core expects."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import slapo_core
from slapo_core import private
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
from slapo_runtime.ranks.launcher import run_process, run_ranks
from tests.support.private_names import private_names


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    assert private_names(Path(slapo_core.__file__).parent) == []


def test_autograd_nodes_are_numbered_in_the_order_in_which_they_are_made() -> None:
    weight = nn.Parameter(torch.ones(2))
    number = next_sequence_number()
    y = weight * 2
    assert y.grad_fn is not None
    assert (private.sequence_number(y.grad_fn), next_sequence_number()) == (number, number + 1)
    leaf = y.grad_fn.next_functions[0][0]
    assert private.sequence_number(leaf) == 2**64 - 1
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
    assert {*private.TENSOR_TABLES} <= {*vars(module)}
    hooks = private.hooks_of(module)
    module.register_forward_pre_hook(len, with_kwargs=True)
    module.register_forward_hook(len, with_kwargs=True)
    module.register_full_backward_pre_hook(len)
    assert private.full_backward_flag(module) is None
    module.register_full_backward_hook(len)
    assert private.full_backward_flag(module)
    private.set_full_backward_flag(module, False)
    with pytest.raises(RuntimeError, match="both regular backward hooks and full backward hooks"):
        module.register_full_backward_hook(len)
    module.register_forward_hook(len, with_kwargs=True, always_call=True)
    module.register_state_dict_pre_hook(len)
    module.register_load_state_dict_pre_hook(len)
    assert {kind: [*table.values()] for kind, table in hooks.items()} == {
        "forward_pre": [len],
        "forward": [len, len],
        "full_backward_pre": [len],
        "full_backward": [len],
    }
    found = {table: len(getattr(module, table)) for tables in private.ALL_HOOK_TABLES.values() for table in tables}
    assert [*found.values()] == [1, 1, 2, 2, 1, 1, 1, 1, 1]
    weight = nn.Parameter(torch.ones(2))
    parameters_of(module)["weight"] = weight
    assert module.weight is weight


def test_tensors_count_their_writes_and_name_their_storage() -> None:
    x = torch.zeros(4)
    count = private.write_count(x)
    x.add_(1)
    assert private.write_count(x) == count + 1
    assert private.storage_id(x[1:]) == private.storage_id(x.untyped_storage()) != private.storage_id(torch.zeros(4))
    sparse = x.to_sparse()
    assert private.storage_id(sparse) == id(sparse)
    assert [part.tolist() for part in private.sparse_parts(sparse)] == [[[0, 1, 2, 3]], [1.0] * 4]
    for table, register in private.TENSOR_HOOK_TABLES.items():
        weight = nn.Parameter(torch.ones(2))
        getattr(weight, register)(len)
        assert [*getattr(weight, table).values()] == [len]


def test_operators_without_a_formula_exist_and_have_schemas() -> None:
    operators = (*private.ATTENTION, *private.ATTENTION_BACKWARD, *private.MATRIX_PRODUCTS, private.ADDED_PRODUCT)
    assert not {*operators} & {*flop_formulas()}
    for operator in operators:
        assert private.schema_of(operator.default).arguments
        assert operator.default.overloadpacket is operator
    assert private.schema_of(len) is None


def test_modules_convert_their_tensors_and_rnns_refresh_their_references() -> None:
    rnn = nn.LSTM(2, 3)
    assert private.apply_to_tensors(rnn, lambda tensor: tensor.double()) is rnn
    assert {parameter.dtype for parameter in rnn.parameters()} == {torch.float64}
    weight = nn.Parameter(torch.zeros(12, 2, dtype=torch.float64))
    parameters_of(rnn)["weight_ih_l0"] = weight
    assert rnn._flat_weights[0] is not weight
    private.refresh_flat_weights(rnn)
    assert rnn._flat_weights[0] is weight


@pytest.mark.ranks
def test_the_running_data_parallel_wrapper_is_known() -> None:
    assert run_ranks(_active_ddp, world_size=1, timeout=60.0) == [(True, True)]


def _active_ddp() -> tuple[bool, bool]:
    model = nn.Linear(2, 2)
    wrapper = nn.parallel.DistributedDataParallel(model)
    seen = []
    model.register_forward_hook(lambda *_: seen.append(private.active_ddp()))
    wrapper(torch.ones(1, 2))
    return seen[0] is wrapper, private.active_ddp() is None
