"""`Fused`: a compiled region, which says whose it is when its compiler fails."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import _StopRecomputationError

from slapo_core import ApplyError, Compiler
from slapo_core.spec.accelerators import fork_rng
from slapo_core.spec.graph import Region
from slapo_fusion.compiled import Compiled, reason
from slapo_fusion.watching import aside, drops, is_fake, is_watched

__all__ = ["Fused", "Fusing"]

_COMPILED: WeakKeyDictionary[Region, dict[Any, Region]] = WeakKeyDictionary()
"""What a compiler made of a region, as long as the region is in use: a cache of a pure function, not a registry."""


class Fused:
    """Called like its region. Equal regions share what was compiled of them; pickled, it compiles again.

    Args:
        region: a pure function of its arguments.
        compiler: whose.
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
        if torch.compiler.is_compiling() or is_fake():
            return self.region(*args)
        if self._compiled is self.region:
            return self.region(*args)
        try:
            if isinstance(self._compiled, Compiled) or not is_watched():
                return self._compiled(*args)
            if drops(self.region, args, {}):
                return self.region(*args)
            with aside(shown=False):
                return self._compiled(*args)
        except _StopRecomputationError:  # by which a checkpoint around ends its second run: no error
            raise
        except Exception as error:
            self._raise_own(args)
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
            raise self._failure(error) from error
        if not callable(compiled):
            raise ApplyError(f"{self.where}: compiler '{self.compiler.name}' gave {compiled!r}, which is no function")
        return compiled

    def _raise_own(self, args: tuple[Any, ...]) -> None:
        """Raise what the region itself raises for these arguments: then it is no fault of the compiler."""
        with fork_rng(), torch.no_grad():
            self.region(*tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), args))

    def _failure(self, error: BaseException) -> ApplyError:
        return ApplyError(
            f"{self.where}: compiler '{self.compiler.name}' failed: {reason(error)}",
            hint="take another compiler, or undo that step: the model itself is as it was",
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("region", "compiler", "options", "where")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state.pop("region"), **state)  # type: ignore[misc]


@dataclass(frozen=True)
class Fusing:
    """Makes a :class:`Fused` of a region; equal wherever it does the same, so that layers alike share a graph.

    Args:
        compiler: as of :class:`Fused`, like the others.
    """

    compiler: type[Compiler]
    options: tuple[tuple[str, Any], ...]
    where: str = field(compare=False)

    def __call__(self, region: Region) -> Fused:
        return Fused(region, compiler=self.compiler, options=self.options, where=self.where)
