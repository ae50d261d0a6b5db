"""Attribute operations to a phase, a module and a step of the schedule."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from slapo_core.internals import forwards, hooks_of, journal, module_calls_through, parameters_of
from slapo_core.observers import ONE_KERNEL, PATCHING, Origin, attributed, is_inlined, is_recording, spans_stages
from slapo_estimate.private import current_autograd_node, next_sequence_number, sequence_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

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
        self._kernels = itertools.count(1)
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
        """Call ``function(*args, **kwargs)`` as code of position ``at``, in the kernel of its caller."""
        if self._stack and self._stack[-1].kernel:
            at = at._replace(kernel=self._stack[-1].kernel)
        self._stack.append(at)
        self._note()
        try:
            return function(*args, **kwargs)
        finally:
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
    def module(self) -> str:
        """Path of the module whose forward or backward runs; ``""`` for the model."""
        return "optimizer" if self.step == "optimizer" else self._now().module

    @property
    def record(self) -> str:
        """The step whose code runs, forward or backward, as in ``str(record)``; empty for none."""
        return "" if self.step == "optimizer" else self._now().record

    @property
    def kernel(self) -> int:
        """Number of the kernel that computes the running code together with other code; 0 for none."""
        return 0 if self.step == "optimizer" else self._now().kernel

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


def attribute_steps(
    model: nn.Module, entries: list[tuple[Record, journal.JournalEntry]], position: PositionTracker
) -> None:
    """Attribute hooks, wrappers and modules of a simulated model to the steps that added them.

    Each hook and wrapper is exchanged for one that reports its step. Modules within one that a step added are
    attributed to that step, unless the model had them before.

    Args:
        model: of the schedule, with all its steps in force; none is undone afterwards.
        entries: the changes of the schedule.
        position: the tracker of its model.
    """
    _modules(model, entries, position)
    paths = {id(module): path for path, module in model.named_modules()}
    hooks: dict[int, dict[str, str]] = {}  # function -> path -> the step; the first one, where `replace` kept the hook
    for record, entry in entries:
        if isinstance(entry, journal.AddHook):
            hooks.setdefault(id(entry.function), {}).setdefault(record.path, str(record))
        elif isinstance(entry, journal.WrapForward):
            hooks.setdefault(id(entry.wrapper), {}).setdefault(record.path, str(record))
            position.wrappers.setdefault(id(entry.wrapper), str(record))

    position.hooks = {
        (record.path, entry.function): str(record)
        for record, entry in reversed(entries)
        if isinstance(entry, journal.AddHook) and getattr(entry.function, "slapo_is_inlined", False)
    }

    def cause(function: Any, module: nn.Module) -> str | None:
        known = hooks.get(id(function), {})
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


def _modules(model: nn.Module, entries: list[tuple[Record, journal.JournalEntry]], position: PositionTracker) -> None:
    """Attribute added modules to the latest step that added them."""
    old = {
        id(module) for _, entry in entries if isinstance(entry, journal.ReplaceModule) for module in entry.old.modules()
    }
    came: dict[int, str] = {}
    for record, entry in entries:
        if isinstance(entry, (journal.ReplaceModule, journal.AddModule)):
            came.update(
                (id(module), str(record)) for module in entry.new.modules() if id(module) not in old | came.keys()
            )
    for module in model.modules():
        if id(module) in came:
            position.attribute_module(module, came[id(module)])


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
