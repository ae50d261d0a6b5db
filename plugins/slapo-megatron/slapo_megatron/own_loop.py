"""Make model chunks for a training loop of the user: no engine, no optimizer.

Imports Megatron: import it in functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from slapo_core import BuildError
from slapo_megatron.config import filled, transformer_config
from slapo_megatron.dialect import violations
from slapo_megatron.groups import acquire_groups, start
from slapo_megatron.marks import mark
from slapo_megatron.model import Chunk, lower_model, refuse_double_sums, working_dtype, wrapped
from slapo_megatron.runtime import require_device
from slapo_runtime.weights.live import live_state

if TYPE_CHECKING:
    from slapo_core import Schedule


def chunks_for_own_loop(sch: Schedule, options: Mapping[str, Any], *, wrap: bool) -> list[Any]:
    """Implement :func:`slapo_megatron.model_chunks`.

    Args:
        sch: the schedule.
        options: of the dialect, as the user gave them.
        wrap: in DistributedDataParallel.
    """
    mesh = sch.mesh
    for reason in violations(sch):
        raise BuildError(reason.message, hint=reason.hint)
    if mesh is not None and mesh.size("pp") > 1:
        raise BuildError(
            f"the mesh {mesh} has several ranks along 'pp': model_chunks() does not pack the messages between stages",
            hint='slapo.build(sch, target="megatron", ...) runs stages',
        )
    completed = filled(sch, options)
    state = live_state(sch, "slapo_megatron.model_chunks")
    context: Any = SimpleNamespace(schedule=sch, state=state, placement=None)
    require_device(context)
    instances = completed["ddp_config"].get("num_distributed_optimizer_instances", 1)
    start(mesh, instances=instances)
    config = transformer_config(completed, mesh)
    refuse_double_sums(sch, state.tensors(), config)
    mark(context)
    lower_model(sch.model, working_dtype(config))
    chunk = Chunk(sch.model, config)
    made = wrapped([chunk], config, completed["ddp_config"]) if wrap else [chunk]
    acquire_groups()  # until the process ends: the end of the loop is unknown
    return made
