"""The command ``slapo checkpoint``: show, verify and export checkpoints, without a model."""

from __future__ import annotations

import json
import math
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from slapo_core import ArgumentError, Command, WeightsError
from slapo_core.cli import AsJson, print_json, print_table
from slapo_runtime.sizes import format_bytes, parse_bytes

_Directory = Annotated[
    Path, typer.Argument(help="A directory of checkpoints, the checkpoint of a step, or safetensors files.")
]


class CheckpointCommands(Command):
    """Show, verify and export checkpoints, without a model."""

    name = "checkpoint"

    def app(self) -> typer.Typer:
        app = typer.Typer(help="Checkpoints and exported weights, without a model.", no_args_is_help=True)
        app.command("show")(show)
        app.command("verify")(verify)
        app.command("export")(export)
        return app


def show(directory: _Directory, as_json: AsJson = False) -> None:
    """Show the checkpoints in a directory: size, tensors, optimizer, ranks.

    An incomplete checkpoint is of an interrupted save; engine.load() passes it over.
    """
    found = [one.about() for one in _stored_in(directory)]
    if as_json:
        print_json({"checkpoints": found, "directory": str(directory)})
        return
    columns = ("name", "state", "size", "tensors", "optimizer", "ranks")
    shown = [{**one, "size": format_bytes(one["size"])} for one in found]
    print_table(columns, [["-" if one[key] is None else str(one[key]) for key in columns] for one in shown])


def verify(directory: _Directory, as_json: AsJson = False) -> None:
    """Check that files are there in full, and as they were written; exit 1 if not.

    Sizes, headers and indexes of all files are checked; checksums of checkpoints, too. An incomplete checkpoint is of
    an interrupted save, and damaged only if there is no complete one.
    """
    found = _stored_in(directory)
    incomplete = [one.name for one in found if isinstance(one, _Incomplete)]
    damaged: dict[str, str] = {}
    checks = [check for one in found for check in one.checks()]
    for file, check in _progress(checks, "verifying"):
        if str(file) in damaged:
            continue
        try:
            check()
        except WeightsError as error:
            damaged[str(file)] = error.message
    if len(incomplete) == len(found):
        damaged |= {str(directory): "no complete checkpoint"}
    if as_json:
        print_json({"damaged": damaged, "directory": str(directory), "incomplete": incomplete})
    else:
        files = len({file for file, _ in checks})
        for name in incomplete:
            print(f"{name} is incomplete: of an interrupted save")
        for problem in damaged.values():
            print(f"damaged: {problem}")
        if not damaged:
            print(f"{files} files of {len(found) - len(incomplete)} checkpoints are as they were written")
    if damaged:
        raise typer.Exit(1)


def export(
    directory: _Directory,
    output: Annotated[Path, typer.Argument(help="A directory for the safetensors files; made if it does not exist.")],
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="The largest file.")] = "5GB",
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of floating-point tensors, e.g. bfloat16.")] = None,
) -> None:
    """Write the weights of a checkpoint as safetensors, one tensor at a time.

    Of a directory of checkpoints, the newest complete one. Configurations of transformers that the checkpoint has are
    copied, so that from_pretrained() reads the directory.
    """
    import torch

    from slapo_runtime.weights.checkpoint_source import CheckpointSource, open_source
    from slapo_runtime.weights.files import replacing, stale_weights, warn_of_other_function
    from slapo_runtime.weights.safetensors_files import (
        INDEX_FILE,
        SafetensorsWriter,
        bytes_of,
        divide,
        file_names,
        write_index,
    )
    from slapo_runtime.weights.sources import SafetensorsSource

    limit, wanted = parse_bytes(max_shard_size, name="--max-shard-size"), getattr(torch, dtype or "float32", None)
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise ArgumentError(f"--dtype must be a floating-point type (got '{dtype}')", hint="--dtype bfloat16")
    source = open_source(directory)
    assert isinstance(source, (CheckpointSource, SafetensorsSource))
    source.check_files()
    if isinstance(source, CheckpointSource):
        warn_of_other_function(source.manifest.description.get("other_function", ()))
    tensors = {}
    for name, shape in source.shapes().items():
        own = source.dtype(name)
        tensors[name] = (wanted if dtype is not None and own.is_floating_point else own, shape)
    parts = divide([(name, bytes_of(*one)) for name, one in tensors.items()], limit)
    names = file_names(len(parts))
    last = INDEX_FILE if len(names) > 1 else names[0]
    with replacing(output, last=last, stale=partial(stale_weights, keep=names)) as place:
        for file, part in _progress(list(zip(names, parts, strict=True)), "exporting"):
            writer = SafetensorsWriter(place / file, {name: tensors[name] for name in part}, {"format": "pt"})
            try:
                for name in part:
                    writer.write(name, source.read_full(name, tensors[name][0]))
                writer.finish()
            finally:
                writer.close()
        if len(names) > 1:
            weight_map = {name: file for file, part in zip(names, parts, strict=True) for name in part}
            write_index(place, sum(bytes_of(*one) for one in tensors.values()), weight_map)
        _copy_configurations(source.directory, place, dtype)
    print(f"wrote {len(tensors)} tensors of {source.label} into {len(names)} file{'s' * (len(names) > 1)}: {output}")


def _copy_configurations(directory: Path, output: Path, dtype: str | None) -> None:
    for name in ("config.json", "generation_config.json"):
        if (directory / name).is_file():
            shutil.copyfile(directory / name, output / name)
    file = output / "config.json"
    if dtype is not None and file.is_file():
        config = {**json.loads(file.read_text(encoding="utf-8")), "dtype": dtype}
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# -- checkpoints and files ----------------------------------------------------------------------------------------

_Check = tuple[Path, Callable[[], None]]


class _Stored(ABC):
    """A checkpoint, or exported files.

    Args:
        path: of the directory, or of a single file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name or str(path)

    def about(self) -> dict[str, Any]:
        """Describe it, for programs."""
        found = [self.path] if self.path.is_file() else [one for one in self.path.glob("*") if one.is_file()]
        about = {"name": self.name, "step": None, "tensors": None, "optimizer": None, "ranks": None}
        return {**about, "size": sum(one.stat().st_size for one in found), **self.details()}

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """Return entries of :meth:`about`."""

    @abstractmethod
    def checks(self) -> Iterator[_Check]:
        """Yield short checks of its files, several of a large one, which raise a WeightsError."""


class _Incomplete(_Stored):
    def details(self) -> dict[str, Any]:
        return {"state": "incomplete"}

    def checks(self) -> Iterator[_Check]:
        yield from ()


class _Checkpoint(_Stored):
    """The complete checkpoint of a step."""

    def details(self) -> dict[str, Any]:
        from slapo_runtime.checkpoints.manifest import Manifest

        manifest = Manifest.read(self.path)
        return {
            "state": "complete",
            "step": manifest.step,
            "tensors": sum(name.startswith("model.") for name in manifest.tensors),
            "optimizer": (manifest.description.get("optimizer") or {}).get("type"),
            "ranks": manifest.world_size,
        }

    def checks(self) -> Iterator[_Check]:
        from slapo_runtime.checkpoints.manifest import MANIFEST, Manifest, check_files

        try:
            manifest = Manifest.read(self.path)
        except WeightsError as error:
            yield self.path / MANIFEST, partial(_raise, error)
            return
        for name, file in manifest.files.items():
            chunks = max(1, len(file.crc32))
            for chunk in range(chunks):
                yield self.path / name, partial(check_files, self.path, {name: file}, part=(chunk, chunks))
        yield self.path / MANIFEST, partial(_check_elements, self.path / MANIFEST, manifest)


class _Files(_Stored):
    """Safetensors files: exported ones, or a checkpoint of format 1."""

    def details(self) -> dict[str, Any]:
        from slapo_runtime.weights.sources import SafetensorsSource

        tensors = len(SafetensorsSource(self.path).shapes())
        if not self._manifest():
            return {"state": "safetensors", "tensors": tensors}
        optimizer = (self._manifest().get("optimizer") or {}).get("type")
        return {"state": "complete, format 1", "tensors": tensors, "optimizer": optimizer}

    def checks(self) -> Iterator[_Check]:
        from slapo_runtime.checkpoints.manifest import MANIFEST, check_sums
        from slapo_runtime.weights.files import located
        from slapo_runtime.weights.sources import SafetensorsSource

        try:
            files = SafetensorsSource.find(self.path)
            sums = self._manifest().get("checksums", {})
        except WeightsError as error:
            yield self.path, partial(_raise, error)
            return
        for file, names in files.items():
            yield file, partial(_check_header, file, names)
        for name, expected in sums.items():
            file = located(self.path, name, last=MANIFEST)
            for number in range(len(expected)):
                yield file, partial(check_sums, file, expected, part=(number, len(expected)))

    def _manifest(self) -> dict[str, Any]:
        from slapo_runtime.weights.sources import description_of

        return description_of(self.path)


def _stored_in(directory: Path) -> list[_Stored]:
    """Return the checkpoints in a directory, the oldest first, or the one that it is.

    Raises:
        ArgumentError: there is nothing of the kind.
    """
    from slapo_runtime.checkpoints.manifest import MANIFEST, is_complete, step_directories, step_of

    if not directory.exists():
        raise ArgumentError(f"'{directory}' does not exist", hint="slapo checkpoint show runs/1")
    steps = step_directories(directory) or [directory] * (step_of(directory.absolute()) is not None)
    if steps:
        return [_Checkpoint(one) if is_complete(one) else _Incomplete(one) for one in steps]
    if directory.is_file() or (directory / MANIFEST).is_file() or any(directory.glob("*.safetensors*")):
        return [_Files(directory)]
    raise ArgumentError(
        f"'{directory}' holds neither checkpoints nor safetensors files",
        hint="give the directory of engine.save(), of a step, or of engine.export()",
    )


def _raise(error: WeightsError) -> None:
    raise error


def _check_elements(file: Path, manifest: Any) -> None:
    """Refuse a checkpoint whose rectangles do not fill its tensors, or lie outside of their files."""
    for name, tensor in manifest.tensors.items():
        held = sum(math.prod(chunk.extent) for chunk in tensor.chunks)
        if held != math.prod(tensor.shape):
            raise WeightsError(f"{file}: '{name}' has {held} of {math.prod(tensor.shape)} elements")
        for chunk in tensor.chunks:
            if chunk.file not in manifest.files or chunk.at + chunk.bytes > manifest.files[chunk.file].bytes:
                raise WeightsError(f"{file} places '{name}' outside of {chunk.file}")


def _check_header(file: Path, names: set[str] | None) -> None:
    from slapo_runtime.weights.safetensors_files import headers_of

    list(headers_of({file: names}))


def _progress(items: list[tuple[Any, Any]], what: str) -> Iterator[tuple[Any, Any]]:
    """Yield the items, with a bar on a terminal's stderr."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, description=what, console=Console(stderr=True), transient=True)
