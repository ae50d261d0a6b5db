"""A schedule of any model, from one recorded forward: which matrices are split, and the steps that follow.

The recording keeps modules and operators. Axes of tensors that operators pair are unified, views divide them into heads
and features; an axis that can be split runs from the matrices that make it to the matrices that sum over it. What the
steps change is run again without memory, and compared with the recording operator by operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import slapo_core as slapo
    from slapo_models.auto.report import AutoReport

__all__ = ["auto"]


def auto(
    sch: slapo.Schedule,
    example_inputs: Any = None,
    *,
    memory: int | str | None = None,
    kernels: bool | Sequence[str] = True,
    sequence_parallel: bool = False,
) -> AutoReport:
    """Schedule any model: tensor parallelism over ``tp``, kernels, checkpoints.

    The steps are ordinary ones, each with its reason (``sch.explain()``); a matrix stays full where no split of it can
    be proved right.

    Gradients are summed as the model needs them now: unfreeze parameters before, or call this again on a new schedule.

    Args:
        sch: the schedule, without steps; tensor parallelism is over its mesh dimension ``tp``.
        example_inputs: one batch, as ``verify`` takes it, with labels if the model computes its loss; None takes the
            schedule's.
        memory: bytes of a device, or e.g. ``"70GiB"``: blocks are checkpointed until a training step fits; None
            checkpoints none.
        kernels: whether to replace or fuse what matches a pattern in repeated blocks, where the estimated step gains
            on this machine's device; or names of patterns, e.g. ``("fusion.sdpa",)``.
        sequence_parallel: whether each rank works on its slice of the sequence between splits, where that can be
            proved; every batch's sequence must then be divisible by the number of ranks. ``report.all_reduced`` has
            the sums that stay all-reduced. Hidden states that the model returns for these inputs are full; those that
            are asked for later (``output_hidden_states=True``) may be slices: ask for them in ``example_inputs``.

    Returns:
        the split parameters, the full matrices with the reason of each, and the sums over the ranks.

    Raises:
        ArgumentError: no inputs, the schedule has steps, or the model does not run on the inputs.
        LaunchError: with ``kernels=True``, ``memory`` or stages, which another process estimates, the script calls this
            outside of ``if __name__ == "__main__":``.
    """
    from slapo_models.auto.scheduling import schedule_automatically

    return schedule_automatically(
        sch, example_inputs, memory=memory, kernels=kernels, sequence_parallel=sequence_parallel
    )
