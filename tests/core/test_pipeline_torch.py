"""What torch's schedules ask of a stage is what ours has."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path

import torch
from torch.distributed.pipelining import schedules as torch_schedules, stage as torch_stage

from slapo_core.native.pipeline.schedules import SCHEDULES
from slapo_core.native.pipeline.stage import RunningStage
from slapo_core.native.pipeline.torch_pipelining import CALLED, recomputes, schedule_class

OF_METADATA = {  # of PipelineStage, whose subclass ours is not; the second since torch 2.14
    "_post_metadata_inference_cleanup",
    "_pre_metadata_inference_backup",
    "_warmup_backward_result",
    "_warmup_forward_vote",
}


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
