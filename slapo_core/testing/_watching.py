"""What an import does besides defining things, seen through the interpreter's audit events."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Watch"]

_STARTS = {"os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system", "subprocess.Popen"}
_NETWORK = {"socket.bind", "socket.connect", "socket.getaddrinfo", "socket.gethostbyname"}
_CHANGES = {"os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC


class Watch:
    """Notes writing, processes, threads and network of this whole process, from when it is made until its end.

    What it notes depends on what the code does, never on how long the machine takes for it.

    Attributes:
        seen: in words, in the order of the events, e.g. ``["it writes '/tmp/log'"]``.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._watching = True
        self._start = threading.Thread.start
        _set_start(lambda thread: self._thread(thread))  # a thread has no audit event before Python 3.12
        sys.addaudithook(self._audit)  # there is no way to take one away

    def end(self) -> None:
        self._watching = False
        _set_start(self._start)

    def _thread(self, thread: threading.Thread) -> None:
        self._note(f"it starts a thread ({thread.name})")
        self._start(thread)

    def _note(self, what: str) -> None:
        if what not in self.seen:
            self.seen.append(what)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._watching:
            return
        what = None
        if event == "open":
            what = _written(*arguments)
        elif event in _CHANGES:
            what = None if _is_bytecode(arguments[0]) else f"it calls {event}({arguments[0]!r})"
        elif event in _STARTS:
            what = f"it starts a process ({event})"
        elif event in _NETWORK:
            what = f"it uses the network ({event})"
        if what is not None:
            self._note(what)


def _set_start(function: Callable[[threading.Thread], None]) -> None:
    threading.Thread.start = function  # type: ignore[method-assign, assignment]


def _written(path: Any, mode: Any, flags: Any) -> str | None:
    writes = set("wax+") & set(mode) if isinstance(mode, str) else isinstance(flags, int) and flags & _WRITING
    if not writes or isinstance(path, int) or path == os.devnull or _is_bytecode(path):
        return None
    return f"it writes {os.fspath(path)!r}"


def _is_bytecode(path: Any) -> bool:
    """Whether the interpreter itself writes there what it compiled."""
    return isinstance(path, str | bytes) and "__pycache__" in os.path.normpath(os.fsdecode(path)).split(os.sep)
