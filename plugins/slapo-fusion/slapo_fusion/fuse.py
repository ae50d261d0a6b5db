"""``fuse``: compile a part of a static graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from slapo_core import ApplyError, Edit, Effect, Equivalence, Node, PluginError, Primitive, Violation, effects
from slapo_core.errors import warn_user
from slapo_core.observers import ONE_KERNEL, run_from
from slapo_fusion.compilers import Compiled, Compiler, reason
from slapo_fusion.function_modes import device_error, drops, innermost, is_fake, is_watched, modes_disabled
from slapo_fusion.kernels import run_without_values
from slapo_fusion.private import StopRecomputation, compile_errors
from slapo_graph.graph import graph_of
from slapo_graph.match import Region, by_place

# `Fused`: a compiled region, whose errors name its place.

_COMPILED: WeakKeyDictionary[Region, dict[Any, Region]] = WeakKeyDictionary()
"""Compiled code of regions in use: a cache of a pure function, not a registry."""


class Fused:
    """Call the compiled code of a region; equal regions share it.

    Args:
        region: a pure function of its arguments.
        compiler: of the region.
        options: for it, as pairs.
        where: for messages, e.g. ``"fuse at 'encoder.layer.0' (match 1 of 1 ...)"``.
    """

    def __init__(
        self, region: Region, *, compiler: type[Compiler], options: tuple[tuple[str, Any], ...], where: str
    ) -> None:
        functools.update_wrapper(self, region)
        self.region, self.compiler, self.options, self.where = region, compiler, options, where
        self._compiled = self._shared()

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.region(*args)
        if is_fake():
            return run_from(ONE_KERNEL if self.compiler.fuses else None, self.region, *args)
        is_unseen = is_watched() and not isinstance(self._compiled, Compiled)  # by the active modes
        if self._compiled is self.region or (is_unseen and drops(self.region, args, {})):
            return self.region(*args)
        try:
            with modes_disabled(show=False) if is_unseen else contextlib.nullcontext():
                return self._compiled(*args)
        except StopRecomputation:  # ends the second run of a checkpoint: not an error
            raise
        except Exception as error:
            failed = device_error(error)
            if failed is error:
                raise
            if failed is not None:
                raise failed from None
            self._raise_own(args, error)
            raise self._failure(error) from error

    def _shared(self) -> Region:
        made = _COMPILED.setdefault(self.region, {})
        key = (self.compiler, repr(self.options))
        if key not in made:
            made[key] = self._compile(dict(self.options))
        return made[key]

    def _compile(self, options: Mapping[str, Any]) -> Region:
        try:
            compiled = self.compiler().compile(self.region, options=options)
        except Exception as error:
            if device_error(error) is not None:
                raise
            raise self._failure(error) from error
        if not callable(compiled):
            raise ApplyError(
                f"{self.where}: compiler '{self.compiler.name}' returned {compiled!r}, which is not callable"
            )
        return compiled

    def _raise_own(self, args: tuple[Any, ...], error: Exception) -> None:
        """Raise the region's own error for these arguments, if it raises one on fake tensors."""
        cause = innermost(error)
        try:
            run_without_values(self.region, args, {})
        except Exception as own:
            is_hidden = isinstance(cause, compile_errors()) and type(own).__module__ == "builtins"
            if is_hidden or type(own) is type(cause):  # another class comes from fake tensors
                raise

    def _failure(self, error: BaseException) -> ApplyError:
        return ApplyError(
            f"{self.where}: compiler '{self.compiler.name}' failed: {reason(error)}",
            hint="check the arguments; else choose another compiler, or undo that step: the model is unchanged",
        )

    def __reduce__(self) -> Any:
        return FusedFactory(self.compiler, self.options, self.where), (self.region,)


@dataclass(frozen=True)
class FusedFactory:
    """Make a :class:`Fused` of a region; equal makers let layers share a graph.

    Args:
        compiler: as of :class:`Fused`, like the others.
    """

    compiler: type[Compiler]
    options: tuple[tuple[str, Any], ...]
    where: str = field(compare=False)

    def __call__(self, region: Region) -> Fused:
        return Fused(region, compiler=self.compiler, options=self.options, where=self.where)


@dataclass(frozen=True)
class Fuse(Primitive):
    """Compile each match of a graph as one region.

    Equal regions of any layers share compiled code. It lives in this process: a model loaded from a file compiles
    again.

    Args:
        match: a match, a list of matches, or a pattern as for ``find``, for all of its matches; each becomes one
            region.
        compiler: ``"inductor"`` (``torch.compile``), ``"aot_eager"`` (the same without its kernels), ``"eager"`` (only
            group), ``"torchscript"``, or another installed one.
        name: of the call in the printed graph; None: ``fused``.
        options: for the compiler; of inductor, ``mode`` and torch's own, e.g. ``{"max_autotune": True}``.

    Raises:
        PreconditionError: nothing matches, no such compiler is installed, or ``name`` is not an identifier.
        StaleError: an earlier step changed the place of a match.
        ApplyError: a match cannot become one call; or the compiler failed, then or at a call.

    rewrite:
        ``h = x + bias; y = gelu(h)`` -> ``y = fused(x, bias)``

    Source: paper section 3.3.1, ``.fuse(subgraph, compiler)``.
    """

    name = "fusion.fuse"
    selections = ("match",)

    match: Any
    compiler: str = "inductor"
    name_: str | None = dataclasses.field(default=None, kw_only=True)
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.options, Mapping):
            object.__setattr__(self, "options", tuple(sorted(self.options.items())))
        super().__post_init__()

    @property
    def equivalence(self) -> Equivalence:  # type: ignore[override]
        if self.compiler == "eager":
            return Equivalence.EXACT
        if self.compiler == "inductor" and dict(self.options).get("fallback_random") is False:
            return Equivalence.RANDOM
        return Equivalence.REORDERED

    def preconditions(self, node: Node) -> Iterator[Violation]:
        if self.match is None:
            yield Violation(
                "match is required: a match or a pattern (got None)", "fuse(lambda x, bias: F.gelu(x + bias))"
            )
        if self.name_ is not None and not self.name_.isidentifier():
            yield Violation(f"name must be a Python identifier (got {self.name_!r})", 'for example name="bias_gelu"')
        try:
            node.plugin("compilers", self.compiler)
        except PluginError as error:
            meant = self.compiler.lower().removeprefix("torch")
            known = {"inductor": "inductor", "dynamo": "inductor", "script": "torchscript"}
            call = f'fuse(match, compiler="{known[meant]}")' if meant in known else error.hint
            yield Violation(error.message, call)

    def apply(self, node: Node, edit: Edit) -> None:
        compiler = node.plugin("compilers", self.compiler)
        if compiler.deprecated is not None:
            warn_user(f"fuse(compiler='{self.compiler}'): {compiler.deprecated}", DeprecationWarning)
        options = tuple(dict(self.options).items())
        for place, matches in by_place(node, self.match):
            graph: Any = graph_of(place)
            where = f"fuse at '{place.path}' ({'; '.join(map(str, matches))})"
            transform = FusedFactory(compiler, options, where)
            edit.set_forward(
                place, graph.with_region_called(place.module, matches, transform, name=self.name_ or "fused")
            )

    def effects(self, node: Node) -> Iterator[Effect]:
        for effect in self.match.effects(node):
            yield effect
            if self.compiler in ("inductor", "aot_eager"):
                yield effects.Compiled(at=effect.at)
