"""``slapo estimate``: memory, communication and time of a training step, before anything runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from slapo_core.cli.estimate_words import batch_of, find, mesh_of, optimizer_of

__all__ = ["register"]


def register(root: typer.Typer, plugins: typer.Typer) -> None:
    """Add the command of this file."""
    root.command("estimate")(estimate)


def estimate(
    model: Annotated[str, typer.Argument(metavar="MODULE:MODEL_FN", help="A function that gives the model.")],
    schedule: Annotated[
        str | None,
        typer.Option("--schedule", metavar="MODULE:FN", help="A function of the schedule that applies steps."),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option("--mesh", metavar="SIZES", help="Declared sizes, outermost first: dp=8,tp=8.")
    ] = None,
    batch: Annotated[
        list[str] | None,
        typer.Option(
            "--batch",
            metavar="MODULE:FN|NAME=SHAPE:DTYPE",
            help="One rank's batch: a function that gives it; or its tensors, repeated: input_ids=4x512:int64. "
            "Integers are zeros; ones where the name has 'mask' in it. SHAPE:DTYPE without a name goes by position.",
        ),
    ] = None,
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="A name of torch.optim, MODULE:FN as for build, or none.")
    ] = "AdamW",
    loss: Annotated[
        str | None, typer.Option("--loss", metavar="MODULE:FN", help="loss(output, batch), as for build.")
    ] = None,
    accumulate: Annotated[int, typer.Option("--accumulate", min=1, help="Micro-batches of a step.")] = 1,
    microbatches: Annotated[
        int | None,
        typer.Option("--microbatches", min=1, help="Micro-batches of a pipeline; default: what build takes."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="FILE|NAME", help="For the time: a file of `slapo device measure`; or h100, a100."
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="One global rank; default: one of each kind of rank.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Exit with 1 if a rank needs more, e.g. 70GiB.")
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="List every collective by itself.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds for each kind of rank.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, keys sorted.")] = False,
) -> None:
    """Predict peak memory, collectives, operations and time of a training step, for a mesh of any size.

    Everything happens on this machine's CPU, without the memory that the step takes. Modules are found from the current
    directory. Example:

    slapo estimate bert:make_model --schedule bert:schedule --mesh dp=8,tp=8 --batch input_ids=4x512:int64
    --batch labels=4x512:int64 --device h100
    """
    import sys
    from pathlib import Path

    from slapo_core.cli.device import find_device, progress
    from slapo_core.cli.estimate_tables import as_plain, print_estimate
    from slapo_core.cli.output import print_json
    from slapo_core.errors import ArgumentError
    from slapo_core.spec.device import format_bytes, parse_bytes

    sizes = mesh_of(mesh)
    try:
        limit = None if memory is None else parse_bytes(memory)
    except ArgumentError as error:
        raise typer.BadParameter(f"{error.message}; e.g. {error.hint}", param_hint="--memory") from error
    spec = None if device is None else find_device(device)
    if not batch:
        raise typer.BadParameter("needed, e.g. --batch input_ids=4x512:int64", param_hint="--batch")
    sys.path.insert(0, str(Path.cwd()))
    make_model = find(model, "MODULE:MODEL_FN")
    apply = _no_steps if schedule is None else find(schedule, "--schedule")
    compute_loss = None if loss is None else find(loss, "--loss")
    inputs, factory = batch_of(batch), optimizer_of(optimizer)
    options: dict[str, Any] = {} if microbatches is None else {"microbatches": microbatches}
    from slapo_core.estimation.estimates import estimate_functions

    with progress(None, "estimating") as tell:
        tell(f"a training step on {sizes or 'one rank'}")
        found = estimate_functions(
            make_model,
            apply,
            inputs,
            mesh=sizes,
            rank=rank,
            optimizer=factory,
            loss=compute_loss,
            device=spec,
            accumulate=accumulate,
            timeout=timeout,
            **options,
        )
    if as_json:
        print_json(as_plain(found))
    else:
        print_estimate(found, spec, each=each)
    if limit is not None and found.memory.total > limit:
        needed = format_bytes(found.memory.total)
        print(f"error: the step needs {needed}, more than {format_bytes(limit)}", file=sys.stderr)
        raise typer.Exit(1)


def _no_steps(schedule: object) -> None:
    """The model as it is."""
