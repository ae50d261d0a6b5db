"""What dropout draws is compared: who drops, how often, how much; and the numbers, where the stream is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slapo_core as slapo
from slapo_core import Node
from slapo_core.internals import Edit
from slapo_runtime.launcher import run_ranks
from slapo_verify.dropout import Draw, compare_draws
from tests.messages import Messages
from tests.tiers import crossed

from . import test_verification_ranks as mini


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.fc, self.act, self.drop = nn.Linear(6, 6), nn.GELU(), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.act(self.fc(x)))


class Net(nn.Module):
    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block(p) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layer:
            x = block(x)
        return x


class Function(nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.function(self, input)


@dataclass(frozen=True)
class OwnStream(slapo.Primitive):
    """Draw one number first, so that what is dropped after it is other than in the reference model."""

    name = "drop.own_stream"
    equivalence = slapo.Equivalence.RANDOM

    def apply(self, node: Node, edit: Edit) -> None:
        edit.wrap_forward(node, lambda forward: lambda module, x: (torch.rand(()), forward(module, x))[1])


@dataclass(frozen=True)
class Twice(slapo.Primitive):
    """Drop out twice, and promise the same distribution."""

    name = "drop.twice"
    equivalence = slapo.Equivalence.RANDOM

    def apply(self, node: Node, edit: Edit) -> None:
        edit.wrap_forward(node, lambda forward: lambda module, x: forward(module, forward(module, x)))


def scheduled(p: float = 0.1) -> slapo.Schedule:
    torch.manual_seed(0)
    return slapo.create_schedule(Net(p))


def failure(sch: slapo.Schedule) -> slapo.VerifyError:
    torch.manual_seed(1)
    with pytest.raises(slapo.VerifyError) as caught:
        slapo.verify(sch, torch.randn(4, 6))
    return caught.value


def test_recomputing_with_other_dropout_than_the_forward_had_is_found_and_keeping_it_agrees(message: Messages) -> None:
    for keep in (True, False):
        sch = scheduled(0.5)
        sch["layer.0"].checkpoint()
        sch["layer.1"].checkpoint(preserve_rng_state=keep)
        if keep:
            report = slapo.verify(sch, torch.randn(4, 6))
            kinds = {entry.kind: (entry.compared, entry.difference) for entry in report.largest}
            assert kinds["output with dropout"] == (1, 0.0)
            assert kinds["gradient with dropout"] == (6, 0.0)
            assert report.notes == ()
        else:
            error = failure(sch)
            assert error.tensor == "recomputed dropout of layer.1.drop"
            assert error.steps == ("#2 checkpoint(preserve_rng_state=False) at 'layer.1'",)
            message(error, "other random numbers", "checkpoint(preserve_rng_state=True)")


def test_wrong_gradients_that_only_dropout_shows_are_found() -> None:
    sch = scheduled(0.5)
    sch["layer.0"].checkpoint()
    sch["layer.1.drop"].replace(Function(_gradient_without_mask))
    error = failure(sch)
    assert error.tensor == "gradient of layer.1.fc.bias with dropout"
    assert [step.partition("(")[0] for step in error.steps] == ["#2 replace"]


def _gradient_without_mask(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + (F.dropout(x, 0.5, module.training) - x).detach()


def test_recomputing_with_other_dropout_is_found_where_the_schedule_draws_otherwise_anyway() -> None:
    sch = scheduled(0.5)
    sch["layer.0.drop"].replace(Function(lambda module, x: F.dropout(x.t(), 0.5, module.training).t()))
    sch["layer.1"].checkpoint(preserve_rng_state=False)
    error = failure(sch)
    assert error.tensor == "recomputed dropout of layer.1.drop"
    assert error.steps == ("#2 checkpoint(preserve_rng_state=False) at 'layer.1'",)


def test_without_dropout_the_random_state_need_not_be_kept() -> None:
    sch = scheduled(0.0)
    sch["layer.*"].checkpoint(preserve_rng_state=False)
    assert "output with dropout" not in {entry.kind for entry in slapo.verify(sch, torch.randn(4, 6)).largest}


WRONG: dict[str, tuple[nn.Module, str, str]] = {
    "no dropout": (
        nn.Identity(),
        "dropout of layer.1.drop",
        "drops nothing",
    ),
    "more": (nn.Dropout(0.5), "dropout of layer.1.drop", "p=0.5, not p=0.1"),
    "twice": (
        Function(lambda module, x: F.dropout(F.dropout(x, 0.1, module.training), 0.1, module.training)),
        "dropout of layer.1.drop",
        "2 times, not once",
    ),
    "in evaluation": (
        Function(lambda module, x: F.dropout(x, 0.1)),
        "dropout of layer.1.drop in evaluation mode",
        "p=0.1, the reference model drops nothing",
    ),
}


@pytest.mark.parametrize(("name", "random"), crossed(WRONG, ["", "layer.2", "layer.1", "layer.1.drop"]))
def test_dropout_that_is_gone_stronger_or_on_in_evaluation_is_blamed_on_its_step(
    name: str, random: str, message: Messages
) -> None:
    module, tensor, word = WRONG[name]
    sch = scheduled()
    sch["layer.0"].checkpoint()
    sch["layer.1.drop"].replace(module)
    if random:  # a promise of other numbers is none of another probability, wherever it was made
        sch[random].apply(OwnStream())
    error = failure(sch)
    assert error.tensor == tensor
    if random:
        assert word in error.message.splitlines()[0]
    else:
        message(error, word, "F.dropout(x, p, training=self.training)")
    assert [step.partition("(")[0] for step in error.steps] == ["#2 replace"]
    assert error.path == "layer.1.drop"


def test_the_same_dropout_written_otherwise_agrees() -> None:
    sch = scheduled()
    sch["layer.1.drop"].replace(Function(lambda module, x: torch.dropout(x, 0.1, module.training)))
    report = slapo.verify(sch, torch.randn(4, 6))
    assert {entry.kind: entry.difference for entry in report.largest}["gradient with dropout"] == 0.0


def test_a_step_that_promises_another_stream_is_not_held_to_this_one_and_the_report_says_so() -> None:
    sch = scheduled()
    sch["layer.1.drop"].apply(OwnStream())
    report = slapo.verify(sch, torch.randn(4, 6))
    assert report.notes == (
        "outputs and gradients with dropout were not compared: a step promises the same distribution only (RANDOM)",
    )


def test_a_step_that_promises_the_same_distribution_and_drops_twice_is_found(message: Messages) -> None:
    sch = scheduled()
    sch["layer.1.drop"].apply(Twice())
    message(failure(sch), "layer.1.drop", "2 times, not once")


def test_dropout_of_another_shape_is_not_compared_and_the_report_says_where() -> None:
    sch = scheduled()
    axes = Function(lambda module, x: F.dropout(x.t(), 0.1, module.training).t())
    sch["layer.1.drop"].replace(axes)
    report = slapo.verify(sch, torch.randn(4, 6))
    assert report.notes == (
        "outputs and gradients with dropout were not compared: 'layer.1.drop' drops (6, 4), the reference model (4, 6)",
    )


def test_dropout_of_recurrent_and_attention_modules_counts_too(message: Messages) -> None:
    class Recurrent(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 6, 2, dropout=p, batch_first=True)
            self.attention = nn.MultiheadAttention(6, 2, dropout=p, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, _ = self.lstm(x)
            return self.attention(x, x, x, need_weights=False)[0]

    class Scaled(nn.Module):
        def forward(self, input: torch.Tensor) -> Any:
            p = 0.3 if self.training else 0.0
            return F.scaled_dot_product_attention(input, input, input, dropout_p=p)

    sch = slapo.create_schedule(nn.Sequential(Recurrent(0.2), Scaled()))
    sch["0"].checkpoint()
    report = slapo.verify(sch, torch.randn(2, 3, 6))
    assert {entry.kind: entry.difference for entry in report.largest}["gradient with dropout"] == 0.0
    for path, new, word in (
        ("0.lstm", nn.LSTM(6, 6, 2, dropout=0.6, batch_first=True), "p=0.6, not p=0.2"),
        (
            "0.attention",
            nn.MultiheadAttention(6, 2, batch_first=True),
            "drops nothing",
        ),
    ):
        sch = slapo.create_schedule(nn.Sequential(Recurrent(0.2), Scaled()))
        sch[path].replace(new)
        with pytest.raises(slapo.VerifyError) as caught:
            slapo.verify(sch, torch.randn(2, 3, 6))
        message(caught, f"dropout of {path}", word)


class Split(nn.Module):
    """Two linear layers, of which the first is split by rows and the second by columns, between two dropouts."""

    def __init__(self, inner: float) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Dropout(0.3), nn.Dropout(inner), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.down(self.inner(self.up(self.before(x)))))


def verify_split(inner: float, **wrong: bool) -> Any:
    torch.manual_seed(0)
    sch = slapo.create_schedule(Split(inner), mesh={"tp": 2})
    sch["up"].apply(mini.Split(("weight", "bias"), axis=0))
    sch["down"].apply(mini.Split(("weight",), axis=1))
    sch["up"].apply(mini.Reduce("backward"))
    sch["down"].apply(mini.Reduce("forward"))
    if wrong:
        sch["after"].checkpoint(preserve_rng_state=False)
    return mini.outcome(sch, torch.ones(4, 8))


def verify_splits() -> list[Any]:
    return [verify_split(0.0), verify_split(0.5), verify_split(0.5, wrong=True)]


@pytest.mark.ranks
def test_on_several_ranks_dropout_is_compared_unless_a_rank_drops_in_a_piece() -> None:
    (whole, pieces, wrong), second = run_ranks(verify_splits, world_size=2)
    assert [whole, pieces, wrong.message] == [*second[:2], second[2].message]
    assert {entry.kind: entry.compared for entry in whole.largest}["gradient with dropout"] == 3
    assert whole.notes == ()
    assert pieces.notes == (
        "outputs and gradients with dropout were not compared: 'inner' drops (4, 8), the reference model (4, 16)",
        "the ranks drop the same elements of different shards at 'inner': "
        'sch["inner"].fork_rng() gives each rank its own RNG stream',
    )
    assert wrong.tensor == "recomputed dropout of after"
    assert wrong.steps == ("#5 checkpoint(preserve_rng_state=False) at 'after'",)


def draw(path: str, p: float = 0.1, shape: tuple[int, ...] = (2, 4), order: tuple[int, ...] = (0, 1)) -> Draw:
    return Draw(path, "dropout", p, shape, order)


def test_a_region_that_tensors_are_split_in_may_draw_another_number_of_times_but_never_with_another_probability(
    message: Messages,
) -> None:
    rules: dict[str, Any] = {"is_random": False, "is_split": lambda path: path == "a"}
    assert compare_draws([draw("a"), draw("a")], [draw("a")], **rules).other_stream == "'a' drops once, not 2 times"
    message(compare_draws([draw("b"), draw("b")], [draw("b")], **rules).wrong, "once, not 2 times")
    message(compare_draws([draw("a", 0.2)], [draw("a")], **rules).wrong, "p=0.1, not p=0.2")
    assert compare_draws([draw("a")], [draw("a", shape=(2, 2))], **rules).other_stream == (
        "'a' drops (2, 2), the reference model (2, 4)"
    )
    assert compare_draws([draw("b")], [draw("b", order=(1, 0))], **rules).other_stream == (
        "'b' drops in another memory order than the reference model"
    )


def test_dropout_beside_split_layers_may_not_be_gone_or_grow_unless_it_draws_for_other_pieces(
    message: Messages,
) -> None:
    rules: dict[str, Any] = {"is_random": False, "is_split": lambda path: True}
    gone = compare_draws([draw("a"), draw("b")], [draw("b")], **rules)
    assert gone.path == "a"
    message(gone.wrong, "drops nothing")
    on_another_rank = compare_draws([draw("a"), draw("b")], [draw("b")], is_local=lambda path: path != "a", **rules)
    assert on_another_rank.wrong is None
    whole = compare_draws([draw("a")], [draw("a"), draw("a")], **rules)
    message(whole.wrong, "2 times, not once")
    pieces = compare_draws([draw("a")], [draw("a", shape=(2, 2)), draw("a", shape=(2, 2))], **rules)
    assert pieces.other_stream == "'a' drops 2 times, not once"
    # What is right at one module excuses nothing at another one.
    both = compare_draws([draw("a"), draw("a"), draw("b")], [draw("a")], **rules)
    assert both.path == "b"
    message(both.wrong, "drops nothing")
    moved = compare_draws([draw("a")], [draw("a.0")], **rules)
    assert (moved.wrong, moved.other_stream) == (None, None)
    # One of two calls of a module runs in a fused region, and the dropout on shards beside it in another.
    fused = [draw("layer", shape=(2, 2)), draw("layer"), draw("layer.dropout")]
    plain = [draw("layer.attention", shape=(4, 4)), draw("layer.dropout"), draw("layer.dropout")]
    assert compare_draws(plain, fused, **rules).wrong is None
    # Another call on shards does not stand for one that is gone.
    shards = [draw("layer.dropout", shape=(2, 2)) for _ in range(3)]
    assert compare_draws(plain, shards, **rules).path == "layer.attention"
