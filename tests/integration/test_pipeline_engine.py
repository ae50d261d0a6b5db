"""What an engine of a pipeline does around its steps: forms of batches, modes, random numbers, bytes, refusals."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_testing import run_ranks
from slapo_torch import running_stage as stage_module
from slapo_torch.replica_gradients import GradientAverage
from tests.integration.pipelines.against import Case, differences
from tests.integration.test_pipeline_training import batch_of, cuts
from tests.messages import Messages
from tests.support.hand_stages import LENGTH, Net

WHOLE = {"batch_axes": {"bias": None}}


def build(count: int = 3, schedule: str = "1f1b", stages: int = 2, **more: Any) -> tuple[Net, Any]:
    net = Net()
    sch = slapo.create_schedule(net, mesh={"pp": 2}, example_inputs=batch_of(0, 0, samples=2 * count))
    for path in cuts(stages):
        sch[path].pipeline_split()
    given = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), **WHOLE, **more}
    return net, slapo.build(sch, pipeline_schedule=schedule, microbatches=count, **given)


# -- on two ranks; each returns what its test looks at -----------------------------------------------------------------


def forms() -> None:
    """Other numbers of samples, arguments left out, and evaluations between steps: the modes come back."""
    net, engine = build()
    reference = Net()
    for samples, bias in ((6, True), (3, True), (6, False), (6, True)):
        batch = batch_of(samples, 0, samples=samples, bias=bias)
        engine.eval_step(batch)
        assert all(module.training for module in net.modules())
        loss = engine.torch.forward_backward(batch)
        pieces = [{n: v if n == "bias" else v.chunk(3)[i] for n, v in batch.items()} for i in range(3)]
        expected = torch.stack([reference(**piece)["loss"] for piece in pieces]).mean()
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
        expected.backward()  # gradients of four batches are added up
    for name, parameter in engine.module.named_parameters():
        wanted = reference.get_parameter(name).grad
        if wanted is not None and parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-11, msg=name)
    assert engine.module.get_submodule(f"blocks.{4 * dist.get_rank()}") is net.blocks[4 * dist.get_rank()]
    assert f"blocks.{4 - 4 * dist.get_rank()}.first.weight" not in dict(engine.module.named_parameters())


def modes() -> None:
    """A model that comes in evaluation mode trains, with the warning; one in evaluation by choice stays so."""
    net, engine = build()
    engine.module.eval()  # of the whole model, as the same call on every rank says
    with pytest.warns(UserWarning, match="was in evaluation mode"):
        engine.train_step(batch_of(0, 0, samples=6))
    assert net.training
    net.blocks[5].norm.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.train_step(batch_of(0, 0, samples=6))
    assert not net.blocks[5].norm.training


def refusals() -> list[str]:
    """Every rank refuses alike, and the engine goes on."""
    _, engine = build()
    told = []
    for batch in (
        batch_of(0, 0, samples=4),
        {**batch_of(0, 0, samples=6), "labels": torch.zeros(3, LENGTH, dtype=torch.long)},
        {"tokens": torch.zeros(6, LENGTH, dtype=torch.long)},
        {**batch_of(0, 0, samples=6), "unknown": 1},
    ):
        with pytest.raises(slapo.SlapoError) as error:
            engine.train_step(batch)
        told.append(str(error.value))
    with torch.no_grad(), pytest.raises(slapo.BuildError) as error:
        engine.train_step(batch_of(0, 0, samples=6))
    told.append(str(error.value))
    engine.train_step(batch_of(0, 0, samples=6))
    engine.close()
    for step in (engine.train_step, engine.eval_step, lambda _: engine.torch):
        with pytest.raises(slapo.BuildError) as error:
            step(batch_of(0, 0, samples=6))
    told.append(str(error.value))
    _, engine = build(optimizer=None)
    engine.eval_step(batch_of(0, 0, samples=6))
    with pytest.raises(slapo.BuildError) as error:
        engine.train_step(batch_of(0, 0, samples=6))
    told.append(str(error.value))
    with pytest.raises(slapo.BuildError) as error:
        build(accumulate=2)
    told.append(str(error.value))
    return told


def dropout() -> list[list[float]]:
    """Steps with dropout: alike under every schedule, because each stage and micro-batch has its own stream."""
    losses = []
    for schedule, stages in (("1f1b", 2), ("gpipe", 2), ("interleaved_1f1b", 4), ("zbv_zero_bubble", 4)):
        net, engine = build(4, schedule, stages)
        for block in net.blocks:
            block.dropout.p = 0.5
        torch.manual_seed(7)
        own = [engine.train_step(batch_of(0, 0, samples=8)).loss.item() for _ in range(2)]
        state = torch.get_rng_state()
        torch.manual_seed(7)
        torch.randint(1 << 62, ())
        torch.randint(1 << 62, ())
        assert torch.equal(state, torch.get_rng_state())  # one number a step, whatever the stages draw
        losses.append([stages, *own])
    net, engine = build(4)
    state = torch.get_rng_state()
    engine.train_step(batch_of(0, 0, samples=8))
    assert torch.equal(state, torch.get_rng_state())  # nothing was drawn
    return losses


def one_stage_draws() -> bool:
    """Both ranks advance, one number a step, although the first one's stage uses no random numbers."""
    net, engine = build(2)
    net.blocks[4].dropout.p = 0.5
    torch.manual_seed(7)
    for _ in range(3):
        engine.train_step(batch_of(0, 0, samples=4))
    state = torch.get_rng_state()
    torch.manual_seed(7)
    for _ in range(3):
        torch.randint(1 << 62, ())
    return torch.equal(state, torch.get_rng_state())


def late_dropout() -> str:
    net, engine = build(2)
    engine.train_step(batch_of(0, 0, samples=4))
    for block in net.blocks:
        block.dropout.p = 0.5
    with pytest.raises(slapo.BuildError) as error:
        engine.train_step(batch_of(0, 0, samples=4))
    return str(error.value)


def streams() -> list[torch.Tensor]:
    """What the dropouts of one step leave."""
    net, engine = build(2)
    for block in net.blocks:
        block.dropout.p = 0.5
    masks: list[torch.Tensor] = []

    def note(module: Any, args: Any, out: torch.Tensor) -> None:
        if type(out) is torch.Tensor:  # not while the forward is recorded
            masks.append(out.detach() == 0)

    for number in (0, 4):
        net.blocks[number].dropout.register_forward_hook(note)
    torch.manual_seed(3)
    engine.train_step(batch_of(0, 0, samples=4))
    return masks


def sent() -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]:
    """What was sent in one training step, and what liveness had said."""
    _, engine = build(3, "interleaved_1f1b", 4)
    engine.train_step(batch_of(0, 0, samples=6))
    ((staged, _),) = engine._cache._kept.values()
    partition, liveness = staged.partition, staged.liveness
    announced = {}
    for stage in range(4):
        forward = sum(partition.values[name].nbytes for name in liveness.sent(stage))
        values = [partition.values[name] for name in liveness.received(stage)]
        announced[stage] = 3 * forward, 3 * sum(value.nbytes for value in values if value.requires_grad)
    counted = engine.torch.sent_bytes()
    return counted, {stage: announced[stage] for stage in counted}


class Words(nn.Module):
    """Gives its output with the samples last, first axes as long as a micro-batch, and what has no samples at all."""

    def __init__(self, summed: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.summed = summed

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        first = self.layers[0](x)
        y = self.layers[1](first)
        out = {"loss": y.square().mean(), "last": y.transpose(0, 2), "early": first, "one": self.layers[0].weight * 2}
        return {**out, "sum": y.sum((0, 1))} if self.summed else out


def gathered() -> str:
    """The output for a whole batch whose micro-batches have as many samples as other axes have elements."""
    x = torch.randn(6, 2, 3)
    for summed in (False, True):
        torch.manual_seed(0)
        model = Words(summed)
        sch = slapo.create_schedule(model, mesh={"pp": 2}, example_inputs={"x": x})
        sch["layers.0"].pipeline_split()
        expected = Words.forward(copy.deepcopy(model), x)
        engine: Any = slapo.build(sch, microbatches=2)
        if not summed:
            torch.testing.assert_close(engine.eval_step({"x": x}, gather_outputs=True).output, expected)
        else:
            with pytest.raises(slapo.BuildError) as error:
                engine.eval_step({"x": x}, gather_outputs=True)
            engine.eval_step({"x": x})
    return str(error.value)


class Scales(nn.Sequential):
    """Writes to its argument, as it may."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x.mul_(2)
        return {"loss": self[1](torch.tanh(self[0](x)) * x).square().mean()}


def written() -> None:
    """A micro-batch that the model writes to does not count as a write to the others, which wait for their backward."""
    torch.manual_seed(0)
    model = Scales(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    x, reference = torch.randn(4, 3, dtype=torch.float64), copy.deepcopy(model)
    sch = slapo.create_schedule(model, mesh={"pp": 2}, example_inputs={"x": x})
    sch["0"].pipeline_split()
    engine: Any = slapo.build(sch, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), microbatches=4)
    reference(x.clone())["loss"].backward()
    engine.torch.forward_backward({"x": x.clone()})
    for name, parameter in engine.module.named_parameters():
        torch.testing.assert_close(parameter.grad, reference.get_parameter(name).grad, rtol=0, atol=1e-12)


def on_two() -> dict[str, Any]:
    torch.set_num_threads(1)
    calls = (forms, modes, refusals, dropout, one_stage_draws, late_dropout, streams, sent, gathered, written)
    return {each.__name__: each() for each in calls}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_two, world_size=2)


def test_other_forms_of_a_batch_and_evaluations_between_steps_are_right(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["forms"] is found["modes"] is found["written"] is None


def test_outputs_are_put_together_along_the_axis_of_the_samples_or_not_at_all(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["gathered"].startswith("output 'sum")
        assert "the micro-batches cannot be combined" in found["gathered"]


def test_unsupported_runs_are_refused_on_every_rank(ranks: list[dict[str, Any]], message: Messages) -> None:
    first, second = (found["refusals"] for found in ranks)
    assert first == second
    words = [
        ("4 samples", "microbatches=3"),
        ("microbatches=3", "batch['tokens']: 6, batch['labels']: 3"),
        ("output of Net", "no loss"),
        ("forward of Net", "'unknown'"),
        ("train_step()", "without gradients"),
        ("engine is closed\n",),
        ("cannot train", "without an optimizer"),
        ("got accumulate=2", "hint: microbatches=6"),
    ]
    for text, those in zip(first, words, strict=True):
        message(text, *those)


def test_dropout_is_alike_under_every_schedule_and_another_one_in_each_stage(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        by_stages: dict[int, list[list[float]]] = {}
        for stages, *losses in found["dropout"]:
            by_stages.setdefault(stages, []).append(losses)
        for each in by_stages.values():
            assert len(each) == 2
            assert each[0] == pytest.approx(each[1], rel=1e-12)
    first, second = (found["streams"] for found in ranks)
    assert len(first) == len(second) == 2  # one block of each stage, two micro-batches
    assert not any(torch.equal(one, other) for one in first for other in second)
    assert not torch.equal(first[0], first[1])


def test_all_ranks_advance_alike_and_dropout_that_begins_later_is_refused(
    ranks: list[dict[str, Any]], message: Messages
) -> None:
    assert all(found["one_stage_draws"] for found in ranks)
    first, second = (found["late_dropout"] for found in ranks)
    assert first == second
    message(first, "RNG", "first step", "\n  hint: ")


def test_bytes_on_the_way_are_those_that_liveness_announced(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        counted, announced = found["sent"]
        assert counted == announced
        assert any(forward and back for forward, back in counted.values())


# -- negative controls -------------------------------------------------------------------------------------------------


def broken(how: str) -> list[str]:
    torch.set_num_threads(1)
    mesh = {"dp": 2, "pp": 2} if how == "the mean over replicas" else {"pp": 2}
    make = functools.partial(batch_of, samples=4)
    case = Case(Net, make, cuts(2), mesh, "1f1b", 2, options=WHOLE, training_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        if how == "the mean over replicas":
            patch.setattr(GradientAverage, "begin", lambda *args: None)
        elif how == "the sum over ties":
            from slapo_runtime.context import BuildContext

            patch.setattr(BuildContext, "sum_tied_gradients", lambda self: None)
        else:
            original = stage_module.RunningStage._roots

            def fewer(self: Any, flight: Any) -> Any:
                roots, gradients = original(self, flight)
                if how == "a micro-batch":
                    self.seen = getattr(self, "seen", 0) + 1
                    return (roots, gradients) if self.seen % 2 else ([], [])
                return roots[:1], gradients[:1]

            patch.setattr(stage_module.RunningStage, "_roots", fewer)
        try:
            return differences(case)
        except slapo.RankMismatchError as error:  # of what must be the same on several ranks
            return [str(error)]


def on_ranks(names: list[str]) -> list[bool]:
    return [bool(broken(name)) for name in names]


@pytest.mark.breadth
def test_omissions_are_found() -> None:
    names = ["the sum over ties", "a micro-batch", "a value that is sent"]
    assert np_any(run_ranks(on_ranks, names, world_size=2)) == [True] * 3
    assert np_any(run_ranks(on_ranks, ["the mean over replicas"], world_size=4)) == [True]


def np_any(ranks: list[list[bool]]) -> list[bool]:
    return [any(one) for one in zip(*ranks, strict=True)]
