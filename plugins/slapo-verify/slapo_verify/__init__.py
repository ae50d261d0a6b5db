"""Compare a scheduled model with the reference model: ``verify``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from slapo_core.errors import ArgumentError
from slapo_core.internals import Internals
from slapo_verify.report import VerifyReport

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_verify.trials import VerifyOptions

__all__ = ["VerifyReport", "verify"]


class VerifyArguments(TypedDict, total=False):
    """Type the keyword arguments of :func:`verify`."""

    more_batches: Sequence[Any]
    rtol: float | None
    atol: float | None
    optimizer_steps: int
    seed: int
    blame_seconds: float | None
    timeout: float | None
    precision: str | None
    effects: bool


@overload
def verify(sch: Schedule, example_inputs: Any = None, **arguments: Unpack[VerifyArguments]) -> VerifyReport: ...


@overload
def verify(
    sch: Sequence[Schedule], example_inputs: Any = None, **arguments: Unpack[VerifyArguments]
) -> tuple[VerifyReport, ...]: ...


def verify(
    sch: Schedule | Sequence[Schedule],
    example_inputs: Any = None,
    *,
    more_batches: Sequence[Any] = (),
    rtol: float | None = None,
    atol: float | None = None,
    optimizer_steps: int = 3,
    seed: int = 0,
    blame_seconds: float | None = 120.0,
    timeout: float | None = None,
    precision: str | None = None,
    effects: bool = True,
) -> VerifyReport | tuple[VerifyReport, ...]:
    """Compare the scheduled model with the reference model, and name the steps that broke it.

    Compared are the outputs in training mode, the buffers and the gradients of all parameters after a forward and a
    backward; outputs and buffers in evaluation mode; outputs and gradients for a batch of twice the size, without the
    tensors that the model can be called without (an error of the scheduled model for such a batch alone is a note in
    the report, as it is loud in training, too); the gradients of floating-point inputs; and after some steps of SGD
    with momentum the parameters, buffers and outputs. (Not of an adaptive optimizer: it divides by the gradient's size,
    and so makes full-sized differences of the rounding noise in a gradient that is zero.) All that with dropout off;
    which modules drop how much is compared, too; and outputs and gradients with dropout on, unless the schedule uses
    other random numbers on purpose: for a shard, or by a step that promises RANDOM; and with dropout on, ranks with the
    same samples must have the same outputs, and the same gradients of full parameters. The first of these once more in
    the model's own types, where it is allowed what rounding does to the reference model there; there both choose
    (``topk``, ``max``, ``argmax``: a token's experts) as in the finer type, where the scores are the same but for
    rounding. A model that the schedule cuts into stages runs stage by stage, in this process, and each gets only what
    it is sent. Every rank of the mesh calls it and compares its own shards; every rank gets the same answer. Where the
    mesh is only declared, the processes are started on this machine's CPU and repeat the schedule.

    A list of schedules of one model (of several instances of it, equal in structure and values) is compared schedule by
    schedule with the reference model, and thereby with each other; the meshes may differ.

    Under ``torch.autocast``, and with ``precision="bf16-mixed"`` or ``"fp16-mixed"``, both models run so, and their own
    types are allowed the rounding of the lower one. A model that does not run in float64, with its steps (a kernel of
    half precision), is compared in float32, or else in its own types, which the report says.

    A rank that raises is named on every rank, and so is one that leaves out a collective, after ``timeout`` at the
    latest: the steps are repeated on a copy whose mesh has process groups of verify's own, with that timeout. (A model
    that names other groups waits there until theirs.)

    Both run as copies, with the same random numbers, float32 products in full precision (no TF32, also where torch is
    set to use it), and in float64 where they can; the model, its gradients, buffers,
    mode and the random number generators stay as they are. Tensors on the meta device get the values that the model's
    own initialization gives.

    Args:
        sch: the schedule, not yet built; or a list of schedules of one model.
        example_inputs: one batch: a mapping (keyword arguments), a tuple (positional ones), or one argument; the same
            on every rank. None takes ``sch.example_inputs``, of several schedules the first one's that has some.
        more_batches: further batches, given likewise, whose outputs and gradients are compared.
        rtol: the difference allowed, relative to the largest element of a tensor; None follows from the type in which
            the model computes and from what the steps promise: see ``slapo_verify.compare``.
        atol: the absolute difference allowed, in place of the floor that follows from the type.
        optimizer_steps: how many are compared; 0 compares none.
        seed: of the inputs' cotangents and of everything random.
        blame_seconds: for the search for the steps to blame, once the models differ; then the best
            three suspects are named, with "search stopped". None: no limit.
        timeout: seconds that a rank waits in a collective for another one; None: the larger of 60 and ten times what
            the reference model took. For an abstract mesh, seconds for its processes; None: 120.
        precision: a preset of ``build(..., precision=)`` in which the model's own types are compared: ``"fp32"``,
            ``"bf16-mixed"`` or ``"fp16-mixed"``; None: under the caller's autocast, if any.
        effects: whether each step's effects are looked for in the training run: collectives, calls, recomputation (see
            :func:`slapo_core.observe`); types are not, because the models run in float64.

    Returns:
        the report: differences by kind, largest share of the tolerance, and notes; print it. For a list, one each.

    Raises:
        VerifyError: they differ; the first tensor that does, the numbers, the tolerance and the steps are named. Or
            they agree, and an effect of a step is missing. The same on every rank. Of several schedules the first, with
            the outcomes of the others.
        RankMismatchError: ranks have other inputs, options, reference weights or steps.
        RankFailedError: a rank ended or left in the middle, e.g. by KeyboardInterrupt; it is named.
        ArgumentError: inputs are missing, or the reference model does not run on them, or its output depends on no
            parameter that is trained; or schedules are of different models.
        SealedError: the schedule was built or sealed, and the originals are gone.
        WeightsError: the model was changed outside of the schedule.
        TraceError: the model cannot be cut where the schedule says; the step is named.
        HookError: a plugin's answer about the stages is wrong; the plugin is named.

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
    if timeout is not None and not timeout > 0:
        raise ArgumentError(
            f"timeout must be a positive number of seconds (got {timeout!r})", hint="verify(sch, batch, timeout=300)"
        )
    if precision is not None and precision not in ("fp32", "bf16-mixed", "fp16-mixed"):
        raise ArgumentError(
            f"precision must be 'fp32', 'bf16-mixed' or 'fp16-mixed' (got {precision!r})",
            hint="parameters in bfloat16 before create_schedule" if precision == "bf16" else 'precision="bf16-mixed"',
        )
    import torch

    from slapo_verify.inputs import Inputs
    from slapo_verify.trials import VerifyOptions

    with torch.inference_mode(False), torch.enable_grad():  # whatever is set where verify is called
        schedules = _schedules(sch, example_inputs)
        for one in schedules:
            Internals(one).tree.tensors.check_unchanged()
        given = next((one.example_inputs for one in schedules if one.example_inputs is not None), None)
        given = example_inputs if example_inputs is not None else given
        further = tuple(Inputs.of(batch) for batch in more_batches)
        options = VerifyOptions(
            rtol, atol, optimizer_steps, seed, more_batches=further, blame_seconds=blame_seconds, effects=effects
        )
        with _autocast(given, precision):
            reports = _verify_each(schedules, given, options, timeout)
    return reports if isinstance(sch, (list, tuple)) else reports[0]


def _autocast(given: Any, precision: str | None) -> AbstractContextManager[Any]:
    """Return the context of a precision on the device of the inputs."""
    if precision is None or given is None:
        return nullcontext()
    import torch

    from slapo_verify.inputs import Inputs

    dtype = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(precision)
    return torch.autocast(Inputs.of(given).device.type, dtype, enabled=dtype is not None)


def _verify_each(
    schedules: Sequence[Schedule], given: Any, options: VerifyOptions, timeout: float | None
) -> tuple[VerifyReport, ...]:
    import torch

    from slapo_verify.child_processes import check_in_processes
    from slapo_verify.inputs import Inputs
    from slapo_verify.report import ScheduleSet, VerifyOutcome, conclude
    from slapo_verify.session import check_each

    for one in schedules:
        Internals(one).mark_verified(passed=False)  # whatever is raised from here on
    schedule_set = ScheduleSet(schedules)
    found: dict[int, VerifyOutcome] = {}
    by_mesh: dict[Any, list[int]] = {}  # those with one declared mesh are verified in the same processes
    for number, one in enumerate(schedules):
        is_abstract = one.mesh is not None and one.mesh.is_abstract
        by_mesh.setdefault(tuple(one.mesh.sizes.items()) if is_abstract and one.mesh else None, []).append(number)
    for mesh, numbers in by_mesh.items():
        together = [schedules[number] for number in numbers]
        if mesh is None:
            live = dataclasses.replace(options, timeout=timeout)
            outcomes = check_each(together, given, live, schedule_set=schedule_set)
        else:
            on_device = Inputs.of(given)
            inputs, kind = on_device.on_cpu(), on_device.device.type
            autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            for one in together:
                with one.reference() as model:
                    schedule_set.require_same_model(one, model)
            further = tuple(batch.on_cpu() for batch in options.more_batches)
            on_cpu = dataclasses.replace(options, more_batches=further, autocast=autocast)
            outcomes = check_in_processes(together, inputs, on_cpu, timeout=120.0 if timeout is None else timeout)
        found.update(zip(numbers, outcomes, strict=True))
    for number, outcome in found.items():
        if isinstance(outcome, VerifyReport):
            Internals(schedules[number]).mark_verified()
    return conclude([found[number] for number in range(len(schedules))])


def _schedules(sch: Schedule | Sequence[Schedule], example_inputs: Any) -> tuple[Schedule, ...]:
    """Return one schedule or several as a tuple.

    Raises:
        ArgumentError: not a schedule or list of schedules, or the second argument is one.
    """
    from slapo_core import Schedule

    if isinstance(example_inputs, Schedule):
        raise ArgumentError("example_inputs must be one batch (got a schedule)", hint="verify([sch_a, sch_b], batch)")
    schedules = tuple(sch) if isinstance(sch, (list, tuple)) else (sch,)
    for one in schedules or (sch,):
        if not isinstance(one, Schedule):
            raise ArgumentError(
                f"verify takes a schedule, or a list of schedules (got {type(one).__name__})",
                hint="verify(sch, batch), or verify([sch_a, sch_b], batch)",
            )
    return schedules
