"""The files of one checkpoint, written one after the other, which replace those of an earlier one all at once."""

from __future__ import annotations

import contextlib
import json
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from slapo_core.weights.configurations import write_configurations
from slapo_core.weights.swap import replacing

__all__ = ["Writer", "checksums"]

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
            about: what the description says beside the names of the files.
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
    """Tied names as tensors of their own, as the format wants it, so that a plain model loads them all."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        result[name] = tensor.clone() if id(tensor) in seen else tensor.contiguous()
        seen.add(id(tensor))
    return result
