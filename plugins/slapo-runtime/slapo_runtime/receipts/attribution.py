"""Attribute operations to a phase, a module and a step of the schedule."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from slapo_core.internals import forwards, hooks_of, journal, module_calls_through, parameters_of
from slapo_core.observers import ONE_KERNEL, PATCHING, Origin, attributed, is_inlined, is_recording, spans_stages
from slapo_runtime.private import backwards_through, current_autograd_node, next_sequence_number, sequence_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from slapo_core.internals import journal
    from slapo_core.observers import Forward
    from slapo_core.primitive import Record

_NO_SEQUENCE = 2**64 - 1  # of AccumulateGrad nodes


class CodePosition(NamedTuple):
    """The module and the step whose code runs.

    Args:
        module: path of the module.
        record: the step of the schedule that added the code, as in ``str(record)``; empty for the model's own code.
        kernel: number of the kernel that computes it together with other code; 0 for none.
    """

    module: str
    record: str = ""
    kernel: int = 0


_MODEL = CodePosition("")
_OPTIMIZER = ("optimizer", "", "optimizer")


class PositionTracker:
    """Track phase, module and step of the running operation; computed when queried.

    A forward pass numbers its autograd nodes in the order of their creation. The numbers at which each module begins
    and ends therefore identify, in the backward pass, the module of the running node.

    Args:
        paths: ``id`` of a module -> its path; a module without an entry counts as part of its caller.
        owners: ``id`` of a parameter -> the path of its module.

    Attributes:
        step: ``"forward"``, ``"backward"`` or ``"optimizer"``; set by the training step. ``"recording"``: a graph is
            made of modules, whose calls are none of the step.
        hooks: (path of a module, hook) -> the step that registered the hook, as in ``str(record)``.
        wrappers: ``id`` of a wrapper of a forward -> the step that added the wrapper.
    """

    def __init__(self, paths: Mapping[int, str], owners: Mapping[int, str]) -> None:
        self.step = "forward"
        self._modules = {module: CodePosition(path) for module, path in paths.items()}
        self._owners = {parameter: CodePosition(path) for parameter, path in owners.items()}
        self.hooks: dict[tuple[str, Any], str] = {}
        self.wrappers: dict[int, str] = {}
        self._kernels = itertools.count(1)
        self._stack: list[CodePosition] = []
        self._is_again = False  # whether a recomputed forward runs, also without gradients
        self._numbers: list[int] = []
        self._since: list[CodePosition] = []

    @classmethod
    def of(cls, model: nn.Module) -> PositionTracker:
        """Make the tracker of a model whose modules and parameters stay the same objects."""
        return cls.over(model.named_modules())

    @classmethod
    def over(cls, modules: Iterable[tuple[str, nn.Module]]) -> PositionTracker:
        """Make the tracker of modules with their paths; copies of one may have one path."""
        modules = list(modules)
        paths = {id(module): path for path, module in modules}
        owners: dict[int, str] = {}
        for path, module in modules:
            for parameter in parameters_of(module).values():
                if parameter is not None:
                    owners.setdefault(id(parameter), path)
        return cls(paths, owners)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Track calls of modules; without hooks, which may change the effect of wrappers."""

        def noticed(run: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            at = self._modules.get(id(module))
            return run(module, *args, **kwargs) if at is None else self.run(at, run, module, *args, **kwargs)

        with PATCHING, module_calls_through(noticed), attributed(self._run_from):
            yield

    def run(self, at: CodePosition, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call ``function(*args, **kwargs)`` as code of position ``at``, in the kernel of its caller."""
        if self._stack and self._stack[-1].kernel:
            at = at._replace(kernel=self._stack[-1].kernel)
        self._stack.append(at)
        is_again, self._is_again = self._is_again, self._is_again or _recomputes()
        self._note()
        try:
            return function(*args, **kwargs)
        finally:
            self._is_again = is_again
            self._stack.pop()
            self._note()

    def _run_from(self, origin: Origin, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a hook inlined in a graph, code that a wrapper deferred, or code that one kernel computes."""
        if origin is ONE_KERNEL:
            return self.run(self._now()._replace(kernel=next(self._kernels)), function, *args, **kwargs)
        if origin.is_below_root:
            return self.run(
                CodePosition(origin.module, self.wrappers.get(id(origin.hook), "")), function, *args, **kwargs
            )
        path = ".".join(filter(None, (self._now().module, origin.module)))
        return self.run(CodePosition(path, self.hooks.get((path, origin.hook), "")), function, *args, **kwargs)

    def module_position(self, module: nn.Module) -> CodePosition:
        """Return the position of a module's own forward, without the steps' wrappers."""
        return self._modules.get(id(module), _MODEL)

    def attribute_module(self, module: nn.Module, record: str) -> None:
        """Attribute the module's own forward to a step."""
        self._modules[id(module)] = CodePosition(self.module_position(module).module, record)

    def begin(self, step: str) -> None:
        """Begin ``"forward"``, ``"backward"`` or ``"optimizer"``."""
        self.step = step

    def run_as(self, step: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call ``function(*args, **kwargs)`` as a part of ``step``."""
        before, self.step = self.step, step
        try:
            return function(*args, **kwargs)
        finally:
            self.step = before

    def forget(self) -> None:
        """Forget earlier forward passes, whose backward passes have run."""
        self._numbers.clear()
        self._since.clear()

    @property
    def phase(self) -> str:
        """``"forward"``, ``"backward"``, ``"recomputation"`` (of checkpointed modules) or ``"optimizer"``."""
        if current_autograd_node() is not None:
            return "recomputation" if self._is_again or torch.is_grad_enabled() else "backward"
        return self.step

    @property
    def in_passes(self) -> bool:
        """Whether a module or a backward pass runs; else a runtime between them."""
        return bool(self._stack) or self.step == "backward" or current_autograd_node() is not None

    @property
    def module(self) -> str:
        """Path of the module whose forward or backward runs; ``""`` for the model."""
        return "optimizer" if self.step == "optimizer" else self._now().module

    @property
    def record(self) -> str:
        """The step whose code runs, forward or backward, as in ``str(record)``; empty for none."""
        return "" if self.step == "optimizer" else self._now().record

    @property
    def place(self) -> tuple[str, str, str]:
        """Return :attr:`module`, :attr:`record` and :attr:`phase` together."""
        node, step = current_autograd_node(), self.step
        if node is not None:
            step = "recomputation" if self._is_again or torch.is_grad_enabled() else "backward"
        elif step == "optimizer":
            return _OPTIMIZER
        at = self._stack[-1] if self._stack else _MODEL if node is None else self._of(node)
        return at.module, at.record, step

    @property
    def kernel(self) -> int:
        """Number of the kernel that computes the running code together with other code; 0 for none."""
        return 0 if self.step == "optimizer" else self._now().kernel

    def _now(self) -> CodePosition:
        if self._stack:
            return self._stack[-1]
        node = current_autograd_node()
        return _MODEL if node is None else self._of(node)

    def _of(self, node: Any) -> CodePosition:
        number = sequence_number(node)
        if number == _NO_SEQUENCE:
            return self._owners.get(id(getattr(node, "variable", None)), _MODEL)
        before = bisect_right(self._numbers, number)
        return self._since[before - 1] if before else _MODEL

    def _note(self) -> None:
        """Attribute further autograd nodes to the innermost running code; recomputation continues the numbers."""
        number, at = next_sequence_number(), self._stack[-1] if self._stack else _MODEL
        if self._numbers and self._numbers[-1] == number:
            self._since[-1] = at
            return
        self._numbers.append(number)
        self._since.append(at)


def _recomputes() -> bool:
    return current_autograd_node() is not None and torch.is_grad_enabled()


@contextmanager
def phases_of(position: PositionTracker, model: nn.Module) -> Iterator[None]:
    """Set the phase of an engine's step: forward from the model's call on, backward, then the optimizer."""

    def backward(run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if position.step == "backward":  # of a checkpointed module, within the backward pass
            return run(*args, **kwargs)
        position.begin("backward")
        try:
            run(*args, **kwargs)
        finally:
            position.begin("optimizer")

    def called(run: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module is model:
            position.begin("forward")
        return run(module, *args, **kwargs)

    with module_calls_through(called), backwards_through(backward):
        yield


@dataclass(frozen=True)
class StepPlaces:
    """The steps of a schedule that added hooks, wrappers and modules, by place; without the objects themselves.

    They hold for the schedule's model, also after a build, and for its copies.

    Args:
        hooks: path of a module, kind and number of a hook -> the step, as in ``str(record)``.
        wrappers: path of a module -> the step of each wrapper of its forward, innermost first; ``""`` for none.
        modules: path of a module that a step added -> the step.
        inlined: path of a module and hook of a step that a graph may hold -> the step.
        replaced: a module that a step took out of the model, while it lives -> its former path.
    """

    hooks: Mapping[tuple[str, str, int], str]
    wrappers: Mapping[str, tuple[str, ...]]
    modules: Mapping[str, str]
    inlined: Mapping[tuple[str, Any], str]
    replaced: WeakIdKeyDictionary

    @classmethod
    def of(cls, model: nn.Module, entries: Iterable[tuple[Record, journal.JournalEntry]]) -> StepPlaces:
        """Find the places.

        Args:
            model: of the schedule, with all its steps in force.
            entries: the changes of the schedule; they are dropped by a build.
        """
        entries = list(entries)
        known: dict[int, dict[str, str]] = {}  # function -> path -> the step; the first, where `replace` kept a hook
        inlined: dict[tuple[str, Any], str] = {}
        for record, entry in entries:
            if isinstance(entry, journal.AddHook):
                known.setdefault(id(entry.function), {}).setdefault(record.path, str(record))
                if is_inlined(entry.function):
                    inlined.setdefault((record.path, entry.function), str(record))
            elif isinstance(entry, journal.WrapForward):
                known.setdefault(id(entry.wrapper), {}).setdefault(record.path, str(record))
                if is_inlined(entry.wrapper):
                    inlined.setdefault((record.path, entry.wrapper), str(record))

        def step(function: Any, path: str) -> str:
            paths = known.get(id(function), {})
            return paths.get(path, next(iter(paths.values()), ""))

        hooks, wrappers = {}, {}
        for path, module in model.named_modules():
            for kind, functions in hooks_of(module).items():
                for number, function in functions.items():
                    if name := step(function, path):
                        hooks[path, kind, number] = name
            forward = module.__dict__.get("forward")
            if isinstance(forward, forwards.ModuleForward):
                wrappers[path] = tuple(step(wrapper, path) for wrapper in forward.wrappers)
        replaced, present = WeakIdKeyDictionary(), set(map(id, model.modules()))
        for _, entry in entries:
            if isinstance(entry, journal.ReplaceModule) and id(entry.old) not in present:
                replaced[entry.old] = entry.path
        return cls(hooks, wrappers, _added_modules(model, entries), inlined, replaced)

    def attribute(self, model: nn.Module, position: PositionTracker) -> None:
        """Exchange the hooks and wrappers of a model for ones that report their step to the tracker of the model.

        Modules within one that a step added are attributed to that step, unless the model had them before. Wrappers
        make their forwards again.
        """
        modules = list(model.named_modules())
        self._attribute_modules(modules, position)
        for functions, number, hook in self._hooks(modules, position):
            functions[number] = hook
        for module, forward, names in self._wrapped(modules):
            self._exchange(forward, names, position.module_position(module), position)

    @contextmanager
    def attributed(
        self, modules: Sequence[tuple[str, nn.Module]], position: PositionTracker, except_below: Callable[[str], bool]
    ) -> Iterator[None]:
        """Let the hooks and wrapped forwards of a model report their step while the block runs; nothing is made again.

        Of several wrappers of one forward the outermost stands for all.

        Args:
            modules: of the schedule's model, or of copies, with their paths.
            position: their tracker.
            except_below: whether the module at a path runs in compiled code, and stays as it is.
        """
        self._attribute_modules(modules, position)
        put, paths = [], {id(module): path for path, module in modules}
        with ExitStack() as stack:
            for module, forward, names in self._wrapped(modules):
                position.wrappers.update(
                    (id(wrapper), name) for wrapper, name in zip(forward.wrappers, names, strict=True) if name
                )
                if names[-1] and not except_below(paths[id(module)]):
                    at = CodePosition(position.module_position(module).module, names[-1])
                    stack.enter_context(forward.called_through(partial(_reported, position, at)))
            try:
                for functions, number, hook in self._hooks(modules, position, except_below):
                    put.append((functions, number, functions[number], hook))
                    functions[number] = hook
                yield
            finally:
                for functions, number, before, hook in put:
                    if functions.get(number) is hook:  # still registered
                        functions[number] = before

    def _attribute_modules(self, modules: Iterable[tuple[str, nn.Module]], position: PositionTracker) -> None:
        for path, module in modules:
            if path in self.modules:
                position.attribute_module(module, self.modules[path])
        position.hooks = dict(self.inlined)

    def _wrapped(
        self, modules: Iterable[tuple[str, nn.Module]]
    ) -> Iterator[tuple[nn.Module, forwards.ModuleForward, tuple[str, ...]]]:
        """Yield each module with wrappers of steps, its forward, and the step of each wrapper."""
        for path, module in modules:
            forward, names = module.__dict__.get("forward"), self.wrappers.get(path)
            if names and isinstance(forward, forwards.ModuleForward) and len(forward.wrappers) == len(names):
                yield module, forward, names

    def _hooks(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        position: PositionTracker,
        except_below: Callable[[str], bool] = lambda _: False,
    ) -> Iterator[tuple[dict[int, Any], int, _Hook]]:
        """Yield each table of hooks, the number of a step's hook in it, and the one that reports."""
        known = {path for path, _, _ in self.hooks}
        for path, module in modules:
            if path not in known or except_below(path):
                continue
            own = position.module_position(module).module
            for kind, functions in hooks_of(module).items():
                for number, function in list(functions.items()):
                    if name := self.hooks.get((path, kind, number)):
                        yield functions, number, _Hook(position, CodePosition(own, name), function)

    @staticmethod
    def _exchange(
        forward: forwards.ModuleForward, names: Sequence[str], own: CodePosition, position: PositionTracker
    ) -> None:
        position.wrappers.update(
            (id(wrapper), name) for wrapper, name in zip(forward.wrappers, names, strict=True) if name
        )
        if all(map(spans_stages, forward.wrappers)):
            return
        innermost, *others = forward.wrappers
        at = CodePosition(own.module, names[0])
        first = _Wrapper(position, at, innermost, beneath=own, is_own=forward.base is None)
        rest = (
            _Wrapper(position, CodePosition(own.module, name), each)
            for name, each in zip(names[1:], others, strict=True)
        )
        forward.exchange_wrappers([first, *rest])


def _added_modules(model: nn.Module, entries: Sequence[tuple[Record, journal.JournalEntry]]) -> dict[str, str]:
    """Return path -> the latest step that added the module."""
    old = {
        id(module) for _, entry in entries if isinstance(entry, journal.ReplaceModule) for module in entry.old.modules()
    }
    came: dict[int, str] = {}
    for record, entry in entries:
        if isinstance(entry, (journal.ReplaceModule, journal.AddModule)):
            came.update(
                (id(module), str(record)) for module in entry.new.modules() if id(module) not in old | came.keys()
            )
    return {path: came[id(module)] for path, module in model.named_modules() if id(module) in came}


def _reported(position: PositionTracker, at: CodePosition, forward: Forward) -> Forward:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or is_recording():
            return forward(*args, **kwargs)
        return position.run(at, forward, *args, **kwargs)

    return run


def _itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@dataclass(frozen=True, eq=False)
class _Hook:
    """A hook that reports its step; equal to the original hook, for recorded graphs."""

    position: PositionTracker
    at: CodePosition
    function: Callable[..., Any]

    @property
    def slapo_is_inlined(self) -> bool:
        return is_inlined(self.function)

    def __eq__(self, other: object) -> bool:
        return bool(self.function == (other.function if isinstance(other, _Hook) else other))

    def __hash__(self) -> int:
        return hash(self.function)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.function,)  # a copy of the model has the hook itself

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or is_recording():  # nodes of a graph are not calls of the model
            return self.function(*args, **kwargs)
        return self.position.run(self.at, self.function, *args, **kwargs)


@dataclass(frozen=True)
class _Wrapper:
    """A wrapper that reports its step while it runs.

    Args:
        position: the tracker to report to.
        at: position of the wrapper.
        function: the wrapper.
        beneath: position of the wrapped forward; None if the forward reports its step itself.
        is_own: whether the wrapped forward is the class's own, marked by ``slapo_own``.
    """

    position: PositionTracker
    at: CodePosition
    function: Callable[[Forward], Forward]
    beneath: CodePosition | None = None
    is_own: bool = False

    def __call__(self, forward: Forward) -> Forward:
        if self.beneath is None:
            return self._reporting(self.at, self.function(forward))
        reporting = self._reporting(self.beneath, forward)
        if self.is_own:
            reporting.slapo_own = reporting  # type: ignore[attr-defined]
        return self._reporting(self.at, self.function(reporting))

    def _reporting(self, at: CodePosition, forward: Forward) -> Forward:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self.position.run(at, forward, *args, **kwargs)

        for name, value in list(vars(run).items()):
            if (
                value is forward and name != "__wrapped__"
            ):  # a mark of this very function, which no function around it may have
                setattr(run, name, run)
        if is_inlined(forward):
            run.slapo_is_inlined = run  # type: ignore[attr-defined]
        return run
