"""Collectives at inputs, outputs and gradients: the table in the docstring of ``sync``, line by line."""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slapo_core as slapo
from slapo_core import ArgumentError
from slapo_testing import run_ranks
from slapo_tp.collectives import (
    RankGroup,
    all_gather,
    all_reduce,
    copy as copy_with_summed_gradient,
    gather_sum,
    reduce_scatter,
    split,
)
from tests.messages import Messages

from .checks import differs_from_untouched, rand, same_as_untouched

pytestmark = pytest.mark.ranks


def mlp(features: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 8), nn.GELU(), nn.Linear(8, features))


def split_mlp(sch: Any) -> None:
    sch["0"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["2"].shard("weight", axis=1).sync("fwd_post", "all_reduce")


def gathered_output(sch: Any) -> None:
    sch["0"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")


def sequence_parallel(axis: int) -> Any:
    def apply(sch: Any) -> None:
        sch["0"].shard(["weight", "bias"], axis=0).sync("fwd_pre", "all_gather", axis=axis)
        sch["2"].shard("weight", axis=1).sync("fwd_post", "reduce_scatter", axis=axis)

    return apply


def entered_and_left(axis: int) -> Any:
    def apply(sch: Any) -> None:
        sequence_parallel(axis)(sch)
        sch.root.sync("fwd_pre", "split", axis=axis).sync("fwd_post", "all_gather", axis=axis)

    return apply


def check_sequence_parallelism() -> str:
    for axis in (0, 1, -2):
        same_as_untouched(mlp, sequence_parallel(axis), (rand(4, 6, 6),), piece_axis=axis)
        same_as_untouched(mlp, entered_and_left(axis), (rand(4, 6, 6),))
    sch = slapo.create_schedule(mlp(), mesh={"tp": 2})
    entered_and_left(1)(sch)
    with pytest.raises(ArgumentError, match=r"split along axis 1 of a tensor .*5 elements are not divisible"):
        sch.model(torch.randn(4, 5, 6))
    for steps in (split_mlp, gathered_output):  # no input is gathered
        with pytest.raises(slapo.RankMismatchError, match="disagree about the batch"):
            same_as_untouched(mlp, steps, (rand(4, 6, 6),), piece_axis=1)
    sch = slapo.create_schedule(mlp(), mesh={"tp": 2})
    sequence_parallel(1)(sch)
    sch["0"].module._forward_pre_hooks.clear()
    with pytest.raises(ArgumentError) as refused:
        sch.model(torch.randn(4, 5, 6))
    return str(refused.value)


def test_a_sequence_parallel_pair_is_the_untouched_pair_on_each_ranks_piece(message: Messages) -> None:
    (odd,) = set(run_ranks(check_sequence_parallelism, world_size=2))
    message(odd, "tp.sync at '2'", "axis 1 of a tensor (4, 5, 6)", "2 ranks", "6 elements")


class Nested(nn.Module):
    """Several inputs and a nested output; only ``hidden`` and the first tensor of the output concern the split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(6, 8), nn.Linear(8, 6, bias=False), nn.Linear(6, 6)

    def forward(self, hidden: Tensor, residual: Tensor, *, scale: Tensor, count: int = 1) -> dict[str, Any]:
        total = self.down(torch.relu(self.up(hidden)))
        return {"total": (total, None), "gate": [self.gate(residual) * scale * count]}


def split_nested(sch: Any, inputs: tuple[Any, ...] | None = ("hidden",), outputs: Any = (0,)) -> None:
    sch["up"].shard(["weight", "bias"], axis=0)
    sch["down"].shard("weight", axis=1)
    sch.root.sync("bwd_post", "all_reduce", inputs=inputs).sync("fwd_post", "all_reduce", outputs=outputs)


def check_nested() -> tuple[str, ...]:
    args, kwargs = (rand(3, 6), rand(3, 6) + 1), {"scale": rand(6), "count": 2}
    same_as_untouched(Nested, split_nested, args, kwargs)
    same_as_untouched(Nested, lambda sch: split_nested(sch, inputs=(0,)), args, kwargs)
    named = {"hidden": args[0], "residual": args[1], **kwargs}
    same_as_untouched(Nested, split_nested, (), named)
    same_as_untouched(Nested, lambda sch: split_nested(sch, inputs=(0,)), (), named)
    # Without a name, the gradients that every rank has whole are summed as well.
    differs_from_untouched(Nested, lambda sch: split_nested(sch, inputs=None), args, kwargs)
    texts = []
    for outputs in (None, (1,)):
        sch = slapo.create_schedule(Nested().double(), mesh={"tp": 2})
        split_nested(sch, outputs=outputs)
        with pytest.raises(ArgumentError) as refused:
            sch.model(*args, **kwargs)
        texts.append(str(refused.value))
    return tuple(texts)


def test_several_inputs_and_nested_outputs_are_synchronized_where_named_and_refused_where_unclear(
    message: Messages,
) -> None:
    ((unnamed, wrong),) = set(run_ranks(check_nested, world_size=2))
    message(unnamed, "2 floating-point tensors", "[0, 2]", "outputs=(0,)")
    message(wrong, "outputs=(1,)", "position 1", "[0, 2]")


def check_composition() -> None:
    x = rand(3, 6)
    compiled = {"run": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True)}
    same_as_untouched(mlp, split_mlp, (x,), **compiled)
    same_as_untouched(mlp, sequence_parallel(0), (rand(4, 6),), piece_axis=0, **compiled)
    same_as_untouched(embedding_and_decoder, split_vocabulary, (torch.tensor([[0, 7, 3]]),), **compiled)
    same_as_untouched(embedding_and_decoder, split_vocabulary, (torch.tensor([[0, 7, 3]]),))

    def checkpointed(sch: Any) -> None:
        split_mlp(sch)
        sch["0"].checkpoint()
        sch["2"].checkpoint()

    same_as_untouched(mlp, checkpointed, (x,))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.decoder = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8, bias=False)
        self.decoder.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.body(self.words(ids))))


def embedding_and_decoder() -> nn.Module:
    return Tied()


def split_vocabulary(sch: Any) -> None:
    sch["words"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
    sch["decoder"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")


def test_a_split_model_can_be_checkpointed_and_compiled_into_one_graph() -> None:
    run_ranks(check_composition, world_size=2)


def check_copies_and_undo() -> None:
    torch.manual_seed(0)
    model = mlp().double()
    x = rand(3, 6)
    wanted = model(x)
    sch = slapo.create_schedule(model, mesh={"tp": 2})
    split_mlp(sch)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.zero_()  # a copy that ran on the original's weights would not give the same any more
    torch.testing.assert_close(twin(x), wanted)
    sch.undo(to=0)
    assert torch.equal(model(x), wanted)
    assert not model[0]._forward_pre_hooks
    assert "forward" not in model[2].__dict__


def test_copy_runs_on_its_own_shards_and_undo_restores_the_model() -> None:
    run_ranks(check_copies_and_undo, world_size=2)


def average_of_ranks(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return all_reduce(output, _world())


def sum_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return (copy_with_summed_gradient(args[0], _world()),), kwargs


def sum_gradient(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    summed = grad_input[0].clone()
    dist.all_reduce(summed)
    return (summed,)


def _world() -> RankGroup:
    name = dist.distributed_c10d._get_default_group().group_name
    return RankGroup(name, dist.get_world_size(), dist.get_rank(), "")


def check_callables() -> None:
    def apply(sch: Any, mode: str, function: Any) -> None:
        sch["0"].shard(["weight", "bias"], axis=0).sync(mode, function)
        sch["2"].shard("weight", axis=1).sync("fwd_post", average_of_ranks)

    same_as_untouched(mlp, lambda sch: apply(sch, "fwd_pre", sum_input), (rand(3, 6),))
    same_as_untouched(mlp, lambda sch: apply(sch, "bwd_post", sum_gradient), (rand(3, 6),))


def test_a_function_of_the_users_takes_the_place_of_a_collective_and_the_bias_is_still_added_once() -> None:
    run_ranks(check_callables, world_size=2)


def scattered(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return reduce_scatter(output, 1, _world())


def summed_in_place(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
    output.copy_(all_reduce(output, _world()))


def half_of_the_features(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return reduce_scatter(output, -1, _world())


def in_a_tuple(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Any:
    return (all_reduce(output, _world()),)


def check_functions_and_the_bias() -> tuple[str, ...]:
    def apply(sch: Any, function: Any) -> None:
        sch["0"].shard(["weight", "bias"], axis=0).sync("fwd_pre", "all_gather", axis=1)
        sch["2"].shard("weight", axis=1).sync("fwd_post", function)

    def whole(sch: Any) -> None:
        sch["0"].shard(["weight", "bias"], axis=0).sync("backward")
        sch["2"].shard("weight", axis=1).sync("fwd_post", summed_in_place)

    compiled = {"run": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True)}
    same_as_untouched(mlp, lambda sch: apply(sch, scattered), (rand(4, 6, 6),), piece_axis=1)
    same_as_untouched(mlp, lambda sch: apply(sch, scattered), (rand(4, 6, 6),), piece_axis=1, **compiled)
    same_as_untouched(mlp, whole, (rand(4, 6, 6),))
    texts = []
    for function in (half_of_the_features, in_a_tuple):
        sch = slapo.create_schedule(mlp().double(), mesh={"tp": 2})
        apply(sch, function)
        with pytest.raises(ArgumentError) as refused:
            sch.model(rand(4, 3, 6))
        texts.append(str(refused.value))
    return tuple(texts)


def test_bias_gets_its_full_gradient_from_a_user_function(message: Messages) -> None:
    (texts,) = set(run_ranks(check_functions_and_the_bias, world_size=2))
    for text, given in zip(texts, ("shape (4, 6, 3)", "tuple"), strict=True):
        message(text, "tp.sync at '2'", given, "(4, 6, 6)", "(2, 6, 6) or (4, 3, 6)")


def check_gradients_of_gradients() -> None:
    group = _world()
    for axis in (0, 1, -1):
        for function in (
            lambda t: all_reduce(t, group),
            lambda t: copy_with_summed_gradient(t, group),
            lambda t: gather_sum(t, axis, group),  # noqa: B023
            lambda t: reduce_scatter(t, axis, group),  # noqa: B023
            lambda t: all_gather(t, axis, group),  # noqa: B023
            lambda t: split(t, axis, group),  # noqa: B023
        ):
            x = rand(2, 4).requires_grad_()
            y = function(x)
            assert type(y) is Tensor
            # With A the function and B its backward: first = 2 B A x, and second = 4 B A first.
            (first,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad((first**2).sum(), x)
            point = first.detach().requires_grad_()
            (half,) = torch.autograd.grad((function(point) ** 2).sum(), point)
            torch.testing.assert_close(second, 2 * half)


def test_gradients_of_gradients_are_synchronized_too() -> None:
    run_ranks(check_gradients_of_gradients, world_size=2)


class Language(nn.Module):
    """Embeds, and gives logits of its head; ``hidden`` leaves the head out."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, *, hidden: bool = False) -> dict[str, Tensor]:
        found = self.norm(self.embed(ids))
        output = found if hidden else self.head(found)
        return {"loss": output.logsumexp(-1).mean(), "output": output}


def reads_the_head(self: Language, ids: Tensor) -> dict[str, Tensor]:
    output = self.norm(self.embed(ids)) @ self.head.weight.T
    return {"loss": output.logsumexp(-1).mean(), "output": output}


def call(inner: Any, *args: Any, **kwargs: Any) -> Any:
    return inner(*args, **kwargs)


def forward_ways(tied: bool) -> dict[str, str | None]:
    """Train in several ways; the words of the error, or None."""
    found: dict[str, str | None] = {}
    ids = torch.arange(8).view(2, 4)
    for way in ("right", "around", "hidden", "no split", "instance", "class", "later", "built"):
        sch = slapo.create_schedule(Language(tied=tied), mesh={"tp": 2})
        model, own = sch.model, Language.forward
        if way != "no split":
            sch["embed"].shard("weight", axis=0).sync("fwd_post", "all_reduce")
            if not tied:
                sch["head"].shard("weight", axis=0)
            sch["head"].sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")
        try:
            if way == "later":
                model(ids)["loss"].backward()
            if way in ("instance", "later", "built", "no split"):
                model.forward = MethodType(reads_the_head, model)  # type: ignore[method-assign]
            elif way == "class":
                Language.forward = reads_the_head  # type: ignore[assignment, method-assign]
            elif way == "around":
                model.forward = functools.partial(call, model.forward)
            if way == "built":
                slapo.build(sch, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)).train_step((ids,))
            for _ in range(4):
                model(ids, **({"hidden": True} if way == "hidden" else {}))["loss"].backward()
            found[way] = None
            assert way in ("no split", "around") or len(model.head._forward_pre_hooks) == 1  # that of bwd_post
        except slapo.MeshError as error:
            found[way] = str(error)
            model.forward = MethodType(own, model)
            model(ids)["loss"].backward()  # nothing is left of the watch
        finally:
            Language.forward = own  # type: ignore[method-assign]
    return found


def check_reading_past() -> list[dict[str, str | None]]:
    return [forward_ways(tied) for tied in (False, True)]


def test_a_weight_that_is_read_past_its_synced_module_is_noticed(message: Messages) -> None:
    first, second = run_ranks(check_reading_past, world_size=2)
    assert first == second
    wrong = {text for found in first for text in found.values() if text is not None}
    assert [[way for way, text in found.items() if text is None] for found in first] == [
        ["right", "around", "hidden", "no split"]
    ] * 2
    (text,) = wrong
    message(text, "forward of 'head' did not run", "'weight'", "call the module")
