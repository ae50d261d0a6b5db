"""The engine trains as a plain loop does, on one rank and on several."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_runtime.launcher import run_ranks
from tests.messages import Messages
from tests.support.building import Cnn, Mlp, adam, batches, bert, real, sgd, split


def plain_run(count: int, *, size: int = 8, max_grad_norm: float | None = None) -> tuple[list[float], Any, list[float]]:
    """Losses, final state and gradient norms of a loop without slapo."""
    model = real("mlp").double()
    optimizer = sgd(list(model.parameters()))
    losses, norms = [], []
    for batch in batches(count, size):
        loss = model(**{name: value.double() for name, value in batch.items()})
        optimizer.zero_grad()
        loss.backward()
        if max_grad_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict(), norms


def engine_run(
    mesh: dict[str, int] | None, count: int, *, size: int = 8, max_grad_norm: float | None = None
) -> tuple[list[float], Any, list[float]]:
    """The same by an engine; over ``dp``, each replica takes its part of the batch."""
    schedule = slapo.create_schedule(real("mlp").double(), mesh=mesh)
    if mesh is not None:
        split(schedule, "mlp")
    engine = slapo.build(schedule, optimizer=sgd, max_grad_norm=max_grad_norm)
    replicas = schedule.mesh.size("dp") if schedule.mesh is not None else 1
    place = schedule.mesh.rank("dp") if schedule.mesh is not None else 0
    losses, norms = [], []
    for batch in batches(count, size):
        part = {name: value.double().chunk(replicas)[place] for name, value in batch.items()}
        result = engine.train_step(part)
        losses.append(result.loss.item())
        if result.grad_norm is not None:
            norms.append(result.grad_norm.item())
    return losses, engine.state_dict(), norms


def check(result: tuple[list[float], Any, list[float]], expected: tuple[list[float], Any, list[float]]) -> None:
    assert result[0] == pytest.approx(expected[0], rel=1e-12)
    assert result[2] == pytest.approx(expected[2], rel=1e-12)
    for key, tensor in expected[1].items():
        torch.testing.assert_close(result[1][key], tensor, rtol=1e-12, atol=1e-14)


def test_an_unscheduled_engine_takes_the_steps_of_a_plain_loop() -> None:
    check(engine_run(None, 4), plain_run(4))
    check(engine_run(None, 4, max_grad_norm=0.1), plain_run(4, max_grad_norm=0.1))


@pytest.mark.ranks
def test_a_split_model_takes_the_steps_of_a_plain_loop_and_clips_by_the_norm_over_all_ranks() -> None:
    expected = plain_run(4, max_grad_norm=0.1)
    assert all(norm > 0.1 for norm in expected[2])
    for result in run_ranks(engine_run, {"tp": 2}, 4, max_grad_norm=0.1, world_size=2):
        check(result, expected)


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_replicas_train_as_one_process_with_the_full_batch(mesh: dict[str, int]) -> None:
    expected = plain_run(4, max_grad_norm=0.1)
    world_size = 2 * mesh.get("tp", 1)
    results = run_ranks(engine_run, mesh, 4, max_grad_norm=0.1, world_size=world_size)
    for losses, state, norms in results:
        check((expected[0], state, norms), expected)
        assert losses != pytest.approx(expected[0])  # a replica's loss is that of its own part
    means = [sum(losses) / world_size for losses in zip(*(result[0] for result in results), strict=True)]
    assert means == pytest.approx(expected[0], rel=1e-12)


def paths_with_replicas() -> tuple[list[str], str, bool]:
    engine = slapo.build(slapo.create_schedule(real("mlp"), mesh={"dp": 2}), optimizer=sgd)
    before = type(engine.module).__name__
    frozen = real("mlp").requires_grad_(False)
    evaluated = slapo.build(slapo.create_schedule(frozen, mesh={"dp": 2})).eval_step(next(batches(1)))
    return [name for name, _ in engine.module.named_parameters()], before, bool(evaluated.loss.isfinite())


@pytest.mark.ranks
def test_the_module_keeps_its_paths_under_data_parallelism() -> None:
    assert run_ranks(paths_with_replicas, world_size=2) == [(["fc1.weight", "fc1.bias", "fc2.weight"], "Mlp", True)] * 2


def test_batches_may_be_mappings_tuples_or_one_argument() -> None:
    batch = next(batches(1))
    engine = slapo.build(slapo.create_schedule(real("mlp")))
    by_name = engine.eval_step(batch).loss
    assert torch.equal(engine.eval_step((batch["x"], batch["y"])).loss, by_name)
    assert torch.equal(engine.eval_step([batch["x"], batch["y"]]).loss, by_name)

    mean = slapo.build(slapo.create_schedule(nn.Linear(6, 1)), loss=lambda output, batch: output.mean())
    assert mean.eval_step(batch["x"]).output.shape == (8, 1)


def test_the_loss_of_a_model_output_is_used() -> None:
    model = bert()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    engine = slapo.build(slapo.create_schedule(model), optimizer=adam)
    tokens = torch.arange(12).reshape(2, 6)
    expected = model(input_ids=tokens, labels=tokens).loss
    result = engine.train_step({"input_ids": tokens, "labels": tokens})
    assert torch.equal(result.loss, expected.detach())
    assert not result.loss.requires_grad
    assert result.grad_norm is None

    class Dictionary(Mlp):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": super().forward(x, y)}

    assert slapo.build(slapo.create_schedule(Dictionary())).eval_step(next(batches(1))).loss.isfinite()


def test_labels_that_the_forward_does_not_take_are_left_to_the_loss() -> None:
    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        labels = batch["labels"] if isinstance(batch, dict) else batch[1]
        return nn.functional.cross_entropy(output, labels)

    torch.manual_seed(0)
    engine = slapo.build(slapo.create_schedule(Cnn()), optimizer=adam, loss=loss)
    images, labels = torch.randn(6, 3, 8, 8), torch.arange(6) % 5
    losses = [engine.train_step({"x": images, "labels": labels}).loss.item() for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    assert engine.train_step((images, labels)).loss.item() < losses[0]
    assert engine.state_dict()["norm.num_batches_tracked"].item() == 21


@pytest.mark.parametrize(
    ("loss", "word"),
    [
        (None, "the output of Linear"),
        (lambda output, batch: output, "got a tensor of shape (4, 3)"),
        (lambda output, batch: None, "got None"),
    ],
)
def test_a_step_without_a_scalar_loss_is_refused(loss: Any, word: str, message: Messages) -> None:
    engine = slapo.build(slapo.create_schedule(nn.Linear(2, 3)), optimizer=sgd, loss=loss)
    before = engine.state_dict()
    with pytest.raises(slapo.BuildError) as error:
        engine.train_step(torch.ones(4, 2))
    message(error, word)
    assert all(torch.equal(tensor, before[key]) for key, tensor in engine.state_dict().items())


def test_evaluating_computes_no_gradients_and_restores_the_mode_of_every_module() -> None:
    model = Cnn()
    model.norm.eval()
    engine = slapo.build(
        slapo.create_schedule(model), loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1])
    )
    modes = [module.training for module in model.modules()]
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    result = engine.eval_step((torch.randn(6, 3, 8, 8), torch.arange(6) % 5))
    assert [module.training for module in model.modules()] == modes
    assert not result.output.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())

    model.train()
    with pytest.raises(TypeError):
        engine.eval_step({"no": "such argument"})
    assert all(module.training for module in model.modules())


def test_training_without_an_optimizer_and_after_close_is_refused(message: Messages) -> None:
    engine = slapo.build(slapo.create_schedule(real("mlp")))
    with pytest.raises(slapo.BuildError) as error:
        engine.train_step(next(batches(1)))
    message(error, "without an optimizer", "build(sch, optimizer=")
    engine.close()
    for step in (engine.train_step, engine.eval_step):
        with pytest.raises(slapo.BuildError) as error:
            step(next(batches(1)))
        message(error, "closed")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_results_have_the_facts_of_the_step(accumulate: int) -> None:
    def halved(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    rate = torch.tensor(0.25)
    engine = slapo.build(
        slapo.create_schedule(nn.Linear(3, 1)),
        optimizer=lambda params: torch.optim.AdamW(params, lr=rate, capturable=False, foreach=False),
        lr_scheduler=halved,
        loss=lambda output, batch: output.mean(),
        loss_weight=lambda batch: batch.sum(),
        accumulate=accumulate,
    )
    for step in range(2):
        before = time.perf_counter()
        result = engine.train_step(torch.full((4, 3), step + 1.0))
        assert float(result.learning_rate) == 0.25 / 2**step
        assert result.tokens is not None
        assert float(result.tokens) == 12.0 * (step + 1)
        assert result.seconds is not None
        assert 0 < result.seconds < time.perf_counter() - before
    assert result.peak_memory > 1 << 20
    evaluated = engine.eval_step(torch.ones(4, 3))
    assert (evaluated.learning_rate, evaluated.tokens, evaluated.seconds) == (None, None, None)
