"""What torch's schedules ask of a stage is what ours has."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path

import torch
from torch.distributed.pipelining import PipelineStage, schedules as torch_schedules

from slapo_torch.running_stage import RunningStage
from slapo_torch.schedules import SCHEDULES
from slapo_torch.torch_pipelining import CALLED, recomputes

ELSEWHERE = {  # of FSDP's modules, and after messages that could not be made
    "_clear_unlaunched_bwd_recv",
    "_clear_unlaunched_fwd_recv",
    "start_gradient_reduction",
    "wait_for_gradient_reduction",
}
STAGES = (
    "stage",
    "self._stage",
    "stages[0]",
    "stage_index_to_stage[stage_idx + 1]",
    "stage_index_to_stage[stage_idx - 1]",
)


def of_stages() -> set[str]:
    """What torch's schedules use of a stage, beside their inference of shapes, which is replaced."""
    tree = ast.parse(Path(inspect.getfile(torch_schedules)).read_text())
    replaced = ("_initialize", "_validate_adjacent", "_warmup")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith(replaced):
            node.body = []
    return {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) in STAGES
    }


def test_schedules_only_use_known_members_of_a_stage() -> None:
    """A version of torch whose schedules ask more of a stage is noticed here, and not at somebody's first step."""
    source = ast.parse(textwrap.dedent(inspect.getsource(RunningStage.__mro__[1].__init__)))
    own = {node.attr for node in ast.walk(source) if isinstance(node, ast.Attribute)}
    used = of_stages()
    assert {"forward_one_chunk", "num_stages", "get_bwd_send_ops"} <= used
    assert used - own - set(CALLED) - ELSEWHERE == set()


def test_stage_methods_have_the_parameters_of_torchs_stage() -> None:
    for name in CALLED:
        method, original = getattr(RunningStage, name), getattr(PipelineStage, name, None)
        if original is not None:  # a version may not have it yet
            assert list(inspect.signature(method).parameters) == list(inspect.signature(original).parameters), name
    assert [name for name in CALLED if not hasattr(PipelineStage, name)] in ([], ["release_fwd_send_outputs"])


def test_replaced_initialization_is_called_by_schedules() -> None:
    for schedule in SCHEDULES:
        kind = getattr(torch.distributed.pipelining, schedule.class_name)
        name = "_initialize_stage" if schedule.is_single else "_initialize_stages"
        assert inspect.isfunction(getattr(kind, name, None)), schedule.name
        assert "scale_grads" in inspect.signature(kind).parameters


def test_a_checkpointed_function_is_noticed() -> None:
    """By a private name of torch: that it tells one from the outside."""
    outside, inside = recomputes(), []

    def function(x: torch.Tensor) -> torch.Tensor:
        inside.append(recomputes() != outside)
        return x * 2

    torch.utils.checkpoint.checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert inside == [True]
    assert recomputes() == outside
