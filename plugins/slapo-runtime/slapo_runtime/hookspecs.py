"""The hooks of the runtime, for pipeline stages and optimizers."""

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
    """Called when ``build`` or ``verify`` needs the stages of a model.

    It is called once for each input signature and mode. The answer must be the same on every rank. A rank may hold
    values for one stage only: there, the tensors of other stages are placeholders on the meta device for tensors on the
    device of the inputs.

    First result: yes; two active plugins that answer are an error.

    Args:
        schedule: with all steps applied; must not be changed. Its model is in the wanted mode.
        inputs: the arguments of the model's forward, by parameter, without the omitted ones. Tensors may be without
            values.
        batch_axes: for a parameter of the forward, the axis of its tensors that counts the samples; None for tensors
            without one. Default: the first axis of every tensor with axes.

    Returns:
        the stages; None if no step of this plugin cuts the model.

    Raises:
        TraceError: the model cannot be cut there; the message names the step.
    """


@hookspec(firstresult=True)
def slapo_liveness(partition: Partition, outputs: Sequence[str]) -> Liveness | None:
    """Called when `slapo_partition` has answered, for the values sent between stages.

    First result: yes; two active plugins that answer are an error.

    Args:
        partition: the stages; must not be changed.
        outputs: names of the values of the output that the last stage needs, for a loss.

    Returns:
        the sent values; None to leave it to others.
    """


@hookspec(firstresult=True)
def slapo_full_matrix(optimizer: type) -> bool | None:
    """Called when ``build`` gets an optimizer of parameters that ranks share, and does not know its class.

    With True, target ``"torch"`` gathers each split parameter and its gradient on one rank, where this optimizer steps
    it by its full matrix. ``step()`` must read the parameters from ``param_groups``, and take empty groups.

    First result: yes; two active plugins that answer are an error.

    Args:
        optimizer: its class.

    Returns:
        whether the update of a parameter depends on that full parameter and its gradients alone; None for classes of
        others.
    """


slapo_partition.slapo_may_raise = TraceError  # type: ignore[attr-defined]
