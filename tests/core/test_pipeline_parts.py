"""The parts of the pipeline runtime by themselves: schedules and options, torch's side, backward passes in two."""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules, stage as torch_stage

import slapo_core as slapo
from slapo_core.building.micro_batches import micro_batches
from slapo_core.native.dialect import TorchDialect
from slapo_core.native.pipeline.received import Received
from slapo_core.native.pipeline.schedules import SCHEDULES, schedule_named, schedule_of
from slapo_core.native.pipeline.splitting import backward_of_inputs
from slapo_core.native.pipeline.stage import RunningStage
from slapo_core.native.pipeline.torch_pipelining import CALLED, recomputes, schedule_class
from slapo_core.native.pipeline.whole import Watch
from tests.core.hand_stages import Double

OF_METADATA = {  # of PipelineStage, whose subclass ours is not; the second since torch 2.14
    "_post_metadata_inference_cleanup",
    "_pre_metadata_inference_backup",
    "_warmup_backward_result",
    "_warmup_forward_vote",
}


def plan(mesh: dict[str, int], **config: Any) -> slapo.Plan:
    return TorchDialect().plan(slapo.create_schedule(nn.Linear(2, 2), mesh=mesh), config)


# -- torch's side -----------------------------------------------------------------------------------------------------


def test_schedules_call_of_a_stage_what_is_known_and_nothing_else() -> None:
    """A version of torch whose schedules ask more of a stage must not find an answer of torch's own."""
    tree = ast.parse(Path(inspect.getfile(torch_schedules)).read_text())
    called = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("stage", "self._stage", "stage_index_to_stage[stage_idx + 1]")
    } | {"set_local_bwd_input"}
    assert called - OF_METADATA == set(CALLED)
    assert not issubclass(RunningStage, torch_stage.PipelineStage)
    for name in CALLED:
        method, original = getattr(RunningStage, name), getattr(torch_stage._PipelineStageBase, name)
        assert method is not original, name
        given = list(inspect.signature(original).parameters)
        taken = inspect.signature(method).parameters
        takes_all = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in taken.values())
        assert takes_all or list(taken) == given, name


def test_schedules_read_of_a_stage_what_it_has() -> None:
    tree = ast.parse(Path(inspect.getfile(torch_schedules)).read_text())
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("stage", "self._stage", "stages[0]")
    }
    source = ast.parse(textwrap.dedent(inspect.getsource(RunningStage.__mro__[1].__init__)))
    own = {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute)}
    properties = {"is_first", "is_last"}
    unknown = read - own - set(CALLED) - properties - OF_METADATA - {"_inference_mode"}  # set, of PipelineStage only
    assert unknown == set()
    for schedule in SCHEDULES:
        assert "scale_grads" in inspect.signature(schedule_class(schedule.class_name)).parameters


def test_a_checkpointed_function_is_noticed() -> None:
    """By a private name of torch: that it tells one from the outside."""
    outside, inside = recomputes(), []

    def function(x: torch.Tensor) -> torch.Tensor:
        inside.append(recomputes() != outside)
        return x * 2

    torch.utils.checkpoint.checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert inside == [True]
    assert recomputes() == outside


# -- schedules and options --------------------------------------------------------------------------------------------


class _FakeGroup:
    def __init__(self, size: int) -> None:
        self._size = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: one.name)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_numbers_that_torch_refuses_are_those_that_we_refuse(schedule: Any, pp: int) -> None:
    for per_rank in (1, 2, 3):
        for count in (1, 2, 3, 4, 5, 6, 7, 9, 12):
            stages = per_rank * pp
            ours = True
            try:
                schedule.check_micro_batches(count, pp)
                ranks = schedule.stage_ranks(stages, pp)
            except slapo.BuildError:
                ours = False
            assert _torch_takes(schedule, stages, count, pp) == ours, (per_rank, count)
            if ours:
                assert sorted(ranks) == sorted(list(range(pp)) * per_rank)


def _torch_takes(schedule: Any, stages: int, count: int, pp: int) -> bool:
    if schedule.is_single and stages != pp:
        return False  # torch takes it, and runs the first stage of each rank only
    group = _FakeGroup(pp)
    own = []
    for index in range(0, stages, pp):
        one = RunningStage.__new__(RunningStage)
        super(RunningStage, one).__init__(nn.Linear(1, 1), index, stages, torch.device("cpu"), group)
        own.append(one)
    try:
        made = schedule_class(schedule.class_name)(own[0] if schedule.is_single else own, count, loss_fn=len)
    except ValueError:
        return False
    if not schedule.is_single:
        assert tuple(made.stage_index_to_group_rank[stage] for stage in range(stages)) == schedule.stage_ranks(
            stages, pp
        )
    return True


def test_a_plan_says_what_happens_and_gives_itself_again() -> None:
    made = plan({"dp": 2, "pp": 2, "tp": 2}, pipeline_schedule="dualpipe_v", batch_axes={"bias": None})
    assert str(made) == (
        "plan for target 'torch'\n"
        "  the scheduled Linear, 0 steps applied\n"
        "  a pipeline over mesh_dim 'pp' (2 ranks): 4 micro-batches a step, schedule dualpipe_v\n"
        "  two stages on each of its ranks, there and back\n"
        "  gradients of weights after those of inputs; together where a stage checkpoints, or hooks tensors\n"
        "  collectives over mesh_dim 'tp' (2 ranks), as the steps say\n"
        "  one random state for the ranks of mesh_dim 'tp': that of the first of them\n"
        "  the mean of gradients, exchanged after the schedule, over mesh_dim 'dp' (2 ranks)"
    )
    assert plan({"dp": 2, "pp": 2, "tp": 2}, **made.config) == made
    assert plan({"pp": 3}).config == {
        "pipeline_schedule": None,
        "microbatches": 3,
        "batch_axes": {},
        "bucket_cap_mb": 25,
    }
    assert schedule_of(plan({"pp": 3}).config, 3, 3).name == "1f1b"
    assert schedule_of(plan({"pp": 3}).config, 6, 3).name == "interleaved_1f1b"


@pytest.mark.parametrize(
    ("mesh", "config", "message"),
    [
        (
            {"pp": 4},
            {"pipeline_schedule": "1f1b", "microbatches": 3},
            "pipeline_schedule='1f1b' does not run microbatches=3 on pp=4 ranks: at least one for each stage; allowed "
            "near it: 4, 5, 6, 7, 8, 9\n  hint: microbatches=4",
        ),
        (
            {"pp": 2},
            {"pipeline_schedule": "interleaved_1f1b", "microbatches": 5},
            "pipeline_schedule='interleaved_1f1b' does not run microbatches=5 on pp=2 ranks: they must be a multiple "
            "of the rounds, microbatches // pp; allowed near it: 1, 2, 3, 4, 6, 8\n  hint: microbatches=6",
        ),
        (
            {"pp": 2},
            {"pipeline_schedule": "dualpipe_v", "microbatches": 3},
            "pipeline_schedule='dualpipe_v' does not run microbatches=3 on pp=2 ranks: at least one for each of the "
            "2 * pp stages; allowed near it: 4, 5, 6, 7, 8\n  hint: microbatches=4",
        ),
        (
            {"pp": 2},
            {"microbatches": 0},
            "microbatches must be a positive number (got 0)\n  hint: microbatches=2",
        ),
        (
            {"pp": 2},
            {"pipeline_schedule": "zero"},
            "there is no pipeline_schedule 'zero'; there are gpipe, 1f1b, interleaved_1f1b, looped_bfs, "
            "interleaved_zero_bubble, zbv_zero_bubble, dualpipe_v\n"
            '  hint: build(sch, pipeline_schedule="1f1b", microbatches=8)',
        ),
        (
            {"pp": 2},
            {"batch_axes": {"x": "first"}},
            "batch_axes must be an axis, or None, for arguments of the forward (got {'x': 'first'})\n"
            '  hint: batch_axes={"bias": None, "x": 1}',
        ),
        (
            {"pp": 2},
            {"find_unused_parameters": True},
            "option 'find_unused_parameters' of target 'torch' is for a mesh with one rank along 'pp' (got {'pp': 2})\n"
            "  hint: leave it out; the options here are pipeline_schedule, microbatches, batch_axes, bucket_cap_mb",
        ),
        (
            {"dp": 2},
            {"microbatches": 4},
            "option 'microbatches' of target 'torch' is for a mesh with several ranks along 'pp' (got {'dp': 2})\n"
            "  hint: leave it out; the options here are find_unused_parameters, gradient_as_bucket_view, bucket_cap_mb",
        ),
        (
            {"pp": 2},
            {"bucket_cap_mb": 0},
            "bucket_cap_mb must be a positive number of MiB (got 0)\n  hint: bucket_cap_mb=25",
        ),
    ],
)
def test_options_that_cannot_be_are_refused(mesh: dict[str, int], config: dict[str, Any], message: str) -> None:
    with pytest.raises(slapo.BuildError) as error:
        plan(mesh, **config)
    assert str(error.value) == message


def test_stages_that_a_schedule_cannot_run_are_refused_with_those_that_can() -> None:
    with pytest.raises(slapo.BuildError) as error:
        schedule_named("gpipe").stage_ranks(4, 2)
    assert str(error.value) == (
        "pipeline_schedule='gpipe' on pp=2 ranks needs 2 stages (got 4, by 3 cuts)\n  hint: pipeline_schedule= one of "
        "'interleaved_1f1b', 'looped_bfs', 'interleaved_zero_bubble', 'zbv_zero_bubble', 'dualpipe_v'"
    )
    assert schedule_named("zbv_zero_bubble").stage_ranks(6, 3) == (0, 1, 2, 2, 1, 0)
    assert schedule_named("looped_bfs").stage_ranks(6, 3) == (0, 1, 2, 0, 1, 2)


def test_batches_are_cut_along_the_axes_that_are_said() -> None:
    x, time_first, bias = torch.arange(8).reshape(4, 2), torch.arange(12).reshape(3, 4), torch.ones(1, 2)
    batch = {"x": x, "deep": [time_first], "bias": bias, "flag": True}
    axes: dict[Any, int | None] = {"deep": 1, "bias": None}
    first, second = micro_batches(batch, 2, option="microbatches", axes=axes)
    assert torch.equal(second["deep"][0], time_first[:, 2:])
    assert (first["bias"] is bias, second["flag"]) == (True, True)
    assert torch.equal(first["x"], x[:2])
    one, two = micro_batches((x, time_first), 2, option="microbatches", axes={1: 1})
    assert [part.shape for part in (*one, *two)] == [(2, 2), (3, 2), (2, 2), (3, 2)]
    with pytest.raises(slapo.BuildError) as error:
        micro_batches(batch, 2, option="microbatches", axes={"deep": 1})
    assert str(error.value) == (
        "microbatches=2 cuts every tensor of the batch along its first axis, or the one that batch_axes names, which "
        "must count the samples in all of them (got batch['x']: 4, batch['deep'][0]: 4, batch['bias']: 1)\n"
        '  hint: batch_axes={"bias": None, "x": 1}: no tensor of "bias" is cut, those of "x" along their second axis'
    )
    with pytest.raises(slapo.BuildError) as error:
        micro_batches(batch, 3, option="microbatches", axes=axes)
    assert str(error.value).startswith("4 samples do not divide into microbatches=3 micro-batches of one size")
    with pytest.raises(slapo.BuildError, match=r"batch_axes names axis 2 of batch\['x'\], which has 2 axes"):
        micro_batches(batch, 2, option="microbatches", axes={**axes, "x": 2})


# -- backward passes in two -------------------------------------------------------------------------------------------


class Hard(nn.Module):
    """Parameters that meet what is received once, twice, never, in a custom function, and through others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.once, self.twice = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.never, self.custom, self.through = (nn.Parameter(torch.randn(4).double()) for _ in range(3))
        self.frozen = nn.Parameter(torch.randn(4).double(), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4).double())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.twice(torch.tanh(self.twice(self.once(x))))
        h = Double.apply(h, self.custom) * self.through.exp().cumsum(0) * self.frozen  # type: ignore[no-untyped-call]
        return h + y, self.never.sin() * torch.ones(3, 4).double(), y


def whole(module: Hard, given: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor | None]:
    leaves = [one.clone().requires_grad_() for one in given]
    torch.autograd.backward(module(*leaves), gradients)
    return [*(leaf.grad for leaf in leaves), *(parameter.grad for parameter in module.parameters())]


def test_a_backward_in_two_parts_gives_every_gradient_and_runs_custom_functions_once() -> None:
    given = [torch.randn(3, 4).double() for _ in range(2)]
    gradients = [torch.randn(3, 4).double() for _ in range(3)]
    module, other = Hard(), Hard()
    expected = whole(other, given, gradients)
    received = [Received(one.clone(), carries_gradient=True) for one in given]
    roots = module(*(one.take() for one in received))
    fired: list[str] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    before = Double.passes
    later = backward_of_inputs(roots, gradients, [one.start for one in received if one.start is not None])
    first_part = set(fired)
    later.run()
    assert Double.passes == before + 1
    assert first_part == {"twice.weight", "twice.bias", "never", "custom"}  # what cannot wait
    assert sorted(fired) == sorted({*first_part, "once.weight", "once.bias", "through"})  # each once
    found = [*(one.give_back() for one in received), *(parameter.grad for parameter in module.parameters())]
    for one, wanted in zip(found, expected, strict=True):
        assert (one is None) == (wanted is None)
        if one is not None and wanted is not None:
            torch.testing.assert_close(one, wanted, rtol=0, atol=1e-14)


def test_a_received_value_may_be_written_to_and_passed_on() -> None:
    """Its gradient is that of its own uses, of the write, and of what comes back from behind."""
    value = torch.randn(3).double()
    leaf = value.clone().requires_grad_()
    own = leaf * 1.0
    use = (own * 3).sum()
    own.mul_(2)
    torch.autograd.backward([use, own], [torch.ones(()).double(), torch.full((3,), 5.0).double()])
    received = Received(value.clone(), carries_gradient=True)
    own = received.take()
    use = (own * 3).sum()
    own.mul_(2)
    torch.autograd.backward([use, own], [torch.ones(()).double(), torch.full((3,), 5.0).double()])
    assert torch.equal(received.give_back(), leaf.grad)
    assert torch.equal(received.give_back(), torch.zeros(3).double())  # nothing since


def test_what_was_received_goes_with_its_last_use() -> None:
    """Activations must not wait for the garbage collector."""
    gc.disable()
    try:
        received = Received(torch.ones(3), carries_gradient=True)
        own = received.take()
        seen = weakref.ref(own)
        loss = (own * own).sum()
        del own
        loss.backward()
        del loss
        assert seen() is None
        assert torch.equal(received.give_back(), torch.full((3,), 2.0))
    finally:
        gc.enable()


def test_hooks_of_tensors_and_checkpoints_keep_a_backward_whole() -> None:
    class Hooked(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.inner, self.kind = nn.Linear(2, 2), kind

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.kind == "checkpoint":
                return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]
            x = self.inner(x)
            if self.kind == "hook":
                x.register_hook(lambda gradient: gradient * 2)
            return x

    reasons = {}
    for kind in ("plain", "hook", "checkpoint"):
        module = Hooked(kind)
        watch = Watch(module, "stage 1")
        with pytest.warns(UserWarning, match="stage 1") if kind != "plain" else contextlib.nullcontext() as caught:  # type: ignore[attr-defined]
            with watch.looking():
                module(torch.ones(2, requires_grad=True))
        if caught is not None:
            assert str(caught[0].message) == (
                "stage 1 computes the gradients of its inputs and of its weights together, where the schedule has them "
                f"apart, because {watch.reason}: they are the same, and the bubbles stay"
            )
        reasons[kind] = watch.reason
    assert reasons == {
        "plain": "",
        "hook": "a hook of a tensor would run in both parts",
        "checkpoint": "a checkpointed function would be computed again for each part",
    }
