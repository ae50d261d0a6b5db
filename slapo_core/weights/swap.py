"""Several files of a directory replaced as one: whoever reads finds all the old ones, or all the new ones.

The new files are written into a directory inside of it, and count from the moment in which that is renamed to
``COMPLETE``. Then they move to their places, the last one last. A reader that finds ``COMPLETE``, because the writer
was interrupted there, takes from it what has not moved yet; the next writer moves the rest first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["COMPLETE", "located", "replacing"]

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
    """Where to read a file; the one that is read ``last`` decides whether the new files count."""
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
