"""Read tensors of a checkpoint: the chunks that overlap a rank's own rectangles, and no others."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import torch

from slapo_core.errors import WeightsError
from slapo_runtime.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    StoredChunk,
    check_files,
    newest_checkpoint,
    overlap,
    read_manifest,
)
from slapo_runtime.correspondence.storage import Window, blocks, from_window, window_of
from slapo_runtime.private import file_view
from slapo_runtime.weights.module_state import unpacked
from slapo_runtime.weights.sources import MappingSource, SafetensorsSource, WeightsSource

if TYPE_CHECKING:
    from slapo_core.layout import Layout, Mesh

Part = Literal["model", "added", "optimizer"]

_ANOTHER = "load another checkpoint, or copy this one again"


class CheckpointSource(WeightsSource):
    """The tensors of one part of a checkpoint, by the reference model's names.

    Nothing in the files is a pickle for this reader: it takes everything from ``checkpoint.json``, and tensors by
    ``torch.load(weights_only=True)``.

    Args:
        directory: of the checkpoint, e.g. ``runs/step-00000042``.
        part: ``"model"``, ``"added"`` for tensors that steps added, or ``"optimizer"``.
        manifest: of the directory, if it is read already.

    Attributes:
        buffers: the shapes and types of buffers that forwards resized or registered.

    Raises:
        WeightsError: no complete checkpoint.
    """

    def __init__(self, directory: Path, part: Part = "model", manifest: Manifest | None = None) -> None:
        self.directory = directory
        self.manifest = manifest if manifest is not None else Manifest.read(directory)
        self._prefix = f"{part}."
        is_model = part == "model"
        self.extra = unpacked(self.manifest.description.get("extra", {})) if is_model else {}
        self.buffers: Mapping[str, Any] = self.manifest.description.get("buffers", {})
        self._stored = {
            name.removeprefix(self._prefix): one
            for name, one in self.manifest.tensors.items()
            if name.startswith(self._prefix)
        }

    @property
    def label(self) -> str:
        return f"the checkpoint '{self.directory}'"

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: one.shape for name, one in self._stored.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored type of a tensor."""
        return self._stored[name].dtype

    def check_files(self, *, part: tuple[int, int] = (0, 1)) -> None:
        """Refuse missing, truncated and damaged files; see :func:`slapo_runtime.checkpoints.manifest.check_files`."""
        check_files(self.directory, self.manifest.files, part=part)

    def read(self, name: str, layout: Layout, mesh: Mesh | None) -> torch.Tensor:
        return self.read_as(name, layout, mesh, self.dtype(name))

    def read_as(
        self, name: str, layout: Layout, mesh: Mesh | None, dtype: torch.dtype, *, window: Window | None = None
    ) -> torch.Tensor:
        value = torch.zeros(layout.local_shape(mesh) if window is None else window.shape, dtype=dtype)
        if layout.holds_values(mesh):
            self.fill(name, value, blocks(layout, mesh, window))
        return value

    def read_like(self, name: str, layout: Layout, mesh: Mesh | None, like: torch.Tensor | None) -> torch.Tensor:
        window = window_of(like, mesh) if like is not None else None
        if like is None or window is None or layout.local_shape(mesh) != tuple(like.shape):
            return self.read(name, layout, mesh)
        return from_window(like, self.read_as(name, layout, mesh, self.dtype(name), window=window))

    def fill(
        self,
        name: str,
        value: torch.Tensor,
        wanted: Iterable[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
    ) -> None:
        """Read rectangles into a tensor, with one chunk in memory at a time.

        Args:
            name: of the tensor.
            value: on the CPU, of any type.
            wanted: start in ``value``, start in the full tensor, and extent of each rectangle.

        Raises:
            WeightsError: the checkpoint lacks elements of it.
        """
        rectangles = list(wanted)
        missing = sum(_count(extent) for _, _, extent in rectangles)
        for chunk in self._stored[name].chunks:
            shared = [
                (at, offset, both)
                for at, offset, extent in rectangles
                if (both := overlap(chunk.offset, chunk.extent, offset, extent)) is not None
            ]
            if not shared:
                continue
            stored = self._load(name, chunk)
            for at, offset, both in shared:
                here = tuple(
                    slice(begin + start - first, begin + stop - first)
                    for begin, first, (start, stop) in zip(at, offset, both, strict=True)
                )
                there = tuple(
                    slice(start - first, stop - first) for first, (start, stop) in zip(chunk.offset, both, strict=True)
                )
                value[here] = stored[there]
                missing -= _count(stop - start for start, stop in both)
            del stored
        if missing:
            raise WeightsError(f"{self.label} lacks elements of '{self._prefix}{name}'", hint=_ANOTHER)

    def _load(self, name: str, chunk: StoredChunk) -> torch.Tensor:
        file = self.directory / chunk.file
        try:
            with file.open("rb", buffering=0) as stream:
                view: IO[bytes] = file_view(stream, chunk.at, chunk.bytes)
                tensor: Any = torch.load(view, map_location="cpu", weights_only=True)
        except Exception as error:
            raise WeightsError(
                f"{file} is damaged: '{self._prefix}{name}' cannot be read: {type(error).__name__}: {error}",
                hint=_ANOTHER,
            ) from error
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.extent:
            raise WeightsError(
                f"{file} is damaged: '{self._prefix}{name}' is not of shape {chunk.extent}", hint=_ANOTHER
            )
        return tensor


def open_source(weights: str | os.PathLike[str] | Mapping[str, torch.Tensor] | WeightsSource) -> WeightsSource:
    """Open the ``weights`` of ``build``.

    Args:
        weights: a directory with safetensors files, one such file, the checkpoint of a step, a directory of them, of
            which the newest complete one is read, or a mapping of full tensors.

    Raises:
        WeightsError: there are no weights, or they cannot be read.
    """
    if isinstance(weights, WeightsSource):
        return weights
    if isinstance(weights, Mapping):
        return MappingSource(weights)
    if isinstance(weights, (str, os.PathLike)):
        return open_checkpoint(weights) or SafetensorsSource(Path(weights))
    raise WeightsError(
        f"weights must be a directory, a .safetensors file or a mapping of tensors (got {type(weights).__name__})",
        hint='build(sch, weights="dir/with/safetensors")',
    )


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointSource | None:
    """Open the weights of a checkpoint: of a step's directory, or of the newest complete one in a directory.

    Returns:
        None if there is none.
    """
    directory = Path(path)
    newest = directory if is_step(directory) else newest_checkpoint(directory)
    return CheckpointSource(newest) if newest is not None else None


def is_step(directory: Path) -> bool:
    """Return whether a directory is the complete checkpoint of a step."""
    return (directory / MANIFEST).is_file() and read_manifest(directory)["format"] >= FORMAT


def _count(extent: Iterable[int]) -> int:
    total = 1
    for length in extent:
        total *= length
    return total
