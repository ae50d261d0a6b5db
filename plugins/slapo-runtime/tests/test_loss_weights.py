"""Losses that are means over unequal numbers of tokens count by these numbers, over micro-batches and replicas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from tests.messages import Messages

LEFT_OUT = -100
STEPS = 3


class Tagger(nn.Module):
    """Two layers over tokens; the loss is given, or divided by ``num_items_in_batch`` as transformers' models do.

    A penalty is a mean over the samples, and not divided by it.
    """

    def __init__(self, penalty: float) -> None:
        super().__init__()
        self.penalty = penalty
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        hidden = self.up(self.embed(tokens)).tanh()
        logits = self.head(hidden).flatten(0, 1)
        kind = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=LEFT_OUT, reduction=kind)
        loss = loss if num_items_in_batch is None else loss / num_items_in_batch
        return {"loss": loss + self.penalty * hidden.square().mean() if self.penalty else loss, "logits": logits}


class Masked(Tagger):
    """The mean is the model's own: 0 / 0 without labels, where gradients are NaN even if multiplied by 0."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": masked_mean(super().forward(tokens, labels), {"labels": labels})}


def masked_mean(output: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
    mask = (batch["labels"] != LEFT_OUT).double()
    losses = nn.functional.cross_entropy(output["logits"], batch["labels"].flatten().clamp(0), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def model(way: str = "") -> Tagger:
    torch.manual_seed(3)
    kind = Masked if way == "the model's masked mean" else Tagger
    return kind(0.7 if way == "num_items_in_batch" else 0.0).double()


WAYS = ("loss_weight", "num_items_in_batch", "a masked mean", "the model's masked mean")


def full(step: int) -> dict[str, torch.Tensor]:
    """Eight sequences, whose numbers of labels differ much: one of four micro-batches has none."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(11, (8, 6), generator=generator)
    labels = torch.randint(5, (8, 6), generator=generator)
    for row, count in enumerate((0, 0, 6, 5, 6, 6, 4, 3)):
        labels[row, count:] = LEFT_OUT
    return {"tokens": tokens, "labels": labels}


def count(batch: Any) -> torch.Tensor:
    return (batch["labels"] != LEFT_OUT).sum()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def reference(way: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process, the whole batch: the mean over all labels."""
    plain = model(way)
    optimizer, losses = sgd(plain.parameters()), []
    for step in range(STEPS):
        loss = plain(**full(step))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, plain.state_dict()


def train(mesh: Any, way: str, options: Any) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """Train a rank's share of the batch; the losses are those of its replica."""
    example = full(0)
    sch = slapo.create_schedule(model(way), mesh=mesh, example_inputs=example)
    if mesh and "pp" in mesh:
        sch["up"].pipeline_split()
    weight = {} if way in ("", "num_items_in_batch") else {"loss_weight": count}
    loss = {"loss": masked_mean} if way == "a masked mean" else {}
    engine: Any = slapo.build(sch, optimizer=sgd, **weight, **loss, **options)
    replicas, place = (sch.mesh.size("dp"), sch.mesh.rank("dp")) if sch.mesh is not None else (1, 0)
    losses = []
    for step in range(STEPS):
        batch: dict[str, Any] = {name: one.chunk(replicas)[place] for name, one in full(step).items()}
        if way == "num_items_in_batch":
            batch["num_items_in_batch"] = count(full(step))
        losses.append(float(engine.train_step(batch).loss.detach()))
    share: dict[str, Any] = {name: one.chunk(replicas)[place] for name, one in full(9).items()}
    return losses, engine.state_dict(), float(engine.eval_step(share).loss)


def train_all(mesh: Any, options: Any) -> dict[str, tuple[list[float], dict[str, torch.Tensor], float]]:
    return {way: train(mesh, way, options) for way in WAYS}


def compare(found: list[tuple[list[float], dict[str, torch.Tensor], float]], replicas: int, way: str = "") -> None:
    losses, state = reference(way)
    for _, own, _ in found:
        for name, value in own.items():
            torch.testing.assert_close(value, state[name], rtol=1e-10, atol=1e-12)
    means = torch.tensor([own for own, _, _ in found], dtype=torch.float64).mean(0)
    torch.testing.assert_close(means, torch.tensor(losses, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    assert replicas <= len(found)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_micro_batches_count_by_their_labels(accumulate: int, way: str) -> None:
    compare([train(None, way, {"accumulate": accumulate})], 1, way)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_plain_mean_of_means_is_another_training(accumulate: int) -> None:
    """The comparison sees the difference: without weights it fails, and accumulating warns of it."""
    if accumulate == 1:
        compare([train(None, "", {})], 1)
        return
    with pytest.warns(UserWarning, match="loss_weight"), pytest.raises(AssertionError):
        compare([train(None, "", {"accumulate": accumulate})], 1)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp": 2}, {"accumulate": 2, "static_graph": True}),  # an option of DistributedDataParallel
        ({"pp": 2}, {"microbatches": 4}),
        ({"pp": 2, "dp": 2}, {"microbatches": 2, "pipeline_schedule": "interleaved_zero_bubble"}),
    ],
    ids=str,
)
def test_replicas_and_stages_count_by_their_labels(mesh: Any, options: Any) -> None:
    found = run_ranks(train_all, mesh, options, world_size=math.prod(mesh.values()))
    for way in WAYS:
        compare([one[way] for one in found], mesh.get("dp", 1), way)


def counted_alone() -> str:
    sch = slapo.create_schedule(model(), mesh={"dp": 2})
    engine = slapo.build(sch, optimizer=sgd)
    own = {name: one.chunk(2)[sch.mesh.rank("dp")] for name, one in full(0).items()}
    with pytest.raises(slapo.RankMismatchError) as error:
        engine.train_step({**own, "num_items_in_batch": count(own)})
    return str(error.value)


@pytest.mark.ranks
def test_a_count_of_one_replica_alone_is_refused(message: Messages) -> None:
    one, other = run_ranks(counted_alone, world_size=2)
    assert one == other
    message(one, "num_items_in_batch", "11", "19", "replicas")


@pytest.mark.parametrize(
    ("weight", "word"), [(lambda batch: batch["labels"], "a number"), (lambda batch: 0, "sum to 0")], ids=["all", "0"]
)
def test_weights_that_are_no_numbers_are_refused(weight: Any, word: str) -> None:
    engine = slapo.build(slapo.create_schedule(model()), optimizer=sgd, loss_weight=weight)
    before = {name: one.clone() for name, one in engine.state_dict().items()}
    with pytest.raises(slapo.BuildError, match=word):
        engine.train_step(full(0))
    assert all(torch.equal(one, before[name]) for name, one in engine.state_dict().items())


def test_a_later_step_without_items_is_refused_and_changes_nothing(message: Messages) -> None:
    weights = iter([3, 0, 0])
    engine = slapo.build(slapo.create_schedule(model()), optimizer=sgd, loss_weight=lambda batch: next(weights))
    assert engine.train_step(full(0)).loss.isfinite()
    before = {name: one.clone() for name, one in engine.state_dict().items()}
    with pytest.raises(slapo.BuildError) as error:
        engine.train_step(full(0))
    message(error, "sum to 0")
    assert all(torch.equal(one, before[name]) for name, one in engine.state_dict().items())
    assert engine.eval_step(full(0)).loss.isnan()  # as torch's means over nothing are


def test_loss_weights_given_twice_are_refused() -> None:
    engine = slapo.build(slapo.create_schedule(model()), optimizer=sgd, loss_weight=count)
    with pytest.raises(slapo.BuildError, match="num_items_in_batch"):
        engine.train_step({**full(0), "num_items_in_batch": count(full(0))})
    with pytest.raises(slapo.BuildError, match="loss_weight"):
        slapo.build(slapo.create_schedule(model()), optimizer=sgd, loss_weight=3)  # type: ignore[arg-type]


def hugging_face(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
        made = transformers.GPT2LMHeadModel(config)
    else:
        made = transformers.BertForMaskedLM(transformers.BertConfig(**small, intermediate_size=16))
    made.config.use_cache = False
    tokens = torch.randint(1, 30, (4, 6))
    return made, {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_model_that_takes_a_count_and_does_not_divide_by_it_is_refused(name: str, message: Messages) -> None:
    made, batch = hugging_face(name)
    engine = slapo.build(slapo.create_schedule(made), optimizer=sgd, accumulate=2)
    counted = {**batch, "num_items_in_batch": torch.tensor(20)}
    if name == "gpt2":
        assert engine.train_step(counted).loss.isfinite()
        return
    with pytest.raises(slapo.BuildError) as error:
        engine.train_step(counted)
    message(error, "num_items_in_batch", "BertForMaskedLM", "loss_weight")


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        boxes = self.head(self.up(x)).split(1)
        losses = [(box - one["boxes"]).square().mean() for box, one in zip(boxes, targets, strict=True)]
        return {"loss": torch.stack(losses).mean()}


def staged_targets() -> tuple[float, str]:
    """Targets of one size are cut between the samples; of several, the stages are not those of all micro-batches."""
    torch.manual_seed(0)
    plain, x = Detector(), torch.randn(4, 4)
    loss = plain(x, alike := [{"boxes": torch.full((1, 4), float(number))} for number in range(4)])["loss"]
    sch = slapo.create_schedule(plain, mesh={"pp": 2}, example_inputs={"x": x, "targets": alike})
    sch["up"].pipeline_split()
    engine = slapo.build(sch, optimizer=sgd, microbatches=2)
    off = float(engine.train_step({"x": x, "targets": alike}).loss - loss)
    with pytest.raises(slapo.BuildError) as error:
        engine.train_step({"x": x, "targets": [*alike[:3], {"boxes": torch.ones(2, 4)}]})
    return off, str(error.value)


def staged_count() -> tuple[str, tuple[float, str]]:
    targets = staged_targets()
    made, batch = hugging_face("bert")
    counted = {**batch, "num_items_in_batch": torch.tensor(20)}
    sch = slapo.create_schedule(made, mesh={"pp": 2}, example_inputs=counted)
    sch["bert.encoder.layer.0"].pipeline_split()
    engine = slapo.build(sch, optimizer=sgd, microbatches=2)
    with pytest.raises(slapo.BuildError) as error:
        engine.train_step(counted)
    return str(error.value), targets


@pytest.mark.ranks
def test_unread_item_counts_and_targets_of_several_sizes_are_refused_on_every_rank(message: Messages) -> None:
    (first, (off, targets)), second = run_ranks(staged_count, world_size=2)
    assert (first, (off, targets)) == second
    message(first, "num_items_in_batch", "**kwargs", "loss_weight")
    assert abs(off) < 1e-6
    message(targets, "'targets' differs", "loss=lambda")
