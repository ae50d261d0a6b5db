"""Divide the samples of a dataset among replicas, and go on with an epoch under another number of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from slapo_core import ArgumentError, Schedule


def sampler(
    sch: Schedule,
    dataset: Any,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    batch_size: int | None = None,
) -> ReplicaSampler:
    """Make torch's DistributedSampler over the replicas of a schedule's mesh: ``dp_replicate`` x ``dp``.

    All other ranks of a replica, along ``tp`` and ``pp``, get the same samples::

        data = sampler(sch, dataset, batch_size=8)
        loader = DataLoader(dataset, batch_sampler=data, num_workers=2)
        engine.attach("data", data)  # saved and loaded with the engine
        for epoch in range(data.epoch, epochs):
            data.set_epoch(epoch)
            for batch in data.batches(loader):
                engine.train_step(batch)

    Args:
        sch: the schedule; without a mesh there is one replica.
        dataset: with a length.
        shuffle: whether samples are drawn in another order in each epoch, from ``seed`` and the epoch.
        seed: the same on all ranks.
        drop_last: whether an incomplete last batch of all replicas is left out; else the batch is smaller, and the
            first samples are repeated until each replica has as many.
        batch_size: the samples of a replica's batch, for ``DataLoader(batch_sampler=...)``; None gives single samples,
            for ``DataLoader(sampler=...)``.

    Raises:
        ArgumentError: not a schedule, a dataset without a length, or an invalid batch size.
    """
    if not isinstance(sch, Schedule):
        raise ArgumentError(
            f"sampler takes the schedule (got {type(sch).__name__})", hint="sampler(sch, dataset, shuffle=True)"
        )
    if not hasattr(dataset, "__len__"):
        raise ArgumentError(
            f"sampler needs a dataset with a length (got {type(dataset).__name__})",
            hint="a map-style dataset, with __len__ and __getitem__",
        )
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise ArgumentError(f"batch_size must be a positive integer or None (got {batch_size!r})", hint="batch_size=8")
    mesh = sch.mesh
    replicas = place = None
    if mesh is not None:
        replicas = mesh.size("dp_replicate") * mesh.size("dp")
        place = mesh.rank("dp_replicate") * mesh.size("dp") + mesh.rank("dp")
    return ReplicaSampler(
        dataset, replicas or 1, place or 0, shuffle=shuffle, seed=seed, drop_last=drop_last, batch_size=batch_size
    )


class ReplicaSampler(DistributedSampler[Any]):
    """Torch's DistributedSampler with a position, which it saves and resumes: see :func:`sampler`.

    Replicas take the samples of an epoch in turn, so that a prefix of their order is done after each step. Under
    another number of replicas the rest of it is divided again.

    Args:
        dataset: with a length.
        replicas: that take samples.
        place: of this one.
        shuffle: see :func:`sampler`.
        seed: see :func:`sampler`.
        drop_last: see :func:`sampler`.
        batch_size: see :func:`sampler`.
    """

    def __init__(
        self,
        dataset: Any,
        replicas: int,
        place: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        batch_size: int | None,
    ) -> None:
        super().__init__(dataset, replicas, place, shuffle, seed, drop_last)
        self.batch_size = batch_size
        self._samples = len(dataset)
        self._start = 0  # of the next iteration, among the samples of all replicas
        self._position = 0  # of the present one
        self._is_counted = False  # by the batches handed out, which a loader draws earlier

    def __iter__(self) -> Iterator[Any]:
        own, start = self._own(), self._start
        self._start, self._position = 0, start
        size = self.batch_size or 1
        for begin in range(0, len(own), size):
            if not self._is_counted:
                self._advance(min(begin + size, len(own)) - begin)
            yield own[begin] if self.batch_size is None else own[begin : begin + size]

    def __len__(self) -> int:
        return math.ceil(self._count() / (self.batch_size or 1))

    @property
    def last_batch(self) -> int:
        """The number of samples in an incomplete last batch of an epoch; 0 without one, or without ``batch_size``."""
        if self.drop_last or self.batch_size is None:
            return 0
        return math.ceil(self._samples / self.num_replicas) % self.batch_size

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader over this sampler, and count its position by them.

        Without it the position is that of the samples drawn, which workers of a loader draw ahead of training. In an
        epoch that is resumed the loader draws no seed from torch's RNG: it did so where the epoch began.

        Args:
            loader: torch's DataLoader, or another one with a ``batch_size`` where the sampler has none.
        """
        size = self.batch_size or getattr(loader, "batch_size", None)
        if not size:
            raise ArgumentError(
                "batches needs the number of samples in a batch",
                hint="sampler(sch, dataset, batch_size=8), or DataLoader(batch_size=8)",
            )
        left = self._count()
        self._is_counted = True
        self._position = self._start
        is_resumed, before = self._start > 0, torch.get_rng_state()
        try:
            drawn = iter(loader)
            if is_resumed:
                torch.set_rng_state(before)
            for batch in drawn:
                self._advance(min(size, left))
                left -= min(size, left)
                yield batch
        finally:
            self._is_counted = False

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; the present one goes on at its resumed position."""
        if epoch != self.epoch:
            self._start = self._position = 0
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and position, as JSON: the same on every rank."""
        return {"epoch": self.epoch, "position": self._position, "samples": self._samples, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the epoch at its position, with any number of replicas.

        Args:
            state: of :meth:`state_dict`.

        Raises:
            ArgumentError: it is of a dataset of another length, or of another seed.
        """
        for name, own in (("samples", self._samples), ("seed", self.seed)):
            if state[name] != own:
                raise ArgumentError(
                    f"the position is in another order of samples: {name} {state[name]} (got {own} here)",
                    hint=f"sampler(sch, dataset, ...) with the dataset and the seed of before: {name} {state[name]}",
                )
        super().set_epoch(state["epoch"])
        self._start = self._position = state["position"]

    def _advance(self, samples: int) -> None:
        self._position = min(self._position + samples * self.num_replicas, self._samples)

    def _count(self) -> int:
        """Return the number of this replica's samples in the next iteration."""
        left = self._samples - self._start
        if not self.drop_last:
            return math.ceil(left / self.num_replicas)
        size = self.batch_size or 1
        return left // (self.num_replicas * size) * size

    def _own(self) -> list[int]:
        """Return this replica's samples of the next iteration."""
        order = self._order()
        total = self._count() * self.num_replicas
        left = order[self._start :][:total]
        while len(left) < total:
            left += order[: total - len(left)]
        return left[self.rank :: self.num_replicas]

    def _order(self) -> list[int]:
        """Return the order of all samples, torch's for this epoch."""
        if not self.shuffle:
            return list(range(self._samples))
        draw = torch.Generator()
        draw.manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(self._samples, generator=draw).tolist()
        return order
