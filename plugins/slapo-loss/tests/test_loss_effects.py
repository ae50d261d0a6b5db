"""Effects of linear_cross_entropy in a training step: seen where its loss is computed, missing where it is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_core as slapo
from slapo_runtime.receipts.receipt import expectations, receipt, unexplained
from slapo_runtime.receipts.watch import Watch
from slapo_testing import run_ranks

from .loss_model import CHUNK, Net, batch


class Own(Net):
    """A loss of its own formula, from log-probabilities."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        logits = self.head(self.hidden(ids))
        assert labels is not None
        picked = logits.softmax(-1).gather(-1, labels.clamp_min(0)[..., None])
        return {"loss": -picked.log().mean(), "logits": logits}


class Measuring(Net):
    """A metric in the forward, of all logits."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        logits = self.head(self.hidden(ids))
        assert labels is not None
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "accuracy": (logits.argmax(-1) == labels).double().mean()}


class Reading(Net):
    """The head's weight is read, and the head is not called."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        logits = F.linear(self.hidden(ids), self.head.weight)
        assert labels is not None
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def observed(
    build: Callable[[], nn.Module],
    *,
    plant: Callable[[Any], object] = lambda sch: None,
    given: dict[str, Tensor] | None = None,
    ranks: int = 1,
    **options: Any,
) -> tuple[int, list[str]]:
    """Return the number of expected effects, and those that are missing."""
    mesh = {"tp": ranks} if ranks > 1 else None
    sch: Any = slapo.create_schedule(build(), mesh=mesh, example_inputs=batch())
    if ranks > 1:
        sch["head"].shard("weight", axis=0, pad=True).sync("bwd_post", "all_reduce")
    sch["head"].linear_cross_entropy(**{"chunk": CHUNK, **options})
    plant(sch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Watch(sch).watching() as record:
            record.steps = 1
            output = sch.model(**(given or batch()))
            (output["loss"] if "loss" in output else output["logits"].sum()).backward()
    expected = expectations(sch)
    found = [*receipt(expected, record), *unexplained(record, expected)]
    return len(found), [str(one) for one in found if not one.is_seen]


def test_a_loss_in_chunks_is_seen() -> None:
    assert observed(Net) == (2, [])
    assert observed(lambda: Net(tied=True, bias=True)) == (2, [])
    assert observed(Net, chunk=None) == (2, [])  # one chunk has all tokens
    assert observed(Net, keep_logits=True) == (1, [])
    assert observed(lambda: Net().eval(), given={"ids": batch()["ids"]}) == (0, [])


def forward_set(sch: Any) -> None:
    head = sch["head"].module
    del head.__dict__["forward"]
    head.forward = lambda hidden: F.linear(hidden, head.weight)


NO_OPS: dict[str, tuple[dict[str, Any], tuple[tuple[str, ...], ...]]] = {
    # options of `observed`, and words of each missing effect
    "a loss of its own": (
        {"build": Own},
        (
            ("calls of chunked, seen: 0", "it ran its fallback: softmax took the logits"),
            ("no tensor of more than 2 rows with 11 features", "(28, 11) of aten.mm in head"),
        ),
    ),
    "a metric": (
        {"build": Measuring},
        (("calls of chunked, seen: 1", "argmax took the logits"), ("no tensor of more than 2 rows",)),
    ),
    "no labels": (
        {"build": Net, "given": {"ids": batch()["ids"]}},
        (("seen: 0", "a forward which computes no cross entropy of the head's logits"), ("no tensor",)),
    ),
    "the weight read": (
        {"build": Reading},
        (("seen: 0", "a forward whose head did not run in training mode"),),
    ),
    "another forward": (
        {"build": Net, "plant": forward_set},
        (("seen: 0", "a forward whose head did not run in training mode"), ("no tensor", "(28, 11) of aten.mm")),
    ),
}


@pytest.mark.parametrize("name", NO_OPS)
def test_a_loss_of_real_logits_is_missing_with_its_cause(name: str) -> None:
    options, wanted = NO_OPS[name]
    _, found = observed(**options)
    assert len(found) == len(wanted), found
    for line, words in zip(found, wanted, strict=True):
        assert all(word in line for word in ("#1 linear_cross_entropy", *words)), line


def check_ranks() -> list[Any]:
    right = observed(lambda: Net(classes=15), ranks=2)
    own = observed(lambda: Own(classes=15), ranks=2)
    return [right, own[0], [line.split("expected ")[1] for line in own[1]]]


@pytest.mark.ranks
def test_a_loss_from_shards_is_seen_on_each_rank() -> None:
    for right, number, missing in run_ranks(check_ranks, world_size=2):
        assert right == (6, [])
        assert number == 6
        assert [line.startswith(("calls of chunked", "no tensor of more than 2 rows")) for line in missing] == [
            True
        ] * 3
        assert "(4, 7, 16)" in missing[2]
