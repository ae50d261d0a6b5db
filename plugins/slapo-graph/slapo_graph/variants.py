"""`RecordedForward`: graphs in place of a forward, one for each kind of call, recorded when first needed."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from slapo_core.errors import GuardError, TraceError, warn_user
from slapo_core.internals import forwards, module_index
from slapo_core.observers import PATCHING, happened, is_observed, is_recording
from slapo_graph import autocast_state
from slapo_graph.arguments import MISSING, Parameters
from slapo_graph.effects import observe
from slapo_graph.guards import call_key, call_signature, describe, exact_signature, fingerprint, surroundings
from slapo_graph.leaves import Leaves, is_changed
from slapo_graph.match import name_of
from slapo_graph.pool import Pool
from slapo_graph.private import (
    disable_dynamo,
    number_of_function_modes,
)
from slapo_graph.protocol import Flag, GuardViolation, Tracer, Untraceable
from slapo_graph.specialization import PreparedCall, Snapshot, Specialization, Structure
from slapo_graph.tracing.diagnostics import refusal
from slapo_graph.tracing.fake import FakeMode, without_values
from slapo_graph.tracing.outside import refusing_changes
from slapo_graph.tracing.reads import GlobalNames
from slapo_graph.tracing.session import attributes_restored, buffers_restored, rng_restored

MOST_SPECIALIZATIONS = 16
MOST_FOR_ATTRIBUTES = 8
_CLOCK = itertools.count(1)


class RecordedForward(forwards.ReplacedForward):
    """Run recorded graphs in place of a forward; takes the module first.

    There is a variant for every signature of inputs, mode and dtype, and for other values of the attributes and global
    names that the forward reads, each recorded when it is first needed. A graph holds no module: names are looked up in
    the called one, so that a copy of the model runs on itself.

    Args:
        forward: the recorded one; takes the module first.
        tracer: records it.
        leaves: which modules below stay calls.
        path: of the traced module, for messages.
        pool: recordings that equal modules share.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        tracer: Tracer,
        leaves: Leaves,
        *,
        path: str = "",
        pool: Pool | None = None,
    ) -> None:
        self.forward, self.tracer, self.leaves, self.path = forward, tracer, leaves, path
        self.pool = pool if pool is not None else Pool()
        self.__name__, self.__qualname__ = "forward", f"the graph of {path}"  # as functions have
        self.parameters = Parameters(forward)
        self.specializations: dict[Any, list[Specialization]] = {}
        self.structures: list[Structure] = []
        self.has_dropped = False  # a variant, for one of another input signature
        self.recorded_anew = 0  # because an attribute or a global name had another value
        self._first: Specialization | None = None
        self._snapshots: dict[int, Snapshot] = {}  # by the id of a module
        self._has_snapshots = True  # False: a class below computes a compared attribute
        self.example: tuple[Any, ...] | None = None  # values of the parameters, without values of tensors

    @property
    def __signature__(self) -> Any:
        return self.parameters.signature

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given: Any = (*args, *kwargs.values())
        signature, found = None, None
        if not torch.compiler.is_compiling() and not (number_of_function_modes() and is_recording()):
            signature = (call_signature(given, kwargs), surroundings())
            snapshot = self._snapshots.get(id(module))
            if snapshot is not None:
                found = snapshot.calls.get((snapshot.modes(module), signature))
        if found is not None and found.holds(module):
            variant = found.variant
            variant.used = next(_CLOCK)
            if found.arrange is not None:
                given = found.arrange(given)
        else:
            values = self.parameters.bind(module, args, kwargs)
            variant, given = self.variant(module, values), [value for value in values if value is not MISSING]
            if signature is not None:
                self._remember(module, variant, signature, self.parameters.arranging(module, len(args), tuple(kwargs)))
        try:
            result = variant.run(module, given)
        except GuardViolation as error:
            guard = variant.recorded.guards[error.index]
            raise GuardError(
                f"the graph of {name_of(self.path)} was recorded with {guard.value} == {guard.expected!r}, and this "
                f"call has {error.found!r}",
                path=self.path,
                location=guard.location,
                hint="the model branches there: call it as it was recorded, or trace only modules below this branch",
            ) from None
        if signature is not None and is_observed():
            for name in variant.calls_of_steps():
                happened("call", self.shown(name))
        return result

    def shown(self, call: str) -> str:
        """Return the name of a rewrite's call for observers."""
        return f"{call} in {name_of(self.path)}"

    def _remember(self, module: nn.Module, variant: Specialization, signature: Any, arrange: Any) -> None:
        """Note the variant for calls of a signature, while the modules stay the same."""
        modules = variant.structure.modules_of(module)
        if not self._has_snapshots or modules is None or variant.checks.violated(modules) is not None:
            return
        snapshots, key = self._snapshots, id(module)
        snapshot = snapshots.get(key)
        if snapshot is None or snapshot.modes(module) is None:
            snapshot = variant.structure.snapshot(modules)
            if snapshot is None:
                self._has_snapshots = False
                return
            snapshot.root = weakref.ref(module, lambda _: snapshots.pop(key, None))
            snapshots[key] = snapshot
        modes = snapshot.modes(module)
        if modes is not None:
            no_longer_called = tuple(map(module.get_submodule, variant.no_longer_called))
            state = autocast_state.state() if variant.has_regions else None
            snapshot.calls[modes, signature] = PreparedCall(
                variant, arrange, variant.checks.bound(modules), no_longer_called, state
            )

    def record(self, module: nn.Module, calls: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        """Record the graph for the first of these calls that can be recorded.

        Args:
            module: the traced module.
            calls: positional and keyword arguments; a later one is requested only if the former ones do not fit.

        Raises:
            TraceError: none can be recorded.
            TypeError: the forward does not take these arguments.
        """
        refused: TraceError | None = None
        try:
            for call in calls:
                values = self.parameters.bind(module, *call)
                try:
                    self.variant(module, values)
                except TraceError as error:
                    refused = error
                    continue
                self.example = without_values(FakeMode(), values)
                return
        except TraceError as unknown:
            if refused is None:
                raise
            refused.hint = f"{unknown.message}; {unknown.hint}; or: {refused.hint}"
        assert refused is not None
        raise refused

    def held_functions(self) -> tuple[Callable[..., Any], ...]:
        return (self.forward,)

    def select_variant(self, module: nn.Module) -> None:
        """Select the variant recorded for the module's present structure to represent the graph."""
        if not self.holds(module):
            alike = (variant for variant in self.variants if variant.structure.modules_of(module) is not None)
            self._first = next(alike, self._first)

    def holds(self, module: nn.Module) -> bool:
        """Return whether the selected specialization matches the module."""
        first = self.first
        return first is None or first.structure.modules_of(module) is not None

    @property
    def first(self) -> Specialization | None:
        """Return the specialization in which patterns are found; None after unpickling."""
        return self._first if self._first is not None else next(iter(self.variants), None)

    @property
    def variants(self) -> list[Specialization]:
        """Return all recorded specializations."""
        return [variant for alike in self.specializations.values() for variant in alike]

    @property
    def is_rewritten(self) -> bool:
        """Return whether steps rewrote the graph."""
        return False

    def __repr__(self) -> str:
        return f"<static graph of {name_of(self.path)}, variants: {len(self.variants)}>"

    def variant(self, module: nn.Module, values: tuple[Any, ...]) -> Specialization:
        """Return the graph for a call, recorded now if its signature is new.

        Args:
            module: the traced module.
            values: of the forward's parameters, in their order.

        Raises:
            TraceError: the variant cannot be recorded, or a rewrite cannot be repeated in it.
            GuardError: a module that a rewrite removed was hooked.
        """
        key, structure, modules = self._key(module, values)
        changed = None
        for found in self.specializations.get(key, ()):
            changed = found.checks.violated(modules)
            if changed is None:
                break
        else:
            return self._specialized(module, values, structure, key, changed)
        if not torch.compiler.is_compiling():
            found.used = next(_CLOCK)
        hooked = next((path for path in found.no_longer_called if is_changed(module.get_submodule(path))), None)
        if hooked is not None:
            raise GuardError(
                f"'{hooked}' got hooks or another forward, without effect: the rewritten graph of "
                f"{name_of(self.path)} does not call it",
                path=self.path,
                hint="hook the module before the rewrite",
            )
        return found

    def _key(self, module: nn.Module, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], Structure, list[nn.Module]]:
        """Return the signature of a call, the structure of the module, and its modules."""
        number, structure, modules = self._structure(module)
        return (number, *call_key(modules, values)), structure, modules

    def _structure(self, module: nn.Module) -> tuple[int, Structure, list[nn.Module]]:
        for number, structure in enumerate(self.structures):
            modules = structure.modules_of(module)
            if modules is not None:
                return number, structure, modules
        structure = Structure(module, self.leaves)
        modules = structure.modules_of(module)
        assert modules is not None
        self.structures.append(structure)
        return len(self.structures) - 1, structure, modules

    @disable_dynamo  # recording is not compiled: torch.compile breaks its graph here, once
    def _specialized(
        self,
        module: nn.Module,
        values: tuple[Any, ...],
        structure: Structure,
        key: Any,
        changed: tuple[Flag, Any] | None,
    ) -> Specialization:
        """Return a new variant; ``changed``: a flag of the variants with this key, and its present value."""
        if len(self.variants) >= MOST_SPECIALIZATIONS:
            self._drop_one()
        self.recorded_anew += changed is not None
        if changed is not None and self.recorded_anew == MOST_FOR_ATTRIBUTES:
            flag, found = changed
            warn_user(
                f"{name_of(self.path)} was recorded again {MOST_FOR_ATTRIBUTES} times because attributes changed that "
                f"its forward reads, most recently {flag.name} from {describe(flag.expected)} to "
                f"{describe(fingerprint(found))}: pass what varies as an argument, or trace a narrower node",
            )
        made = self._new_variant(module, values, structure, key)
        self.specializations.setdefault(key, []).append(made)
        self._snapshots.clear()  # the new variant may precede others
        return made

    def _drop_one(self) -> None:
        """Drop the least recently used variant."""
        others = [variant for variant in self.variants if variant is not self.first]
        dropped = min(others, key=lambda variant: variant.used)
        for key, alike in list(self.specializations.items()):
            alike[:] = [variant for variant in alike if variant is not dropped]
            if not alike:
                del self.specializations[key]
        if not self.has_dropped:
            warn_user(
                f"{name_of(self.path)} exceeded the limit of {MOST_SPECIALIZATIONS} variants: the least recently used "
                "one is dropped, and recorded again when needed; pass varying values as numbers or tensors, or trace a "
                "narrower node",
            )
        self.has_dropped = True

    def _new_variant(
        self, module: nn.Module, values: tuple[Any, ...], structure: Structure, key: Any
    ) -> Specialization:
        """Return a variant that another module has recorded, or else a new one."""
        exact = self._exact(module, values, key)
        found = self.pool.find(exact, module)
        if found is None:
            found = self._recorded(module, values, structure)
            self.pool.add(exact, module, found)
        return found

    def _exact(self, module: nn.Module, values: tuple[Any, ...], key: tuple[Any, ...]) -> Any:
        """Return the key of a recording, besides attributes and global names."""
        return (
            self.forward,
            type(self.tracer),
            self.leaves,
            key[1:],
            exact_signature(values),
            module_index.structure(module),
        )

    def _recorded(self, module: nn.Module, values: tuple[Any, ...], structure: Structure) -> Specialization:
        """Record a variant for calls with these values of the parameters."""
        named = zip(self.parameters.names, values, strict=True)
        arguments = {name: value for name, value in named if value is not MISSING}
        modules = structure.modules_of(module)
        assert modules is not None
        with PATCHING:
            names = GlobalNames(self.forward, modules[: len(structure.paths)])
            try:
                with names.restored(), buffers_restored(module):
                    forward = refusing_changes(self.forward, names)
                    recorded = self.tracer.trace(module, forward, arguments, self.leaves)
                    if not any("example" in node.meta for node in recorded.graph.nodes):  # by a plugin
                        with rng_restored(), attributes_restored(module, (), Untraceable):
                            observe(recorded.graph, module, (*recorded.captured, *arguments.values()))
            except Exception as error:
                refused = refusal(error, self.tracer, self.path)
                read = getattr(error, "slapo_read", None)
                if read is not None:
                    refused.slapo_read = (*read, *names.flags)  # type: ignore[attr-defined]
                raise refused from error
        return Specialization(recorded, structure, surroundings=names.flags)
