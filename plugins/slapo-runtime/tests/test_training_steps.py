"""A training step trains: in training mode, with gradients, on the whole batch, whatever was done in between."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import slapo_core as slapo
from slapo_runtime.batches import labels_left_out, micro_batches
from slapo_runtime.engine import UnusedParameters
from tests.messages import Messages
from tests.support.building import Cnn, adam, batches, bert, real, sgd


def cross_entropy(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def test_a_model_that_comes_in_evaluation_mode_is_trained_with_dropout(tmp_path: Path, message: Messages) -> None:
    bert().save_pretrained(tmp_path)
    model = type(bert()).from_pretrained(tmp_path)
    assert not model.training
    engine = slapo.build(slapo.create_schedule(model), optimizer=adam)
    tokens = torch.arange(12).reshape(2, 6)
    batch = {"input_ids": tokens, "labels": tokens}
    dropped: list[bool] = []
    dropout = next(module for module in model.modules() if isinstance(module, nn.Dropout))
    dropout.register_forward_hook(lambda module, args, output: dropped.append(bool((output == 0).any())))
    for _ in range(2):  # as it comes, and after somebody's own evaluation
        with pytest.warns(UserWarning, match="evaluation mode") as caught:
            engine.train_step(batch)
        message(caught[0].message, "BertForMaskedLM", "model.train()")
        assert all(module.training for module in model.modules())
        model.eval()
    assert dropped == [True, True]

    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.train_step(batch)
        engine.eval_step(batch)
    assert dropped == [True, True, True, False]


def test_modules_in_evaluation_mode_by_choice_stay_so() -> None:
    model = Cnn()
    model.norm.eval()
    engine = slapo.build(slapo.create_schedule(model), optimizer=sgd, loss=cross_entropy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.train_step((torch.randn(6, 3, 8, 8), torch.arange(6) % 5))
    assert not model.norm.training
    assert int(model.norm.num_batches_tracked) == 0
    model.eval()
    model.head.train()  # a choice too, for a head that is trained alone
    engine.train_step((torch.randn(6, 3, 8, 8), torch.arange(6) % 5))
    assert [name for name, module in model.named_modules() if module.training] == ["head"]


@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused(block: Any, message: Messages) -> None:
    engine = slapo.build(slapo.create_schedule(real("mlp")), optimizer=sgd)
    with block(), pytest.raises(slapo.BuildError) as error:
        engine.train_step(next(batches(1)))
    message(error, "train_step()", "torch.no_grad()")


@pytest.mark.parametrize("what", ["detached", "frozen"])
def test_a_loss_without_a_gradient_is_refused_and_can_be_evaluated(what: str, message: Messages) -> None:
    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return output.detach() if what == "detached" else output

    model = real("mlp").requires_grad_(what != "frozen")
    engine = slapo.build(slapo.create_schedule(model), optimizer=sgd, loss=loss)
    with pytest.raises(slapo.BuildError) as error:
        engine.train_step(next(batches(1)))
    message(error, "does not require grad")
    assert engine.eval_step(next(batches(1))).loss.isfinite()


@pytest.mark.parametrize("count", [1, 2, 8])
def test_accumulated_steps_equal_full_batch_steps_also_with_an_lr_scheduler(count: int) -> None:
    model = real("mlp").double()
    optimizer, losses, norms = sgd(list(model.parameters())), [], []
    rates = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3)
    engine = slapo.build(
        slapo.create_schedule(real("mlp").double()), optimizer=sgd, max_grad_norm=0.1, accumulate=count
    )
    own_rates = torch.optim.lr_scheduler.LinearLR(engine.optimizer, 0.1, 1.0, 3)
    for batch in batches(4):
        batch = {name: value.double() for name, value in batch.items()}
        loss = model(**batch)
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        rates.step()
        result = engine.train_step(batch)
        own_rates.step()
        assert not result.loss.requires_grad
        losses.append((loss.item(), result.loss.item()))
        assert result.grad_norm.item() == pytest.approx(norms[-1], rel=1e-12)
    assert [a for _, a in losses] == pytest.approx([b for b, _ in losses], rel=1e-12)
    for key, tensor in engine.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[key], rtol=1e-12, atol=1e-14)


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_batches_of_every_form_are_cut_along_the_first_axis() -> None:
    x, y, scale = torch.arange(8).reshape(4, 2), torch.arange(4), torch.tensor(3.0)
    assert micro_batches({"x": x}, 1) == [{"x": x}]
    first, second = micro_batches({"x": x, "scale": scale, "flag": True, "none": None, "deep": [{"y": y}]}, 2)
    assert torch.equal(second["x"], x[2:])
    assert (first["scale"] is scale, first["flag"], first["none"]) == (True, True, None)
    assert torch.equal(first["deep"][0]["y"], y[:2])
    assert [piece.tolist() for piece in micro_batches(y, 4)] == [[0], [1], [2], [3]]
    assert [piece.y.tolist() for piece in micro_batches(Pair(x, y), 2)] == [[0, 1], [2, 3]]
    assert [(len(a), len(b), c) for a, b, c in micro_batches((x, y, "mean"), 2)] == [(2, 2, "mean")] * 2


def test_lists_are_cut_between_the_items_of_samples_or_through_their_tensors() -> None:
    x, boxes = torch.arange(4), [torch.ones(rows, 4) for rows in (1, 0, 3, 4)]
    targets = tuple({"boxes": one, "name": "a", "nested": {"area": (one.sum(),)}} for one in boxes)
    _, second = micro_batches({"x": x, "targets": targets}, 2)
    assert [one["boxes"].shape for one in second["targets"]] == [(3, 4), (4, 4)]
    assert second["targets"] == targets[2:]
    first, _ = micro_batches({"deep": {"targets": [*targets[:3], None]}, "pairs": [(one, 1) for one in boxes]}, 2)
    assert first["deep"]["targets"] == list(targets[:2])
    assert len(first["pairs"]) == 2
    images, several = [torch.ones(3, 5, 5), torch.ones(3, 4, 6)] * 2, [torch.ones(2, 3), torch.ones(2, 5)]
    for number in (2, 3):  # as many as channels, too
        first, *_ = micro_batches((images[:number], [{"boxes": one} for one in boxes[:number]]), number)
        assert [one.shape for one in first[0]] == [(3, 5, 5)]
    (one, _) = micro_batches({"levels": [x, x.clone(), x.clone()], "x": x}, 2)  # an item for each level
    assert [level.tolist() for level in one["levels"]] == [[0, 1]] * 3
    one, _ = micro_batches({"views": several}, 2, axes={"views": 0})
    assert [view.shape for view in one["views"]] == [(1, 3), (1, 5)]
    with pytest.warns(UserWarning, match="between the dictionaries"):  # two images, each with two boxes
        one, _ = micro_batches({"x": x[:2], "targets": [{"boxes": torch.ones(2, 4)}] * 2}, 2)
    assert [target["boxes"].shape for target in one["targets"]] == [(2, 4)]
    assert labels_left_out(micro_batches({"x": x, "targets": [{"labels": one.long()} for one in boxes]}, 2)) is None


@pytest.mark.parametrize("samples", [2, 3])
def test_positions_beside_tokens_are_cut_along_their_second_axis(samples: int) -> None:
    ids, positions = torch.ones(samples, 6, dtype=torch.long), torch.ones(3, samples, 6, dtype=torch.long)
    for first, *_ in (
        micro_batches({"ids": ids, "position_ids": positions, "labels": ids[:, 0]}, samples),
        micro_batches({"ids": ids, "codes": positions}, samples, axes={"codes": 1}),
    ):
        assert [one.shape[:2] for one in first.values() if one.dim() > 1] == [(1, 6), (3, 1)]
    images = {"images": torch.ones(3, 3, 6, 6), "masks": torch.ones(3, 6, 6, dtype=torch.long)}
    assert micro_batches(images, 3)[0]["images"].shape == (1, 3, 6, 6)
    with pytest.warns(UserWarning, match="batch_axes={'codes': 1}"):
        first, *_ = micro_batches({"ids": ids[:1].expand(3, -1), "codes": positions[:, :1].expand(3, 3, -1)}, 3)
    assert first["codes"].shape == (1, 3, 6)


@pytest.mark.parametrize(
    ("batch", "word"),
    [
        ({"x": torch.ones(9, 2)}, "9 samples"),
        ({"x": torch.ones(8, 2), "positions": torch.ones(1, 2)}, "batch['x']: 8, batch['positions']: 1"),
        ({"x": torch.ones(2, 2), "names": ["a", "b"]}, "batch['names'], a list"),
        ({"x": torch.ones(2, 2), "extra": {1, 2}}, "batch['extra'], a set"),
        ({"x": torch.tensor(1.0)}, "no tensor"),
        (torch.ones(0, 2), "0 samples"),
        ({"x": torch.ones(4, 2), "targets": [{"boxes": torch.ones(1, 4)}] * 3}, "batch['targets']: 3"),
        ({"x": torch.ones(2, 2), "views": [torch.ones(2, 3), torch.ones(2, 5)]}, "batch_axes={'views': 0}"),
        ({"ids": torch.ones(2, 6), "positions": torch.ones(3, 2, 6)}, "batch_axes={'positions': 1}"),
        ({"ids": torch.ones(4, 4).long(), "mask": torch.ones(1, 4, 4).long()}, "batch_axes={'mask': None}"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_with_the_reason(batch: Any, word: str, message: Messages) -> None:
    with pytest.raises(slapo.BuildError) as error:
        micro_batches(batch, 2)
    message(error, word)
    assert error.value.hint


def test_an_uneven_last_batch_changes_nothing() -> None:
    engine = slapo.build(slapo.create_schedule(real("mlp")), optimizer=sgd, accumulate=4)
    engine.train_step(next(batches(1)))
    before = engine.state_dict()
    with pytest.raises(slapo.BuildError, match="accumulate=4"):
        engine.train_step(next(batches(1, 6)))
    assert all(torch.equal(tensor, before[key]) for key, tensor in engine.state_dict().items())
    assert engine.eval_step(next(batches(1, 6))).loss.isfinite()


def test_uneven_ignored_labels_warn(message: Messages) -> None:
    labels = torch.tensor([[1, 2], [3, -100], [1, 2], [3, 4]])
    told = labels_left_out(micro_batches({"labels": labels}, 2))
    assert told is not None
    message(told, "3, 4 labels other than -100")
    assert labels_left_out(micro_batches({"labels": labels.abs(), "x": labels.double()}, 2)) is None
    model = bert()
    engine = slapo.build(slapo.create_schedule(model), optimizer=adam, accumulate=2)
    batch = {"input_ids": labels.abs() % 96, "labels": labels}
    with pytest.warns(UserWarning, match="labels other than -100"):
        engine.train_step(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.train_step(batch)  # said once


@pytest.mark.parametrize("accumulate", [0, -1, True, 2.0, "2"])
def test_a_bad_number_of_micro_batches_is_refused(accumulate: Any, message: Messages) -> None:
    with pytest.raises(slapo.BuildError) as error:
        slapo.build(slapo.create_schedule(real("mlp")), accumulate=accumulate)
    message(error, f"got {accumulate!r}")


def test_parts_of_a_step_are_on_one_attribute() -> None:
    engine = slapo.build(slapo.create_schedule(real("mlp")), optimizer=sgd, max_grad_norm=0.1)
    assert engine.torch.module is engine.module
    with engine.torch.no_sync():
        engine.torch.module(**next(batches(1))).backward()
    norm = engine.torch.clip_gradients()
    assert norm is not None
    assert float(norm) > 0.1
    engine.optimizer.step()
    engine.close()
    with pytest.raises(slapo.BuildError, match="the engine is closed"):
        engine.torch  # noqa: B018 - asking for it is what fails


def test_after_three_steps_that_used_all_parameters_no_hook_is_left_on_them() -> None:
    model = real("mlp")
    engine = slapo.build(slapo.create_schedule(model))
    unused = UnusedParameters(SimpleNamespace(state=engine._state), "a runtime")  # type: ignore[arg-type, attr-defined]
    for step in range(4):
        hooks = [parameter._post_accumulate_grad_hooks for parameter in model.parameters()]
        assert all(hooks) == (step < 3)
        unused.step_begins()
        model(torch.ones(4, 6), torch.ones(4, 4)).backward()
        unused.step_is_over()


class Rotated(nn.Module):
    """Tokens with places in time, height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(11, 8), nn.Embedding(9, 8), nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        time, height, width = self.places(places)
        logits = self.out((self.words(ids) + time - height * width).tanh())
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())


@pytest.mark.parametrize(("samples", "options"), [(2, {}), (3, {"batch_axes": {"places": 1}})])
def test_accumulation_with_positions_equals_a_full_batch_step(samples: int, options: Any) -> None:
    torch.manual_seed(0)
    model = Rotated().double()
    plain = copy.deepcopy(model)
    batch = torch.randint(11, (samples, 6)), torch.randint(9, (3, samples, 6))
    plain(*batch).backward()
    sgd(plain.parameters()).step()
    slapo.build(slapo.create_schedule(model), accumulate=samples, optimizer=sgd, **options).train_step(batch)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


class Spectral(nn.Module):
    """A complex weight beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.out = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat)), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((x.to(torch.cfloat) @ self.weight).abs()).square().mean()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_complex_gradients_are_clipped_as_torch_does(norm_type: float) -> None:
    batch, plain = torch.randn(3, 4), Spectral()
    optimizer = sgd(list(plain.parameters()))
    plain(batch).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    optimizer.step()
    sch = slapo.create_schedule(Spectral())
    own = sgd(list(sch.model.parameters()))
    sch.model(batch).backward()
    got = slapo.clip_grad_norm_(sch, 0.1, norm_type)
    own.step()
    assert got.dtype == norm.dtype == torch.float32
    torch.testing.assert_close(got, norm)
    torch.testing.assert_close(dict(sch.model.named_parameters()), dict(plain.named_parameters()))
    if norm_type == 2.0:
        engine = slapo.build(slapo.create_schedule(Spectral()), optimizer=sgd, max_grad_norm=0.1)
        torch.testing.assert_close(engine.train_step(batch).grad_norm, norm)
        torch.testing.assert_close(engine.state_dict(), plain.state_dict())
