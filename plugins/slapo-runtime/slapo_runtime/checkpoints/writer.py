"""Write checkpoints: one file a rank, then the descriptions that make them one checkpoint.

The files have the form of ``torch.distributed.checkpoint``: ``__<rank>_0.distcp`` with one ``torch.save`` for each
rectangle, and ``.metadata``, which ``torch.distributed.checkpoint.load`` reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from slapo_core.errors import BuildError
from slapo_runtime.checkpoints.manifest import (
    CHUNK,
    Manifest,
    StoredChunk,
    StoredFile,
    StoredTensor,
    file_from_json,
    keep_newest,
    settle_step,
    stored_as_json,
    stored_from_json,
    to_disk,
    write_json,
)
from slapo_runtime.private import storage_info


class RankFile:
    """Write the rectangles of one rank, one after the other; a context manager.

    Args:
        directory: of the step, made by the first rank.
        rank: the place among the ranks that write.
        identifier: of the save.
    """

    def __init__(self, directory: Path, rank: int, identifier: str) -> None:
        self._directory, self._rank, self._identifier = directory, rank, identifier
        self._name = f"__{rank}_0.distcp"
        self._tensors: dict[str, StoredTensor] = {}
        self._stream: IO[bytes] | None = None
        self._size = self._crc = 0
        self._sums: list[int] = []
        self._error: OSError | None = None

    def __enter__(self) -> RankFile:
        self._stream = (self._directory / self._name).open("xb")  # another save of this step would be in the way
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):  # the rest of a file whose writing failed before
                self._stream.close()

    def write(self, data: Any) -> int:
        """Write bytes, called by ``torch.save``, which takes no errors; :meth:`add` raises them."""
        view = memoryview(data).cast("B")
        try:
            if self._error is None:
                self._write(view)
        except OSError as error:
            self._error = error
        return len(view)

    def _write(self, view: memoryview) -> None:
        assert self._stream is not None
        start = 0
        while start < len(view):
            part = view[start : start + CHUNK - self._size % CHUNK]
            self._stream.write(part)
            self._crc = zlib.crc32(part, self._crc)
            start, self._size = start + len(part), self._size + len(part)
            if self._size % CHUNK == 0:
                self._sums.append(self._crc)
                self._crc = 0

    def flush(self) -> None:
        """Do nothing: :meth:`finish` has the bytes on the disk."""

    def add(self, name: str, shape: tuple[int, ...], offset: tuple[int, ...], value: torch.Tensor) -> None:
        """Write one rectangle.

        Args:
            name: of the full tensor, e.g. ``"model.fc1.weight"``.
            shape: of the full tensor.
            offset: of the rectangle in it.
            value: its elements, on any device.
        """
        at = self._size
        own = value.detach().to("cpu").contiguous()
        if own.untyped_storage().nbytes() != own.nbytes:
            own = own.clone()  # torch.save writes the entire memory
        torch.save(own, self)  # type: ignore[arg-type]
        if self._error is not None:
            raise self._error
        chunk = StoredChunk(offset, tuple(own.shape), self._name, at, self._size - at)
        others = self._tensors[name].chunks if name in self._tensors else ()
        self._tensors[name] = StoredTensor(own.dtype, shape, (*others, chunk))

    def finish(self) -> None:
        """Have the file on the disk, and say so in ``rank-<n>-<save>.json``."""
        assert self._stream is not None
        self._stream.flush()
        os.fsync(self._stream.fileno())
        sums = [*self._sums, self._crc] if self._size % CHUNK else self._sums
        about = {
            "files": {self._name: StoredFile(self._size, tuple(sums))._asdict()},
            "tensors": {name: stored_as_json(one) for name, one in self._tensors.items()},
        }
        write_json(_rank_json(self._directory, self._rank, self._identifier), about)


def _rank_json(directory: Path, rank: int, identifier: str) -> Path:
    return directory / f"rank-{rank}-{identifier}.json"


@dataclass(frozen=True)
class Completion:
    """The facts by which the first rank completes a checkpoint of all ranks' files.

    Args:
        directory: of the step.
        identifier: of the save.
        step: the number of training steps.
        world_size: the number of ranks that write.
        description: everything but the tensors, as JSON.
        random: the states of torch's generators.
        keep: the number of checkpoints to keep; None keeps all.
    """

    directory: Path
    identifier: str
    step: int
    world_size: int
    description: Mapping[str, Any]
    random: Mapping[str, Mapping[str, str]]
    keep: int | None

    def run(self, *, ends: Callable[[], bool] = lambda: False) -> Path:
        """Complete the checkpoint, once the files of all ranks are there.

        Args:
            ends: whether to give up waiting for them.

        Returns:
            its directory.

        Raises:
            BuildError: it gave up, or ranks wrote different tensors.
        """
        found = [_rank_json(self.directory, rank, self.identifier) for rank in range(self.world_size)]
        pause = 0.001
        while missing := [file for file in found if not file.is_file()]:
            if ends():
                raise BuildError(
                    f"the checkpoint '{self.directory}' was given up: {missing[0].name} is missing",
                    hint="engine.save(directory) on every rank; earlier checkpoints are intact",
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        files: dict[str, StoredFile] = {}
        tensors: dict[str, StoredTensor] = {}
        for file in found:
            about = json.loads(file.read_text(encoding="utf-8"))
            files |= {name: file_from_json(one) for name, one in about["files"].items()}
            for name, value in about["tensors"].items():
                own, known = stored_from_json(value), tensors.get(name)
                if known is not None and (known.dtype, known.shape) != (own.dtype, own.shape):
                    raise BuildError(
                        f"ranks hold '{name}' in different types or shapes: {known.dtype} {known.shape}, "
                        f"{own.dtype} {own.shape}",
                        hint="build the same model with the same types on every rank",
                    )
                tensors[name] = own._replace(chunks=(*(known.chunks if known is not None else ()), *own.chunks))
        write_metadata(self.directory, tensors)
        size = (self.directory / ".metadata").stat().st_size
        with (self.directory / ".metadata").open("rb") as stream:
            files[".metadata"] = StoredFile(size, _sums(stream))
        to_disk(self.directory)
        tensors = dict(sorted(tensors.items()))
        Manifest(self.identifier, self.step, self.world_size, files, tensors, self.description, self.random).write(
            self.directory
        )
        for file in found:
            file.unlink()
        directory = settle_step(self.directory)
        if self.keep is not None:
            keep_newest(directory.parent, self.keep, step=self.step)
        return directory


def _sums(stream: IO[bytes]) -> tuple[int, ...]:
    found = []
    while part := stream.read(CHUNK):
        found.append(zlib.crc32(part))
    return tuple(found)


def write_metadata(directory: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write ``.metadata`` for readers of ``torch.distributed.checkpoint``; this package does not read it."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.storage import WriteResult

    described: dict[str, Any] = {}
    results = []
    for name, tensor in tensors.items():
        chunks = []
        for number, chunk in enumerate(tensor.chunks):
            chunks.append(ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.extent)))
            index = MetadataIndex(name, chunk.offset, number)
            place = storage_info(chunk.file, chunk.at, chunk.bytes)
            results.append(WriteResult(index=index, size_in_bytes=chunk.bytes, storage_data=place))
        described[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)
    keys = {name: tuple(name.split(".", 1)) for name in tensors}  # {"model": {"fc1.weight": ...}, ...}
    FileSystemWriter(directory).finish(Metadata(described, planner_data=keys), [results])
