"""Sources of full tensors by name: mappings and safetensors files."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import WeightsError
from slapo_core.layout import Layout
from slapo_runtime.checkpoints.manifest import MANIFEST
from slapo_runtime.correspondence.storage import Window, blocks, slices
from slapo_runtime.weights.files import COMPLETE, located
from slapo_runtime.weights.module_state import is_extra, unpacked
from slapo_runtime.weights.safetensors_files import (
    INDEX_FILE,
    SINGLE_FILE,
    TYPES,
    StoredTensor,
    headers_of,
    read_index,
)

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_runtime.correspondence.reference import Survey, TensorSpec


class WeightsSource(ABC):
    """Full tensors by name; a rank reads its own shards.

    Attributes:
        extra: the modules' extra state (``get_extra_state``), by the keys of the state dict.
        buffers: of a checkpoint: the shapes and types of buffers that forwards resized or registered.
        directory: of the files, if there are any.
    """

    extra: Mapping[str, Any] = {}
    buffers: Mapping[str, Any] = {}
    directory: Path = Path()

    @property
    @abstractmethod
    def label(self) -> str:
        """The name for messages, e.g. ``"weights 'checkpoints/bert'"``."""

    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all tensors, by name."""

    def check_files(self, *, part: tuple[int, int] = (0, 1)) -> None:
        """Compare files with their checksums, if there are any.

        Args:
            part: ``(place, count)``: of ``count`` readers that share the work, this is the one at ``place``.

        Raises:
            WeightsError: a file is damaged.
        """
        return

    @abstractmethod
    def read(self, name: str, layout: Layout, mesh: Mesh | None) -> torch.Tensor:
        """Read this rank's shard in the source's dtype, as new contiguous memory."""

    def read_as(
        self, name: str, layout: Layout, mesh: Mesh | None, dtype: torch.dtype, *, window: Window | None = None
    ) -> torch.Tensor:
        """Read this rank's shard in another dtype, as new contiguous memory.

        Args:
            name: of the full tensor.
            layout: of the shard.
            mesh: of the ranks.
            dtype: of the result.
            window: of the shard, to be read; None: all of it.
        """
        shard = self.read(name, layout, mesh)
        return (shard if window is None else window.of(shard).clone()).to(dtype)

    def read_full(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read a full tensor in a type, into the memory of the CPU."""
        return self.read_as(name, Layout(name, tuple(self.shapes()[name])), None, dtype).to("cpu")

    def read_like(self, name: str, layout: Layout, mesh: Mesh | None, like: torch.Tensor | None) -> torch.Tensor:
        """Read as :meth:`read`; of a DTensor ``like``, this rank's rows may be enough, as a DTensor."""
        return self.read(name, layout, mesh)


class MappingSource(WeightsSource):
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
            raise WeightsError(f"{label} are on the meta device, without values: {', '.join(on_meta)}")
        self._tensors = tensors

    @property
    def label(self) -> str:
        return self._label

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, layout: Layout, mesh: Mesh | None) -> torch.Tensor:
        return layout.local(self._tensors[name].detach(), mesh)


class SafetensorsSource(WeightsSource):
    """One file, or a directory: ``model.safetensors``, the only ``*.safetensors``, or several and their index."""

    def __init__(self, path: Path) -> None:
        self._path = self.directory = path
        self._files: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        description = description_of(path)
        self.extra = unpacked(description.get("extra", {}))
        self.buffers = description.get("buffers", {})
        self._stored: dict[str, StoredTensor] = {}
        for file, tensors in headers_of(self.find(path)):
            handle = self._open(file)
            for name, stored in sorted(tensors.items()):
                if is_extra(name):
                    self.extra = {**self.extra, name: handle.get_tensor(name).clone()}
                    continue
                self._file_of[name] = file
                self._stored[name] = stored

    @property
    def label(self) -> str:
        return f"weights '{self._path}'"

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: one.shape for name, one in self._stored.items()}

    def read(self, name: str, layout: Layout, mesh: Mesh | None) -> torch.Tensor:
        return self.read_as(name, layout, mesh, self.dtype(name))

    def read_as(
        self, name: str, layout: Layout, mesh: Mesh | None, dtype: torch.dtype, *, window: Window | None = None
    ) -> torch.Tensor:
        # A copy: safetensors maps the file, and later writes into it would reach the model.
        value = torch.zeros(layout.local_shape(mesh) if window is None else window.shape, dtype=dtype, device="cpu")
        if layout.holds_values(mesh):
            handle = self._files[self._file_of[name]]
            if not layout.shape:
                return value.copy_(handle.get_tensor(name))
            stored = handle.get_slice(name)
            for at, offset, extent in blocks(layout, mesh, window):  # each is converted by itself
                value[slices(at, extent)] = stored[slices(offset, extent)]
        return value

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored type of a tensor."""
        code = self._stored[name].dtype
        if code not in TYPES:
            raise WeightsError(f"{self.label}: '{name}' is stored as {code}, which is not supported")
        return TYPES[code]

    def _open(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            self._files[file] = safe_open(file, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{file} cannot be read as safetensors: {error}") from error
        return self._files[file]

    @staticmethod
    def find(path: Path) -> dict[Path, set[str] | None]:
        """Return the files to read, each with its names; None takes all.

        Raises:
            WeightsError: there are none, or several without an index, or the index is damaged.
        """
        if path.is_file():
            return {path: None}
        if not path.is_dir():
            raise WeightsError(f"no weights found at '{path}': no such file or directory")
        if (path / INDEX_FILE).is_file():
            return {**read_index(path / INDEX_FILE)}
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


class Wider(WeightsSource):
    """A source that prefers some tensors in a wider type.

    Args:
        source: all tensors.
        wider: some of them, by first names.
        names: name in the source -> first name.
    """

    def __init__(self, source: WeightsSource, wider: WeightsSource, names: Mapping[str, str]) -> None:
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


def description_of(directory: Path) -> dict[str, Any]:
    """Return the description of an engine's checkpoint; empty for other directories and for files."""
    file = located(directory, MANIFEST, last=MANIFEST)
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise WeightsError(f"{file} is not the description of a checkpoint: {error}") from error


def check_names(survey: Survey, source: WeightsSource) -> dict[str, str]:
    """Compare a source's names and shapes with the reference model's.

    Returns:
        first name of each tensor of the state dict -> its name in the source.

    Raises:
        WeightsError: with every missing name, unexpected name and wrong shape.
    """
    shapes = source.shapes()
    names: dict[str, str] = {}
    wrong: list[str] = []
    hint = "give the names and shapes of the reference model's state_dict(), independent of the schedule"
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
                "for a buffer that the forward resizes, engine.load(directory) uses the shape of the checkpoint; else "
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


def read_tensor(source: WeightsSource, name: str, spec: TensorSpec, *, wider: bool = False) -> torch.Tensor:
    """Read a full tensor in the model's type; ``wider`` keeps a wider type."""
    if not wider:
        return source.read_full(name, spec.dtype)
    value = source.read(name, Layout(spec.name, spec.shape), None)
    return value.to("cpu", torch.promote_types(value.dtype, spec.dtype))
