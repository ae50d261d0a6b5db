"""The private names of torch and transformers exist, and behave as slapo_runtime expects."""

from __future__ import annotations

import io
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_runtime import private
from slapo_runtime.launcher import run_process, run_ranks
from slapo_runtime.schedule_copies import sent
from tests.support.private_names import private_names


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    assert private_names(Path(private.__file__).parent) == []


def test_functorch_s_wrappers_are_recognized() -> None:
    seen: list[bool] = []

    def square(x: torch.Tensor) -> torch.Tensor:
        seen.append(private.is_functorch_wrapped(x))
        return x * x

    torch.func.vmap(square)(torch.ones(2))
    square(torch.ones(2))
    assert seen == [True, False]


@pytest.mark.ranks
def test_a_group_is_made_by_its_members_alone() -> None:
    """Rank 2 does not call; the others reduce over their group, with another timeout, and under a reused name."""
    assert run_ranks(_group_of_two, world_size=3, timeout=60.0) == [(0, 1, 3.0), (0, 1, 3.0), None]


def _group_of_two() -> tuple[int, int, float] | None:
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return None
    for number in range(2):
        store = dist.PrefixStore(f"test {number}", private.default_store())
        group = private.new_group_among(pair, store, "again", timedelta(seconds=30))
        private.set_timeout(group, timedelta(seconds=20))
        x = torch.full((1,), dist.get_rank() + 1.0)
        dist.all_reduce(x, group=group)
        first, second = dist.get_process_group_ranks(group)
        dist.destroy_process_group(group)
    return first, second, x.item()


def test_modules_keep_their_tensors_and_hooks_in_these_tables() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert private.non_persistent_buffers_of(module) == {"scratch"}
    module.register_forward_pre_hook(len, with_kwargs=True)
    module.register_forward_hook(len, with_kwargs=True)
    module.register_full_backward_pre_hook(len)
    module.register_full_backward_hook(len)
    module.register_forward_hook(len, with_kwargs=True, always_call=True)
    module.register_state_dict_pre_hook(len)
    module.register_load_state_dict_pre_hook(len)
    found = {table: len(getattr(module, table)) for tables in private.HOOK_TABLES.values() for table in tables}
    assert [*found.values()] == [1, 1, 2, 2, 1, 1, 1, 1, 1]


def test_tensors_count_their_writes_and_name_their_storage() -> None:
    x = torch.zeros(4)
    count = private.write_count(x)
    x.add_(1)
    assert private.write_count(x) == count + 1
    assert private.write_counts([x, x[:1]]) == [count + 1] * 2
    assert private.storage_id(x[1:]) == private.storage_id(x.untyped_storage()) != private.storage_id(torch.zeros(4))
    sparse = x.to_sparse()
    assert private.storage_id(sparse) == id(sparse)


def test_modules_convert_their_tensors_in_place() -> None:
    module = nn.Linear(2, 3)
    assert private.apply_to_tensors(module, lambda tensor: tensor.double()) is module
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float64}


@pytest.mark.ranks
def test_shards_of_distributed_tensors_know_their_rows() -> None:
    assert run_ranks(_rows, world_size=2, timeout=60.0) == [((2, 2), (0, 0)), ((1, 2), (2, 0))]


def _rows() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return private.local_window(distribute_tensor(torch.ones(3, 2), init_device_mesh("cpu", (2,)), [Shard(0)]))


def test_a_range_of_a_file_is_a_file() -> None:
    view = private.file_view(io.BytesIO(b"0123456789"), 2, 5)
    assert (view.read(3), view.tell(), view.read(), view.seek(0), view.read(1)) == (b"234", 3, b"56", 2, b"2")


def test_places_of_tensors_in_checkpoints_are_those_of_torch() -> None:
    place = private.storage_info("__0_0.distcp", 3, 5)
    assert (place.relative_path, place.offset, place.length) == ("__0_0.distcp", 3, 5)


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


def test_compiled_modules_are_seen() -> None:
    module = nn.Linear(2, 2)
    assert not private.is_compiled(module)
    module.compile()
    assert private.is_compiled(module)


def test_trees_are_mapped_and_have_leaves() -> None:
    assert private.tree_leaves({"a": [1, (2,)]}) == [1, 2]
    assert private.tree_map_only(int, lambda value: -value, ["x", 1]) == ["x", -1]


@pytest.mark.parametrize("ran_before", [False, True])
def test_a_model_sent_to_another_process_gives_the_outputs_that_a_batch_asks_for(ran_before: bool) -> None:
    """There no constructor of transformers has run, which writes down the layers to record; pickle takes no hooks."""
    transformers = pytest.importorskip("transformers")
    from transformers.utils import output_capturing

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config)
    batch: dict[str, Any] = {
        "input_ids": torch.arange(4)[None],
        "output_hidden_states": True,
        "output_attentions": True,
    }
    expected = model(**batch) if ran_before else None
    payload = pickle.dumps(sent(slapo.create_schedule(model)))
    assert bool(model.model.layers[0]._forward_hooks) is ran_before
    kept = dict(output_capturing._CAN_RECORD_REGISTRY)
    output_capturing._CAN_RECORD_REGISTRY.clear()
    try:
        copied = pickle.loads(payload).schedule(None).model
        found = copied(**batch)
    finally:
        output_capturing._CAN_RECORD_REGISTRY.update(kept)
    expected = expected or model(**batch)
    assert (len(found.hidden_states), len(found.attentions)) == (3, 2)
    for key in ("hidden_states", "attentions"):
        assert all(map(torch.equal, found[key], expected[key]))


def test_autograd_nodes_are_numbered_in_order_of_creation() -> None:
    weight = nn.Parameter(torch.ones(2))
    number = private.next_sequence_number()
    y = weight * 2
    assert y.grad_fn is not None
    assert (private.sequence_number(y.grad_fn), private.next_sequence_number()) == (number, number + 1)
    leaf = y.grad_fn.next_functions[0][0]
    assert private.sequence_number(leaf) == 2**64 - 1
    assert leaf.variable is weight
    seen = []
    y.register_hook(lambda grad: seen.append(private.current_autograd_node()))
    y.sum().backward()
    assert private.current_autograd_node() is None
    assert seen[0] is not None


@pytest.mark.ranks
def test_ranks_of_a_group_are_found_by_name() -> None:
    assert run_process(_ranks_of_a_fake_group, timeout=60.0) == [tuple(range(8))] * 2


def _ranks_of_a_fake_group() -> list[tuple[int, ...]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    group = dist.group.WORLD
    assert group is not None
    return [private.ranks_of_group(group), private.ranks_of_group(group.group_name)]


def test_backward_passes_are_routed_through_a_function() -> None:
    seen: list[str] = []

    def backward(run: Any, *args: Any, **kwargs: Any) -> None:
        seen.append("before")
        run(*args, **kwargs)
        seen.append("after")

    x = torch.ones(2, requires_grad=True)
    with private.backwards_through(backward):
        x.sum().backward()
    x.sum().backward()
    assert seen == ["before", "after"]
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]


def test_resizes_are_routed_through_a_function() -> None:
    seen: list[Any] = []

    def resized(run: Any, storage: torch.UntypedStorage, size: int) -> Any:
        seen.append((storage.nbytes(), size))
        return run(storage, size)

    with private.resizes_through(resized):
        storage = torch.ones(4).untyped_storage()
        storage.resize_(0)
    storage.resize_(8)
    assert seen == [(16, 0)]
    assert storage.nbytes() == 8


def test_subclasses_with_inner_tensors_are_known() -> None:
    assert not private.is_traceable_wrapper_subclass(torch.ones(2))
    assert not issubclass(nn.Parameter, private.FakeTensor)
