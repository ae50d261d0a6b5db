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

from slapo_core.internals import Internals, forwards, module_calls_through, plain_calls_within
from slapo_core.observers import PATCHING, compiles, is_recording, watched
from slapo_runtime.private import TorchDispatchMode, backwards_through, is_compiled, tree_leaves
from slapo_runtime.receipts.attribution import PositionTracker, StepPlaces
from slapo_runtime.receipts.collectives import CollectiveCall, MeshGroups, collective_operations, wait_operations

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
    """The result of an operation.

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
        forward: those of forward passes.
        recomputed: those within backward passes.
        with_gradient: of those of forward passes, the ones with an input that requires a gradient.
        rows: the most rows, of all axes but the last, of an input.
    """

    forward: int = 0
    recomputed: int = 0
    with_gradient: int = 0
    rows: int = 0


@dataclass
class Observed:
    """What was seen.

    Args:
        steps: the number of training steps.
        calls: path of a module -> its calls.
        collectives: with their places; of a recomputed forward ``phase`` is ``"recomputation"``.
        happenings: events of steps, and how often.
        operators: operator -> how often, for each place.
        products: types of matrix products, for each place.
        largest: the largest result for each place.
    """

    steps: int = 0
    calls: dict[str, ModuleCalls] = field(default_factory=dict)
    collectives: list[CollectiveCall] = field(default_factory=list)
    happenings: Counter[Happening] = field(default_factory=Counter)
    operators: dict[Place, Counter[str]] = field(default_factory=dict)
    products: dict[Place, Counter[str]] = field(default_factory=dict)
    largest: dict[Place, Allocation] = field(default_factory=dict)


class Watch:
    """Observed the training steps of a block; afterwards the model is as it was.

    Backward passes run in the calling thread, so that their code is attributed, too.

    Args:
        schedule: with all its steps in force, also one that was built.
        modules: that run, with their paths, also of copies of the model; None: the schedule's.
        places: of the schedule's steps, which a build drops; None: of the schedule now.
    """

    def __init__(
        self,
        schedule: Schedule,
        modules: Iterable[tuple[str, nn.Module]] | None = None,
        places: StepPlaces | None = None,
    ) -> None:
        self._modules = list(schedule.model.named_modules() if modules is None else modules)
        self._places = StepPlaces.of(schedule.model, Internals(schedule).entries()) if places is None else places
        mesh = schedule.mesh
        self._groups = MeshGroups({} if mesh is None else mesh.sizes, _rank(schedule))
        self._compiled = [(path, module) for path, module in self._modules if _is_compiled(module)]
        self.record = Observed()

    @contextlib.contextmanager
    def watching(self) -> Iterator[Observed]:
        """Observed what runs in a block; the block counts its steps in ``record.steps``."""
        position = PositionTracker.over(self._modules)
        with (
            PATCHING,
            plain_calls_within(module for _, module in self._compiled),
            torch.autograd.set_multithreading_enabled(False),
            self._places.attributed(self._modules, position, self._is_compiled),
            position.watching(),
            backwards_through(partial(_backward, position)),
            self._counting_calls(position),
            watched(lambda event, name, **facts: self._happened(position, event, name, facts)),
            _Operations(self.record, position, self._groups),
        ):
            yield self.record

    def _is_compiled(self, path: str) -> bool:
        """Return whether a module runs in the compiled code of one above it, or is compiled itself."""
        return any(each in ("", path) or path.startswith(f"{each}.") for each, _ in self._compiled)

    def _counting_calls(self, position: PositionTracker) -> contextlib.AbstractContextManager[None]:
        paths = {id(module): path for path, module in self._modules}
        calls = self.record.calls

        def count(run: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(module))
            if is_recording():
                return run(module, *args, **kwargs)
            if path is not None:
                if position.step == "optimizer":
                    position.begin("forward")
                seen = calls.setdefault(path, ModuleCalls())
                tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
                if position.phase == "recomputation":
                    seen.recomputed += 1
                else:
                    seen.forward += 1
                    seen.with_gradient += torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
                rows = (each.numel() // max(1, each.shape[-1]) for each in tensors if each.dim())
                seen.rows = max(seen.rows, *rows, 0, 0)
            elif module in self._places.replaced:
                place = Place(self._places.replaced[module], "", position.phase)
                self.record.happenings[Happening("fallback", "the module that it replaced", (), place)] += 1
            return run(module, *args, **kwargs)

        return module_calls_through(count)

    def _happened(self, position: PositionTracker, event: str, name: str, facts: Mapping[str, Any]) -> None:
        place = Place(position.module, position.record, position.phase)
        self.record.happenings[Happening(event, name, tuple(sorted(facts.items())), place)] += 1


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

    return dist.get_rank()


_PRODUCTS = frozenset(
    f"aten.{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "convolution", "_scaled_dot_product_attention")
)


class _Operations(TorchDispatchMode):
    """Observed operations where they run.

    Args:
        record: to write to.
        position: of the running code.
        groups: of the mesh.
    """

    supports_higher_order_operators = True  # compiled code with dropout under checkpointing has some

    def __init__(self, record: Observed, position: PositionTracker, groups: MeshGroups) -> None:
        super().__init__()
        self._record, self._position, self._groups = record, position, groups
        self._collectives, self._waits = collective_operations(), wait_operations()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let ``torch.compile`` compile as it does without this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._waits:
            return func(*args, **kwargs)
        at = self._position
        place = Place(at.module, at.record, at.phase)
        read = self._collectives.get(func)
        if read is not None:
            for kind, size, dtype, group in read(args, kwargs):
                mesh_dim, ranks = self._groups.find(group)
                self._record.collectives.append(
                    CollectiveCall(kind, mesh_dim, ranks, size, place.module, place.phase, place.record, dtype)
                )
        result = func(*args, **kwargs)
        self._note(str(getattr(func, "overloadpacket", func)), place, result)
        return result

    def _note(self, operator: str, place: Place, result: Any) -> None:
        record = self._record
        record.operators.setdefault(place, Counter())[operator] += 1
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if not isinstance(leaf, torch.Tensor) or leaf.is_sparse:
                continue
            size, dtype = leaf.numel() * leaf.element_size(), str(leaf.dtype).removeprefix("torch.")
            if operator in _PRODUCTS:
                record.products.setdefault(place, Counter())[dtype] += 1
            largest = record.largest.get(place)
            if largest is None or size > largest.bytes:
                record.largest[place] = Allocation(size, tuple(leaf.shape), dtype, operator, place)
