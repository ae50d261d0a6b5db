"""A mesh over trial process groups with a timeout, so that failing trials leave the user's groups intact."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from slapo_core.layout import Mesh
from slapo_core.private import new_group_among, set_timeout

SECONDS = 60.0
"""That a rank waits in a collective for another one, at least."""

_TIMES = 10.0  # as long as what ran before
_LOOK = 0.05  # seconds between two looks at what the others have published


class TrialMesh(Mesh):
    """The dimensions and ranks of a mesh, over new process groups with a timeout.

    A rank that raises leaves the others waiting in a collective. It drops its groups, which ends the others' wait at
    once (gloo: unless something else holds them), or the timeout does. All ranks make them again then, under the same
    names.

    Args:
        mesh: of several running ranks, which all make it together.
        store: in which no other code writes.
        seconds: the timeout; None: the larger of 60 and ten times what :meth:`allow` was told.
    """

    def __init__(self, mesh: Mesh, store: Any, seconds: float | None) -> None:
        super().__init__(mesh.sizes, rank=mesh.global_rank, device_mesh=mesh.device_mesh)
        self._original, self._store = mesh.device_mesh, store
        self._is_given, self._seconds = seconds is not None, seconds or SECONDS
        self._groups: list[Any] = []
        self._made = 0
        self.open()

    def open(self) -> None:
        """Make the groups again."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        assert self._original is not None
        self.drop()
        self._made += 1
        for mesh_dim in self.sizes:
            original = self._original.get_group(mesh_dim)
            ranks = dist.get_process_group_ranks(original)
            store = dist.PrefixStore(f"{self._made} {mesh_dim} {'-'.join(map(str, ranks))}", self._store)
            self._groups.append(new_group_among(original, store, f"{original.group_name} of a trial", self._timeout()))
        self._device_mesh = DeviceMesh.from_group(
            self._groups, self._original.device_type, self._original.mesh, mesh_dim_names=tuple(self.sizes)
        )

    def drop(self) -> None:
        """Drop the groups, so that ranks waiting for this one raise."""
        import torch.distributed as dist

        self._device_mesh = None
        while self._groups:
            group = self._groups.pop()
            group.abort()  # NCCL
            dist.destroy_process_group(group)

    def allow(self, seconds: float) -> None:
        """Raise the timeout to ten times a duration."""
        if not self._is_given and _TIMES * seconds > self._seconds:
            self._seconds = _TIMES * seconds
            for group in self._groups:
                set_timeout(group, self._timeout())

    @contextlib.contextmanager
    def watched(self, store: Any) -> Iterator[None]:
        """Abort this rank's groups when another rank fails in a trial: for waits on the GPU.

        NCCL waits on the GPU, and hears nothing of a group that another rank dropped: a thread of this rank looks into
        the store, and ends its own groups before NCCL's watchdog would end the process.

        Args:
            store: of this trial alone.
        """
        if not any("nccl" in group.name() for group in self._groups):
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(store.clone(), over), daemon=True)
        thread.start()
        try:
            yield
            store.set("done", "")
        except BaseException:
            store.set("failed", "")
            raise
        finally:
            over.set()
            thread.join()

    def _watch(self, store: Any, over: threading.Event) -> None:
        deadline = float("inf")  # for those that wait for a rank that is done
        while not over.wait(_LOOK):
            if deadline == float("inf") and store.check(["done"]):
                deadline = time.monotonic() + 0.9 * self._seconds
            if store.check(["failed"]) or time.monotonic() > deadline:
                for group in self._groups:
                    group.abort()
                return

    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._seconds)
