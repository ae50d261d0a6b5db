"""Attribute operations to a phase, a module and a step of the schedule."""

from __future__ import annotations

import functools
from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from slapo_core.internals import Internals, forwards, hooks_of, journal, module_calls_through, parameters_of
from slapo_core.observers import PATCHING, Origin, attributed, is_inlined, is_recording, spans_stages
from slapo_runtime.private import backwards_through, current_autograd_node, next_sequence_number, sequence_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from slapo_core import Schedule
    from slapo_core.internals import journal
    from slapo_core.observers import Forward
    from slapo_core.primitive import Record

_NO_SEQUENCE = 2**64 - 1  # of AccumulateGrad nodes


class CodePosition(NamedTuple):
    """The module and the step whose code runs.

    Args:
        module: path of the module.
        record: the step of the schedule that added the code, as in ``str(record)``; empty for the model's own code.
    """

    module: str
    record: str = ""


_MODEL = CodePosition("")


class PositionTracker:
    """Track phase, module and step of the running operation; computed when queried.

    A forward pass numbers its autograd nodes in the order of their creation. The numbers at which each module begins
    and ends therefore identify, in the backward pass, the module of the running node.

    Args:
        paths: ``id`` of a module -> its path; a module without an entry counts as part of its caller.
        owners: ``id`` of a parameter -> the path of its module.

    Attributes:
        step: ``"forward"``, ``"backward"`` or ``"optimizer"``; set by the training step.
        hooks: (path of a module, hook) -> the step that registered the hook, as in ``str(record)``.
        wrappers: ``id`` of a wrapper of a forward -> the step that added the wrapper.
    """

    def __init__(self, paths: Mapping[int, str], owners: Mapping[int, str]) -> None:
        self.step = "forward"
        self._modules = {module: CodePosition(path) for module, path in paths.items()}
        self._owners = {parameter: CodePosition(path) for parameter, path in owners.items()}
        self.hooks: dict[tuple[str, Any], str] = {}
        self.wrappers: dict[int, str] = {}
        self._stack: list[CodePosition] = []
        self._numbers: list[int] = []
        self._since: list[CodePosition] = []

    @classmethod
    def of(cls, model: nn.Module) -> PositionTracker:
        """Make the tracker of a model whose modules and parameters stay the same objects."""
        modules = dict(model.named_modules())
        paths = {id(module): path for path, module in modules.items()}
        owners: dict[int, str] = {}
        for path, module in modules.items():
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
        """Call ``function(*args, **kwargs)`` as code of position ``at``."""
        self._stack.append(at)
        self._note()
        try:
            return function(*args, **kwargs)
        finally:
            self._stack.pop()
            self._note()

    def _run_from(self, origin: Origin, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a hook inlined in a graph, or code that a wrapper deferred."""
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

    def forget(self) -> None:
        """Forget earlier forward passes, whose backward passes have run."""
        self._numbers.clear()
        self._since.clear()

    @property
    def phase(self) -> str:
        """``"forward"``, ``"backward"``, ``"recomputation"`` (of checkpointed modules) or ``"optimizer"``."""
        if self.step == "backward" and torch.is_grad_enabled() and current_autograd_node() is not None:
            return "recomputation"
        return self.step

    @property
    def in_passes(self) -> bool:
        """Whether a module or autograd's backward runs; else a runtime between them."""
        return bool(self._stack) or current_autograd_node() is not None

    @property
    def module(self) -> str:
        """Path of the module whose forward or backward runs; ``""`` for the model."""
        return "optimizer" if self.step == "optimizer" else self._now().module

    @property
    def record(self) -> str:
        """The step whose code runs, forward or backward, as in ``str(record)``; empty for none."""
        return "" if self.step == "optimizer" else self._now().record

    def _now(self) -> CodePosition:
        if self._stack:
            return self._stack[-1]
        node = current_autograd_node() if self.step == "backward" else None
        if node is None:
            return _MODEL
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
class StepCode:
    """The steps that added hooks, wrappers and modules of a model, as in ``str(record)``; it keeps no tensor alive.

    Args:
        hooks: ``id`` of a hook or wrapper -> path of the step -> the step; the first one, where `replace` kept the hook.
        wrappers: ``id`` of a wrapper -> the step.
        inlined: (path, hook that graphs inline) -> the step.
        modules: ``id`` of a module that the model did not have before -> the latest step that added it.
    """

    hooks: Mapping[int, Mapping[str, str]]
    wrappers: Mapping[int, str]
    inlined: Mapping[tuple[str, Any], str]
    modules: Mapping[int, str]

    @classmethod
    def of(cls, schedule: Schedule) -> StepCode:
        """Read the changes of a schedule, which a build drops; all its steps are in force."""
        entries, model = list(Internals(schedule).entries()), schedule.model
        present = {id(function) for module in model.modules() for function in _functions(module)}
        hooks: dict[int, dict[str, str]] = {}
        wrappers: dict[int, str] = {}
        for record, entry in entries:
            if isinstance(entry, journal.AddHook) and id(entry.function) in present:
                hooks.setdefault(id(entry.function), {}).setdefault(record.path, str(record))
            elif isinstance(entry, journal.WrapForward) and id(entry.wrapper) in present:
                hooks.setdefault(id(entry.wrapper), {}).setdefault(record.path, str(record))
                wrappers.setdefault(id(entry.wrapper), str(record))
        inlined = {
            (record.path, entry.function): str(record)
            for record, entry in reversed(entries)
            if isinstance(entry, journal.AddHook) and getattr(entry.function, "slapo_is_inlined", False)
        }
        return cls(hooks, wrappers, inlined, _added(model, entries))


def _functions(module: nn.Module) -> Iterator[Any]:
    """Yield a module's hooks, and the wrappers of its forward."""
    for functions in hooks_of(module).values():
        yield from functions.values()
    forward = module.__dict__.get("forward")
    if isinstance(forward, forwards.ModuleForward):
        yield from forward.wrappers


def _added(model: nn.Module, entries: list[tuple[Record, journal.JournalEntry]]) -> dict[int, str]:
    old = {
        id(module) for _, entry in entries if isinstance(entry, journal.ReplaceModule) for module in entry.old.modules()
    }
    came: dict[int, str] = {}
    for record, entry in entries:
        if isinstance(entry, (journal.ReplaceModule, journal.AddModule)):
            came.update(
                (id(module), str(record)) for module in entry.new.modules() if id(module) not in old | came.keys()
            )
    return {id(module): came[id(module)] for module in model.modules() if id(module) in came}


def attribute_steps(model: nn.Module, code: StepCode, position: PositionTracker) -> None:
    """Attribute hooks, wrappers and modules of a model to the steps that added them.

    Each hook and wrapper is exchanged for one that reports its step. Modules within one that a step added are
    attributed to that step, unless the model had them before.

    Args:
        model: of the schedule, with all its steps in force; none is undone afterwards.
        code: the steps.
        position: the tracker of its model.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    for module in model.modules():
        if id(module) in code.modules:
            position.attribute_module(module, code.modules[id(module)])
    position.wrappers.update(code.wrappers)
    position.hooks = dict(code.inlined)

    def cause(function: Any, module: nn.Module) -> str | None:
        known = code.hooks.get(id(function), {})
        return known.get(paths[id(module)], next(iter(known.values()), None))

    for module in model.modules():
        own = position.module_position(module)
        for functions in hooks_of(module).values():
            for number, function in functions.items():
                name = cause(function, module)
                if name is not None:
                    functions[number] = _Hook(position, CodePosition(own.module, name), function)
        forward = module.__dict__.get("forward")
        if isinstance(forward, forwards.ModuleForward) and not all(map(spans_stages, forward.wrappers)):
            names = [cause(wrapper, module) or "" for wrapper in forward.wrappers]
            innermost, *others = forward.wrappers
            first = _Wrapper(
                position, CodePosition(own.module, names[0]), innermost, beneath=own, is_own=forward.base is None
            )
            rest = (
                _Wrapper(position, CodePosition(own.module, name), each)
                for name, each in zip(names[1:], others, strict=True)
            )
            forward.exchange_wrappers([first, *rest])


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_recording():  # nodes of a graph are not calls of the model
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
