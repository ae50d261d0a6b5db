"""Safetensors files: their headers, complete or truncated; directories with an index; writing tensor by tensor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from slapo_core.errors import WeightsError

T = TypeVar("T")

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TYPES = {code: dtype for dtype, code in DTYPES.items()}
_ALIGNMENT = 8
_LONGEST = 100_000_000  # bytes of a header, as in the safetensors library


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file.

    Args:
        dtype: as in the header, e.g. ``"BF16"``.
        shape: in elements.
        start: of its bytes in the file.
        size: in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, by name, and check that the file has all their bytes.

    Raises:
        WeightsError: it is not a safetensors file, or truncated.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            text = stream.read(length) if length <= min(size, _LONGEST) else b""
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error}") from error
    if size < 8 or (length <= _LONGEST and size < 8 + length):
        raise WeightsError(f"{file} is truncated: it ends within its header ({size} bytes)", hint=_COPY_AGAIN)
    try:
        entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
        found = {
            name: StoredTensor(str(entry["dtype"]), tuple(entry["shape"]), 8 + length + begin, end - begin)
            for name, entry in entries.items()
            for begin, end in [entry["data_offsets"]]
        }
        end = max((one.start + one.size for one in found.values()), default=8 + length)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{file} cannot be read as safetensors: {type(error).__name__}: {error}") from error
    if size < end:
        raise WeightsError(f"{file} is truncated: it has {size} of {end} bytes", hint=_COPY_AGAIN)
    if size > end:
        raise WeightsError(f"{file} has {size} bytes, and its header describes {end}", hint=_COPY_AGAIN)
    return found


_COPY_AGAIN = "copy or download it again"


def read_index(file: Path) -> dict[Path, set[str]]:
    """Return the files of an index, each with the names of its tensors.

    Raises:
        WeightsError: it is not an index, or names files outside of its directory.
    """
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(shard)) for name, shard in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{file} is not an index of safetensors files: {type(error).__name__}: {error}") from error
    files: dict[Path, set[str]] = {}
    for name, shard in pairs:
        if Path(shard).name != shard:
            raise WeightsError(f"{file} places '{name}' in '{shard}', outside of its directory")
        files.setdefault(file.parent / shard, set()).add(name)
    return files


def headers_of(files: Mapping[Path, set[str] | None]) -> Iterator[tuple[Path, dict[str, StoredTensor]]]:
    """Yield each file with its tensors; all damaged and missing files are named in one error.

    Args:
        files: with the names that an index places in each; None takes all of a file.

    Raises:
        WeightsError: after the intact files: missing or damaged files, or files without tensors of the index.
    """
    wrong: list[WeightsError] = []
    for file, names in files.items():
        try:
            if not file.is_file():
                raise WeightsError(f"{file} is missing, which {INDEX_FILE} lists", hint=_COPY_AGAIN)
            found = read_header(file)
            absent = sorted(names - set(found)) if names is not None else []
            if absent:
                raise WeightsError(f"{file} lacks tensors that {INDEX_FILE} lists: {', '.join(absent)}")
        except WeightsError as error:
            wrong.append(error)
            continue
        yield file, found if names is None else {name: found[name] for name in found if name in names}
    if wrong:
        raise WeightsError("\n".join(one.message for one in wrong), hint=wrong[0].hint)


def divide(sizes: Iterable[tuple[T, int]], limit: int | None) -> list[list[T]]:
    """Divide tensors with sizes in bytes into files up to a limit, with at least one tensor each."""
    files: list[list[T]] = [[]]
    total = 0
    for one, size in sizes:
        if limit is not None and files[-1] and total + size > limit:
            files.append([])
            total = 0
        files[-1].append(one)
        total += size
    return files


def file_names(count: int) -> list[str]:
    """Return the names of the files of a model, as transformers gives them."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_index(directory: Path, size: int, weight_map: Mapping[str, str]) -> None:
    """Write the index of several files: their size in bytes, and the file of each tensor."""
    index = {"metadata": {"total_size": size}, "weight_map": dict(weight_map)}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class SafetensorsWriter:
    """Write a safetensors file tensor by tensor, in any order.

    The sizes are known before the values, so that no more than one tensor is in memory.

    Args:
        file: to write.
        tensors: element type and shape by name.
        metadata: of the header.
    """

    def __init__(
        self, file: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
    ) -> None:
        self._missing = set(tensors)
        self._tensors = tensors
        self._starts: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        position = 0
        for name in sorted(tensors, key=lambda name: -tensors[name][0].itemsize):  # stable; keeps values aligned
            dtype, shape = tensors[name]
            size = bytes_of(dtype, shape)
            self._starts[name] = position
            header[name] = {
                "dtype": DTYPES[dtype],
                "shape": list(shape),
                "data_offsets": [position, position + size],
            }
            position += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._begin = 8 + len(text)
        self._stream = file.open("wb")
        self._stream.write(len(text).to_bytes(8, "little") + text)
        self._stream.truncate(self._begin + position)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor of the given type and shape, on the CPU."""
        assert (tensor.dtype, tuple(tensor.shape)) == self._tensors[name]
        self._missing.discard(name)
        if tensor.numel():
            self._stream.seek(self._begin + self._starts[name])
            values: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            self._stream.write(memoryview(values))

    def finish(self) -> None:
        """Flush all tensors to the disk, and close the file."""
        assert not self._missing, f"not written: {self._missing}"
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self.close()

    def close(self) -> None:
        """Close the file, complete or not."""
        self._stream.close()


def bytes_of(dtype: torch.dtype, shape: Iterable[int]) -> int:
    """Return the size of a tensor in bytes."""
    return dtype.itemsize * math.prod(shape)
