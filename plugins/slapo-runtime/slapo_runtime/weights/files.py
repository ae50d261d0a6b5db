"""Write files of weights: safetensors with their index, replaced together, and configurations."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slapo_core.errors import BuildError, warn_user
from slapo_runtime.checkpoints.manifest import to_disk
from slapo_runtime.sizes import parse_bytes
from slapo_runtime.weights.safetensors_files import INDEX_FILE, divide, file_names, write_index

COMPLETE = ".checkpoint-complete"
_WRITING = ".checkpoint-writing"


@contextlib.contextmanager
def writing(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of the file system into a BuildError.

    Raises:
        BuildError: a file or the directory cannot be written.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise BuildError(
            f"'{os.fspath(directory)}' cannot be written: {type(error).__name__}: {error}",
            hint="give a directory that every rank can write, with enough free space",
        ) from error


@contextlib.contextmanager
def replacing(directory: Path, *, last: str, stale: Callable[[Path], Iterable[str]] | None = None) -> Iterator[Path]:
    """Give a directory for new files, which replace old ones at the end.

    Args:
        directory: made if it does not exist; other files in it stay.
        last: the name of the file that every reader reads first.
        stale: gives the names of old files, which go before new ones come into their places.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _finish(directory, last)
    writing = directory / _WRITING
    if writing.exists():  # of an interrupted writer
        shutil.rmtree(writing)
    writing.mkdir()
    try:
        yield writing
        for file in writing.iterdir():
            to_disk(file)
        to_disk(writing)
        writing.rename(directory / COMPLETE)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)  # the original error is raised
        raise
    for name in stale(directory) if stale is not None else ():
        (directory / name).unlink(missing_ok=True)
    _finish(directory, last)


def located(directory: Path, name: str, *, last: str) -> Path:
    """Return the path of a file to read, among complete files."""
    complete = directory / COMPLETE
    has_new = (complete / last).is_file()
    return complete / name if has_new and (complete / name).is_file() else directory / name


def _finish(directory: Path, last: str) -> None:
    complete = directory / COMPLETE
    if not complete.is_dir():
        return
    to_disk(directory)
    for file in sorted(complete.iterdir(), key=lambda file: file.name == last):
        file.replace(directory / file.name)
    to_disk(directory)
    complete.rmdir()


def warn_of_other_function(steps: Sequence[str]) -> None:
    """Warn that the reference model with these weights is another model than the trained one.

    Args:
        steps: of :attr:`slapo_runtime.correspondence.tensors.Correspondence.other_function`.
    """
    if steps:
        warn_user(
            "the saved weights are of the reference model, which computes another function than the trained model:\n  "
            + "\n  ".join([*steps[:3], *([f"... ({len(steps)} in all)"] if steps[3:] else [])])
            + "\nhint: load them into the reference model, and replay the schedule: slapo.replay(model, schedule)"
        )


def write_configurations(model: nn.Module, directory: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write ``config.json``, and ``generation_config.json``, of a model that has them.

    A model has one if its ``config`` has ``save_pretrained``, as in transformers. If writing fails, there is a warning:
    the weights are worth more.

    Args:
        model: the scheduled model.
        directory: an existing one.
        dtype: of the written weights; None: of the model's first floating-point parameter.
    """
    config = getattr(model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    if hasattr(model, "peft_config"):  # a plain model would load none of peft's names
        warn_user(
            "the checkpoint has no config.json: transformers would load random weights with it, because a peft model "
            "has other names; slapo.save_pretrained(sch, directory) of a live loop writes the adapter",
        )
        return
    written: list[tuple[str, Any]] = [("config", _with_class(config, model, dtype))]
    generation = getattr(model, "generation_config", None)
    if callable(getattr(generation, "save_pretrained", None)):
        written.append(("generation_config", generation))
    for name, value in written:
        try:
            value.save_pretrained(directory)
        except Exception as error:  # noqa: BLE001 - reported: foreign validation must not cost a checkpoint
            warn_user(
                f"the checkpoint has no {name}.json, because {type(value).__name__}.save_pretrained() raised "
                f"{type(error).__name__}: {error}",
            )


def _with_class(config: Any, model: nn.Module, dtype: torch.dtype | None) -> Any:
    """Return a copy with the class and the element type, as ``model.save_pretrained`` writes it."""
    config = copy.deepcopy(config)
    own = next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch.distributed"))
    config.architectures = [own.__name__]  # fully_shard puts its own class first
    found = (tensor.dtype for tensor in model.parameters() if tensor.is_floating_point())
    dtype = dtype or next(found, torch.float32)
    config.dtype = str(dtype).removeprefix("torch.")
    return config


def export_plain(
    weights: Mapping[str, torch.Tensor], directory: str | os.PathLike[str], max_shard_size: int | str | None
) -> None:
    """Write ``model.safetensors``, or, with a limit, several files and their index.

    Tied names become separate tensors, so that a plain model finds all of its keys.

    Raises:
        ArgumentError: an invalid size.
    """
    from safetensors.torch import save_file

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    limit = None if max_shard_size is None else parse_bytes(max_shard_size, name="max_shard_size")
    shards = divide([(name, tensor.nbytes) for name, tensor in weights.items()], limit)
    names = file_names(len(shards))
    for name, shard in zip(names, shards, strict=True):
        save_file({key: weights[key].clone() for key in shard}, path / name, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in weights.values())
        write_index(path, total, {key: name for name, shard in zip(names, shards, strict=True) for key in shard})
    for name in stale_weights(path, keep=[*names, INDEX_FILE] if len(names) > 1 else names):
        (path / name).unlink()


_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def stale_weights(directory: Path, *, keep: Sequence[str]) -> list[str]:
    """List files of weights of an earlier export, the index first.

    Args:
        directory: may not exist.
        keep: names of new files.
    """
    found = {file.name for file in directory.glob("model*.safetensors*")} - set(keep)
    return sorted(filter(_WEIGHTS.fullmatch, found), reverse=True)
