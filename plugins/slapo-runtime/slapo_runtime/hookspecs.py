"""The hooks of the runtime: where a model is cut into stages, and what passes between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slapo_core.errors import TraceError
from slapo_core.hookspecs import hookspec

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_runtime.stages.partition import Liveness, Partition


@hookspec(firstresult=True)
def slapo_partition(
    schedule: Schedule, inputs: Mapping[str, Any], batch_axes: Mapping[str, int | None]
) -> Partition | None:
    """Called when stages are needed: by ``build`` and ``verify``, once for each input signature and mode.

    The answer must be the same on every rank. It is asked on ranks that have values for one stage only: the tensors of
    the others are on the meta device there, and stand for tensors on the device of the inputs.

    First result: yes; two active plugins that answer are an error.

    Args:
        schedule: with all steps applied; must not be changed. Its model is in the mode that is asked for.
        inputs: the arguments of the model's forward, by parameter; those that are left out are missing. Tensors may be
            without values.
        batch_axes: for a parameter of the forward, the axis of its tensors that counts the samples; None for one that
            has none. Where nothing is said it is the first axis of every tensor that has axes.

    Returns:
        the stages; None if no step of this plugin cuts the model.

    Raises:
        TraceError: it cannot be cut there; the message names the step that asks for it.
    """


@hookspec(firstresult=True)
def slapo_liveness(partition: Partition, outputs: Sequence[str]) -> Liveness | None:
    """Called when `slapo_partition` has answered: which values pass from each stage to the next?

    First result: yes; two active plugins that answer are an error.

    Args:
        partition: of the model; must not be changed.
        outputs: names of the values of the output that the last stage needs, for a loss.

    Returns:
        what is sent; None to leave it to others.
    """


slapo_partition.slapo_may_raise = TraceError  # type: ignore[attr-defined]
