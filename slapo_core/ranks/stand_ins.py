"""Groups that stand in for the user's process groups while a model is tried, so that a failed run can be broken off.

A rank that raises leaves the others waiting in a collective. What ends their wait is breaking the connection, and a
process group whose connection is broken is lost. So a trial communicates through groups of its own, whatever group the
model names, and after a broken trial new ones are made; the user's are not touched.

Making is over when it is on every rank: one that had its groups already, failed at once and broke them off would take
them from a rank that still connects.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from slapo_core.errors import RankFailedError
from slapo_core.ranks.connections import Connection, connections_since, mutual, open_sockets

__all__ = ["StandIns", "kinds_of", "make_group"]

Members = tuple[tuple[int, ...], int]
"""The global ranks of a group, and its number among the groups of the same ranks."""

_COLLECTIVES = (
    "_allgather_base",
    "_end_coalescing",
    "_reduce_scatter_base",
    "_start_coalescing",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
_RESOLVE = "_resolve_process_group"  # from a name to a group; torch.distributed's modules import it by this name
_KINDS = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}
_TRIES = 3  # of all ranks together
_CONNECTING = timedelta(minutes=2)  # that a rank waits for another one to connect; all begin at the same time


class StandIns:
    """One group in the place of each process group whose ranks all take part; made and renewed by all ranks together.

    From :meth:`open` to :meth:`close` they are reached by whatever leads to the user's group: its name (functional
    collectives, ``DTensor``), or the object itself, from a ``DeviceMesh`` or kept by a model or a library: Python goes
    on to see the user's object only. Groups that reach beyond ``ranks``, that are made later, or that have another
    backend than gloo or NCCL stay as they are.

    Args:
        ranks: the global ones that take part, ascending.
        rank: this process's.
        store: in which nobody else writes.
        gather: gives every rank's value, in the order of ``ranks``.
        timeout: of a collective.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        store: Any,
        gather: Callable[[Any], list[Any]],
        timeout: timedelta,
    ) -> None:
        self._ranks, self._rank, self._store, self._timeout = tuple(ranks), rank, store, timeout
        self._gather = gather
        self._originals = _groups_within(set(ranks))
        offers = [{members: kinds_of(group) for members, group in self._originals.items()}]
        offers = gather(offers[0])
        by_rank = dict(zip(self._ranks, offers, strict=True))
        self._order = [  # the same on every rank, so that nobody waits for a rank that waits for him
            (members, kinds)
            for members, kinds in dict.fromkeys(item for offer in offers for item in offer.items())
            if kinds and all(by_rank[member].get(members) == kinds for member in members[0])
        ]
        self._made: dict[str, Any] = {}  # name of the user's group -> what stands in for it; nobody else holds these
        self._connections: list[Connection] = []  # of gloo
        self._changed: list[tuple[Any, str, Any]] = []  # whose attribute was changed, which one, and what it was
        self._generation = 0
        self._froze = False
        self.is_broken = False

    @property
    def on_gpu(self) -> bool:
        """Whether a collective goes on behind the back of the process that started it."""
        return any(kind == "nccl" for _, kinds in self._order for _, kind in kinds)

    def open(self) -> None:
        """Make them, and lead everybody there.

        Raises:
            RankFailedError: they cannot be made; nothing has changed.
        """
        try:
            self._renew()
            self._lead()
        except BaseException:
            self.close()
            raise

    def break_off(self) -> None:
        """Let every rank that waits for this one, or will, raise instead; only this rank need call it.

        So does this rank, where it waits by itself for a collective that it has started.
        """
        self.is_broken = True
        for group in self._made.values():
            group.abort()  # NCCL
        for connection in self._connections:
            connection.end()  # gloo: a group waits for its works before it goes
        self._connections.clear()
        self._made.clear()

    def renew(self) -> None:
        """New ones in the place of broken ones; every rank calls it.

        Raises:
            RankFailedError: they cannot be made.
        """
        self.break_off()
        gc.collect()  # works of the broken ones, which hold descriptors and threads, in frames of exceptions
        self._renew()

    def close(self) -> None:
        """Lead everybody to the user's groups again."""
        for owner, name, before in reversed(self._changed):
            setattr(owner, name, before)
        self._changed.clear()
        self.break_off()
        for original in self._originals.values():
            _register(original.group_name, original)
        if self._froze:
            gc.unfreeze()

    def _lead(self) -> None:
        import torch.distributed as dist

        if not gc.get_freeze_count():  # so that what a broken run has left is found without looking at all else
            gc.freeze()
            self._froze = True
        for name in _COLLECTIVES:
            if name in dist.ProcessGroup.__dict__:  # torch's versions differ in a few
                self._change(dist.ProcessGroup, name, _redirected(getattr(dist.ProcessGroup, name), self._made))
        originals = {group.group_name: group for group in self._originals.values()}
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(("torch.distributed", "torch._C._distributed_c10d")) and _RESOLVE in vars(module):
                self._change(module, _RESOLVE, _known_first(getattr(module, _RESOLVE), originals))

    def _change(self, owner: Any, name: str, value: Any) -> None:
        self._changed.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def _renew(self) -> None:
        for _ in range(_TRIES):
            error, own = self._make_all()
            told = self._gather((error, [connection.ends for connection in own]))
            failures = {rank: each for rank, (each, _) in zip(self._ranks, told, strict=True) if each}
            if not failures:
                self._connections = mutual(own, (ends for _, theirs in told for ends in theirs))
                return
            self._made.clear()
        said = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
        raise RankFailedError(
            f"the ranks could not be connected for a trial, {_TRIES} times; {said}",
            failures=failures,
            first=min(failures),
        )

    def _make_all(self) -> tuple[str, list[Connection]]:
        """What went wrong, or ""; and the connections that this process has got meanwhile."""
        self._generation += 1
        self.is_broken = False
        before = open_sockets()
        try:
            for number, (members, kinds) in enumerate(self._order):
                if self._rank in members[0]:
                    original = self._originals[members]
                    store = self._within(f"{self._generation}/{number}")
                    made = make_group(original.group_name, kinds, original.rank(), members[0], store, self._timeout)
                    _register(original.group_name, made)
                    self._made[original.group_name] = made
        except (RuntimeError, OSError) as error:  # torch's own, and of the system
            return f"{type(error).__name__}: {error}", []
        return "", connections_since(before)

    def _within(self, prefix: str) -> Any:
        import torch.distributed as dist

        return dist.PrefixStore(prefix, self._store)


def _groups_within(ranks: set[int]) -> dict[Members, Any]:
    """The process groups of this process that have several ranks, all of them among ``ranks``."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    found: dict[Members, Any] = {}
    for group, theirs in _world.pg_group_ranks.items():
        members = tuple(sorted(theirs, key=theirs.__getitem__))
        is_mine = isinstance(group, dist.ProcessGroup)  # a number stands for one that this process is no member of
        if is_mine and len(members) > 1 and ranks.issuperset(members):
            number = sum(1 for those, _ in found if those == members)
            found[members, number] = group
    return found


def kinds_of(group: Any) -> tuple[tuple[str, str], ...]:
    """Device type and backend of a group, e.g. ``(("cpu", "gloo"),)``; empty if there is one that we cannot make."""
    found = []
    for device in sorted({device.type for device in group._device_types}):
        backend = group._get_backend(torch.device(device))
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL puts one around it
        kind = next((kind for kind, name in _KINDS.items() if type(backend).__name__ == name), None)
        if kind is None:
            return ()
        found.append((device, kind))
    return tuple(found)


def make_group(
    name: str, kinds: Sequence[tuple[str, str]], rank: int, members: Sequence[int], store: Any, timeout: timedelta
) -> Any:
    """A group like the one of that name; gloo connects at once, and NCCL is made to: later a rank may have failed."""
    import torch.distributed as dist

    size = len(members)
    group: Any = dist.ProcessGroup(store, rank, size)
    backends: dict[str, Any] = {}
    for device, kind in kinds:
        if kind not in backends:
            own = dist.PrefixStore(kind, store)
            if kind == "gloo":
                backends[kind] = dist.ProcessGroupGloo(own, rank, size, _gloo_options(min(timeout, _CONNECTING)))
                backends[kind]._set_default_timeout(timeout)
            else:
                options: Any = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                options.global_ranks_in_group = list(members)
                backends[kind] = dist.ProcessGroupNCCL(own, rank, size, options)
                backends[kind]._set_sequence_number_for_group()
                backends[kind].eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
        backend_type = dist.ProcessGroup.BackendType.__members__[kind.upper()]
        group._set_default_backend(backend_type)
        group._register_backend(torch.device(device), backend_type, backends[kind])
    group._set_group_name(name)
    group._set_group_desc(f"stands in for {name}")
    return group


def _gloo_options(timeout: timedelta) -> Any:
    """Torch's own, but for connecting at once also where TORCH_GLOO_LAZY_INIT says otherwise."""
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options = gloo._Options()
    options._devices = [gloo.create_device(interface=name, lazy_init=False) for name in interfaces] or [
        gloo.create_default_device(lazy_init=False)
    ]
    options._threads = 2 * len(options._devices)
    options._timeout = timeout
    return options


def _redirected(method: Callable[..., Any], made: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        return method(made.get(group.group_name, group), *args, **kwargs)

    return call


def _known_first(resolve: Callable[[str], Any], known: Mapping[str, Any]) -> Callable[[str], Any]:
    @functools.wraps(resolve)
    def call(name: str) -> Any:
        return known[name] if name in known else resolve(name)

    return call


def _register(name: str, group: Any) -> None:
    """For the functional collectives, which go by name."""
    registry: Any = importlib.import_module("torch._C._distributed_c10d")
    registry._unregister_process_group(name)
    registry._register_process_group(name, group)
