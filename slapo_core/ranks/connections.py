"""The TCP connections that gloo has made for a group, so that they can be ended whoever still holds the group.

Gloo ends a connection when nothing holds it any more: no work in flight, no frame of an exception, no graph of
autograd; and a group waits for its works before it goes. So a rank that raises while a peer never joins a collective of
his would keep both waiting until the timeout. Ending the connection itself lets every work on both sides raise at once.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass

__all__ = ["Connection", "Ends", "connections_since", "mutual", "open_sockets"]

Ends = tuple[tuple[str, int], tuple[str, int]]
"""Host and port of this side, and of the other one."""

_DESCRIPTORS = "/dev/fd"


@dataclass(frozen=True)
class Connection:
    """A connection of this process.

    Args:
        descriptor: the file descriptor of whoever made it, who may have closed it since.
        inode: of the socket; tells whether the descriptor is still the same one.
        ends: its addresses.
    """

    descriptor: int
    inode: int
    ends: Ends

    def end(self) -> None:
        """Let both sides read the end of it; its descriptor stays with its owner."""
        try:
            one = _duplicate(self.descriptor, self.inode)
        except OSError:
            return  # closed already
        if one is not None:
            with one:
                try:
                    one.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return  # ended already, by the other side


def open_sockets() -> frozenset[tuple[int, int]]:
    """Descriptor and inode of all sockets of this process."""
    found = set()
    for name in os.listdir(_DESCRIPTORS):
        try:
            status = os.fstat(int(name))
        except OSError:  # closed meanwhile, as the one of this list is
            continue
        if stat.S_ISSOCK(status.st_mode):
            found.add((int(name), status.st_ino))
    return frozenset(found)


def connections_since(before: Collection[tuple[int, int]]) -> list[Connection]:
    """The TCP connections that are open now and were not when :func:`open_sockets` gave ``before``."""
    found = []
    for descriptor, inode in sorted(open_sockets().difference(before)):
        try:
            one = _duplicate(descriptor, inode)
            if one is None:
                continue
            with one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    ends = (_address(one.getsockname()), _address(one.getpeername()))
                    found.append(Connection(descriptor, inode, ends))
        except OSError:  # closed meanwhile, or listening
            continue
    return found


def mutual(own: Iterable[Connection], of_others: Iterable[Ends]) -> list[Connection]:
    """Those of ``own`` whose other side is one of ``of_others``: what another thread opened meanwhile is none of them.

    Args:
        own: this rank's new connections.
        of_others: the ends of the other ranks' new ones, each as that rank sees it.
    """
    theirs = {(there, here) for here, there in of_others}
    return [connection for connection in own if connection.ends in theirs]


def _duplicate(descriptor: int, inode: int) -> socket.socket | None:
    """The socket behind a descriptor, if it is still the one of that inode; to be closed by the caller."""
    copy = os.dup(descriptor)
    try:
        status = os.fstat(copy)
        if not stat.S_ISSOCK(status.st_mode) or status.st_ino != inode:
            os.close(copy)
            return None
        is_blocking = os.get_blocking(copy)
        one = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    os.set_blocking(copy, is_blocking)  # which socket.setdefaulttimeout would have changed, for its owner too
    return one


def _address(address: tuple[str, int] | tuple[str, int, int, int]) -> tuple[str, int]:
    return address[0].partition("%")[0], address[1]  # the interface has another number on each host
