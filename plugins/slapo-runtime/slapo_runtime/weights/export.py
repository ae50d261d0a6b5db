"""Export the reference model's weights as safetensors files, written by all ranks."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from slapo_core.errors import ArgumentError, BuildError, warn_user
from slapo_runtime.correspondence.storage import blocks, is_distributed, slices, window_of
from slapo_runtime.ranks.world import World
from slapo_runtime.sizes import parse_bytes
from slapo_runtime.weights.files import (
    replacing,
    stale_weights,
    warn_of_other_function,
    write_configurations,
    writing,
)
from slapo_runtime.weights.safetensors_files import (
    DTYPES,
    INDEX_FILE,
    SafetensorsWriter,
    bytes_of,
    divide,
    file_names,
    write_index,
)

if TYPE_CHECKING:
    from slapo_runtime.correspondence.storage import LiveTensor
    from slapo_runtime.weights.state import ModelState


@dataclass
class _Tensor:
    """A reference tensor to be written, under all of its keys.

    Args:
        name: its first name.
        keys: of the state dict: several for a tie, each with a copy in the files.
        dtype: in the file.
        shape: in elements.
    """

    name: str
    keys: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The bytes of all copies."""
        return bytes_of(self.dtype, self.shape) * len(self.keys)


@dataclass
class _Part:
    """Reference tensors that one rank assembles and writes.

    Args:
        tensors: one, or the tensors of a translated live tensor.
        live: the live tensor; None for a dropped tensor, and for a buffer that only other ranks hold.
        how: ``"exchanged"``: ranks send their rectangles to the owner; ``"gathered"``: a collective of all ranks;
            ``"dropped"``: by a step, and every rank has it.
        owner: the index of the rank that writes it.
    """

    tensors: list[_Tensor]
    live: LiveTensor | None
    how: Literal["exchanged", "gathered", "dropped"]
    owner: int = 0

    @property
    def size(self) -> int:
        return sum(one.size for one in self.tensors)


_Place = tuple[tuple[int, ...], tuple[int, ...]]  # offset in the full tensor, extent


def export(
    state: ModelState,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str,
    dtype: torch.dtype | None,
) -> None:
    """Write the weights of a model; see :meth:`slapo_runtime.engine.StatefulEngine.export`."""
    if not os.fspath(directory):
        raise ArgumentError("the directory to write to is empty", hint='engine.export("exported")')
    limit = parse_bytes(max_shard_size, name="max_shard_size")
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError(f"dtype must be a floating-point type (got {dtype})", hint="dtype=torch.bfloat16")
    state.check_unchanged()
    differing = state.differing()
    if differing is not None:
        raise differing
    _warn_of_others(state)
    with World(state.mesh) as world:
        _Export(state, world, Path(directory), limit, dtype).run()


def _warn_of_others(state: ModelState) -> None:
    warn_of_other_function(state.correspondence.other_function)
    added = [live.name for live in state.correspondence.added()]
    left_out = added + sorted(state.correspondence.survey.not_tensors)
    if left_out:
        warn_user(
            "the exported files hold the tensors of the reference model only, without added tensors and extra state: "
            + ", ".join(left_out)
        )


@dataclass
class _Export:
    """One export: a plan that is the same on all ranks, then rounds of one assembled tensor a rank.

    Args:
        state: of the model.
        world: all ranks.
        directory: for the files.
        limit: the size of a file, in bytes, unless one tensor is larger.
        dtype: of floating-point tensors; None for the reference model's.
    """

    state: ModelState
    world: World
    directory: Path
    limit: int
    dtype: torch.dtype | None

    def run(self) -> None:
        with self.world.together(f"exporting to '{self.directory}'"):
            parts = self._parts()
            rounds = _rounds(parts, self.world.size)
            files = self._files(rounds)
        own = self.world.index
        with contextlib.ExitStack() as stack:
            place = self.directory
            with self._writing():
                if own == 0:
                    names = [name for _, name, _ in files]
                    stale = functools.partial(stale_weights, keep=names)
                    last = INDEX_FILE if len(files) > 1 else names[0]
                    place = stack.enter_context(replacing(self.directory, last=last, stale=stale))
            place = self.world.gather(place)[0]
            written = _Files(place, [(name, tensors) for rank, name, tensors in files if rank == own])
            self._write(rounds, written)
            with self._writing():
                if written.error is not None:
                    raise written.error
                if own == 0:
                    self._describe(place, files)
            with self._writing():
                stack.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise errors of the file system on every rank."""
        with self.world.together(f"exporting to '{self.directory}'"), writing(self.directory):
            yield

    # -- the plan -----------------------------------------------------------------------------------------------

    def _parts(self) -> list[_Part]:
        """List the tensors to assemble, in the same order on every rank."""
        correspondence = self.state.correspondence
        specs, keys = correspondence.survey.specs, correspondence.survey.keys
        by_name: dict[str, _Tensor] = {}
        for key, name in keys.items():
            spec = specs[name]
            dtype = self.dtype if self.dtype is not None and spec.dtype.is_floating_point else spec.dtype
            if dtype not in DTYPES:
                raise BuildError(f"safetensors files cannot hold '{name}' in {dtype}", hint="dtype=torch.float32")
            known = by_name.setdefault(name, _Tensor(name, (), dtype, spec.shape))
            known.keys += (key,)
        parts: list[_Part] = []
        lives: dict[str, LiveTensor] = {}
        for live, spec in correspondence.carried():
            lives.setdefault(spec.name, live)
        for live, of_live in correspondence.translated():
            parts.append(_Part([by_name.pop(spec.name) for spec in of_live if spec.name in by_name], live, "gathered"))
        sends = self._sends_rectangles()
        for name, tensor in by_name.items():
            carrier = lives.get(name)
            is_sum = carrier is not None and bool(carrier.layout.partials())
            how: Any = "dropped" if name in self.state.dropped else "exchanged" if sends and not is_sum else "gathered"
            parts.append(_Part([tensor], carrier, how))
        return [part for part in parts if part.tensors]

    def _sends_rectangles(self) -> bool:
        """Return whether every rank holds its rectangles of all tensors in the model itself."""
        tensors = [live.tensor for live in self.state.tensors() if is_distributed(live.tensor)]
        own = self.state.kept is None and all(window_of(one, self.state.mesh) is not None for one in tensors)
        return all(self.world.gather(own))

    def _files(self, rounds: Sequence[Sequence[_Part]]) -> list[tuple[int, str, list[_Tensor]]]:
        """Divide the tensors of each rank into files: rank, name and tensors of each."""
        found: list[tuple[int, list[_Tensor]]] = []
        for rank in range(self.world.size):
            own = [one for parts in rounds for part in parts if part.owner == rank for one in part.tensors]
            found += [(rank, tensors) for tensors in divide([(one, one.size) for one in own], self.limit) if tensors]
        found = found or [(0, [])]
        return [(rank, name, own) for (rank, own), name in zip(found, file_names(len(found)), strict=True)]

    # -- the values ---------------------------------------------------------------------------------------------

    def _write(self, rounds: Sequence[Sequence[_Part]], files: _Files) -> None:
        """Assemble and write this rank's tensors: a collective, to the end on every rank."""
        by_rank = self.world.gather([[list(self._places(part)) for part in parts] for parts in rounds])
        for number, parts in enumerate(rounds):
            values = self._assembled(parts, [theirs[number] for theirs in by_rank])
            while values:
                files.write(*values.pop(0))
        files.finish()

    def _places(self, part: _Part) -> Iterator[_Place]:
        if part.how == "exchanged" and part.live is not None and part.live.is_local:
            for offset, extent, _ in self._rectangles(part.live):
                yield offset, extent

    def _rectangles(self, live: LiveTensor) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]:
        """Yield this rank's rectangles: offset in the full tensor, extent, values."""
        window = window_of(live.tensor, self.state.mesh)
        value: Any = live.tensor.detach()
        value = value if window is None else value.to_local()
        for at, offset, extent in blocks(live.layout, self.state.mesh, window):
            yield offset, extent, value[slices(at, extent)]

    def _assembled(
        self, parts: Sequence[_Part], by_rank: Sequence[Sequence[Sequence[_Place]]]
    ) -> list[tuple[_Tensor, torch.Tensor]]:
        """Return the tensors that this rank writes in one round: a collective.

        Args:
            parts: of the round, each with another owner.
            by_rank: of each rank the places of its rectangles of each part.
        """
        own, values, sent = self.world.index, list[tuple[_Tensor, torch.Tensor]](), list[Any]()
        received: list[tuple[_Part, list[tuple[_Place, int]]]] = []
        for number, part in enumerate(parts):
            if part.how != "exchanged":
                found = self._common(part)
                values += found if part.owner == own else []
                continue
            senders = _senders([theirs[number] for theirs in by_rank], part.owner)
            if part.owner == own:
                received.append((part, senders))
            elif any(sender == own for _, sender in senders):
                wanted = {place for place, sender in senders if sender == own}
                assert part.live is not None
                for offset, extent, value in self._rectangles(part.live):
                    if (offset, extent) in wanted:
                        wanted.discard((offset, extent))
                        sent.append(self.world.send(self._cast(value, part).contiguous(), part.owner))
        for part, senders in received:
            tensor = part.tensors[0]
            full = torch.zeros(tensor.shape, dtype=tensor.dtype)
            here = {}
            if any(sender == own for _, sender in senders):
                assert part.live is not None
                here = {(offset, extent): value for offset, extent, value in self._rectangles(part.live)}
            for place, sender in senders:
                target = full[slices(*place)]
                if sender == own:
                    target.copy_(here[place])
                elif target.is_contiguous():
                    self.world.receive(target, sender)
                else:
                    buffer = torch.empty(place[1], dtype=tensor.dtype)
                    self.world.receive(buffer, sender)
                    target.copy_(buffer)
            values.append((tensor, full))
        for work in sent:
            work()
        return values

    @staticmethod
    def _cast(value: torch.Tensor, part: _Part) -> torch.Tensor:
        return value.to("cpu", part.tensors[0].dtype)

    def _common(self, part: _Part) -> list[tuple[_Tensor, torch.Tensor]]:
        """Return tensors that all ranks assemble together."""
        state, live = self.state, part.live
        if part.how == "dropped":
            found = {part.tensors[0].name: state.dropped[part.tensors[0].name]}
        elif live is None:
            found = {part.tensors[0].name: state.full_elsewhere(part.tensors[0].name)}
        else:
            full = state.full(live)
            if part.owner != self.world.index:
                return []
            is_carried = live.reference_names == (part.tensors[0].name,)
            translate = state.correspondence.translations.to_reference
            found = {live.reference_names[0]: full} if is_carried else dict(translate(live, full))
        return [(one, found[one.name].detach().to("cpu", one.dtype)) for one in part.tensors]

    def _describe(self, place: Path, files: Sequence[tuple[int, str, Sequence[_Tensor]]]) -> None:
        """Write the configurations, and the index of several files."""
        specs = [one for one in self.state.correspondence.survey.specs.values() if one.dtype.is_floating_point]
        dtype = self.dtype or next((one.dtype for one in specs if one.is_parameter), torch.float32)
        write_configurations(self.state.correspondence.tree.root, place, dtype=dtype)
        if len(files) > 1:
            total = sum(one.size for _, _, tensors in files for one in tensors)
            write_index(place, total, {key: name for _, name, tensors in files for one in tensors for key in one.keys})


@dataclass
class _Files:
    """The files of one rank, one after the other; an error ends the writing, and not the exchange between ranks.

    Args:
        place: the directory.
        remaining: name and tensors of each file.
    """

    place: Path
    remaining: list[tuple[str, Sequence[_Tensor]]]
    error: OSError | None = None
    _open: SafetensorsWriter | None = None
    _names: frozenset[str] = frozenset()

    def write(self, tensor: _Tensor, value: torch.Tensor) -> None:
        """Write a tensor under each of its keys."""
        if self.error is not None:
            return
        try:
            if tensor.name not in self._names:
                self._close()
                name, tensors = self.remaining.pop(0)
                entries = {key: (one.dtype, one.shape) for one in tensors for key in one.keys}
                self._names = frozenset(one.name for one in tensors)
                self._open = SafetensorsWriter(self.place / name, entries, {"format": "pt"})
            assert self._open is not None
            for key in tensor.keys:
                self._open.write(key, value)
        except OSError as error:
            self.error = error

    def finish(self) -> None:
        """Write the last file to the disk."""
        try:
            if self.error is None:
                self._close()
        except OSError as error:
            self.error = error
        if self._open is not None:
            self._open.close()

    def _close(self) -> None:
        if self._open is not None:
            self._open.finish()


def _rounds(parts: Sequence[_Part], ranks: int) -> list[list[_Part]]:
    """Deal parts of similar sizes to all ranks, one a round."""
    largest = sorted(parts, key=lambda part: -part.size)
    rounds = [largest[start : start + ranks] for start in range(0, len(largest), ranks)]
    for number, own in enumerate(rounds):
        for place, part in enumerate(own):
            part.owner = place if number % 2 == 0 else ranks - 1 - place
    return rounds


def _senders(by_rank: Sequence[Sequence[_Place]], owner: int) -> list[tuple[_Place, int]]:
    """Return each rectangle with the rank that gives it: the owner itself where it can."""
    found: dict[_Place, int] = dict.fromkeys(by_rank[owner], owner)
    for rank, places in enumerate(by_rank):
        for place in places:
            found.setdefault(place, rank)
    return list(found.items())
