"""What the processes of a trial print: in a file beside the log, of limited size."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType

__all__ = ["HEAD", "TAIL", "Output", "output_file"]

HEAD = 256 * 1024
"""Bytes that are kept from the beginning of what a trial prints."""

TAIL = 256 * 1024
"""Bytes that are kept from its end."""


def output_file(log: str | Path, number: int) -> Path:
    """Where the output of a trial is: ``run.output/0003.txt`` beside ``run.jsonl``.

    Args:
        log: of the search.
        number: of the trial.
    """
    return Path(log).with_suffix(".output") / f"{number:04d}.txt"


class Output:
    """A file that keeps the beginning and the end of what is written to it; a context manager.

    Args:
        path: where; an older file is replaced.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file = self._path.open("wb", buffering=0)
        self._room = HEAD
        self._tail = bytearray()
        self._left_out = 0

    def write(self, data: bytes) -> None:
        head, rest = data[: self._room], data[self._room :]
        if head:
            with contextlib.suppress(OSError):  # the disk is full: what is printed is not what a trial is made for
                self._file.write(head)
            self._room -= len(head)
        self._tail += rest
        if len(self._tail) > 2 * TAIL:
            self._cut()

    def _cut(self) -> None:
        excess = max(0, len(self._tail) - TAIL)
        del self._tail[:excess]
        self._left_out += excess

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cut()
        with contextlib.suppress(OSError):
            if self._left_out:
                self._file.write(f"\n... {self._left_out} bytes left out ...\n".encode())
            self._file.write(self._tail)
            self._file.close()
