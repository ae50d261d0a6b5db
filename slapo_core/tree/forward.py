"""Steps around calls of modules: `CallTable` has all, `ModuleForward` those active, and `ReplacedForward`."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.weak import WeakIdKeyDictionary

from slapo_core.errors import SerializationError
from slapo_core.private import overrides_of_call

if TYPE_CHECKING:
    from torch import nn

    from slapo_core.observers import Forward, HookKind
    from slapo_core.tree.edit import Edit
    from slapo_core.tree.node import Node

__all__ = [
    "FORWARD",
    "AppliedWrapper",
    "CallTable",
    "ChangeBelow",
    "HookOrWrapper",
    "ModuleForward",
    "ReplacedForward",
    "overrides_of_call",
]

FORWARD = "forward"
"""The key of a module's state for what a step set in place of its forward."""

_NO_STATE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class HookOrWrapper:
    """A hook, or a wrapper around the forward, compared by identity."""

    kind: HookKind | Literal["wrapper"]
    function: Callable[..., Any]


class CallTable:
    """Hooks, forward wrappers and state that steps put on modules, by module identity.

    Written by journal entries only, and not kept on the modules: a step that is inactive on this mesh leaves no trace
    there. A module without another reference is forgotten.
    """

    def __init__(self) -> None:
        self._changes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._state: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def wrappers(self, module: nn.Module) -> tuple[Callable[[Forward], Forward], ...]:
        """Return the wrappers around the module's forward, innermost first."""
        return tuple(change.function for change in self._of(module) if change.kind == "wrapper")

    def hooks(self, module: nn.Module) -> tuple[tuple[HookKind, Callable[..., Any]], ...]:
        """Return the module's hooks, each kind in the order of the calls."""
        return tuple((change.kind, change.function) for change in self._of(module) if change.kind != "wrapper")

    def of_copies(self, copies: Mapping[nn.Module, nn.Module]) -> CallTable:
        """Make the same record for copies of modules.

        Args:
            copies: module -> its copy.
        """
        calls = CallTable()
        for module, copied in copies.items():
            if module in self._changes:
                calls._changes[copied] = list(self._of(module))
            if module in self._state:
                calls._state[copied] = self.state(module)
        return calls

    def add(self, module: nn.Module, change: HookOrWrapper, *, first: bool = False) -> None:
        changes = self._changes.setdefault(module, [])
        changes.insert(0 if first else len(changes), change)

    def remove(self, module: nn.Module, change: HookOrWrapper) -> None:
        """Remove a change, if present."""
        left = [one for one in self._of(module) if one is not change]
        if left:
            self._changes[module] = left
        else:
            self._changes.pop(module, None)

    def exchange_hooks(self, module: nn.Module, other: nn.Module) -> None:
        """Exchange the recorded hooks of two modules."""
        noted = self._of(module), self._of(other)
        for one, (own, others) in zip((module, other), (noted, noted[::-1]), strict=True):
            changes = [each for each in own if each.kind == "wrapper"]
            changes += [each for each in others if each.kind != "wrapper"]
            if changes:
                self._changes[one] = changes
            else:
                self._changes.pop(one, None)

    @property
    def have_state(self) -> bool:
        """Whether steps keep anything for any module."""
        return len(self._state) > 0

    def state(self, module: nn.Module) -> Mapping[str, Any]:
        """Return the steps' state of the module by key; under ``FORWARD`` a replaced forward."""
        found: Mapping[str, Any] = self._state.get(module, _NO_STATE)
        return found

    def set_state(self, module: nn.Module, key: str, value: Any) -> Any:
        """Set a value, None for none; return the former one."""
        state = dict(self.state(module))
        before = state.pop(key, None)
        if value is not None:
            state[key] = value
        if state:
            self._state[module] = MappingProxyType(state)
        else:
            self._state.pop(module, None)
        return before

    def _of(self, module: nn.Module) -> list[HookOrWrapper]:
        changes: list[HookOrWrapper] = self._changes.get(module, [])
        return changes


@dataclass(frozen=True)
class ChangeBelow:
    """A step's changes at one module.

    Args:
        path: of the module.
        node: the module's; None if it is no longer in the model.
        is_call: whether the change is noticed only where the module is called: a hook, a wrapper, a forward, or
            another module.
        is_wrapped: whether the forward was wrapped by a function that goes around any forward, active on this mesh.
        forward: what was set in place of the module's forward; None if nothing was.
        is_waiting: whether the step changed tensors too, so that another step may have to follow before the module
            can run, e.g. the collective of a split layer.
    """

    path: str
    node: Node | None
    is_call: bool
    is_wrapped: bool
    forward: Any
    is_waiting: bool


class ReplacedForward(ABC):
    """A forward for ``edit.set_forward`` that depends on the modules below it and follows their changes."""

    @abstractmethod
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run as the forward of ``module``."""

    def held_functions(self) -> tuple[Callable[..., Any], ...]:
        """The user's functions that this calls, which a copy of the model exchanges by :meth:`rebind`."""
        return ()

    def is_like(self, other: ReplacedForward, module: nn.Module) -> bool:
        """Return whether ``other``, the forward of an equal ``module``, runs alike every call that this one ran."""
        return False

    def rebind(self, twin: Callable[[Any], Any]) -> None:  # noqa: B027 - most hold none
        """Replace the user's functions by their twins, in a copy."""

    @abstractmethod
    def take_up(self, change: ChangeBelow, node: Node, edit: Edit) -> None:
        """Follow a change of a module below, at the end of its step.

        Args:
            change: what the step changed.
            node: the module whose forward this is.
            edit: of the step, for further changes as part of it.

        Raises:
            ApplyError: the change cannot be taken up, or would have no effect; the step is undone.
        """


class _Nothing:
    """Marks a module without a forward of its own; a class, which copies and pickles share."""


class AppliedWrapper:
    """One wrapper, and its result for the wrapped forward.

    Args:
        wrapper: makes a forward of a forward; both take the module first.
    """

    __slots__ = ("_beneath", "_made", "wrapper")

    def __init__(self, wrapper: Callable[[Forward], Forward]) -> None:
        self.wrapper = wrapper
        self._beneath: Forward | None = None
        self._made: Any = None

    def over(self, forward: Forward) -> Forward:
        """Return ``wrapper(forward)``, made again only for another forward."""
        if self._beneath is not forward:
            made = self.wrapper(forward)
            if not callable(made):
                raise TypeError(f"the function given to wrap_forward must return a function (got {made!r})")
            self._beneath, self._made = forward, made
        return self._made  # type: ignore[no-any-return]


class ModuleForward:
    """The ``module.__dict__["forward"]`` while steps change the forward: callable like a bound method.

    It is a base, and wrappings around it in order. The base is the forward set on the instance, or the class's
    forward; another one may come in its place (a graph), and the wrappings stay around it. With the first change this
    object comes into the module's ``__dict__``, and with the last change undone it goes: what the user had there is
    there again. A forward set meanwhile is kept: it is neither removed nor replaced.

    Not a bound method itself, because pickle stores that by its name alone: the module would come back with its class's
    own forward, silently.

    Args:
        module: the module that is called.
    """

    # Derived from the rest: not part of the state that comparisons of models see.
    __slots__ = ("__dict__", "__weakref__", "_bottom", "_function")

    _module: nn.Module
    _own: Any  # set on the instance, or _Nothing
    _base: Callable[..., Any] | None
    _wrappings: list[AppliedWrapper]
    _bottom: Forward
    _function: Forward

    def __init__(self, module: nn.Module) -> None:
        own = module.__dict__.get("forward", _Nothing)
        self._set_up(module, own, None if own is _Nothing else own, ())

    @classmethod
    def of(cls, module: nn.Module) -> ModuleForward:
        """Return the module's own, or a new one around its forward, not installed yet."""
        present = module.__dict__.get("forward")
        return present if isinstance(present, cls) and present._module is module else cls(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._module, *args, **kwargs)

    # -- changing ---------------------------------------------------------------------------------------------

    @property
    def base(self) -> Callable[..., Any] | None:
        """The base, called without the module; None for the class's forward."""
        return self._base

    @property
    def has_own(self) -> bool:
        """Whether the instance had a forward of its own before any step."""
        return self._own is not _Nothing

    @property
    def bottom(self) -> Forward:
        """The base, or the class's forward, as a function that takes the module first."""
        return self._bottom

    @property
    def wrappers(self) -> tuple[Callable[[Forward], Forward], ...]:
        """Innermost first."""
        return tuple(wrapping.wrapper for wrapping in self._wrappings)

    @property
    def parts(self) -> tuple[Forward, ...]:
        """List the functions called besides the class's forward, innermost first: base and wrappers' results."""
        made, function = [] if self._base is None else [self._bottom], self._bottom
        for wrapping in self._wrappings:
            function = wrapping.over(function)
            made.append(function)
        return tuple(made)

    @property
    def is_in_place(self) -> bool:
        """Whether the module's ``__dict__`` holds this object's forward, not one set meanwhile."""
        return self._module.__dict__.get("forward", _Nothing) is (self._own if self._is_idle else self)

    def add(self, wrapping: AppliedWrapper, *, inside: bool = False) -> None:
        """Put ``wrapping`` around everything, or within everything that is around the base."""
        self._change([wrapping, *self._wrappings] if inside else [*self._wrappings, wrapping], self._base)

    def remove(self, wrapping: AppliedWrapper) -> None:
        """Remove ``wrapping``, if present."""
        self._change([one for one in self._wrappings if one is not wrapping], self._base)

    def exchange_wrappers(self, wrappers: Sequence[Callable[[Forward], Forward]]) -> None:
        """Replace all wrappers, innermost first; undo does not know the new ones."""
        self._change([AppliedWrapper(wrapper) for wrapper in wrappers], self._base)

    @contextlib.contextmanager
    def called_through(self, around: Callable[[Forward], Forward]) -> Iterator[None]:
        """Let ``around(forward)`` run in place of the forward with all wrappings, while the block runs."""
        function = self._function
        around_it = self._function = around(function)
        try:
            yield
        finally:
            if self._function is around_it:  # no step came or went
                self._function = function

    def set_base(self, base: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """Put the wrappings around another base.

        Args:
            base: called without the module, as what a user sets on an instance; a bound method of the module is called
                without a detour, and a copy of the model deep-copies it. None is the class's forward.

        Returns:
            the base before, for undo.
        """
        before = self._base
        self._change(self._wrappings, base)
        return before

    @property
    def _is_idle(self) -> bool:
        return not self._wrappings and self._base is (None if self._own is _Nothing else self._own)

    def _change(self, wrappings: Sequence[AppliedWrapper], base: Callable[..., Any] | None) -> None:
        is_in_place = self.is_in_place
        bottom, function = self._composed(wrappings, base)  # first of all: a wrapper may raise
        self._wrappings[:] = wrappings
        self._base, self._bottom, self._function = base, bottom, function
        if not is_in_place:
            return
        instance = self._module.__dict__
        if not self._is_idle:
            instance["forward"] = self
        elif self._own is _Nothing:
            instance.pop("forward", None)
        else:
            instance["forward"] = self._own

    def _composed(
        self, wrappings: Sequence[AppliedWrapper], base: Callable[..., Any] | None
    ) -> tuple[Forward, Forward]:
        """Compose the base, as a function that takes the module first, and the wrappings around it."""
        if base is None:
            bottom: Forward = type(self._module).forward
        else:
            bottom = self._bottom if base is self._base else _taking_the_module(self._module, base)
        function = bottom
        for wrapping in wrappings:
            function = wrapping.over(function)
        return bottom, function

    # -- like a bound method ----------------------------------------------------------------------------------

    @property
    def __self__(self) -> nn.Module:
        """The module, as of a bound method."""
        return self._module

    @property
    def __func__(self) -> Forward:
        """The forward that takes the module first, as of a bound method."""
        return self._function

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self._function)
        parameters = list(signature.parameters.values())
        if parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
            parameters = parameters[1:]
        return signature.replace(parameters=parameters)

    @property
    def __code__(self) -> Any:
        """The code that steps wrapped, as of a bound method; ``torch.export`` reads its place."""
        return inspect.unwrap(self._function).__code__

    def __repr__(self) -> str:
        return f"<forward of {type(self._module).__name__}, wrapped>"

    # -- copies -----------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleForward:
        """Copy the base for the copy of the module; wrappers are shared, as functions are."""
        twin = ModuleForward.__new__(ModuleForward)
        memo[id(self)] = twin
        module = copy.deepcopy(self._module, memo)
        twin._set_up(module, copy.deepcopy(self._own, memo), copy.deepcopy(self._base, memo), self.wrappers)
        return twin

    def rebind(self, twin: Callable[[Any], Any]) -> None:
        """Replace base and wrappers by their twins, in a copy."""
        self._set_up(self._module, twin(self._own), twin(self._base), tuple(map(twin, self.wrappers)))

    def __getstate__(self) -> dict[str, Any]:
        for wrapper in self.wrappers:
            _refuse_nameless(wrapper, self._module)
        base = self._base
        # Pickle stores a bound method by its function's name alone, which a graph does not have.
        is_bound = isinstance(base, MethodType) and base.__self__ is self._module
        kept = {"base": None, "bound": base.__func__} if is_bound else {"base": base, "bound": None}  # type: ignore[union-attr]
        return {"module": self._module, "own": self._own, "wrappers": self.wrappers, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        bound = state.pop("bound")
        if bound is not None:
            state["base"] = MethodType(bound, state["module"])
        self._set_up(**state)

    def _set_up(
        self,
        module: nn.Module,
        own: Any,
        base: Callable[..., Any] | None,
        wrappers: Sequence[Callable[[Forward], Forward]],
    ) -> None:
        self._module, self._own, self._base = module, own, base
        self._wrappings = [AppliedWrapper(wrapper) for wrapper in wrappers]
        self._bottom = _taking_the_module(module, base) if base is not None else type(module).forward
        self._bottom, self._function = self._composed(self._wrappings, base)


def _taking_the_module(module: nn.Module, base: Callable[..., Any]) -> Forward:
    """Make a base a function that takes the module first."""
    if isinstance(base, MethodType) and base.__self__ is module:
        return base.__func__

    def forward(_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return base(*args, **kwargs)

    with contextlib.suppress(TypeError, ValueError):  # a callable in C has no signature to show
        signature = inspect.signature(base)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[itself, *signature.parameters.values()]
        )
    return forward


def _refuse_nameless(wrapper: Callable[..., Any], module: nn.Module) -> None:
    """Raise if pickle cannot find a wrapper by its qualified name."""
    while isinstance(wrapper, functools.partial):
        wrapper = wrapper.func
    if isinstance(wrapper, FunctionType) and "<" in wrapper.__qualname__:  # <locals>, <lambda>
        raise SerializationError(
            f"a {type(module).__name__} cannot be pickled: its forward is wrapped by "
            f"{wrapper.__module__}.{wrapper.__qualname__}, which pickle cannot find by name",
            hint="save the state dict instead; or, in the primitive, give edit.wrap_forward a function that is "
            "defined at the top level of its module, with functools.partial for its arguments",
        )
