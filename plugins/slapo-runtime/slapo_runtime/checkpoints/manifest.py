"""Describe checkpoints: the directories of steps, and the manifest that makes one of them complete."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slapo_core.errors import WeightsError

FORMAT = 2
MANIFEST = "checkpoint.json"
CHUNK = 64 << 20  # bytes of one checksum

_STEP = re.compile(r"step-(\d{8,})(\.again)?")
_AGAIN = ".again"  # a second checkpoint of a step, until it takes the place of the first


class StoredChunk(NamedTuple):
    """A rectangle of a tensor in a file, as ``torch.save`` wrote it."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    file: str
    at: int
    bytes: int


class StoredTensor(NamedTuple):
    """The type, the full shape and the rectangles of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


class StoredFile(NamedTuple):
    """The size and the CRC-32 of each chunk of 64 MiB of a file."""

    bytes: int
    crc32: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """The description of a complete checkpoint, in ``checkpoint.json``.

    Args:
        identifier: of the save, e.g. ``"5b1c..."``.
        step: the number of training steps before it.
        world_size: the number of ranks that wrote it.
        files: by name.
        tensors: by name with its kind, e.g. ``"model.fc1.weight"``, ``"optimizer.fc1.weight::exp_avg"``.
        description: everything but the tensors, as of :class:`slapo_runtime.correspondence.storage.ShardedState`.
        random: the states of torch's generators, in base64, by replica and device.
    """

    identifier: str
    step: int
    world_size: int
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]
    description: Mapping[str, Any]
    random: Mapping[str, Mapping[str, str]]

    def write(self, directory: Path) -> None:
        """Write ``checkpoint.json``, which completes the checkpoint: all other files are on the disk."""
        values = {
            "format": FORMAT,
            "id": self.identifier,
            "step": self.step,
            "world_size": self.world_size,
            "files": {name: one._asdict() for name, one in self.files.items()},
            "tensors": {name: stored_as_json(one) for name, one in self.tensors.items()},
            "description": self.description,
            "random": self.random,
        }
        write_json(directory / MANIFEST, values)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a step's directory.

        Raises:
            WeightsError: there is none, or it is damaged, or of a newer format.
        """
        values = read_manifest(directory)
        try:
            if values["format"] != FORMAT:
                raise WeightsError(
                    f"the checkpoint '{directory}' is in format {values['format']!r}; this slapo-core reads up to "
                    f"{FORMAT}",
                    hint="pip install --upgrade slapo-core",
                )
            return cls(
                identifier=str(values["id"]),
                step=int(values["step"]),
                world_size=int(values["world_size"]),
                files={name: file_from_json(one) for name, one in values["files"].items()},
                tensors={name: stored_from_json(one) for name, one in values["tensors"].items()},
                description=values["description"],
                random=values["random"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _not_written(directory, f"{type(error).__name__}: {error}") from error


def stored_as_json(tensor: StoredTensor) -> dict[str, Any]:
    """Return the JSON form of a tensor's description."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": tensor.shape, "chunks": [chunk._asdict() for chunk in tensor.chunks]}


def stored_from_json(value: Mapping[str, Any]) -> StoredTensor:
    """Read the JSON form of a tensor's description."""
    dtype = getattr(torch, value["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {value['dtype']!r}")
    chunks = tuple(
        StoredChunk(
            tuple(map(int, one["offset"])),
            tuple(map(int, one["extent"])),
            plain_name(one["file"]),
            int(one["at"]),
            int(one["bytes"]),
        )
        for one in value["chunks"]
    )
    return StoredTensor(dtype, tuple(map(int, value["shape"])), chunks)


def file_from_json(value: Mapping[str, Any]) -> StoredFile:
    """Read the JSON form of a file's description."""
    return StoredFile(int(value["bytes"]), tuple(map(int, value["crc32"])))


def plain_name(name: str) -> str:
    """Return the name of a file, which may not lead out of its directory."""
    if not name or Path(name).name != name:
        raise ValueError(f"{name!r} is outside of the directory")
    return name


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read ``checkpoint.json`` of any format, unchecked but for its entries ``format`` and ``id``.

    Raises:
        WeightsError: there is none, or it is damaged.
    """
    try:
        values = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(values, dict) or {"format", "id"} - set(values):
            raise ValueError("it lacks entries")
    except (OSError, ValueError) as error:
        raise _not_written(directory, str(error)) from error
    return values


def _not_written(directory: Path, why: str) -> WeightsError:
    return WeightsError(
        f"'{directory}' is not a checkpoint written by engine.save(): {MANIFEST}: {why}",
        hint="plain weights are loaded with build(sch, weights=dir)",
    )


# -- directories of steps ---------------------------------------------------------------------------------------


def step_directory(directory: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint, e.g. ``runs/step-00000042``."""
    return directory / f"step-{step:08d}"


def step_of(directory: Path) -> int | None:
    """Return the step of a directory's name; None for another directory."""
    match = _STEP.fullmatch(directory.name)
    return int(match[1]) if match else None


def is_complete(directory: Path) -> bool:
    """Return whether a step's directory holds a complete checkpoint."""
    return (directory / MANIFEST).is_file()


def step_directories(directory: Path) -> list[Path]:
    """Return the directories of steps, complete or not, the oldest first."""
    if not directory.is_dir():
        return []
    found = [one for one in directory.iterdir() if step_of(one) is not None and one.is_dir()]
    return sorted(found, key=lambda one: (step_of(one), one.name.endswith(_AGAIN)))


def newest_checkpoint(directory: Path) -> Path | None:
    """Return the newest complete checkpoint among the directories of steps; None without one."""
    return next((one for one in reversed(step_directories(directory)) if is_complete(one)), None)


def begin_step(directory: Path, step: int) -> Path:
    """Make the empty directory for the checkpoint of a step.

    What an interrupted save left there is removed. A complete checkpoint of the same step stays until
    :func:`settle_step`.
    """
    first = step_directory(directory, step)
    again = first.with_name(first.name + _AGAIN)
    if is_complete(again):  # its save was interrupted at its end
        settle_step(again)
    new = again if is_complete(first) else first
    for left in (again, new):
        if left.exists():
            shutil.rmtree(left)
    new.mkdir(parents=True)
    to_disk(directory)
    return new


def settle_step(directory: Path) -> Path:
    """Let a complete second checkpoint of a step take the place of the first; return the checkpoint's directory."""
    if not directory.name.endswith(_AGAIN):
        return directory
    first = directory.with_name(directory.name.removesuffix(_AGAIN))
    remove_checkpoint(first)
    directory.rename(first)
    to_disk(first.parent)
    return first


def remove_checkpoint(directory: Path) -> None:
    """Remove a checkpoint: it is incomplete first, then gone."""
    (directory / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)  # the rest is not a checkpoint any more


def keep_newest(directory: Path, keep: int, *, step: int) -> None:
    """Remove all but the newest complete checkpoints up to a step, and what interrupted saves left before it.

    Later ones are of another training: they stay.
    """
    own = [one for one in step_directories(directory) if step_of(one) <= step]  # type: ignore[operator]
    kept = [one for one in own if is_complete(one)][-keep:]
    for one in own:
        if one not in kept:
            remove_checkpoint(one)


# -- files ------------------------------------------------------------------------------------------------------


def write_json(file: Path, values: Any) -> None:
    """Write a JSON file, which is there in full or not at all."""
    writing = file.with_name(file.name + ".writing")
    with writing.open("w", encoding="utf-8") as stream:
        json.dump(values, stream)
        stream.flush()
        os.fsync(stream.fileno())
    writing.replace(file)
    to_disk(file.parent)


def to_disk(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    if os.name != "posix" and path.is_dir():  # only POSIX opens directories
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_files(directory: Path, files: Mapping[str, StoredFile], *, part: tuple[int, int] = (0, 1)) -> None:
    """Refuse missing, truncated and damaged files of a checkpoint.

    Args:
        directory: of the checkpoint.
        files: of its manifest.
        part: ``(place, count)``: of ``count`` readers that share the checksums, this is the one at ``place``.

    Raises:
        WeightsError: with the first file that is not what was written.
    """
    for name, file in files.items():
        path = directory / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {error}") from error
        if size != file.bytes:
            raise _damaged(path, f"it holds {size} bytes of {file.bytes}")
        check_sums(path, file.crc32, part=part)


def check_sums(path: Path, expected: Sequence[int], *, part: tuple[int, int]) -> None:
    """Refuse a file whose chunks have other checksums; arguments and errors as above."""
    place, count = part
    own = range(place, len(expected), count)
    try:
        found = list(_checksums(path, own))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    for number, crc in zip(own, found, strict=True):
        if crc != expected[number]:
            raise _damaged(path, f"the checksum of its chunk {number + 1} of {len(expected)} differs from {MANIFEST}")


def _damaged(path: Path, why: str) -> WeightsError:
    return WeightsError(f"{path} is damaged: {why}", hint="load another checkpoint, or copy this one again")


def _checksums(path: Path, chunks: Iterable[int]) -> Iterable[int]:
    with path.open("rb") as stream:
        for number in chunks:
            stream.seek(number * CHUNK)
            yield checksum(stream, CHUNK)


def checksum(stream: Any, size: int) -> int:
    """Return the CRC-32 of the next bytes of a file, a MiB at a time."""
    crc = 0
    while size and (read := stream.read(min(size, 1 << 20))):
        crc, size = zlib.crc32(read, crc), size - len(read)
    return crc


def overlap(
    offset: Sequence[int], extent: Sequence[int], other_offset: Sequence[int], other_extent: Sequence[int]
) -> tuple[tuple[int, int], ...] | None:
    """Return the ``(start, stop)`` of each axis that two rectangles share; None without a common element."""
    found = tuple(
        (max(a, b), min(a + size, b + other))
        for a, size, b, other in zip(offset, extent, other_offset, other_extent, strict=True)
    )
    return found if all(start < stop for start, stop in found) else None
