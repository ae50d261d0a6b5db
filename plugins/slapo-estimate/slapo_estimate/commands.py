"""The commands ``slapo estimate`` and ``slapo device``."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
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
    find_function,
    find_schedule,
    print_json,
    print_table,
    progress,
)
from slapo_runtime.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from slapo_estimate.device import DeviceSpec
    from slapo_estimate.results import CollectiveCall, Estimate, RankEstimate


class DeviceCommands(Command):
    """Measure the speed of a machine, or show a device."""

    name = "device"

    def app(self) -> typer.Typer:
        app = typer.Typer(help="Describe the speed of a machine, for estimates of time.", no_args_is_help=True)
        app.command("measure")(measure)
        app.command("show")(show)
        return app


def measure(
    file: Annotated[
        Path | None, typer.Option("--json", help="Write the device to this file, for `slapo estimate --device FILE`.")
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, help="Processes on this machine to measure links between.")
    ] = 1,
    dtypes: Annotated[
        str, typer.Option("--dtypes", help="Types of the measured products.")
    ] = "float32,bfloat16,float16,float64",
) -> None:
    """Measure this machine: products by dtype, memory, launches, links.

    Measures the first GPU; without a GPU the CPU, with OMP_NUM_THREADS threads. Float32 is measured in full precision;
    on CUDA also in TF32. Takes about 30 seconds; use an idle machine. Progress goes to stderr.
    """
    from slapo_estimate.device_benchmark import measure_device, products_of

    names = products_of([name.strip() for name in dtypes.split(",") if name.strip()])
    if file is not None and not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"{file.absolute().parent} is not a directory", param_hint="--json")
    with progress(len(names) + 2 + (ranks > 1), "measuring") as tell:
        device = measure_device(ranks=ranks, dtypes=names, tell=tell)
    if file is not None:
        file.write_text(json.dumps(device.to_json(), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _print(device)


def show(
    device: Annotated[str, typer.Argument(help="A file of `slapo device measure --json FILE`; or h100, a100.")],
    as_json: AsJson = False,
) -> None:
    """Show a device without measuring."""
    found = find_device(device)
    if as_json:
        print_json(found.to_json())
    else:
        _print(found)


def find_device(name: str) -> DeviceSpec:
    """Return the device of a file or of a name.

    Raises:
        ArgumentError: neither a device's file nor its name.
    """
    from slapo_core.errors import ArgumentError
    from slapo_estimate.device import DEVICES, DeviceSpec

    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    if not Path(name).exists():
        raise ArgumentError(
            f"unknown device '{name}': neither a file nor one of {', '.join(sorted(DEVICES))}",
            hint="slapo device measure --json device.json",
        )
    return DeviceSpec.from_json(Path(name))


def _print(device: DeviceSpec) -> None:
    rows = [(f"products in {dtype}", f"{value / 1e12:.4g} TFLOP/s") for dtype, value in sorted(device.flops.items())]
    rows.append(("memory", "unknown" if device.memory is None else format_bytes(device.memory)))
    rows.append(("memory bandwidth", f"{device.bandwidth / 1e9:.4g} GB/s"))
    rows.append(("launch of an operation", f"{device.launch * 1e6:.3g} us"))
    for mesh_dim, link in device.links.items():
        name = "links" if mesh_dim == "*" else f"links of {mesh_dim}"
        rows.append((name, f"{link.bandwidth / 1e9:.4g} GB/s, {link.latency * 1e6:.3g} us"))
    if not device.links:
        rows.append(("links", "none: `slapo device measure --ranks 2` measures them"))
    print_table((device.name, ""), rows)


Loss = Annotated[str | None, typer.Option("--loss", metavar="MODULE:FN", help="loss(output, batch), as for build.")]
Optimizer = Annotated[str, typer.Option("--optimizer", help="A class of torch.optim, MODULE:FN as for build, or none.")]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="FILE|NAME",
        help="Predict time by this device: a file of `slapo device measure`; or h100, a100.",
    ),
]
Microbatches = Annotated[
    int | None, typer.Option("--microbatches", min=1, help="Micro-batches of a pipeline; default: as for build.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="A JSON file for the target's option config, e.g. DeepSpeed's."),
]


class EstimateCommands(Command):
    """Estimate memory, collectives and time of a saved schedule."""

    name = "estimate"

    def app(self) -> typer.Typer:
        app = typer.Typer()
        app.command()(estimate)
        return app


def estimate(
    schedule: ScheduleName,
    model: ModelName = None,
    mesh: MeshSizes = None,
    batch: Annotated[
        list[str] | None,
        batch_option("One rank's batch", "Integers are zeros, or ones if the name contains 'mask'."),
    ] = None,
    optimizer: Optimizer = "AdamW",
    loss: Loss = None,
    accumulate: Annotated[int, typer.Option("--accumulate", min=1, help="Micro-batches of a step.")] = 1,
    microbatches: Microbatches = None,
    target: Annotated[str, typer.Option("--target", help="The dialect whose training step is estimated.")] = "torch",
    config: ConfigFile = None,
    device: Device = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="One global rank; default: one of each kind of rank.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Exit with 1 if a rank needs more, e.g. 70GiB.")
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="List each collective.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds for each kind of rank.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Predict peak memory, collectives, operations and time of a training step, for a mesh of any size.

    Runs on this machine's CPU, without the memory of the step. Modules are imported from the current directory.
    Example:

    slapo estimate bert:schedule --model bert:make_model --mesh dp=8,tp=8 --batch input_ids=4x512:int64
    --batch labels=4x512:int64 --device h100
    """
    from slapo_core.errors import ArgumentError

    try:
        limit = None if memory is None else parse_bytes(memory)
    except ArgumentError as error:
        raise typer.BadParameter(f"{error.message}; e.g. {error.hint}", param_hint="--memory") from error
    spec = None if device is None else find_device(device)
    if not batch:
        raise typer.BadParameter("required, e.g. --batch input_ids=4x512:int64", param_hint="--batch")
    named = find_schedule(schedule, model=model, mesh=mesh)
    compute_loss = None if loss is None else find_function(loss, "--loss")
    inputs, factory = batch_of(batch), optimizer_of(optimizer)
    options: dict[str, Any] = {} if microbatches is None else {"microbatches": microbatches}
    options |= {} if config is None else {"config": str(config)}
    with progress(None, "estimating") as tell:
        tell(f"a training step of {named.name}")
        found = estimate_named(
            named,
            inputs,
            rank=rank,
            optimizer=factory,
            loss=compute_loss,
            device=spec,
            accumulate=accumulate,
            target=target,
            timeout=timeout,
            **options,
        )
    if as_json:
        print_json(as_plain(found))
    else:
        print_estimate(found, spec, each=each)
    if limit is not None and found.memory.total > limit:
        needed = format_bytes(found.memory.total)
        print(f"error: the step needs {needed}, more than --memory {format_bytes(limit)}", file=sys.stderr)
        raise typer.Exit(1)


def estimate_named(named: NamedSchedule, batch: Any, **options: Any) -> Estimate:
    """Estimate a schedule of the command line.

    Args:
        named: made in the simulating processes by its functions; where one function makes model and schedule, made
            here on the meta device.
        batch: see :func:`slapo_core.estimate`.
        options: see :func:`slapo_core.estimate`.
    """
    from slapo_estimate.estimates import estimate, estimate_functions
    from slapo_estimate.values import IntegerTracking

    if named.make_model is not None:
        return estimate_functions(named.make_model, named.apply, batch, mesh=named.mesh, **options)
    with IntegerTracking():  # models read masks
        schedule = named.make(on_meta=True)
    return estimate(schedule, batch, **options)


def optimizer_of(name: str) -> Callable[..., Any] | None:
    """Return the factory of an optimizer; None for ``"none"``."""
    import torch

    if name.lower() == "none":
        return None
    if ":" in name:
        return find_function(name, "--optimizer")
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise typer.BadParameter(f"torch.optim has no optimizer {name!r}", param_hint="--optimizer")
    factory: Callable[..., Any] = found
    return factory


def as_plain(estimate: Estimate) -> dict[str, Any]:
    """Convert to ``{"assumptions", "kinds": [{"collectives", "flops", "memory", "rank", ...}], "mesh", ...}``."""
    kinds = []
    for kind in estimate.kinds:
        value = {
            field.name: getattr(kind, field.name) for field in dataclasses.fields(kind) if field.name != "observed"
        }
        memory = {**dataclasses.asdict(kind.memory), "total": kind.memory.total}
        kinds.append({**value, "memory": memory, "collectives": list(map(dataclasses.asdict, kind.collectives))})
    return {
        "assumptions": list(estimate.assumptions),
        "kinds": kinds,
        "memory": estimate.memory.total,
        "mesh": dict(estimate.mesh),
        "time": estimate.time,
    }


def print_estimate(estimate: Estimate, device: DeviceSpec | None, *, each: bool) -> None:
    """Print memory, collectives and FLOPs for each kind of rank, and the assumptions."""
    for number, kind in enumerate(estimate.kinds):
        if number:
            print()
        if len(estimate.kinds) > 1:
            print(f"{_ranks(kind.ranks)}, simulated as rank {kind.rank}\n")
        _print_memory(kind, device)
        print()
        _print_collectives(kind.collectives, each=each)
        print(f"\n{kind.flops:.4g} floating-point operations a step")
        if kind.time is not None and device is not None:
            print(f"{kind.time:.4g} s a step on {device.name}")
    for assumption in estimate.assumptions:
        print(f"assumption: {assumption}")


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} ({shown})"


def _print_memory(kind: RankEstimate, device: DeviceSpec | None) -> None:
    memory = kind.memory
    rows = [(name, format_bytes(size)) for name, size in memory.by_kind().items() if size]
    share = ""
    if device is not None and device.memory is not None:
        share = f" of {format_bytes(device.memory)}"
    print_table(("MEMORY AT THE PEAK", "BYTES"), [*rows, ("total", format_bytes(memory.total) + share)])
    where = f"in '{memory.module}'" if memory.module and memory.module != memory.phase else "in the model"
    print(f"reached {where}, {memory.phase}" if memory.phase != "optimizer" else "reached in the optimizer's step")


def _print_collectives(collectives: Sequence[CollectiveCall], *, each: bool) -> None:
    if not collectives:
        print("no collectives")
        return
    columns = ("COLLECTIVE", "MESH DIM", "RANKS", "PHASE", "COUNT", "BYTES", "MODULE", "STEP")
    print_table(columns, [tuple(row) for row in _rows(collectives, each=each)])


def _rows(collectives: Sequence[CollectiveCall], *, each: bool) -> Iterator[list[str]]:
    """Yield a row for collectives that differ in the number of a layer only."""
    together: dict[tuple[str, ...], list[int]] = {}
    for number, one in enumerate(collectives):
        module, record = one.module, one.record
        if not each:
            module = re.sub(r"(?<![^.])\d+(?![^.])", "*", module)
            record = re.sub(r"^#\d+ ", "", record).partition(" at ")[0]
        dimension = one.mesh_dim or "(other)"
        key = (
            one.kind,
            dimension,
            str(one.ranks),
            one.phase,
            module or "(the model)",
            record or "-",
            str(each * number),
        )
        together.setdefault(key, []).append(one.bytes)
    for (kind, dimension, ranks, phase, module, record, _), sizes in together.items():
        yield [kind, dimension, ranks, phase, str(len(sizes)), format_bytes(sum(sizes)), module, record]
