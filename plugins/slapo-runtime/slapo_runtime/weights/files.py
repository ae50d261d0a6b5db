"""Files of weights: safetensors and their index, read and written."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import re
import shutil
import uuid
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import WeightsError
from slapo_core.layout import Layout
from slapo_runtime.sizes import parse_bytes
from slapo_runtime.weights.module_state import is_extra, unpacked

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_runtime.correspondence.reference import Survey, TensorSpec


INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MANIFEST = "checkpoint.json"
COMPLETE = ".checkpoint-complete"
_WRITING = ".checkpoint-writing"


@contextlib.contextmanager
def replacing(directory: Path, *, last: str) -> Iterator[Path]:
    """Give a directory to write new files into; at the end of the block they replace those of the same names.

    Args:
        directory: made if it is not there; other files in it stay.
        last: the name of the file that every reader reads first.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _finish(directory, last)
    writing = directory / _WRITING
    if writing.exists():  # of a writer that was interrupted
        shutil.rmtree(writing)
    writing.mkdir()
    try:
        yield writing
        for file in writing.iterdir():
            _to_disk(file)
        _to_disk(writing)
        writing.rename(directory / COMPLETE)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)  # the error that is on its way says more
        raise
    _finish(directory, last)


def located(directory: Path, name: str, *, last: str) -> Path:
    """Return the path to read a file from; the file ``last`` decides whether new files count."""
    complete = directory / COMPLETE
    has_new = (complete / last).is_file()
    return complete / name if has_new and (complete / name).is_file() else directory / name


def _finish(directory: Path, last: str) -> None:
    complete = directory / COMPLETE
    if not complete.is_dir():
        return
    _to_disk(directory)
    for file in sorted(complete.iterdir(), key=lambda file: file.name == last):
        file.replace(directory / file.name)
    _to_disk(directory)
    complete.rmdir()


def _to_disk(path: Path) -> None:
    if os.name != "posix" and path.is_dir():  # elsewhere a directory cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_configurations(model: nn.Module, directory: Path) -> None:
    """Write ``config.json``, and ``generation_config.json`` for a model that generates, where a model has them.

    A model has one where its ``config`` can ``save_pretrained``, as those of transformers can. What cannot be written
    is left out with a warning: the weights are worth more.

    Args:
        model: the scheduled one.
        directory: it exists.
    """
    config = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    if hasattr(model, "peft_config"):  # its names are peft's: a plain model would take none of these weights
        warnings.warn(
            "the checkpoint has no config.json: transformers would load random weights with it, because the names of "
            "a peft model are its own; slapo_core.save_pretrained(sch, directory) of a live loop writes the adapter",
            stacklevel=6,
        )
        return
    written: list[tuple[str, Any]] = [("config", _with_class(config, model))]
    generation = getattr(model, "generation_config", None)
    if callable(getattr(generation, "save_pretrained", None)):
        written.append(("generation_config", generation))
    for name, value in written:
        try:
            value.save_pretrained(directory)
        except Exception as error:  # noqa: BLE001 - told: foreign validation must not cost a checkpoint
            warnings.warn(
                f"the checkpoint has no {name}.json, because {type(value).__name__}.save_pretrained() raised "
                f"{type(error).__name__}: {error}",
                stacklevel=6,
            )


def _with_class(config: Any, model: nn.Module) -> Any:
    """A copy that names the class and the element type, as ``model.save_pretrained`` writes it."""
    config = copy.deepcopy(config)
    own = next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch.distributed"))
    config.architectures = [own.__name__]  # fully_shard puts a class of its own before it
    dtype = next((tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()), torch.float32)
    config.dtype = str(dtype).removeprefix("torch.")
    return config


_CHUNK = 64 << 20  # bytes that one checksum is of


class Writer:
    """A context manager: without :meth:`finish` nothing was written.

    Args:
        directory: of the checkpoint.
        files: the names of all that a checkpoint can have; the first is always written.
        last: the name of the description.
    """

    def __init__(self, directory: Path, files: Sequence[str], *, last: str) -> None:
        self._directory, self._files, self._last = directory, files, last
        self._identifier = uuid.uuid4().hex
        self._written: list[str] = []
        self._stack = contextlib.ExitStack()
        self._new = Path()

    def __enter__(self) -> Writer:
        self._new = self._stack.enter_context(replacing(self._directory, last=self._last))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write tensors by name; a file without any is left out."""
        from safetensors.torch import save_file

        if tensors or name == self._files[0]:
            metadata = {"format": "pt", "slapo_checkpoint": self._identifier}
            save_file(_unshared(tensors), self._new / name, metadata=metadata)
            self._written.append(name)

    def finish(self, model: nn.Module, about: Mapping[str, Any]) -> None:
        """Write the description, and put all files into their places.

        Args:
            model: the reference model, for its configurations.
            about: further entries of the description.
        """
        sums = {name: list(checksums(self._new / name)) for name in sorted(self._written)}
        manifest = {**about, "id": self._identifier, "files": sorted(self._written), "checksums": sums}
        write_configurations(model, self._new)
        (self._new / self._last).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        self._stack.close()
        for name in set(self._files) - set(self._written):
            (self._directory / name).unlink(missing_ok=True)  # of an earlier checkpoint


def checksums(file: Path, chunks: Iterable[int] | None = None) -> Iterator[int]:
    """The CRC-32 of chunks of 64 MiB of a file; None: of all."""
    chunks = range(-(-file.stat().st_size // _CHUNK)) if chunks is None else chunks
    with file.open("rb") as stream:
        for number in chunks:
            stream.seek(number * _CHUNK)
            yield zlib.crc32(stream.read(_CHUNK))


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Clone tied tensors, as the format requires."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor.clone() if id(tensor) in seen else tensor.contiguous()
        seen.add(id(tensor))
    return result


_SHARDS = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def export_plain(
    weights: Mapping[str, torch.Tensor], directory: str | os.PathLike[str], max_shard_size: int | str | None
) -> None:
    """Write ``model.safetensors``, or, where a limit asks for it, several files and their index.

    Tied names become tensors of their own, so that a plain model finds all of its keys.

    Raises:
        ArgumentError: an invalid size.
    """
    from safetensors.torch import save_file

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    limit = None if max_shard_size is None else parse_bytes(max_shard_size, name="max_shard_size")
    shards = _shards(weights, limit)
    names = [SINGLE_FILE]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file({key: weights[key].clone() for key in shard}, path / name, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(_size(tensor) for tensor in weights.values())
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    else:
        (path / INDEX_FILE).unlink(missing_ok=True)  # of an earlier export, like what follows
    for file in path.iterdir():
        if file.name not in names and (_SHARDS.fullmatch(file.name) or file.name == SINGLE_FILE):
            file.unlink()


def _shards(weights: Mapping[str, torch.Tensor], limit: int | None) -> list[list[str]]:
    """Split the names into files below the limit, at least one tensor each."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in weights.items():
        if limit is not None and shards[-1] and size + _size(tensor) > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _size(tensor)
    return shards


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Source(ABC):
    """Full tensors by name; a rank reads its own shards.

    Attributes:
        extra: what modules gave by ``get_extra_state``, by the keys of the state dict.
    """

    extra: Mapping[str, Any] = {}

    @property
    @abstractmethod
    def label(self) -> str:
        """The name for messages, e.g. ``"weights 'checkpoints/bert'"``."""

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of every tensor."""

    @abstractmethod
    def read(self, name: str, layout: Layout, mesh: Mesh | None) -> torch.Tensor:
        """This rank's shard of the tensor ``name``, in the source's dtype, as new contiguous memory."""


def open_source(weights: str | os.PathLike[str] | Mapping[str, torch.Tensor] | Source) -> Source:
    """Open what ``build(weights=...)`` accepts.

    Args:
        weights: a directory with safetensors files, one such file, or a mapping of full tensors.

    Raises:
        WeightsError: there are no weights, or they cannot be read.
    """
    if isinstance(weights, Source):
        return weights
    if isinstance(weights, Mapping):
        return MappingSource(weights)
    if isinstance(weights, (str, os.PathLike)):
        return SafetensorsSource(Path(weights))
    raise WeightsError(
        f"weights must be a directory, a .safetensors file or a mapping of tensors (got {type(weights).__name__})",
        hint='build(sch, weights="dir/with/safetensors")',
    )


class MappingSource(Source):
    """Full tensors in memory, e.g. a plain model's ``state_dict()``."""

    def __init__(self, tensors: Mapping[str, Any], label: str = "the weights given") -> None:
        self._label = label
        self.extra = {name: value for name, value in tensors.items() if is_extra(name)}
        tensors = {name: value for name, value in tensors.items() if name not in self.extra}
        wrong = [name for name, tensor in tensors.items() if not isinstance(tensor, torch.Tensor)]
        if wrong:
            raise WeightsError(f"{label}: {', '.join(map(repr, wrong))} must be tensors (got other objects)")
        on_meta = [name for name, tensor in tensors.items() if tensor.is_meta]
        if on_meta:
            raise WeightsError(f"{label} hold no values, they are on the meta device: {', '.join(on_meta)}")
        self._tensors = tensors

    @property
    def label(self) -> str:
        return self._label

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, layout: Layout, mesh: Mesh | None) -> torch.Tensor:
        return layout.local(self._tensors[name].detach(), mesh)


class SafetensorsSource(Source):
    """One file, or a directory: ``model.safetensors``, the only ``*.safetensors``, or several and their index."""

    def __init__(self, path: Path) -> None:
        self._path = self.directory = path
        self._files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        description = _description_of(path)
        self.extra = unpacked(description.get("extra", {}))
        self.buffers: Mapping[str, Any] = description.get("buffers", {})  # that forwards resized or registered
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file, names in self._find(path).items():
            handle = self._open(file)
            present = set(handle.keys())
            absent = sorted(names - present) if names is not None else []
            if absent:
                raise WeightsError(f"{file} lacks tensors that {INDEX_FILE} lists: {', '.join(absent)}")
            for name in sorted(present if names is None else names):
                if is_extra(name):
                    self.extra = {**self.extra, name: handle.get_tensor(name).clone()}
                    continue
                self._file_of[name] = file
                self._shapes[name] = tuple(handle.get_slice(name).get_shape())

    @property
    def label(self) -> str:
        return f"weights '{self._path}'"

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, layout: Layout, mesh: Mesh | None) -> torch.Tensor:
        handle = self._files[self._file_of[name]]
        if layout.shape:
            shard = _read_segments(handle.get_slice(name), layout, mesh)
        else:
            shard = handle.get_tensor(name).clone()
        return shard if layout.holds_values(mesh) else shard.zero_()

    def _open(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            self._files[file] = safe_open(file, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{file} cannot be read as safetensors: {error}") from error
        return self._files[file]

    @staticmethod
    def _find(path: Path) -> dict[Path, set[str] | None]:
        """The files to read, each with the names to take from it; None takes all."""
        if path.is_file():
            return {path: None}
        if not path.is_dir():
            raise WeightsError(f"no weights found at '{path}': no such file or directory")
        if (path / INDEX_FILE).is_file():
            return _read_index(path / INDEX_FILE)
        for file in (path / COMPLETE / SINGLE_FILE, path / SINGLE_FILE):
            if file.is_file():
                return {file: None}
        files = sorted(path.glob("*.safetensors"))
        if len(files) == 1:
            return {files[0]: None}
        if not files:
            raise WeightsError(
                f"no weights found in '{path}': no *.safetensors file",
                hint="save them with model.save_pretrained(dir), or with safetensors.torch.save_file(state_dict, file)",
            )
        raise WeightsError(
            f"'{path}' holds {len(files)} safetensors files and no {INDEX_FILE}: "
            + ", ".join(file.name for file in files),
            hint="name the file: weights='dir/file.safetensors'",
        )


class Wider(Source):
    """A source with some tensors in a wider type, which is preferred.

    Args:
        source: all tensors.
        wider: some of them, by first names.
        names: every name of the source with its first one.
    """

    def __init__(self, source: Source, wider: Source, names: Mapping[str, str]) -> None:
        self._source, self._wider, self._names = source, wider, names

    @property
    def label(self) -> str:
        return self._source.label

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._source.shapes()

    def read(self, name: str, layout: Layout, mesh: Mesh | None) -> torch.Tensor:
        first = self._names.get(name, name)
        if first in self._wider.shapes():
            return self._wider.read(first, layout, mesh)
        return self._source.read(name, layout, mesh)


def _description_of(directory: Path) -> dict[str, Any]:
    """The description of an engine's checkpoint; empty for other directories and for files."""
    file = located(directory, MANIFEST, last=MANIFEST)
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise WeightsError(f"{file} is not the description of a checkpoint: {error}") from error


def _read_index(file: Path) -> dict[Path, set[str] | None]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(shard)) for name, shard in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{file} is not an index of safetensors files: {type(error).__name__}: {error}") from error
    files: dict[Path, set[str] | None] = {}
    for name, shard in pairs:
        if Path(shard).name != shard:
            raise WeightsError(f"{file} places '{name}' in '{shard}', outside of its directory")
        names = files.setdefault(file.parent / shard, set())
        assert names is not None
        names.add(name)
    return files


def _read_segments(stored: Any, layout: Layout, mesh: Mesh | None) -> torch.Tensor:
    """Read only this rank's ranges, with zeros for padding.

    What safetensors gives is the file itself, mapped: who writes into the file later would write into the model.
    """
    shard: torch.Tensor | None = None
    for ranges in itertools.product(*(placed(axis) for axis in layout.segments(mesh))):
        stops = [min(start + length, extent) for (_, start, length), extent in zip(ranges, layout.shape, strict=True)]
        starts = [min(start, stop) for (_, start, _), stop in zip(ranges, stops, strict=True)]
        part = stored[tuple(map(slice, starts, stops))]
        if shard is None:
            shard = torch.zeros(layout.local_shape(mesh), dtype=part.dtype, device="cpu")
        own = tuple(slice(at, at + extent) for (at, _, _), extent in zip(ranges, part.shape, strict=True))
        shard[own] = part
    assert shard is not None
    return shard


def placed(ranges: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """``(where it comes in the shard, start, length)`` of each range of one axis."""
    lengths = [length for _, length in ranges]
    return [(sum(lengths[:number]), start, length) for number, (start, length) in enumerate(ranges)]


def check_names(survey: Survey, source: Source) -> dict[str, str]:
    """Hold a source's names and shapes against the reference model's.

    Returns:
        first name of each tensor of the state dict -> its name in the source.

    Raises:
        WeightsError: every missing name, unexpected name and wrong shape.
    """
    shapes = source.shapes()
    names: dict[str, str] = {}
    wrong: list[str] = []
    hint = "names and shapes are those of the reference model's state_dict(), whatever the schedule"
    for spec in survey.specs.values():
        if not spec.keys:
            continue
        found = [key for key in spec.keys if key in shapes]
        if not found:
            tied = f" (tied with {', '.join(spec.keys[1:])})" if spec.keys[1:] else ""
            wrong.append(f"missing: {spec.keys[0]} {spec.shape}{tied}")
            continue
        names[spec.name] = found[0]
        if not spec.is_parameter and shapes[found[0]] != spec.shape:
            path, _, own_name = spec.name.rpartition(".")
            hint = (
                "of a buffer that the forward resizes, engine.load(directory) takes the shape of the checkpoint; else "
                f"resize it first: model.get_submodule('{path}').{own_name} = state['{found[0]}'].clone()"
            )
        wrong += [
            f"wrong shape: {key} must be {spec.shape} (got {shapes[key]})" for key in found if shapes[key] != spec.shape
        ]
    wrong += [f"unexpected: {name} {shape}" for name, shape in shapes.items() if name not in survey.keys]
    wrong += [f"unexpected: {name}" for name in source.extra if name not in survey.not_tensors]
    if wrong:
        raise WeightsError(
            "\n".join([f"{source.label} do not fit the model:", *(f"  - {line}" for line in wrong)]), hint=hint
        )
    return names


def read_tensor(source: Source, name: str, spec: TensorSpec, *, wider: bool = False) -> torch.Tensor:
    """A whole tensor, on the CPU and in the model's type; ``wider`` keeps a type that holds more."""
    value = source.read(name, Layout(spec.name, spec.shape), None)
    dtype = torch.promote_types(value.dtype, spec.dtype) if wider else spec.dtype
    return value.to("cpu", dtype)
