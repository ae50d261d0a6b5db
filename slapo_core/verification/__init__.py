"""``verify``: hold a scheduled model against the untouched one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slapo_core.errors import ArgumentError
from slapo_core.verification.report import VerifyReport

if TYPE_CHECKING:
    from slapo_core.schedule.schedule import Schedule

__all__ = ["VerifyReport", "verify"]


def verify(
    sch: Schedule,
    example_inputs: Any = None,
    *,
    more_batches: Sequence[Any] = (),
    rtol: float | None = None,
    atol: float | None = None,
    optimizer_steps: int = 3,
    seed: int = 0,
    timeout: float = 120.0,
) -> VerifyReport:
    """Compare the scheduled model with the untouched one, and name the steps that broke it.

    Compared are the outputs in training mode, the buffers and the gradients of all parameters after a forward and a
    backward; outputs and buffers in evaluation mode; outputs and gradients for a batch of twice the size, without the
    tensors that the model can be called without; the gradients of floating-point inputs; and after some steps of SGD
    with momentum the parameters, buffers and outputs. (Not of an adaptive optimiser: it divides by the gradient's size,
    and so makes full-sized differences of the rounding noise in a gradient that is zero.) All that with dropout off;
    who drops how much is compared too, and outputs and gradients with dropout on, unless the schedule draws other
    random numbers, rightly: for a piece of a tensor, or by a step that promises RANDOM. The first of these once more in
    the model's own types, where it is allowed what rounding does to the untouched model there. Every rank of the mesh
    calls it and compares its own pieces; every rank gets the same answer. Where the mesh is only declared, the
    processes are started on this machine's CPU and repeat the schedule.

    Both run as copies, with the same random numbers, and in float64 where they can; the model, its gradients, buffers,
    mode and the random number generators stay as they are. Tensors on the meta device get the values that the model's
    own initialisation gives.

    Args:
        sch: the schedule, not yet built.
        example_inputs: one batch: a mapping (keyword arguments), a tuple (positional ones), or one argument; the same
            on every rank. None takes ``sch.example_inputs``.
        more_batches: further ones, in the same form, of which outputs and gradients are compared.
        rtol: the difference allowed, relative to the largest element of a tensor; None follows from the type in which
            the model computes and from what the steps promise: see ``slapo_core.verification.tolerance``.
        atol: the absolute difference allowed, in place of the floor that follows from the type.
        optimizer_steps: how many are compared; 0 compares none.
        seed: of the inputs' cotangents and of everything random.
        timeout: for a mesh that is only declared, seconds for its processes.

    Returns:
        what was compared, how close it came, and what could not be compared; print it.

    Raises:
        VerifyError: they differ; the first tensor that does, the numbers, the tolerance and the steps are named. The
            same on every rank.
        RankMismatchError: ranks have other inputs, options, untouched weights or steps.
        ArgumentError: there are no inputs, or the untouched model does not run on them.
        SealedError: the schedule was built or sealed, and the originals are gone.

    Source: paper section 3.5, the verifier.
    """
    if isinstance(optimizer_steps, bool) or not isinstance(optimizer_steps, int) or optimizer_steps < 0:
        raise ArgumentError(
            f"optimizer_steps must be 0 or a positive integer (got {optimizer_steps!r})",
            hint="verify(sch, batch, optimizer_steps=3)",
        )
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:
            raise ArgumentError(f"{name} must not be negative (got {value!r})", hint=f"verify(sch, batch, {name}=1e-6)")
    from slapo_core.verification.checking import Options, check
    from slapo_core.verification.dry import check_in_processes
    from slapo_core.verification.inputs import Inputs

    further = tuple(Inputs.of(batch) for batch in more_batches)
    is_dry = sch.mesh is not None and sch.mesh.is_dry
    further = tuple(batch.on_cpu() for batch in further) if is_dry else further
    options = Options(rtol=rtol, atol=atol, optimizer_steps=optimizer_steps, seed=seed, more_batches=further)
    if is_dry:
        return check_in_processes(sch, example_inputs, options, timeout=timeout)
    return check(sch, example_inputs, options)
