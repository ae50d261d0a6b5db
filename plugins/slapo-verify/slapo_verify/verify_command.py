"""The command ``slapo verify``."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated, Any

import typer

from slapo_core import Command, RankFailedError, VerifyError
from slapo_core.cli import (
    AsJson,
    ExampleBatch,
    MeshSizes,
    ModelName,
    ScheduleName,
    batch_for,
    batch_option,
    find_schedule,
    print_json,
    progress,
)


class VerifyCommands(Command):
    """Compare a scheduled model with the reference model; name the steps that broke it."""

    name = "verify"

    def app(self) -> typer.Typer:
        app = typer.Typer()
        app.command()(verify)
        return app


def verify(
    schedule: ScheduleName,
    model: ModelName = None,
    mesh: MeshSizes = None,
    batch: Annotated[
        list[str] | None,
        batch_option(
            "One batch",
            "Values are random, within the vocabulary. Default: the schedule's example_inputs; else made from the "
            "model's configuration or first layer.",
        ),
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="Also compare in fp32, bf16-mixed or fp16-mixed.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the model's values and of the batch.")] = 0,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds for the processes of a mesh.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Compare a scheduled model with the reference model: outputs, gradients, optimizer steps, effects.

    Starts the processes of the mesh on this machine's CPU. Exits with 0 if the models agree; with 1 if not, or if a
    process failed, and names the steps to blame; with 2 if they could not be compared. Examples:

    slapo verify bert:schedule --model bert:make_model --mesh tp=2

    slapo verify saved.json --model bert:make_model --mesh dp=2,tp=2 --batch input_ids=4x32:int64
    """
    import torch

    import slapo_verify

    named = find_schedule(schedule, model=model, mesh=mesh)
    torch.manual_seed(seed)
    found: list[ExampleBatch] = []

    def example_inputs(reference: torch.nn.Module) -> Any:
        found.append(batch_for(reference, batch, seed))
        return found[0].inputs

    made = named.make(example_inputs)
    if not found and made.example_inputs is not None and not batch:
        found.append(ExampleBatch(made.example_inputs, "the schedule's example_inputs"))
    elif not found:
        with made.reference() as reference:
            example_inputs(reference)
    given = found[0]
    ranks = made.mesh.world_size if made.mesh is not None else 1
    with progress(None, "verifying") as tell:
        tell(f"the batch, {given.how}")
        tell(f"{len(made.records)} steps on {ranks} process{'es' if ranks > 1 else ''}")
        try:
            report = slapo_verify.verify(made, given.inputs, precision=precision, seed=seed, timeout=timeout)
            error: VerifyError | RankFailedError | None = None
        except (VerifyError, RankFailedError) as raised:
            error = raised
    about = {"batch": given.how, "mesh": None if made.mesh is None else made.mesh.sizes, "passed": error is None}
    if error is None:
        if as_json:
            print_json({**about, "report": dataclasses.asdict(report)})
        else:
            print(f"{report}\n  batch: {given.how}")
        return
    if as_json:
        print_json({**about, "error": _error(error)})
    else:
        print(f"error: not verified: {error}", file=sys.stderr)
    raise typer.Exit(1)


def _error(error: VerifyError | RankFailedError) -> dict[str, Any]:
    fields = ("tensor", "difference", "tolerance", "rank", "steps") if isinstance(error, VerifyError) else ()
    return {"hint": error.hint, "message": error.message, **{name: getattr(error, name) for name in fields}}
