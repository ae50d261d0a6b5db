"""Effects of tensor-parallel steps in a training step: seen where they are right, missing where they do nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import slapo_core as slapo
from slapo_runtime.receipts.receipt import expectations, receipt, unexplained
from slapo_runtime.receipts.watch import Watch
from slapo_testing import run_ranks

from .checks import rand

pytestmark = pytest.mark.ranks


def called(module: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = module(x)
    return found


class Block(nn.Module):
    """A split pair with dropout between, a norm, and an output that the loss may not use.

    Args:
        call: how ``up`` is run.
    """

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor] = called) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.drop, self.norm, self.aside = nn.Dropout(0.1), nn.LayerNorm(6), nn.Linear(6, 6)
        self.call = call

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        return {"loss": self.norm(self.down(self.drop(F.gelu(self.call(self.up, x))))).sum(), "aside": self.aside(x)}


class Around(nn.Module):
    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor] = called) -> None:
        super().__init__()
        self.block = Block(call)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out: dict[str, Tensor] = self.block(x)
        return out


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(8, 6), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids))


def split(sch: Any, **options: Any) -> None:
    sch["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce", **options)
    sch["down"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def sequence_parallel(sch: Any, **options: Any) -> None:
    sch["up"].shard(["weight", "bias"], axis=0).sync("fwd_pre", "all_gather", axis=1, **options)
    sch["down"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=1)
    sch["norm"].sync_gradient(["weight", "bias"])


def gathered(sch: Any) -> None:
    sch["up"].shard(["weight", "bias"], axis=0).sync("backward").sync("forward")
    sch["aside"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")


def held_twice(sch: Any) -> None:
    sch["up"].shard(["weight", "bias"], axis=0, shards=1).sync("bwd_post", "all_reduce")
    sch["up"].fork_rng()
    sch["first"].shard(["weight", "bias"], axis=0).sync("fwd_post", "all_gather")


def wrapped_often(sch: Any) -> None:
    split(sch, overlap=True)
    sch["drop"].fork_rng()
    sch["norm"].sync_gradient("weight").sync_gradient("bias").checkpoint()
    sch["up"].checkpoint()


def traced(sch: Any) -> None:
    sequence_parallel(sch)
    sch.root.trace(flatten=True)


def frozen(sch: Any) -> None:
    sch["first"].module.requires_grad_(False)
    sch["up"].module.weight.requires_grad_(False)
    split(sch, overlap=True)
    sch["norm"].module.weight.requires_grad_(False)
    sch["norm"].sync_gradient(["weight", "bias"])


def within_checkpoint(sch: Any) -> None:
    split(sch["block"])
    sch["block"].checkpoint()


def recomputed_graph(sch: Any) -> None:
    split(sch["block"])
    sch["block"].trace(flatten=True)
    sch["block"].checkpoint()


def compiled(sch: Any) -> None:
    split(sch["block"], overlap=True)
    sch["block"].compile(backend="aot_eager")


def by_function(sch: Any) -> None:
    sch["up"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["down"].shard("weight", axis=1).sync("fwd_post", reduced)


def reduced(module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    import torch.distributed.nn.functional as functional

    return functional.all_reduce(output)


def words(sch: Any, op: str, **options: Any) -> None:
    sch["words"].shard("weight", axis=0).sync("fwd_post", op, **options)


def observed(
    steps: Callable[[Any], object],
    *,
    plant: Callable[[Any], object] = lambda sch: None,
    build: Callable[[], nn.Module] = Block,
    size: int = 2,
) -> tuple[int, list[str]]:
    """Return the number of expected effects, and those that are missing."""
    torch.manual_seed(0)
    model = build()
    batch = torch.tensor([[1, 5], [7, 0]]) if build is Words else rand(2, 4, 6)
    mesh = {"tp": size} if size == 2 else {"dp": 2, "tp": 1}
    sch = slapo.create_schedule(model.double(), mesh=mesh, example_inputs=batch)
    steps(sch)
    plant(sch)
    with Watch(sch).watching() as record:
        record.steps = 1
        output = sch.model(batch)
        (output.sum() if isinstance(output, Tensor) else output["loss"]).backward()
    expected = expectations(sch)
    found = [*receipt(expected, record), *unexplained(record, expected)]
    return len(found), [str(one) for one in found if not one.is_seen]


RIGHT: dict[str, tuple[Callable[[Any], object], int, dict[str, Any]]] = {
    # steps, the number of their effects, options
    "split": (split, 2, {}),
    "sequence parallel": (sequence_parallel, 6, {}),
    "gathered, and a branch without a loss": (gathered, 3, {}),
    "a shard on two ranks": (held_twice, 4, {}),
    "overlap": (functools.partial(split, overlap=True), 3, {}),
    "overlap of a gather": (functools.partial(sequence_parallel, overlap=True), 7, {}),
    "several wrappers": (wrapped_often, 8, {}),
    "in a graph": (traced, 6, {}),
    "frozen": (frozen, 2, {}),
    "within a checkpoint": (within_checkpoint, 3, {"build": Around}),
    "a recomputed graph": (recomputed_graph, 3, {"build": Around}),
    "compiled": (compiled, 1, {"build": Around}),
    "a function": (by_function, 1, {}),
    "one rank": (functools.partial(split, overlap=True), 0, {"size": 1}),
    "vocabulary": (functools.partial(words, op="all_reduce"), 1, {"build": Words}),
    "vocabulary, scattered": (functools.partial(words, op="reduce_scatter", axis=1), 1, {"build": Words}),
}


def check_right() -> dict[str, tuple[int, list[str]]]:
    return {name: observed(steps, **options) for name, (steps, _, options) in RIGHT.items()}


def test_effects_of_right_steps_are_seen() -> None:
    wanted = {name: (number, []) for name, (_, number, _) in RIGHT.items()}
    assert run_ranks(check_right, world_size=2) == [wanted, wanted]


# -- no-ops -----------------------------------------------------------------------------------------------------------


def hooks_cleared(sch: Any, path: str) -> None:
    sch[path].module._forward_hooks.clear()
    sch[path].module._forward_pre_hooks.clear()


def forward_set(sch: Any, path: str) -> None:
    """Of a library that puts its own forward on the module."""
    module = sch[path].module
    module.__dict__.pop("forward", None)
    module.forward = functools.partial(type(module).forward, module)


def over_one_rank(sch: Any, path: str) -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    for hook in sch[path].module._forward_hooks.values():
        object.__setattr__(hook, "group", dataclasses.replace(hook.group, name=alone.group_name, size=1))


def input_cloned(sch: Any, path: str) -> None:
    sch[path].module.register_forward_pre_hook(lambda module, args: (args[0].clone(),))


def past_call(module: nn.Module, x: Tensor) -> Tensor:
    return module.forward(x)


def by_weight(module: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.bias)


NO_OPS: dict[str, tuple[Callable[[Any], object], dict[str, Any], tuple[tuple[str, ...], ...]]] = {
    # steps, options, and words of each missing effect
    "hook removed": (
        split,
        {"plant": functools.partial(hooks_cleared, path="down")},
        (("#4 sync('fwd_post'", "'down'", "0 of 1 all_reduce", "the module has no hook OutputHook"),),
    ),
    "gradient hook removed": (
        split,
        {"plant": functools.partial(hooks_cleared, path="up")},
        (("#2 sync('bwd_post'", "'up'", "0 all_reduce", "the module has no hook InputHook"),),
    ),
    "group of one rank": (
        split,
        {"plant": functools.partial(over_one_rank, path="down")},
        (("#4 sync", "0 of 1 all_reduce over 'tp'", "it ran over a group of 1 ranks"),),
    ),
    "forward past the call": (
        within_checkpoint,
        {"build": functools.partial(Around, past_call)},
        (("#2 sync", "'block.up'", "no call of the module, which computes", "its forward ran past its hooks"),),
    ),
    "weight read": (
        within_checkpoint,
        {"build": functools.partial(Around, by_weight)},
        (("#2 sync", "'block.up'", "its forward ran past its hooks"),),
    ),
    "overlap of another input": (
        functools.partial(split, overlap=True),
        {"plant": functools.partial(input_cloned, path="up")},
        (("#2 sync", "0 of 1 calls of overlapped reduction", "it ran its fallback: the layer's input is another"),),
    ),
    "overlap without its forward": (
        functools.partial(split, overlap=True),
        {"plant": functools.partial(forward_set, path="up")},
        (("#2 sync", "0 of 1 calls of overlapped reduction", "the module's forward is not the wrapped one"),),
    ),
    "gradient sums without their forward": (
        sequence_parallel,
        {"plant": functools.partial(forward_set, path="norm")},
        (("#5 sync_gradient", "'norm'", "0 of 2 all_reduce", "the module's forward is not the wrapped one"),),
    ),
    "a shard's sums without their forward": (
        held_twice,
        {"plant": functools.partial(forward_set, path="up")},
        (
            ("#1 shard", "0 all_to_all over 'tp'", "the module's forward is not the wrapped one"),
            ("#3 fork_rng", "0 of 1 calls of forked RNG stream"),
        ),
    ),
    "sequence parallelism without its hooks": (
        sequence_parallel,
        {"plant": functools.partial(hooks_cleared, path="down")},
        (("#4 sync", "0 of 1 reduce_scatter"), ("#4 sync", "0 of 1 all_gather"), ("#4 sync", "0 of 1 all_reduce")),
    ),
}


def check_no_ops() -> dict[str, list[str]]:
    return {name: observed(steps, **options)[1] for name, (steps, options, _) in NO_OPS.items()}


def test_steps_without_an_effect_are_missing_with_their_cause() -> None:
    for found in run_ranks(check_no_ops, world_size=2):
        for name, (_, _, wanted) in NO_OPS.items():
            assert len(found[name]) == len(wanted), (name, found[name])
            for line, words in zip(found[name], wanted, strict=True):
                assert all(word in line for word in words), (name, line)
