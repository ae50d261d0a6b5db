"""Record initializers of meta tensors as programs, and run them for any shard.

A tensor is initialized in blocks, each by a generator seeded with the tensor's name and the block's number. Blocks
depend on the full shape alone: every layout has the same values, and a rank computes only the blocks that overlap its
shard.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from slapo_core.errors import HookError, WeightsError
from slapo_core.internals import module_index
from slapo_core.layout import Layout
from slapo_runtime.correspondence.storage import shard_ranges
from slapo_runtime.initialization.initializers import (
    SKIP_MARK,
    InitializerCall,
    Initializers,
    Rerun,
    copy_on_meta,
    copy_with,
)
from slapo_runtime.private import TorchDispatchMode, storage_id, tree_leaves

if TYPE_CHECKING:
    from slapo_core.internals import HookManager
    from slapo_core.layout import Mesh


Box = tuple[tuple[int, int], ...]  # (start, length) along each axis
_BLOCK = 1 << 16  # elements; changing it changes the initial values of every model


@dataclass(frozen=True)
class Write:
    """One in-place operation, the same for every element.

    Args:
        operation: e.g. ``torch.ops.aten.mul_.Tensor``; called with the elements and the arguments.
        arguments: numbers.
        box: the written elements.
        value: the source of a copy, of the box's shape.
    """

    operation: Any
    arguments: tuple[Any, ...]
    box: Box
    value: torch.Tensor | None = None

    def apply(self, block: torch.Tensor, box: Box) -> None:
        """Run it on ``block``, the elements ``box`` of the tensor."""
        shared = [_overlap(own, other) for own, other in zip(self.box, box, strict=True)]
        if any(length <= 0 for _, length in shared):
            return
        part = block[_slices(shared, box)] if shared != list(box) else block
        if self.value is not None:
            part.copy_(self.value[_slices(shared, self.box)])
        else:
            self.operation(part, *self.arguments)


@dataclass(frozen=True)
class InitProgram:
    """The operations that give a tensor its initial value.

    Args:
        shape: the tensor's full shape, in elements.
        dtype: its element type.
        draw: the random operation for all elements, e.g. ``torch.ops.aten.normal_.default``, and its numbers; None if
            the first of ``writes`` sets all elements.
        writes: the later operations, in order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    draw: tuple[Any, tuple[Any, ...]] | None
    writes: tuple[Write, ...]

    def shard(self, layout: Layout, mesh: Mesh | None, key: str) -> torch.Tensor:
        """Compute this rank's shard, on the CPU.

        Args:
            layout: of the tensor, with its full shape.
            mesh: None for the full tensor.
            key: seeds the random numbers, together with the number of the block.
        """
        zero = bool(layout.padding) or not layout.holds_values(mesh)
        make = torch.zeros if zero else torch.empty
        shard = make(layout.local_shape(mesh), dtype=self.dtype, device="cpu")
        if layout.holds_values(mesh):
            axes = [shard_ranges(ranges) for ranges in layout.segments(mesh)]
            generator = torch.Generator(device="cpu")
            scratch = torch.empty(min(_BLOCK, math.prod(self.shape)), dtype=self.dtype, device="cpu")
            for number, box in enumerate(blocks(self.shape)):
                self._fill(shard, axes, box, generator, f"{key}:{number}", scratch)
        return shard

    def _fill(
        self,
        shard: torch.Tensor,
        axes: list[list[tuple[int, int, int]]],
        box: Box,
        generator: torch.Generator,
        key: str,
        scratch: torch.Tensor,
    ) -> None:
        """Write the overlap of a shard and a block, if possible in place."""
        parts = list(itertools.product(*(_shared(ranges, *own) for ranges, own in zip(axes, box, strict=True))))
        if not parts:
            return
        lengths = [length for _, length in box]
        if [length for _, _, length in parts[0]] == lengths:
            there = shard[tuple(slice(at, at + length) for at, _, length in parts[0])]
            if there.is_contiguous():
                self._run(there, box, generator, key)
                return
        block = scratch[: math.prod(lengths)].view(lengths)
        self._run(block, box, generator, key)
        for part in parts:
            there = shard[tuple(slice(at, at + length) for at, _, length in part)]
            there.copy_(block[tuple(slice(at, at + length) for _, at, length in part)])

    def _run(self, block: torch.Tensor, box: Box, generator: torch.Generator, key: str) -> None:
        if self.draw is not None:
            operation, numbers = self.draw
            generator.manual_seed(seed_of(key))
            operation(block, *numbers, generator=generator)
        for write in self.writes:
            write.apply(block, box)


def blocks(shape: tuple[int, ...]) -> Iterator[Box]:
    """Split a tensor into contiguous blocks of at most 65536 elements."""
    if 0 in shape:
        return
    axis = next((axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= _BLOCK), None)
    if axis is None:
        yield ()
        return
    step = _BLOCK // math.prod(shape[axis + 1 :])
    rest = tuple((0, extent) for extent in shape[axis + 1 :])
    for lead in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            yield (*((index, 1) for index in lead), (start, min(step, shape[axis] - start)), *rest)


def seed_of(key: str) -> int:
    """Return a seed for torch's generators."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    start = max(one[0], other[0])
    return start, min(sum(one), sum(other)) - start


def _slices(part: list[tuple[int, int]], inside: Box) -> tuple[slice, ...]:
    return tuple(slice(a - b, a - b + length) for (a, length), (b, _) in zip(part, inside, strict=True))


def _shared(ranges: list[tuple[int, int, int]], start: int, length: int) -> list[tuple[int, int, int]]:
    """Return the overlaps of a shard with a range: ``(start in the shard, start in the range, length)``."""
    found = []
    for at, first, extent in ranges:
        begin, common = _overlap((first, extent), (start, length))
        if common > 0:
            found.append((at + begin - first, begin - start, common))
    return found


_aten = torch.ops.aten
_DRAWS = (_aten.normal_.default, _aten.uniform_.default)
_FILLS = (_aten.fill_.Scalar, _aten.zero_.default)
_COPIES = (_aten.copy_.default, _aten.fill_.Tensor)
_SCALINGS = (_aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar)
_CHANGES = (
    *_SCALINGS,
    *(_aten.add_.Tensor, _aten.add_.Scalar, _aten.sub_.Tensor, _aten.sub_.Scalar),
    *(_aten.clamp_.default, _aten.clamp_min_.default, _aten.clamp_max_.default),
)
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_LARGEST_COPY = 1 << 20  # elements: copied values are kept until the model is materialized
_AROUND = frozenset({"numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "share_memory_"})

_Writes = list[Write | None]  # None: an unsupported write


def record(model: nn.Module) -> dict[str, InitProgram]:
    """Record programs for the tensors of ``model`` on the meta device.

    Args:
        model: it is only read.

    Returns:
        name -> program, for every name of each recorded tensor; torch's RNG state is restored.
    """
    names = [(name, tensor) for name, tensor in _named(model) if tensor.is_meta and tensor.numel()]
    if not names:
        return {}
    memory = mmap.mmap(-1, max(tensor.numel() * tensor.element_size() for _, tensor in names))
    twins: dict[int, torch.Tensor] = {}

    def twin_of(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta or not tensor.numel():
            return torch.empty_like(tensor.detach(), device="meta")
        size = tensor.numel() * tensor.element_size()
        raw = torch.frombuffer(memory, dtype=torch.uint8, count=size)
        twin: torch.Tensor = raw.view(tensor.dtype).view(tensor.shape)
        twins[storage_id(twin)] = twin
        return twin

    copied = copy_with(model, twin_of)
    index = module_index.ModuleIndex(copied)
    for _, tensor in _named(copied):
        tensor.__dict__.pop(SKIP_MARK, None)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        return _InitializerRecords(index, twins).programs()


class _InitializerRecords:
    """Record the writes of each initializer, by tensor.

    Args:
        index: of the copy.
        twins: the copy's tensors by their storage.
    """

    def __init__(self, index: module_index.ModuleIndex, twins: Mapping[int, torch.Tensor]) -> None:
        self._index, self._twins = index, twins
        self._sites = module_index.TensorSites(index)
        self._initializers = Initializers(index)
        self._written: dict[InitializerCall, dict[int, _Writes] | None] = {}

    def programs(self) -> dict[str, InitProgram]:
        found = {}
        for tensor, sites in self._tracked():
            program = self._program(tensor, sites)
            if program is not None:
                found.update({module_index.full_name(path, own_name): (tensor, program) for path, own_name in sites})
        return {name: program for name, (tensor, program) in found.items() if self._index.tensor_at(name) is tensor}

    def _tracked(self) -> list[tuple[torch.Tensor, tuple[tuple[str, str], ...]]]:
        tensors = {id(tensor): tensor for _, tensor in _named(self._index.modules[""]) if not tensor.is_meta}
        return [(tensor, self._sites.of(tensor)) for tensor in tensors.values()]

    def _program(self, tensor: torch.Tensor, sites: tuple[tuple[str, str], ...]) -> InitProgram | None:
        """Record the program of a tensor, from its first site with writes."""
        key = storage_id(tensor)
        for path, _ in sites:
            writes: _Writes = []
            for initializer in self._initializers.of(path):
                if initializer not in self._written:
                    self._written[initializer] = _written_by(initializer, self._twins)
                written = self._written[initializer]
                if written is None:
                    return None
                writes += written.get(key, [])
            if writes:
                return _program_of(writes, self._twins[key])
        return None


def _written_by(initializer: InitializerCall, twins: Mapping[int, torch.Tensor]) -> dict[int, _Writes] | None:
    """Record the writes of one initializer; None if it did anything else or raised."""
    recorder = _WriteRecorder(twins)
    try:
        with recorder, _MemoryGuard(recorder):
            initializer.call()
    except (_NotUnderstoodError, Exception):  # noqa: BLE001 - the run on real memory raises it, too
        return None
    return None if recorder.gave_up else recorder.writes


class _NotUnderstoodError(BaseException):
    """End an initializer, past its own ``except Exception``."""


class _WriteRecorder(TorchDispatchMode):
    """Record in-place operations on tensors with the storages ``twins`` instead of running them."""

    def __init__(self, twins: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.writes: dict[int, _Writes] = {}
        self.gave_up = False
        self.has_used_rng = False  # outside of the tensors: dependent values are not reproducible
        self._twins = twins

    def has(self, value: Any) -> bool:
        """Return whether ``value`` is one of the tensors, or a view of one."""
        return isinstance(value, torch.Tensor) and not value.is_meta and storage_id(value) in self._twins

    def give_up(self) -> None:
        self.gave_up = True
        raise _NotUnderstoodError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        touched = [leaf for leaf in tree_leaves((args, kwargs)) if self.has(leaf)]
        if not touched:
            return self._elsewhere(func, args, kwargs)
        if func.is_view:
            return func(*args, **kwargs)
        if len(touched) > 1 or touched[0] is not args[0] or any(value is not None for value in kwargs.values()):
            self.give_up()
        self._note(func, args[0], args[1:])
        return args[0]

    def _elsewhere(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.has_used_rng |= torch.Tag.nondeterministic_seeded in func.tags
        result = func(*args, **kwargs)
        if self.has_used_rng and not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            self.give_up()  # a number for Python, which may decide on later operations
        return result

    def _note(self, func: Any, view: torch.Tensor, arguments: tuple[Any, ...]) -> None:
        key = storage_id(view)
        full = self._twins[key]
        if func in _COPIES:
            write = self._copy(view, full, *arguments[:1])
        elif func in (*_DRAWS, *_FILLS, *_CHANGES):
            func(torch.empty(1, dtype=view.dtype, device="cpu"), *arguments)  # raises for invalid arguments
            write = _write(func, view, full, arguments)
        else:
            self.give_up()
        self.writes.setdefault(key, []).append(write)

    def _copy(self, view: torch.Tensor, full: torch.Tensor, value: torch.Tensor) -> Write | None:
        if value.is_meta:
            self.give_up()
        if self.has_used_rng:
            return None
        if not value.ndim:
            return _write(_aten.fill_.Scalar, view, full, (value.item(),))
        box = _box(view, full)
        if box is None or view.numel() > _LARGEST_COPY:
            return None
        shape = [length for _, length in box]
        copied = torch.empty(view.shape, dtype=full.dtype, device="cpu").copy_(value)
        return None if copied.isnan().any() else Write(_aten.copy_.default, (), box, copied.view(shape))


class _MemoryGuard(TorchFunctionMode):
    """Give up on accesses to a tensor's memory without an operator."""

    def __init__(self, recorder: _WriteRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        around = getattr(func, "__name__", "") in _AROUND or func == _SET_DATA
        if around and (self._recorder.has_used_rng or any(map(self._recorder.has, args))):
            self._recorder.give_up()
        return func(*args, **(kwargs or {}))


def _program_of(writes: _Writes, full: torch.Tensor) -> InitProgram | None:
    """Return the program from the last full write on; None for unknown writes."""
    everything = tuple((0, extent) for extent in full.shape)
    shape = tuple(full.shape)
    for position in range(len(writes) - 1, -1, -1):
        write = writes[position]
        if write is None:
            return None
        if write.box != everything or write.operation in _CHANGES:
            continue
        rest = tuple(later for later in writes[position + 1 :] if later is not None)
        if write.operation in _DRAWS:
            return InitProgram(shape, full.dtype, (write.operation, write.arguments), rest)
        return InitProgram(shape, full.dtype, None, (write, *rest))
    return None


def _write(func: Any, view: torch.Tensor, full: torch.Tensor, arguments: tuple[Any, ...]) -> Write | None:
    box = _box(view, full)
    given = [number for number in arguments if number is not None]
    if box is None or any(not isinstance(number, (int, float)) or not math.isfinite(number) for number in given):
        return None
    if func in _DRAWS and (view.shape != full.shape or not full.is_floating_point()):
        return None
    if func in _SCALINGS and 0 in arguments:
        return None  # the result may be NaN
    return Write(func, arguments, box)


def _box(view: torch.Tensor, full: torch.Tensor) -> Box | None:
    """Return the box of ``full`` that a view covers in order, if any."""
    if view.dtype != full.dtype:
        return None
    if view.shape == full.shape and view.stride() == full.stride():
        return tuple((0, extent) for extent in full.shape)
    dims = [(extent, stride) for extent, stride in zip(view.shape, view.stride(), strict=True) if extent != 1]
    offset = int(view.storage_offset())
    box = []
    for extent, stride in zip(full.shape, full.stride(), strict=True):
        start, offset = divmod(offset, stride)
        length = dims.pop(0)[0] if extent > 1 and dims and dims[0][1] == stride else 1
        if start + length > extent:
            return None
        box.append((start, length))
    return tuple(box) if not dims else None


def _named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


class Initializer:
    """Initialize tensors as ``model`` would, without changing the model.

    Args:
        model: the reference model, or the scheduled one for what its steps added.
        hooks: of the schedule: a plugin's ``slapo_initialize`` precedes the model's own initialization.
        seed: mixed into the seed of every tensor.
        is_reference: False for a scheduled model. Its tensors may be shards, so that recorded programs would depend on
            the layout: all initializers are run again for each tensor.
    """

    def __init__(self, model: nn.Module, hooks: HookManager, *, seed: int = 0, is_reference: bool = True) -> None:
        self._hooks = hooks
        self._seed = seed
        self._programs = record(model) if is_reference else {}
        tensors = (*model.named_parameters(), *model.named_buffers())
        others = any(tensor.is_meta and name not in self._programs for name, tensor in tensors)
        self._rerun = Rerun(copy_on_meta(model)) if others else None

    def value(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return the initial value of one tensor on the CPU; restore torch's RNG state.

        Args:
            name: the tensor's full name in the model, e.g. ``"encoder.layer.0.output.dense.weight"``.
            shape: its full shape, in elements.

        Returns:
            None if no plugin and no initializer sets all elements.

        Raises:
            WeightsError: an initializer raised.
            HookError: plugins disagree, or give a wrong value.
        """
        return self.shard(name, Layout(name, shape), None)

    def shard(self, name: str, layout: Layout, mesh: Mesh | None) -> torch.Tensor | None:
        """Return this rank's shard of :meth:`value`, without the full tensor where possible.

        Args:
            name: the tensor's full name in the model.
            layout: of the rank's shard, with the full shape.
            mesh: None for the full tensor.
        """
        shape, key, program = tuple(layout.shape), f"{self._seed}:{name}", self._programs.get(name)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            full = self._ask(name, shape, key, program.dtype if program is not None else self._again.dtype(name))
            if full is None and program is not None:
                return program.shard(layout, mesh, key)
            if full is None:
                full = self._again.value(name, shape, seed_of(key))
        return layout.local(full, mesh) if full is not None else None

    @property
    def _again(self) -> Rerun:
        assert self._rerun is not None
        return self._rerun

    def _ask(self, name: str, shape: tuple[int, ...], key: str, dtype: torch.dtype) -> torch.Tensor | None:
        path, _, own_name = name.rpartition(".")
        torch.default_generator.manual_seed(seed_of(key))
        answer = self._hooks.single("slapo_initialize", path=path, name=own_name, shape=shape, dtype=dtype)
        if answer is None:
            return None
        label, value = answer
        fits = isinstance(value, torch.Tensor) and tuple(value.shape) == shape and value.dtype == dtype
        if not fits or value.is_meta:
            got = f"{tuple(value.shape)}, {value.dtype}, {value.device}" if isinstance(value, torch.Tensor) else value
            raise HookError(
                f"hook slapo_initialize of {label} must give a tensor of shape {shape}, {dtype}, with values, for "
                f"'{name}' (got {got})",
                plugin=label,
            )
        return value.detach().to("cpu")


def cannot_initialize(names: list[str]) -> WeightsError:
    """Make the error for tensors on the meta device without an initializer."""
    one = len(names) == 1
    return WeightsError(
        f"{'a tensor' if one else f'{len(names)} tensors'} on the meta device cannot be initialized, because no "
        f"reset_parameters() or _init_weights() fills {'it' if one else 'them'}: {', '.join(names)}",
        hint='pass weights="dir/with/safetensors", or build the model on the CPU instead of the meta device',
    )
