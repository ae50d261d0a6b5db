"""``build`` refuses what is certain to train another model; where it is not certain, there is no word of it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo_core as slapo
from slapo_runtime.ranks.consistency import obligations
from slapo_testing import run_ranks
from tests.messages import Messages

Schedule = slapo.Schedule
MESHES = pytest.mark.parametrize("size", [1, 2], ids=["one rank", "two ranks"])


class Model(nn.Module):
    """A vocabulary that another module is tied to, and a pair of layers in a block."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.shared = nn.Embedding(8, 6)
        self.words = nn.Embedding(8, 6)
        self.words.weight = self.shared.weight
        self.block = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6, bias=bias))
        self.norm = nn.LayerNorm(6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.block(self.words(ids)))


def split(sch: Schedule, *, syncs: bool = True) -> None:
    sch["words"].shard("weight", axis=0)
    sch["block.0"].shard(["weight", "bias"], axis=0).sync("backward")
    sch["block.2"].shard("weight", axis=1)
    if syncs:
        sch["words"].sync("forward")
        sch["block.2"].sync("forward")


def scheduled(size: int, *, bias: bool = True) -> Schedule:
    return slapo.create_schedule(Model(bias=bias), mesh={"tp": size})


@MESHES
def test_each_partial_sum_that_nobody_reduces_is_named_with_its_step_and_the_call_to_add(
    size: int, message: Messages
) -> None:
    sch = scheduled(size)
    split(sch, syncs=False)
    words, _, _, down = (record.location for record in sch.records)
    assert words.rpartition(":")[0].endswith("test_tp_obligations.py")
    first, second, third = map(str, obligations(sch))
    assert first.startswith(f"#1 shard('weight', axis=0) at 'words' ({words}) ")
    message(first, "output of 'shared'", 'add sch[\'shared\'].sync("fwd_post", "all_reduce")')
    assert second == first.replace("'shared'", "'words'")
    assert third.startswith(f"#4 shard('weight', axis=1) at 'block.2' ({down}) ")
    message(third, "output of 'block.2'", "bias", 'add sch[\'block.2\'].sync("fwd_post", "all_reduce")')


@MESHES
def test_a_bias_that_a_reduction_further_out_does_not_add_is_named(size: int, message: Messages) -> None:
    sch = scheduled(size)
    sch["block.0"].shard(["weight", "bias"], axis=0).sync("backward")
    sch["block"].sync("fwd_post", "all_reduce")
    sch["block.2"].shard("weight", axis=1)
    (found,) = obligations(sch)
    assert str(found).startswith(f"#4 shard('weight', axis=1) at 'block.2' ({sch.records[-1].location}) ")
    message(found, "bias of 'block.2'", "at 'block'", 'sch[\'block.2\'].sync("fwd_post", "all_reduce")')


def leave(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return output


def leave_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return args, kwargs


class OwnNorm(nn.LayerNorm):
    """Code that this plugin does not know: it may reduce its input."""


def only_pair(sch: Schedule) -> None:
    sch["block.0"].shard(["weight", "bias"], axis=0).sync("backward")
    sch["block.2"].shard("weight", axis=1)


def reduced_around(sch: Schedule) -> None:
    only_pair(sch)
    sch["block"].sync("fwd_post", "reduce_scatter", axis=1)


def reduced_at_the_root(sch: Schedule) -> None:
    only_pair(sch)
    sch.root.sync("fwd_post", "all_reduce")


def function_of_the_users(sch: Schedule) -> None:
    only_pair(sch)
    sch["block.2"].sync("fwd_post", leave)


def function_around(sch: Schedule) -> None:
    only_pair(sch)
    sch["block"].sync("fwd_post", leave)


def function_at_an_input(sch: Schedule) -> None:
    only_pair(sch)
    sch["block.0"].sync("fwd_pre", leave_input)


def next_layer_sums_its_input(sch: Schedule) -> None:
    only_pair(sch)
    sch["norm"].shard(["weight", "bias"], axis=0).sync("fwd_pre", "reduce_scatter")


def hook_of_the_users(sch: Schedule) -> None:
    only_pair(sch)
    sch.model.norm.register_forward_pre_hook(lambda module, args: None)


def forward_of_the_users(sch: Schedule) -> None:
    only_pair(sch)
    sch.model.norm.forward = sch.model.norm.forward  # type: ignore[method-assign]


def module_of_the_users(sch: Schedule) -> None:
    only_pair(sch)
    sch["norm"].replace(OwnNorm(6))


def tied_and_never_called(sch: Schedule) -> None:
    sch["words"].shard("weight", axis=0).sync("forward")


UNCERTAIN = [
    reduced_around, reduced_at_the_root, function_of_the_users, function_around, function_at_an_input,
    next_layer_sums_its_input, hook_of_the_users, forward_of_the_users, module_of_the_users, tied_and_never_called,
]  # fmt: skip


@MESHES
@pytest.mark.parametrize("apply", UNCERTAIN, ids=lambda apply: apply.__name__)
def test_uncertain_reductions_are_not_reported(apply: Callable[[Schedule], None], size: int) -> None:
    sch = scheduled(size, bias=apply is function_of_the_users)
    apply(sch)
    assert obligations(sch) == ()


@MESHES
def test_steps_that_cannot_reduce_leave_the_partial_sum_certain(size: int) -> None:
    sch = scheduled(size, bias=False)
    only_pair(sch)
    sch["norm"].replace(nn.LayerNorm(6))
    sch["block"].checkpoint()
    sch["block.0"].sync("forward")
    assert len(obligations(sch)) == 1


def test_a_global_hook_may_be_a_reduction() -> None:
    sch = scheduled(2)
    split(sch, syncs=False)
    assert len(obligations(sch)) == 3
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert obligations(sch) == ()
    finally:
        handle.remove()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def check_build_and_verify() -> None:
    ids = torch.arange(6).view(2, 3)
    torch.manual_seed(0)
    sch = scheduled(2)
    split(sch, syncs=False)
    sch["words"].sync("forward")
    (missing,) = obligations(sch)
    with pytest.raises(slapo.BuildError) as refused:
        slapo.build(sch, optimizer=make_optimizer)
    assert str(refused.value) == f"the schedule is incomplete: {missing}"
    with pytest.raises(slapo.BuildError, match="the schedule is incomplete"):
        sch.model(ids)  # the first training forward of a loop without build
    with pytest.raises(slapo.VerifyError) as differs:
        slapo.verify(sch, ids)
    assert "which then agrees: add sch['block.2'].sync('fwd_post', op='all_reduce')" in str(differs.value)
    assert "missing: " not in str(differs.value)
    with pytest.raises(slapo.VerifyError) as differs:
        slapo.verify(sch, ids, blame_seconds=0)
    assert f"\n  missing: {missing}" in str(differs.value)

    sch.undo()
    with pytest.raises(slapo.BuildError) as refused:
        slapo.build(sch, optimizer=make_optimizer)
    listed = "".join(f"\n  - {one}" for one in obligations(sch))
    assert str(refused.value) == f"the schedule is incomplete:{listed}"

    sch["words"].sync("forward")
    sch["block.2"].sync("forward")
    slapo.verify(sch, ids)
    document = sch.to_json()
    assert unverified(slapo.replay(Model(), document)) == []
    (line,) = unverified(slapo.replay(Model(), {**json.loads(document), "verified": ""})) or [""]
    assert ("'tp' (2 ranks) and was never verified" in line) == (dist.get_rank() == 0)
    assert unverified(slapo.create_schedule(Model(), mesh={"dp": 2})) == []


def unverified(sch: Schedule) -> list[str]:
    """Build, and give what is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        slapo.build(sch, optimizer=make_optimizer, weights=Model().state_dict())
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


@pytest.mark.ranks
def test_build_refuses_an_incomplete_schedule_and_verify_says_what_is_missing() -> None:
    run_ranks(check_build_and_verify, world_size=2)


class Gated(nn.Module):
    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.norm = nn.LayerNorm(6) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(self.gate(x).sigmoid() * self.up(x))


def gated(*reducing: str, norm: bool = False, size: int = 2) -> Schedule:
    sch = slapo.create_schedule(nn.Sequential(Gated(norm=norm)), mesh={"tp": size})
    sch["0.gate"].shard(["weight", "bias"], axis=0)
    sch["0.up"].shard(["weight", "bias"], axis=0)
    sch["0.down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    for path in reducing:
        sch[path].sync("bwd_post", "all_reduce")
    return sch


@MESHES
def test_gradients_that_are_reduced_twice_on_their_way_are_named(size: int, message: Messages) -> None:
    (doubled,) = obligations(gated("0.gate", "0.up", "0", size=size))
    message(doubled, "the inputs of '0' are reduced twice", "'0.gate', '0.up'")


@pytest.mark.parametrize(
    ("reducing", "norm"),
    [(("0",), False), (("0.gate", "0.up"), False), (("0.gate", "0.up", "0"), True)],
    ids=["around", "each", "whole layer between"],
)
def test_gradients_that_are_reduced_once_or_perhaps_are_not_named(reducing: tuple[str, ...], norm: bool) -> None:
    assert obligations(gated(*reducing, norm=norm)) == ()


def stacked(size: int = 2, norm: type[nn.Module] = nn.LayerNorm) -> Schedule:
    """Two pairs of layers, of which the second gets what the first and a norm make."""
    layers = (nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), norm(6))
    pair = nn.Sequential(nn.Dropout(0.1), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    sch = slapo.create_schedule(nn.Sequential(*layers, pair), mesh={"tp": size})
    for first, second in (("0", "2"), ("4.1", "4.3")):
        sch[first].shard(["weight", "bias"], axis=0)
        sch[second].shard("weight", axis=1).sync("fwd_post", "all_reduce")
    return sch


@MESHES
def test_a_gradient_that_reaches_a_trained_layer_unreduced_is_named(size: int, message: Messages) -> None:
    sch = stacked(size)
    (missing,) = obligations(sch)  # not of the first layer: its input may need none
    message(missing, "input of '4.1'", "'3.weight'", 'add sch[\'4.1\'].sync("bwd_post", "all_reduce")')
    sch.root.sync("bwd_post", "all_reduce")  # behind the norm's weight
    assert obligations(sch) == (missing,)
    (missing,) = obligations(stacked(size, nn.Identity))
    assert "'2.weight'" in str(missing)  # its shards need the whole gradient too


def of_the_input(sch: Schedule) -> None:
    sch["4.1"].sync("bwd_post", "all_reduce")


def own_hook_between(sch: Schedule) -> None:
    sch.model[4][0].register_forward_pre_hook(lambda module, args: None)  # type: ignore[index]


def of_the_sequence(sch: Schedule) -> None:
    sch["4"].sync("bwd_post", "all_reduce")


def of_the_parameters(sch: Schedule) -> None:
    sch["3"].sync_gradient(["weight", "bias"])


def nothing_trained(sch: Schedule) -> None:
    sch.model.requires_grad_(False)


def own_module_between(sch: Schedule) -> None:
    sch["4.0"].replace(Passing())


def own_backward_hook(sch: Schedule) -> None:
    sch.model[3].register_full_backward_hook(lambda module, inputs, outputs: None)  # type: ignore[index]


def own_hook_of_the_parameter(sch: Schedule) -> None:
    sch.model[3].weight.register_hook(lambda gradient: gradient)  # type: ignore[index]


def other_order(sch: Schedule) -> None:
    sch.model.forward = sch.model.forward  # type: ignore[method-assign]


class Passing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


REDUCED = [
    of_the_input, own_hook_between, of_the_sequence, of_the_parameters, nothing_trained, own_module_between,
    own_backward_hook, own_hook_of_the_parameter, other_order,
]  # fmt: skip


@MESHES
@pytest.mark.parametrize("apply", REDUCED, ids=lambda apply: apply.__name__)
def test_uncertain_gradient_reductions_are_not_reported(apply: Callable[[Schedule], None], size: int) -> None:
    sch = stacked(size)
    assert len(obligations(sch)) == 1
    apply(sch)
    assert obligations(sch) == ()


def test_an_engine_that_only_evaluates_needs_no_gradient(message: Messages) -> None:
    with pytest.raises(slapo.BuildError) as refused:
        slapo.build(stacked(1), optimizer=make_optimizer)
    message(refused, "the schedule is incomplete", "input of '4.1'")
    slapo.build(stacked(1))


class Heads(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = count, 8
        self.q, self.o = nn.Linear(24, 8 * count), nn.Linear(8 * count, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x).unflatten(-1, (-1, self.head_dim)).flatten(-2))


def test_a_split_that_cuts_a_head_is_named_unless_it_is_gathered(message: Messages) -> None:
    def schedule(count: int) -> Schedule:
        sch = slapo.create_schedule(nn.Sequential(Heads(count)), mesh={"tp": 2})
        sch["0.q"].shard(["weight", "bias"], axis=0)
        return sch

    (cut,) = obligations(schedule(3))
    message(cut, "cuts a head", "3 heads ('num_heads')", "tp size 2")
    assert obligations(schedule(4)) == ()
    gathered = schedule(3)
    gathered["0.q"].sync("fwd_post", "all_gather")
    assert obligations(gathered) == ()
