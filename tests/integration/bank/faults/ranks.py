"""Ranks that do not mean the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.integration.bank.faults.changing import changed_by
from tests.integration.bank.faults.collectives import pair_of
from tests.integration.bank.faults.fault import fault
from tests.integration.bank.places import BLOCKS, NORMS
from tests.integration.bank.steps import Right, Wrong, step


@fault("a step on one rank only", "one rank waits in a collective for the other", at_most=1)
def on_one_rank(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("forward"):
        yield Wrong(
            right, each.path, right.changed(position, each.with_(ranks=(0,))), guilty=(position,), near=(each.path,),
            by_hand="rank 1 does not sum", alone=True,
        )  # fmt: skip


@fault("other arguments on one rank", "the ranks split different axes", at_most=1)
def other_arguments(right: Right) -> Iterator[Wrong]:
    for position, each in right.where("row"):
        other = each.with_(kwargs=(("axis", 1 - dict(each.kwargs)["axis"]),), ranks=(1,))
        yield Wrong(
            right, each.path, right.changed(position, each.with_(ranks=(0,)), other), guilty=(position, position + 1),
            near=(each.path,), by_hand="the pieces do not make up a whole", alone=True,
        )  # fmt: skip


@fault("steps in another order on one rank", "records differ, and collectives may cross", at_most=1)
def other_order(right: Right) -> Iterator[Wrong]:
    checkpoint = step(BLOCKS[right.model][0].format(n=0), "checkpoint")
    steps = (checkpoint.with_(ranks=(0,)), *right.steps, checkpoint.with_(ranks=(1,)))
    yield Wrong(
        right, checkpoint.path, steps, guilty=(0, len(steps) - 1), near=(checkpoint.path, right.steps[0].path),
        by_hand="rank 1 applies its checkpoint last", alone=True,
    )  # fmt: skip


@fault("other weights on one rank", "the ranks train different models", at_most=1)
def other_weights(right: Right) -> Iterator[Wrong]:
    path = NORMS[right.model].format(n=0)
    yield Wrong(
        right, path, right.steps, options=(("prepare", by_rank),), anywhere=True, by_hand="rank 1's norm is scaled"
    )


@fault("a module that raises on one rank", "rank 0 waits in a collective", at_most=1)
def raises_on_one_rank(right: Right) -> Iterator[Wrong]:
    path = NORMS[right.model].format(n=0)
    wrong = step(path, "replace", changed_by(RaisesOnRankOne))
    yield Wrong(right, path, right.inserted(0, wrong), guilty=(0,), by_hand="it raises on rank 1", alone=True)


@fault("other values of a shared tensor on one rank, from a step", "the ranks train different models", at_most=1)
def replaced_by_rank(right: Right) -> Iterator[Wrong]:
    path = NORMS[right.model].format(n=1)
    wrong = step(path, "replace", eps_by_rank)
    yield Wrong(right, path, right.inserted(0, wrong), guilty=(0,))


@fault("a sync missing, the mistake is at the other layer's twin", "the partial sums of both layers go on: outputs")
def both_layers(right: Right) -> Iterator[Wrong]:
    positions = [n for n, e in right.where("forward") if e.part.startswith("mlp")]
    near = tuple(path for n in positions for path in pair_of(right, right.steps[n]))
    adds = tuple((right.steps[n].path, "sync(") for n in positions)
    yield Wrong(right, "every MLP", right.without(*positions), near=near, add=adds)


@fault("two mistakes at once", "a partial sum goes on, and a norm is scaled: outputs", at_most=1)
def two_mistakes(right: Right) -> Iterator[Wrong]:
    from tests.integration.bank.faults.modules import Scaled

    for position, each in right.where("forward"):
        wrong = step(NORMS[right.model].format(n=1), "replace", changed_by(Scaled))
        yield Wrong(
            right, each.path, (wrong, *right.without(position)), guilty=(0,), near=pair_of(right, each),
            add=((each.path, "sync("),),
        )  # fmt: skip


class RaisesOnRankOne(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("out of memory on this rank")
        return super().forward(*args, **kwargs)


def by_rank(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (parameter.dim() == 1 and "norm" in name.lower()) or "ln_" in name:
                parameter.mul_(1 + 0.01 * dist.get_rank())


def eps_by_rank(old: nn.Module) -> nn.Module:
    import copy

    made = copy.deepcopy(old)
    name = "variance_epsilon" if hasattr(made, "variance_epsilon") else "eps"
    setattr(made, name, getattr(made, name) + 1e-3 * dist.get_rank())
    return made
