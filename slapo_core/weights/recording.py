"""What a model's initializers write into its tensors, found out by running them once with nothing being written.

They run on a copy of the model whose tensors are on the CPU as in a real one, with memory behind them that is never
touched: every operation on them is looked at instead of being run. A tensor is understood if all that its initializers
do with it is to draw it, fill it or copy a small value into it, whole, and then to change elements each by itself.

Whoever reads a tensor or goes around torch's operators is not followed any further: for the tensors that such an
initializer is for, there is no program. Nor is there one for a tensor that gets values which were drawn elsewhere.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slapo_core.tree.index import ModuleIndex, TensorSites, full_name
from slapo_core.weights.copies import copy_with
from slapo_core.weights.initializers import SKIP_MARK, InitializerCall, Initializers
from slapo_core.weights.programs import Box, Program, Write

__all__ = ["record"]

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
_LARGEST_COPY = 1 << 20  # elements: what is copied in is kept until the model has its values
_AROUND = frozenset({"numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "share_memory_"})

_Writes = list[Write | None]  # None: a write that is not understood


def record(model: nn.Module) -> dict[str, Program]:
    """Programs for the tensors of ``model`` that are on the meta device.

    Args:
        model: it is only read.

    Returns:
        name -> program, for every name of each tensor that is understood; torch's random state stays as it was.
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
        twins[_storage(twin)] = twin
        return twin

    copied = copy_with(model, twin_of)
    index = ModuleIndex(copied)
    for _, tensor in _named(copied):
        tensor.__dict__.pop(SKIP_MARK, None)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        return _Recording(index, twins).programs()


class _Recording:
    """The writes of each initializer, by tensor.

    Args:
        index: of the copy.
        twins: the copy's tensors by their storage.
    """

    def __init__(self, index: ModuleIndex, twins: Mapping[int, torch.Tensor]) -> None:
        self._index, self._twins = index, twins
        self._sites = TensorSites(index)
        self._initializers = Initializers(index)
        self._written: dict[InitializerCall, dict[int, _Writes] | None] = {}

    def programs(self) -> dict[str, Program]:
        found = {}
        for tensor, sites in self._tracked():
            program = self._program(tensor, sites)
            if program is not None:
                found.update({full_name(path, own_name): (tensor, program) for path, own_name in sites})
        return {name: program for name, (tensor, program) in found.items() if self._index.tensor_at(name) is tensor}

    def _tracked(self) -> list[tuple[torch.Tensor, tuple[tuple[str, str], ...]]]:
        tensors = {id(tensor): tensor for _, tensor in _named(self._index.modules[""]) if not tensor.is_meta}
        return [(tensor, self._sites.of(tensor)) for tensor in tensors.values()]

    def _program(self, tensor: torch.Tensor, sites: tuple[tuple[str, str], ...]) -> Program | None:
        """As the tensor's first place does it, if that does anything."""
        key = _storage(tensor)
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
    """What one initializer writes; None if it did something else too, or raised."""
    recorder = _Recorder(twins)
    try:
        with recorder, _Guard(recorder):
            initializer.call()
    except (_NotUnderstoodError, Exception):  # noqa: BLE001 - it is run again on real memory, and raises there too
        return None
    return None if recorder.gave_up else recorder.writes


class _NotUnderstoodError(BaseException):
    """Ends an initializer, past its own ``except Exception``."""


class _Recorder(TorchDispatchMode):
    """Notes in-place operations on the tensors with the storages ``twins`` instead of running them."""

    def __init__(self, twins: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.writes: dict[int, _Writes] = {}
        self.gave_up = False
        self.has_drawn = False  # numbers that are no tensor's own: what depends on them is not the same again
        self._twins = twins

    def has(self, value: Any) -> bool:
        """Whether ``value`` is one of the tensors, or a view of one."""
        return isinstance(value, torch.Tensor) and not value.is_meta and _storage(value) in self._twins

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
        self.has_drawn |= torch.Tag.nondeterministic_seeded in func.tags
        result = func(*args, **kwargs)
        if self.has_drawn and not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            self.give_up()  # a number for Python, which may decide what is run next
        return result

    def _note(self, func: Any, view: torch.Tensor, arguments: tuple[Any, ...]) -> None:
        key = _storage(view)
        whole = self._twins[key]
        if func in _COPIES:
            write = self._copy(view, whole, *arguments[:1])
        elif func in (*_DRAWS, *_FILLS, *_CHANGES):
            func(torch.empty(1, dtype=view.dtype, device="cpu"), *arguments)  # what it refuses is refused here too
            write = _write(func, view, whole, arguments)
        else:
            self.give_up()
        self.writes.setdefault(key, []).append(write)

    def _copy(self, view: torch.Tensor, whole: torch.Tensor, value: torch.Tensor) -> Write | None:
        if value.is_meta:
            self.give_up()
        if self.has_drawn:
            return None
        if not value.ndim:
            return _write(_aten.fill_.Scalar, view, whole, (value.item(),))
        box = _box(view, whole)
        if box is None or view.numel() > _LARGEST_COPY:
            return None
        shape = [length for _, length in box]
        copied = torch.empty(view.shape, dtype=whole.dtype, device="cpu").copy_(value)
        return None if copied.isnan().any() else Write(_aten.copy_.default, (), box, copied.view(shape))


class _Guard(TorchFunctionMode):
    """Notices what reaches a tensor's memory without an operator."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        around = getattr(func, "__name__", "") in _AROUND or func == _SET_DATA
        if around and (self._recorder.has_drawn or any(map(self._recorder.has, args))):
            self._recorder.give_up()
        return func(*args, **(kwargs or {}))


def _program_of(writes: _Writes, whole: torch.Tensor) -> Program | None:
    """The last write that gives every element its value, and what came after it; None if it is not all understood."""
    everything = tuple((0, extent) for extent in whole.shape)
    shape = tuple(whole.shape)
    for position in range(len(writes) - 1, -1, -1):
        write = writes[position]
        if write is None:
            return None
        if write.box != everything or write.operation in _CHANGES:
            continue
        rest = tuple(later for later in writes[position + 1 :] if later is not None)
        if write.operation in _DRAWS:
            return Program(shape, whole.dtype, (write.operation, write.arguments), rest)
        return Program(shape, whole.dtype, None, (write, *rest))
    return None


def _write(func: Any, view: torch.Tensor, whole: torch.Tensor, arguments: tuple[Any, ...]) -> Write | None:
    box = _box(view, whole)
    given = [number for number in arguments if number is not None]
    if box is None or any(not isinstance(number, (int, float)) or not math.isfinite(number) for number in given):
        return None
    if func in _DRAWS and (view.shape != whole.shape or not whole.is_floating_point()):
        return None
    if func in _SCALINGS and 0 in arguments:
        return None  # what comes out may not be a number
    return Write(func, arguments, box)


def _box(view: torch.Tensor, whole: torch.Tensor) -> Box | None:
    """Which elements of ``whole`` a view has; None if they are no box, or not in the same order."""
    if view.dtype != whole.dtype:
        return None
    if view.shape == whole.shape and view.stride() == whole.stride():
        return tuple((0, extent) for extent in whole.shape)
    dims = [(extent, stride) for extent, stride in zip(view.shape, view.stride(), strict=True) if extent != 1]
    offset = int(view.storage_offset())
    box = []
    for extent, stride in zip(whole.shape, whole.stride(), strict=True):
        start, offset = divmod(offset, stride)
        length = dims.pop(0)[0] if extent > 1 and dims and dims[0][1] == stride else 1
        if start + length > extent:
            return None
        box.append((start, length))
    return tuple(box) if not dims else None


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
