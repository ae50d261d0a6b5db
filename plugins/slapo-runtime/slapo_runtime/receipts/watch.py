"""`Watch`: record what training steps of a live model do, by module and step of the schedule."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from slapo_core.internals import Internals, forwards, module_calls_through, parameters_of, plain_calls_within
from slapo_core.observers import PATCHING, compiles, is_recording, watched
from slapo_runtime.private import (
    FakeTensor,
    TorchDispatchMode,
    backwards_through,
    is_compiled,
    schema_of,
    tree_leaves,
)
from slapo_runtime.receipts.attribution import PositionTracker, StepPlaces
from slapo_runtime.receipts.collectives import CollectiveCall, CollectiveReader, MeshGroups, wait_operations
from slapo_runtime.receipts.memory import MemoryTracker

if TYPE_CHECKING:
    from slapo_core import Schedule


class Place(NamedTuple):
    """The code that runs.

    Args:
        module: path of the module.
        record: the step of the schedule, as in ``str(record)``; empty for the model's own code.
        phase: ``"forward"``, ``"backward"``, ``"recomputation"`` or ``"optimizer"``.
    """

    module: str
    record: str
    phase: str


class Happening(NamedTuple):
    """An event that a step's code reported.

    Args:
        event: its kind; see :func:`slapo_core.observers.happened`.
        name: of the function, or the reason of a fallback.
        facts: about it, as sorted pairs.
        place: where.
    """

    event: str
    name: str
    facts: tuple[tuple[str, Any], ...]
    place: Place


class Allocation(NamedTuple):
    """The result of an operation, in memory of its own.

    Args:
        bytes: its size.
        shape: of the tensor.
        dtype: e.g. ``"float32"``.
        operator: that gave it.
        place: where.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    operator: str
    place: Place


@dataclass
class ModuleCalls:
    """Calls of one module in the watched steps.

    Args:
        forward: calls in forward passes.
        recomputed: those within backward passes.
        with_gradient: calls in forward passes with an input that requires a gradient.
        differentiable: likewise, with an output that requires a gradient.
        rows: the most rows, of all axes but the last, of an input.
        inputs: types of floating-point inputs of forward passes, e.g. ``"bfloat16"``.
        outputs: likewise of outputs.
    """

    forward: int = 0
    recomputed: int = 0
    with_gradient: int = 0
    differentiable: int = 0
    rows: int = 0
    inputs: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)


@dataclass
class Observed:
    """What was seen on one rank; it grows with the model, and not with the number of steps.

    Args:
        steps: the number of training steps.
        calls: path of a module -> its calls.
        collectives: and how often, with their places; of a recomputed forward ``phase`` is ``"recomputation"``.
        happenings: events of steps, and how often.
        operators: operator -> how often, for each place.
        products: types of matrix products, for each place.
        largest: the largest result for each place, of those with one number of elements along the last axis.
        parameters: types of the parameters of a module itself, by its path, after the steps.
        trained: paths of modules with trained parameters of their own.
    """

    steps: int = 0
    calls: dict[str, ModuleCalls] = field(default_factory=dict)
    collectives: Counter[CollectiveCall] = field(default_factory=Counter)
    happenings: Counter[Happening] = field(default_factory=Counter)
    operators: dict[Place, Counter[str]] = field(default_factory=dict)
    products: dict[Place, Counter[str]] = field(default_factory=dict)
    largest: dict[tuple[Place, int], Allocation] = field(default_factory=dict)
    parameters: dict[str, set[str]] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)


class Watch:
    """Observe the training steps of a block; afterwards the model is as it was.

    Backward passes run in the calling thread, so that their code is attributed, too. Other threads are not observed.

    Args:
        schedule: with all its steps in force, also one that was built.
        modules: that run, with their paths, also of copies of the model; None: the schedule's.
        places: of the schedule's steps, which a build drops; None: of the schedule now.
        with_memory: whether to measure memory, too.

    Attributes:
        record: what was seen.
        memory: the bytes of tensors in use; None unless it is measured, and before the block.
        position: the running code; None before the block.
    """

    def __init__(
        self,
        schedule: Schedule,
        modules: Iterable[tuple[str, nn.Module]] | None = None,
        places: StepPlaces | None = None,
        *,
        with_memory: bool = False,
    ) -> None:
        self._modules = list(schedule.model.named_modules() if modules is None else modules)
        self._places = StepPlaces.of(schedule.model, Internals(schedule).entries()) if places is None else places
        mesh = schedule.mesh
        self._groups = MeshGroups({} if mesh is None else mesh.sizes, _rank(schedule))
        self._compiled = [(path, module) for path, module in self._modules if _is_compiled(module)]
        self._with_memory = with_memory
        self.record = Observed()
        self.memory: MemoryTracker | None = None
        self.position: PositionTracker | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[Observed]:
        """Observe what runs in a block; the block counts its steps in ``record.steps``."""
        self.position = position = PositionTracker.over(self._modules)
        self.memory = MemoryTracker(position) if self._with_memory else None
        operations = Operations(self.record, position, self._groups, self.memory)
        with (
            PATCHING,
            plain_calls_within(module for _, module in self._compiled),
            torch.autograd.set_multithreading_enabled(False),
            self._places.attributed(self._modules, position, self._is_compiled),
            position.watching(),
            backwards_through(partial(_backward, position)),
            self._counting_calls(position),
            watched(lambda event, name, **facts: self._happened(position, event, name, facts)),
            contextlib.nullcontext() if self.memory is None else self.memory.watching(),
            operations,
        ):
            try:
                yield self.record
            finally:
                operations.finish()
                self._note_parameters()

    def _is_compiled(self, path: str) -> bool:
        """Return whether a module runs in the compiled code of one above it, or is compiled itself."""
        return any(each in ("", path) or path.startswith(f"{each}.") for each, _ in self._compiled)

    def _counting_calls(self, position: PositionTracker) -> contextlib.AbstractContextManager[None]:
        paths = {id(module): path for path, module in self._modules}
        calls = self.record.calls

        def count(run: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(module))
            if path is None and module in self._places.replaced:
                place = Place(self._places.replaced[module], "", position.phase)
                self.record.happenings[Happening("fallback", "the module that it replaced", (), place)] += 1
            if is_recording() and position.step != "recording":
                return position.run_as("recording", run, module, *args, **kwargs)
            if path is None or position.step == "recording":
                return run(module, *args, **kwargs)
            if position.step == "optimizer":
                position.begin("forward")
            seen = calls.get(path)
            if seen is None:
                seen = calls[path] = ModuleCalls()
            if position.phase == "recomputation":
                seen.recomputed += 1
                return run(module, *args, **kwargs)
            seen.forward += 1
            requires_grad = False
            for each in _tensors((args, kwargs) if kwargs else args):
                requires_grad = requires_grad or each.requires_grad
                if each.dim():
                    seen.rows = max(seen.rows, each.numel() // max(1, each.shape[-1]))
                if each.dtype.is_floating_point:
                    seen.inputs.add(dtype_name(each.dtype))
            seen.with_gradient += requires_grad and torch.is_grad_enabled()
            output = run(module, *args, **kwargs)
            outputs = list(_tensors(output))
            seen.differentiable += any(each.requires_grad for each in outputs)
            seen.outputs.update(dtype_name(each.dtype) for each in outputs if each.dtype.is_floating_point)
            return output

        return module_calls_through(count)

    def _happened(self, position: PositionTracker, event: str, name: str, facts: Mapping[str, Any]) -> None:
        if position.step == "recording":
            return
        place = Place(*position.place)
        self.record.happenings[Happening(event, name, tuple(sorted(facts.items())), place)] += 1

    def _note_parameters(self) -> None:
        for path, module in self._modules:
            own = [each for each in parameters_of(module).values() if each is not None]
            if own:
                self.record.parameters[path] = {dtype_name(each.dtype) for each in own}
            if any(each.requires_grad for each in own):
                self.record.trained.add(path)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or an output."""
    if isinstance(value, torch.Tensor):
        if _has_strides(value):
            yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        yield from filter(_has_strides, tree_leaves(value))


def _has_strides(value: Any) -> bool:
    """Return whether a value is a tensor of one shape; not a sparse or nested one."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested


def _backward(position: PositionTracker, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Run a backward pass; the optimizer follows until a module is called."""
    if position.step == "backward":  # of a checkpointed module, within the backward pass
        return run(*args, **kwargs)
    position.begin("backward")
    try:
        run(*args, **kwargs)
    finally:
        position.begin("optimizer")


def _is_compiled(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return is_compiled(module) or (isinstance(forward, forwards.ModuleForward) and any(map(compiles, forward.wrappers)))


def _rank(schedule: Schedule) -> int:
    mesh = schedule.mesh
    if mesh is None or mesh.is_abstract:
        return 0
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


_PRODUCTS = frozenset(
    f"aten.{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "_addmm_activation", "_grouped_mm"),
        *("_scaled_mm", "_scaled_grouped_mm", "_int_mm", "_weight_int8pack_mm", "_weight_int4pack_mm"),
    )
)
_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_ATTENTION = "aten._scaled_dot_product_"
_OF_ARGUMENT = frozenset({"aten._scaled_mm", "aten._scaled_grouped_mm", "aten._int_mm"})
"""Products whose result has another type than their factors."""


class _Operation:
    """An operator of torch at one place: how often it ran.

    Args:
        func: the operator.
        place: where it runs.
    """

    __slots__ = ("allocates", "count", "name", "of_argument", "place", "products")

    def __init__(self, func: Any, place: Place) -> None:
        self.place, self.count = place, 0
        self.name = str(getattr(func, "overloadpacket", func))
        schema = schema_of(func)
        results = [] if schema is None else schema.returns
        self.allocates = any(result.alias_info is None for result in results)
        is_product = self.name in _PRODUCTS or (self.name.startswith(_ATTENTION) and "backward" not in self.name)
        self.products: Counter[Any] | None = Counter() if is_product else None
        self.of_argument = self.name in _OF_ARGUMENT


class Operations(TorchDispatchMode):
    """Observe operations where they run; code that a graph recorder or a compiler traces is left out.

    Args:
        record: to write to.
        position: of the running code.
        groups: of the mesh.
        memory: observes operations that may allocate, too; None: nothing does.
    """

    supports_higher_order_operators = True  # compiled code with dropout under checkpointing has some

    def __init__(
        self, record: Observed, position: PositionTracker, groups: MeshGroups, memory: MemoryTracker | None = None
    ) -> None:
        super().__init__()
        self._record, self._position, self._memory = record, position, memory
        self._collectives, self._waits = CollectiveReader(groups), wait_operations()
        self._seen: dict[Any, _Operation] = {}
        self._largest: dict[tuple[Place, int], tuple[int, torch.Size, Any, str]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` compile as it does without this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._waits or self._position.step == "recording":
            return func(*args, **kwargs)
        for kind in types:
            if kind not in _PLAIN:
                if issubclass(kind, FakeTensor):
                    return func(*args, **kwargs)  # of a trace
                return NotImplemented  # the operations on inner tensors are dispatched again
        place = self._position.place
        key = (func, place)
        operation = self._seen.get(key)
        if operation is None:
            at = Place(*place)
            operation = self._seen[key] = _Operation(func, at)
        if self._collectives.communicates(func):
            in_passes = self._position.in_passes
            self._record.collectives.update(self._collectives.read(func, args, kwargs, place, in_passes=in_passes))
        result = func(*args, **kwargs)
        operation.count += 1
        if operation.allocates:
            self._note(operation, result, args)
            if self._memory is not None:
                self._memory.on_operation(func, args, kwargs, result)
        return result

    def _note(self, operation: _Operation, result: Any, args: Any) -> None:
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if not _has_strides(leaf) or leaf.is_meta or isinstance(leaf, FakeTensor):
                continue
            shape, dtype = leaf.shape, leaf.dtype
            size = leaf.nbytes
            key = (operation.place, shape[-1] if shape else 0)
            largest = self._largest.get(key)
            if largest is None or size > largest[0]:
                self._largest[key] = (size, shape, dtype, operation.name)
            if operation.products is not None:
                operation.products[args[0].dtype if operation.of_argument else dtype] += 1
                return  # further results are statistics

    def finish(self) -> None:
        """Write what was counted to the record."""
        record = self._record
        for one in self._seen.values():
            record.operators.setdefault(one.place, Counter())[one.name] += one.count
            for dtype, count in (one.products or {}).items():
                record.products.setdefault(one.place, Counter())[dtype_name(dtype)] += count
        for (place, features), (size, shape, dtype, name) in self._largest.items():
            record.largest[place, features] = Allocation(size, tuple(shape), dtype_name(dtype), name, place)
        self._seen.clear()


def dtype_name(dtype: torch.dtype) -> str:
    """Return e.g. ``"float32"``."""
    return str(dtype).removeprefix("torch.")
