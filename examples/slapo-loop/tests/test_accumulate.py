"""Training in pieces gives what training on the whole batch gives; the engine is complete."""

import copy

import pytest
import torch
from slapo_loop import Accumulate
from torch import nn

import slapo_core as slapo


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))

    def forward(self, features):
        return self.layers(features)


def cross_entropy(output, batch):
    return nn.functional.cross_entropy(output, batch["labels"])


def make_engine(model, target, **options):
    sch = slapo.create_schedule(copy.deepcopy(model))
    sch["layers.0"].checkpoint()
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731
    return slapo.build(sch, target=target, optimizer=optimizer, loss=cross_entropy, **options)


def batches(count=4, size=10):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield {
            "features": torch.randn(size, 6, generator=generator),
            "labels": torch.randint(3, (size,), generator=generator),
        }


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 10, 64])
def test_pieces_train_like_the_whole_batch(micro_batches):
    torch.manual_seed(0)
    model = Classifier().double()
    whole = make_engine(model, "torch", max_grad_norm=0.1)
    pieces = make_engine(model, "accumulate", max_grad_norm=0.1, micro_batches=micro_batches)
    calls = []
    pieces.module.register_forward_pre_hook(lambda module, args: calls.append(module))
    for batch in batches():
        batch["features"] = batch["features"].double()
        expected, got = whole.train_step(batch), pieces.train_step(batch)
        torch.testing.assert_close(got.loss, expected.loss)
        torch.testing.assert_close(got.grad_norm, expected.grad_norm)
    assert len(calls) == 4 * {3: 3, 64: 10}.get(micro_batches, micro_batches)
    trained, initial = pieces.state_dict(), model.state_dict()
    torch.testing.assert_close(trained, whole.state_dict())
    assert not torch.equal(trained["layers.0.weight"], initial["layers.0.weight"])


def test_the_engine_is_complete_and_its_checkpoint_loads_elsewhere(tmp_path):
    engine = make_engine(Classifier(), "accumulate")
    assert isinstance(engine, slapo.Engine)
    batch = next(batches())
    engine.train_step(batch)
    engine.save(tmp_path / "checkpoint")
    other = make_engine(Classifier(), "torch")
    other.load(tmp_path / "checkpoint")
    assert torch.equal(other.eval_step(batch).loss, engine.eval_step(batch).loss)
    engine.close()
    with pytest.raises(slapo.BuildError, match="it is closed, or was built without an optimizer"):
        engine.train_step(batch)


def test_the_plan_and_a_bad_option():
    plan = Accumulate().plan(slapo.create_schedule(Classifier()), {"micro_batches": 4})
    assert str(plan) == ("plan for target 'accumulate'\n  4 micro-batches a step, gradients summed, one optimiser step")
    with pytest.raises(slapo.BuildError, match=r"micro_batches, an int >= 1 \(got {'micro_batches': 0}\)"):
        make_engine(Classifier(), "accumulate", micro_batches=0)
