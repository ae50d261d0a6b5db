"""The command ``slapo observe``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slapo_core import Command
from slapo_core.cli import (
    AsJson,
    MeshSizes,
    ModelName,
    NamedSchedule,
    ScheduleName,
    batch_of,
    batch_option,
    call_function,
    find_function,
    find_schedule,
    print_json,
    progress,
)
from slapo_estimate.commands import (
    ConfigFile,
    Device,
    Loss,
    Microbatches,
    Optimizer,
    estimate_named,
    find_device,
    optimizer_of,
)

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_runtime.receipts import Observation
    from slapo_runtime.schedule_copies import Sent


class ObserveCommands(Command):
    """Run training steps of a schedule, and report what each of its steps did."""

    name = "observe"

    def app(self) -> typer.Typer:
        app = typer.Typer()
        app.command()(observe)
        return app


def observe(
    schedule: ScheduleName,
    model: ModelName = None,
    mesh: MeshSizes = None,
    batch: Annotated[
        list[str] | None,
        batch_option("One rank's batch", "Floats are random; integers are zeros, or ones if the name contains 'mask'."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Observed training steps.")] = 1,
    loss: Loss = None,
    target: Annotated[
        str | None,
        typer.Option("--target", help="Observe an engine of this dialect; default: the scheduled model alone."),
    ] = None,
    optimizer: Optimizer = "AdamW",
    accumulate: Annotated[int, typer.Option("--accumulate", min=1, help="Micro-batches of an engine's step.")] = 1,
    microbatches: Microbatches = None,
    config: ConfigFile = None,
    with_estimate: Annotated[
        bool, typer.Option("--estimate", help="Estimate the step, too, and show both side by side.")
    ] = False,
    device: Device = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds for the processes.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Run training steps of a schedule, and report the effects of its steps that were seen.

    Starts the processes of the mesh on this machine's CPU. Exits with 1 if an effect is missing, and with 2 if the
    steps cannot run. Modules are imported from the current directory. Example:

    slapo observe bert:schedule --model bert:make_model --mesh tp=2 --batch input_ids=2x64:int64
    --batch labels=2x64:int64
    """
    spec = None if device is None else find_device(device)
    if not batch:
        raise typer.BadParameter("required, e.g. --batch input_ids=2x64:int64", param_hint="--batch")
    named = find_schedule(schedule, model=model, mesh=mesh)
    compute_loss = None if loss is None else find_function(loss, "--loss")
    inputs, factory = batch_of(batch), optimizer_of(optimizer) if target is not None else None
    options: dict[str, Any] = {} if microbatches is None else {"microbatches": microbatches}
    options |= {} if config is None else {"config": str(config)}
    arguments = {"optimizer": factory, "loss": compute_loss, "accumulate": accumulate, **options}
    with progress(None, "observing") as tell:
        tell(f"training steps of {named.name}")
        build = None if target is None else {"target": target, **arguments}
        found = call_function(
            _observed, "the training step", named, inputs, steps=steps, loss=compute_loss, build=build, timeout=timeout
        )
    comparison = None
    if with_estimate:
        with progress(None, "estimating") as tell:
            tell(f"a training step of {named.name}")
            predicted = estimate_named(
                named, inputs, device=spec, target=target or "torch", timeout=timeout, **arguments
            )
        comparison = found.compare(predicted)
    if as_json:
        print_json({**found.to_json(), **({} if comparison is None else {"estimate": comparison.to_json()})})
    else:
        print(found)
        if comparison is not None:
            print(f"\n{comparison}")
    if found.missing:
        raise typer.Exit(1)


def _observed(
    named: NamedSchedule,
    batch: Any,
    *,
    steps: int,
    loss: Callable[..., Any] | None,
    build: Mapping[str, Any] | None,
    timeout: float,
) -> Observation:
    import torch

    import slapo_core as slapo
    from slapo_estimate.private import tree_map_only

    generator = torch.Generator().manual_seed(0)

    def with_values(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if not tensor.dtype.is_floating_point:
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    torch.manual_seed(0)
    given = tree_map_only(torch.Tensor, with_values, batch)
    schedule = named.make(lambda _model: given)
    if build is None:
        return slapo.observe(schedule, given, steps=steps, loss=loss, timeout=timeout)
    if schedule.mesh is None:
        return _observe_engine(schedule, given, steps, build)
    from slapo_runtime.declared_ranks import on_declared_ranks

    return on_declared_ranks(_observe_sent, [schedule], given, steps, build, what="observe", timeout=timeout)[0]


def _observe_sent(
    sent: Sequence[Sent], sizes: Mapping[str, int], batch: Any, steps: int, build: Mapping[str, Any]
) -> Observation:
    return _observe_engine(sent[0].schedule(sizes), batch, steps, build)


def _observe_engine(schedule: Schedule, batch: Any, steps: int, build: Mapping[str, Any]) -> Observation:
    import slapo_core as slapo

    engine = slapo.build(schedule, **build)
    try:
        return slapo.observe(engine, batch, steps=steps)
    finally:
        engine.close()
