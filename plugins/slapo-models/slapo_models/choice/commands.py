"""The command ``slapo suggest``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slapo_core import Command
from slapo_core.cli import (
    AsJson,
    batch_of,
    batch_option,
    call_function,
    find_function,
    print_json,
    print_table,
    progress,
)
from slapo_estimate.commands import Loss, Optimizer, find_device, optimizer_of

if TYPE_CHECKING:
    from slapo_models.choice.search import Choice


class SuggestCommands(Command):
    """Choose mesh and schedule of a model by predicted time and memory."""

    name = "suggest"

    def app(self) -> typer.Typer:
        app = typer.Typer()
        app.command()(suggest)
        return app


def suggest(
    model: Annotated[str, typer.Argument(metavar="MODULE:MODEL_FN", help="A function that returns the model.")],
    devices: Annotated[int, typer.Option("--devices", min=1, help="Number of devices, one rank each.")],
    batch: Annotated[
        list[str] | None, batch_option("The batch of a step of all replicas", "", "input_ids=64x512:int64")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Bytes of a device, e.g. 70GiB; default: 90 % of the device's.")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="FILE|NAME", help="A file of `slapo device measure`; or h100, a100.")
    ] = "a100",
    optimizer: Optimizer = "AdamW",
    loss: Loss = None,
    schedule: Annotated[
        str | None,
        typer.Option("--schedule", metavar="MODULE:FN", help="Steps for tp and kernels; default: slapo_models.auto."),
    ] = None,
    kernels: Annotated[bool, typer.Option(help="Replace patterns by kernels where that pays.")] = True,
    as_json: AsJson = False,
    as_python: Annotated[bool, typer.Option("--python", help="Print the best schedule as Python.")] = False,
    study: Annotated[
        Path | None, typer.Option("--study", metavar="FILE", help="Write a study of the best five for `slapo tune`.")
    ] = None,
) -> None:
    """Choose mesh, stages, micro-batches and checkpoints for a model on a number of devices.

    Nothing runs and no tensor has memory. The table has the best five meshes: data parallelism by replicas or shards
    (fsdp), micro-batches of a step and samples of each on a device, checkpointed blocks; predicted time of a step, peak
    memory of a device, and bytes that it sends in a step. Then the meshes that do not fit or run, with the reasons.
    Progress goes to stderr. Modules are imported from the current directory.
    Example:

    slapo suggest bert:make_model --devices 8 --memory 70GiB --batch input_ids=64x512:int64 --batch labels=64x512:int64
    """
    if as_json and as_python:
        raise typer.BadParameter("give one of them", param_hint="--json and --python")
    if not batch:
        raise typer.BadParameter("required, e.g. --batch input_ids=64x512:int64", param_hint="--batch")
    if study is not None and study.exists():
        raise typer.BadParameter(f"{study} exists", param_hint="--study")
    import torch

    from slapo_core.errors import ArgumentError
    from slapo_estimate.composition import memory_limit
    from slapo_models.choice.search import auto_schedule

    make_model = find_function(model, "MODULE:MODEL_FN")
    apply = None if schedule is None else find_function(schedule, "--schedule")
    compute_loss = None if loss is None else find_function(loss, "--loss")
    inputs, factory, spec = batch_of(batch), optimizer_of(optimizer), find_device(device)
    try:
        limit = memory_limit(memory, spec)
    except ArgumentError as error:
        raise typer.BadParameter(f"{error.message}; e.g. {error.hint}", param_hint="--memory") from error
    with torch.device("meta"):
        made = call_function(make_model, model)
    if not isinstance(made, torch.nn.Module):
        raise typer.BadParameter(f"must return a torch.nn.Module (got {type(made).__name__})", param_hint=model)
    with progress(None, "suggesting") as tell:
        choice = auto_schedule(
            made,
            inputs,
            devices=devices,
            memory=limit,
            device=spec,
            optimizer=factory,
            loss=compute_loss,
            schedule=apply,
            kernels=kernels,
            tell=tell,
        )
    if study is not None:
        from slapo_models.choice.study import study_source

        study.write_text(
            study_source(choice, model=model, batch=batch, schedule=schedule, optimizer=optimizer, loss=loss)
        )
        print(f"wrote {study}: slapo tune run {study}", file=sys.stderr)
    if as_json:
        print_json(as_plain(choice))
    elif as_python:
        print(python_of(choice), end="")
    else:
        from slapo_models.choice.search import HEAD

        print_table(HEAD, choice.rows())
        print("\n".join(choice.summary()))


def as_plain(choice: Choice) -> dict[str, Any]:
    """Convert to ``{"candidates", "device", "memory", "refused"}``, the best candidate first."""
    return {
        "candidates": [candidate.to_json() for candidate in choice.candidates],
        "device": choice.device.name,
        "memory": choice.memory,
        "refused": [{"mesh": mesh, "reason": reason} for mesh, reason in choice.refused],
    }


def python_of(choice: Choice) -> str:
    """Return the chosen schedule as Python, with its mesh and the options of ``build``."""
    from slapo_estimate.composition import text_of_bytes
    from slapo_models.source import python_source

    imports, function = python_source(choice.schedule).split("\n\n\n", 1)
    mesh, options = (_literal(each) for each in (choice.best.mesh, choice.options))
    *_, time, memory, _ = choice.best.row()
    limit = "" if choice.memory is None else f" of {text_of_bytes(choice.memory)}"
    predicted = f"# Predicted for {choice.device.name}: {time} a step, {memory}{limit}."
    use = f"""\
# sch = slapo.create_schedule(model, mesh=MESH, example_inputs=micro_batch)  # samples: {choice.best.samples}
# schedule(sch)
# engine = slapo.build(sch, optimizer=..., **OPTIONS)"""
    return f"{imports}\n\n{predicted}\n{use}\nMESH = {mesh}\nOPTIONS = {options}\n\n\n{function}"


def _literal(value: dict[str, Any]) -> str:
    import json

    return json.dumps(value)
