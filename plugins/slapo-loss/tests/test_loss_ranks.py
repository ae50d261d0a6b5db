"""linear_cross_entropy on ranks: split heads, stages, sequence parallelism, and what a schedule with it lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import slapo_core as slapo
from slapo_loss import chunked
from slapo_loss.withheld import WithheldLogits
from slapo_testing import run_ranks

from .loss_model import CLASSES, Net, agree, batch

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Case:
    """A training run on ranks, against the plain model.

    Args:
        mesh: its sizes.
        steps: of the schedule, in order.
        form: of the model.
        given: the batch of a step.
        options: of ``build``.
        plain: those of the build of the plain model.
    """

    mesh: Mapping[str, int]
    steps: tuple[Callable[[Any], Any], ...]
    form: Mapping[str, Any] = field(default_factory=dict)
    given: Callable[[int], dict[str, Any]] = batch
    options: Mapping[str, Any] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)


def loss(sch: Any) -> None:
    sch["head"].linear_cross_entropy(chunk=5)


def split(sch: Any, *, pad: bool = True) -> None:
    names = "weight" if sch["head"].module.bias is None else ["weight", "bias"]
    sch["head"].shard(names, axis=0, pad=pad)
    sch["head"].sync("bwd_post", "all_reduce")


def overlapped(sch: Any) -> None:
    sch["head"].shard("weight", axis=0, pad=True)
    sch["head"].sync("bwd_post", "all_reduce", overlap=True)


def loss_then_overlapped(sch: Any) -> None:
    sch["head"].shard("weight", axis=0, pad=True)
    loss(sch)
    sch["head"].sync("bwd_post", "all_reduce", overlap=True)


def split_tied(sch: Any) -> None:
    sch["embed"].shard("weight", axis=0, pad=True)
    sch["embed"].sync("fwd_post", "all_reduce")
    sch["head"].sync("bwd_post", "all_reduce")


def blocks(sch: Any) -> None:
    sch["blocks.0"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")


def in_sequence(sch: Any) -> None:
    """Each rank has its part of the sequence between the embedding and the head."""
    sch["embed"].shard("weight", axis=0, pad=True).sync("fwd_post", "reduce_scatter", axis=1)
    sch["head"].shard("weight", axis=0, pad=True).sync("fwd_pre", "all_gather", axis=1)
    for number in range(4):
        sch[f"blocks.{number}"].sync_gradient(["weight", "bias"])


def cut(*after: int) -> Callable[[Any], None]:
    def apply(sch: Any) -> None:
        for number in after:
            sch[f"blocks.{number}"].pipeline_split()

    return apply


def checkpoint(sch: Any) -> None:
    sch["blocks.1"].checkpoint()
    sch["head"].checkpoint()


def counted(step: int) -> dict[str, Any]:
    return {**batch(step), "num_items_in_batch": 20}


def even(step: int) -> dict[str, Any]:
    """Return a batch of eight tokens in a row."""
    given = batch(step)
    return {name: torch.cat([one, one[:, :1]], 1) for name, one in given.items()}


def alike(step: int) -> dict[str, Any]:
    """Return as many ignored labels in each sample: a mean over micro-batches is that over all tokens."""
    given = batch(step, ignored=0)
    given["labels"][:, 3] = -100
    return given


def of_first_rank(step: int) -> dict[str, Any]:
    """Return labels of the first shard of the classes only."""
    return batch(step, largest=4)


def outside(output: Any, given: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(output["logits"].flatten(0, 1), given["targets"].flatten())


def with_targets(step: int) -> dict[str, Any]:
    """Return labels for a loss outside of the model."""
    given = batch(step, ignored=0)
    return {"ids": given["ids"], "targets": given["labels"]}  # without ignored ones: see `alike`


ON_TWO = {
    "bias": Case({"tp": 2}, (split, loss), {"bias": True}),
    "loss first": Case({"tp": 2}, (loss, split), given=counted),
    "overlap": Case({"tp": 2}, (overlapped, loss)),
    "overlap last": Case({"tp": 2}, (loss_then_overlapped,), given=counted),
    "tied": Case({"tp": 2}, (loss, split_tied), {"tied": True}),
    "no target here": Case({"tp": 2}, (split, loss), given=of_first_rank),
    "layers and checkpoints": Case({"tp": 2}, (blocks, split, loss, checkpoint)),
    "sequence": Case({"tp": 2}, (in_sequence, loss), given=even),
    "accumulation": Case({"tp": 2}, (split, loss), options={"accumulate": 2}, plain={"accumulate": 2}),
    "stages, loss first": Case({"pp": 2}, (loss, cut(1)), given=alike, options={"microbatches": 2}),
    "gpipe, tied": Case(
        {"pp": 2},
        (cut(2), loss),
        {"tied": True},
        alike,
        options={"microbatches": 2, "pipeline_schedule": "gpipe"},
    ),
    "interleaved": Case({"pp": 2}, (cut(0, 1, 2), loss), given=alike, options={"microbatches": 4}),
    "loss of build": Case(
        {"pp": 2},
        (loss, cut(1)),
        given=with_targets,
        options={"microbatches": 2, "loss": outside},
        plain={"loss": outside},
    ),
}
ON_FOUR = {
    "replicas": Case({"dp": 2, "tp": 2}, (split, loss)),
    "stages": Case({"pp": 2, "tp": 2}, (split, loss, cut(1)), given=alike, options={"microbatches": 2}),
    "four shards of three": Case({"tp": 4}, (split, loss), {"bias": True}, given=of_first_rank),
}


def differences(name: str, case: Case) -> tuple[list[str], int]:
    """What this rank's engine does otherwise than that of the plain model, and its losses from hidden states."""
    results, made = [], 0
    for mesh, steps, options in ((dict(case.mesh), case.steps, case.options), (None, (), case.plain)):
        sch: Any = slapo.create_schedule(Net(**case.form), mesh=mesh, example_inputs=case.given(0))
        for step in steps:
            step(sch)
        make = functools.partial(torch.optim.AdamW, lr=0.01)
        engine = slapo.build(sch, optimizer=make, max_grad_norm=1e9, **options)
        found: list[Tensor] = []
        with mock.patch.object(chunked, "linear_cross_entropy", wraps=chunked.linear_cross_entropy) as computed:
            for step in range(3):
                result = engine.train_step(case.given(step))
                found += [result.loss, torch.as_tensor(result.grad_norm)]
        made += computed.call_count
        found += [engine.eval_step(case.given(7)).loss, *engine.state_dict().values()]
        results.append(found)
        engine.close()
    try:
        agree(*results)
    except AssertionError as error:
        return [f"{name}: {error}"], made
    return [], made


def train(ranks: int) -> tuple[list[str], dict[str, int]]:
    torch.set_num_threads(1)
    found, made = [], {}
    for name, case in (ON_TWO if ranks == 2 else ON_FOUR).items():
        wrong, made[name] = differences(name, case)
        found += wrong
    return found + (outputs() if ranks == 2 else []), made


def check(ranks: int) -> None:
    results = run_ranks(train, ranks, world_size=ranks, timeout=300)
    assert [found for found, _ in results] == [[]] * ranks
    for name in results[0][1]:
        is_in_effect = any(made[name] for _, made in results)
        assert is_in_effect == (name != "loss of build"), name


def outputs() -> list[str]:
    """Hold what a split head gives where there is no loss, and that a wrong gather is noticed."""
    sch: Any = slapo.create_schedule(Net(bias=True), mesh={"tp": 2}, example_inputs=batch())
    split(sch)
    loss(sch)
    plain, ids = Net(bias=True), batch()["ids"]
    found = []
    sch.model.eval()
    agree([sch.model(ids)["logits"]], [plain(ids)["logits"]])
    with torch.no_grad():
        agree([sch.model.train()(ids)["logits"]], [plain(ids)["logits"]])
    assert isinstance(sch.model(**batch())["logits"], WithheldLogits)
    for model in (sch.model, plain):  # without labels, in training: with gradients
        model.zero_grad()
        model(ids)["logits"].square().mean().backward()
    agree([sch.model.embed.weight.grad], [plain.embed.weight.grad])
    if sch.model(ids)["logits"].shape != (4, 7, CLASSES):
        found.append("the logits are not whole")
    return found


def test_on_two_ranks_it_trains_as_the_plain_model_in_one_process() -> None:
    check(2)


@pytest.mark.breadth
def test_on_four_ranks_it_trains_as_the_plain_model_in_one_process() -> None:
    check(4)


# -- what a schedule lacks ------------------------------------------------------------------------------------


def chain() -> nn.Module:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.layers(x), labels)

    return Chain().double()


def test_a_missing_reduction_of_the_gradient_is_asked_for_as_of_any_split_layer() -> None:
    sch: Any = slapo.create_schedule(chain(), mesh={"tp": 2})
    sch["layers.2"].shard(["weight", "bias"], axis=0, pad=True)
    sch["layers.2"].linear_cross_entropy()
    (missing,) = _missing(sch)
    assert "layers.2" in missing.message
    assert 'sync("bwd_post", "all_reduce")' in str(missing.hint)
    sch["layers.2"].sync("bwd_post", "all_reduce")
    assert _missing(sch) == []


def test_a_full_bias_beside_a_split_head_is_named() -> None:
    sch: Any = slapo.create_schedule(Net(bias=True), mesh={"tp": 2})
    sch["head"].shard("weight", axis=0, pad=True)
    sch["head"].sync("bwd_post", "all_reduce")
    loss(sch)
    (missing,) = _missing(sch)
    assert "'head'" in missing.message
    assert "'bias'" in missing.message


def test_partial_sums_are_still_noticed_beside_it() -> None:
    sch: Any = slapo.create_schedule(Net(), mesh={"tp": 2})
    split(sch)
    loss(sch)
    sch["blocks.0"].shard(["weight", "bias"], axis=0).sync("bwd_post", "all_reduce")
    sch["blocks.1"].shard("weight", axis=1)
    (missing,) = _missing(sch)
    assert "blocks.1" in missing.message
    assert "all_reduce" in str(missing.hint)


def _missing(sch: Any) -> list[Any]:
    from slapo_runtime.ranks.consistency import obligations

    return list(obligations(sch))
