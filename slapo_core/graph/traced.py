"""`TracedForward`: what runs in place of a module's forward once it is traced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slapo_core.errors import GuardError, TraceError
from slapo_core.graph import regions
from slapo_core.graph.arguments import MISSING, Parameters, form
from slapo_core.graph.buffers import buffers_kept
from slapo_core.graph.errors import NeedsValues, Untraceable
from slapo_core.graph.guards import GuardViolation
from slapo_core.graph.leaves import Leaves, inlined_modules
from slapo_core.graph.record import Recorded, record
from slapo_core.graph.structure import children, rebuild

__all__ = ["TracedForward"]

MOST_VARIANTS = 16


class TracedForward:
    """The graphs of one forward, called like it: with the module first.

    There is a graph for every form of arguments, mode and types that it was called with: a variant, recorded when it is
    first needed. A graph holds no module: the names in it are looked up in the one that is called, so that a copy of
    the model runs on itself.

    Args:
        forward: the forward that is recorded; takes the module first.
        leaves: which modules below are called as they are.
        path: of the traced module, for messages.
    """

    def __init__(self, forward: Callable[..., Any], leaves: Leaves, *, path: str = "") -> None:
        self.forward, self.leaves, self.path = forward, leaves, path
        self.parameters = Parameters(forward)
        self.variants: dict[Any, Recorded] = {}

    @property
    def __signature__(self) -> Any:
        return self.parameters.signature

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values = self.parameters.bind(module, args, kwargs)
        variant = self.variant(module, values)
        given = [value for value in values if value is not MISSING]
        try:
            if not variant.has_regions:
                return variant.code(module, *variant.captured, *given)
            before = regions.state()
            try:
                return variant.code(module, *variant.captured, *given)
            finally:
                regions.set_state(*before)
        except GuardViolation as error:
            guard = variant.guards[error.index]
            raise GuardError(
                f"the graph of {self._where} was recorded with {guard.value} == {guard.expected!r}, and this call has "
                f"{error.found!r}",
                path=self.path,
                location=guard.location,
                hint="the model decides there what to compute: call it as it was recorded, or trace only modules that "
                "lie below this decision",
            ) from None

    def record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the graph for calls like this one, if it is not there yet.

        Raises:
            TraceError: it cannot be recorded.
            TypeError: the forward does not take these arguments.
        """
        self.variant(module, self.parameters.bind(module, args, kwargs))

    def __str__(self) -> str:
        """As Python; of several variants, the one recorded first."""
        recorded = list(self.variants.values())
        if not recorded:
            return f"# {self!r}: recorded at its first call"
        code = recorded[0].graph.python_code("self").src.strip("\n")
        more = f"# the first of {len(recorded)} variants\n" if len(recorded) > 1 else ""
        return f"{more}{code}"

    def __repr__(self) -> str:
        return f"<static graph of {self._where}, variants: {len(self.variants)}>"

    def variant(self, module: nn.Module, values: tuple[Any, ...]) -> Recorded:
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
            tuple(map(form, values)),
            tuple(below.training for below in inlined.values()),
            tuple(tensor.dtype for tensor in module.parameters()),
            regions.state(),
        )
        found = self.variants.get(key)
        if found is None:
            if len(self.variants) >= MOST_VARIANTS:
                raise TraceError(
                    f"{self._where} was called in more than {MOST_VARIANTS} different forms: {key[0]}",
                    path=self.path,
                    hint="pass what varies as numbers or tensors, or trace a narrower node",
                )
            found = self.variants[key] = self._record(module, values)
        else:
            self._check_flags(inlined, found)
        return found

    def _record(self, module: nn.Module, values: tuple[Any, ...]) -> Recorded:
        try:
            with _quiet(), buffers_kept(module):
                return record(module, self.forward, self.parameters, values, leaves=self.leaves)
        except NeedsValues as error:
            if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
                raise self._refusal(error) from error
            fake_error: Exception = error
        except Untraceable as error:
            raise self._refusal(error) from error
        except (RuntimeError, NotImplementedError) as error:
            if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
                raise self._failure(error) from error
            fake_error = error
        # An operation without a fake implementation: on the tensors themselves, as the forward would run.
        real = tuple(_copied(value) for value in values)
        try:
            with buffers_kept(module), torch.random.fork_rng():
                return record(module, self.forward, self.parameters, real, leaves=self.leaves, fake=False)
        except Untraceable as error:
            raise self._refusal(error) from error
        except (RuntimeError, NotImplementedError):
            raise self._failure(fake_error) from fake_error

    def _refusal(self, error: Untraceable) -> TraceError:
        return TraceError(
            f"{self._where} cannot be traced: it {error.problem}",
            path=self.path,
            location=error.location,
            hint=error.hint or "trace a narrower node, or name the module that does this in leaves=",
        )

    def _failure(self, error: Exception) -> TraceError:
        return TraceError(
            f"{self._where} cannot be traced: run on tensors without values it raises {type(error).__name__}: {error}",
            path=self.path,
            hint="trace a narrower node, or name the module that does this in leaves=",
        )

    @property
    def _where(self) -> str:
        return f"'{self.path}'" if self.path else "the root"

    def _check_flags(self, inlined: dict[str, nn.Module], variant: Recorded) -> None:
        for flag in variant.flags:
            found = flag.read(inlined[""])
            if found is not flag.expected and (type(found) is not type(flag.expected) or found != flag.expected):
                raise GuardError(
                    f"the graph of {self._where} was recorded with {flag.name} == {flag.expected!r}, and now it is "
                    f"{found!r}",
                    path=self.path,
                    hint="trace the module again after changing it",
                )

    def __getstate__(self) -> dict[str, Any]:
        return {"forward": self.forward, "leaves": self.leaves, "path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["forward"], state["leaves"], path=state["path"])  # type: ignore[misc]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log of the stack of a fake operation that fails: the error says it."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    parts = children(value)
    return value if parts is None else rebuild(value, [_copied(part) for _, _, part in list(parts)])
