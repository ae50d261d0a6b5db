"""``slapo device``: measure or show the speed of a machine, for estimates of time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slapo_core import Command

if TYPE_CHECKING:
    from collections.abc import Callable

    from slapo_estimate.device import DeviceSpec


class DeviceCommands(Command):
    """``slapo device measure`` and ``slapo device show``."""

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
        int, typer.Option("--ranks", min=1, help="Processes on this machine between which links are measured.")
    ] = 1,
    dtypes: Annotated[
        str, typer.Option("--dtypes", help="Of the products that are measured.")
    ] = "float32,bfloat16,float16,float64",
) -> None:
    """Measure this machine: products by dtype, memory, launches, links.

    The first GPU; the CPU where there is none, with the threads that OMP_NUM_THREADS says. Takes about 30 seconds on an
    idle machine, and says less on a busy one. Progress goes to stderr.
    """
    from slapo_estimate.device_benchmark import measure_device

    names = [name.strip() for name in dtypes.split(",") if name.strip()]
    if file is not None and not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"{file.absolute().parent} is not a directory", param_hint="--json")
    with progress(len(names) + 2 + (ranks > 1), "measuring") as tell:
        device = measure_device(ranks=ranks, dtypes=names, tell=tell)
    if file is not None:
        file.write_text(json.dumps(device.to_json(), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _print(device)


def show(
    device: Annotated[str, typer.Argument(help="A file of `slapo device measure --json FILE`; or h100, a100.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, keys sorted.")] = False,
) -> None:
    """Show a device. Measures nothing."""
    from slapo_core.cli.output import print_json

    found = find_device(device)
    if as_json:
        print_json(found.to_json())
    else:
        _print(found)


def find_device(name: str) -> DeviceSpec:
    """The device of a file, or of a name.

    Raises:
        ArgumentError: there is none, or the file is none of a device.
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


@contextmanager
def progress(total: int | None, what: str) -> Iterator[Callable[[str], None]]:
    """Show progress on stderr: a bar on a terminal, otherwise a line for each part.

    Args:
        total: number of parts; None where it is not known.
        what: is done.
    """
    if not sys.stderr.isatty():
        yield lambda text: print(f"{what}: {text}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns: list[Any] = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        begun = False

        def tell(text: str) -> None:
            nonlocal begun
            bar.update(task, advance=1 if begun and total is not None else 0, description=f"{what}: {text}")
            begun = True

        yield tell


def _print(device: DeviceSpec) -> None:
    from slapo_core.cli.output import print_table
    from slapo_runtime.sizes import format_bytes

    rows = [(f"products in {dtype}", f"{value / 1e12:.4g} TFLOP/s") for dtype, value in sorted(device.flops.items())]
    rows.append(("memory", "not known" if device.memory is None else format_bytes(device.memory)))
    rows.append(("to and from memory", f"{device.bandwidth / 1e9:.4g} GB/s"))
    rows.append(("an operation at least", f"{device.launch * 1e6:.3g} us"))
    for mesh_dim, link in device.links.items():
        name = "links" if mesh_dim == "*" else f"links of {mesh_dim}"
        rows.append((name, f"{link.bandwidth / 1e9:.4g} GB/s, {link.latency * 1e6:.3g} us"))
    if not device.links:
        rows.append(("links", "none: `slapo device measure --ranks 2` measures them"))
    print_table((device.name, ""), rows)
