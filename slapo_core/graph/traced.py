"""`TracedForward`: what runs in place of a module's forward once it is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slapo_core.errors import GuardError, TraceError
from slapo_core.graph import regions
from slapo_core.graph.arguments import MISSING, Parameters, forms
from slapo_core.graph.buffers import buffers_kept
from slapo_core.graph.expected import ABSENT, is_held
from slapo_core.graph.leaves import Leaves, inlined_modules, signature_of
from slapo_core.graph.refusals import refusal
from slapo_core.graph.variant import Variant
from slapo_core.spec.tracer import GuardViolation, Tracer

__all__ = ["TracedForward"]

MOST_VARIANTS = 16


class TracedForward:
    """The graphs of one forward, called like it: with the module first.

    There is a graph for every form of arguments, mode and types that it was called with: a variant, recorded when it is
    first needed. A graph holds no module: the names in it are looked up in the one that is called, so that a copy of
    the model runs on itself.

    Args:
        forward: the forward that is recorded; takes the module first.
        tracer: records it.
        leaves: which modules below are called as they are.
        path: of the traced module, for messages.
    """

    def __init__(self, forward: Callable[..., Any], tracer: Tracer, leaves: Leaves, *, path: str = "") -> None:
        self.forward, self.tracer, self.leaves, self.path = forward, tracer, leaves, path
        self.parameters = Parameters(forward)
        self.variants: dict[Any, Variant] = {}
        self.draft: Variant | None = None  # recorded before any call was known: never run

    @property
    def __signature__(self) -> Any:
        return self.parameters.signature

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values = self.parameters.bind(module, args, kwargs)
        variant = self.variant(module, values)
        try:
            return variant.run(module, [value for value in values if value is not MISSING])
        except GuardViolation as error:
            guard = variant.recorded.guards[error.index]
            raise GuardError(
                f"the graph of {self._where} was recorded with {guard.value} == {guard.expected!r}, and this call has "
                f"{error.found!r}",
                path=self.path,
                location=guard.location,
                hint="the model decides there what to compute: call it as it was recorded, or trace only modules that "
                "lie below this decision",
            ) from None

    def record(self, module: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]] | None) -> None:
        """Record the graph for calls like this one, if it is not there yet.

        Args:
            module: the traced module.
            call: positional and keyword arguments; None for a tracer that needs to know none.

        Raises:
            TraceError: it cannot be recorded.
            TypeError: the forward does not take these arguments.
        """
        if call is None:
            self.draft = self._recorded(module, None)
        else:
            self.variant(module, self.parameters.bind(module, *call))

    @property
    def first(self) -> Variant | None:
        """The variant that stands for all of them: the one recorded first; None after a copy through pickle."""
        return next(iter(self.variants.values()), self.draft)

    def __str__(self) -> str:
        """As Python; of several variants, the one recorded first."""
        first = self.first
        if first is None:
            return f"# {self!r}: recorded at its first call"
        code = first.recorded.graph.python_code("self").src.strip("\n")
        more = f"# the first of {len(self.variants)} variants\n" if len(self.variants) > 1 else ""
        return f"{more}{code}"

    def __repr__(self) -> str:
        return f"<static graph of {self._where}, variants: {len(self.variants)}>"

    def variant(self, module: nn.Module, values: tuple[Any, ...]) -> Variant:
        """The graph for a call, recorded now if it is the first of its form.

        Args:
            module: the traced module.
            values: of the forward's parameters, in their order.

        Raises:
            TraceError: what is needed cannot be recorded.
            GuardError: an attribute has another value than when it was recorded.
        """
        inlined = inlined_modules(module, self.leaves)
        key = (
            forms(values),
            signature_of(inlined.values()),
            tuple(tensor.dtype for tensor in module.parameters()),
            regions.state(),
            torch.get_default_dtype(),
        )
        found = self.variants.get(key)
        if found is None:
            if len(self.variants) >= MOST_VARIANTS:
                raise TraceError(
                    f"{self._where} was called in more than {MOST_VARIANTS} different forms: {key[0][0]}",
                    path=self.path,
                    hint="pass what varies as numbers or tensors, or trace a narrower node",
                )
            found = self.variants[key] = self._recorded(module, values)
        else:
            self._check_flags(inlined, found)
        return found

    def _recorded(self, module: nn.Module, values: tuple[Any, ...] | None) -> Variant:
        """A new variant; ``values`` of the parameters are None if no call is known."""
        arguments = None
        if values is not None:
            named = zip(self.parameters.names, values, strict=True)
            arguments = {name: value for name, value in named if value is not MISSING}
        try:
            with buffers_kept(module):
                recorded = self.tracer.trace(module, self.forward, arguments, self.leaves)
        except Exception as error:
            raise refusal(error, self.tracer, self.path) from error
        return Variant(recorded, module)

    @property
    def _where(self) -> str:
        return f"'{self.path}'" if self.path else "the root"

    def _check_flags(self, inlined: dict[str, nn.Module], variant: Variant) -> None:
        for flag in variant.recorded.flags:
            found = _read(flag.path, flag.attribute, inlined[""])
            if not is_held(flag.expected, found):
                raise GuardError(
                    f"the graph of {self._where} was recorded with {flag.name} == {flag.expected!r}, and now it is "
                    f"{found!r}",
                    path=self.path,
                    hint="trace the module again after changing it",
                )

    def __getstate__(self) -> dict[str, Any]:
        return {"forward": self.forward, "tracer": self.tracer, "leaves": self.leaves, "path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["forward"], state["tracer"], state["leaves"], path=state["path"])  # type: ignore[misc]


def _read(path: tuple[str, ...], attribute: str, owner: Any) -> Any:
    for name in path:
        owner = getattr(owner, name, ABSENT)
    return getattr(owner, attribute, ABSENT)
