"""torch's own ``state_dict`` and ``load_state_dict`` of a split model: it carries pieces, and is told so."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slapo_core.schedule.watching.pieces import Piece, Pieces, described

if TYPE_CHECKING:
    from torch import nn

__all__ = ["PlainStateDicts"]

_OUT = "slapo_core.state_dict(sch), slapo_core.save_pretrained(sch, directory)"
_IN = "slapo_core.load_state_dict(sch, state)"


class PlainStateDicts:
    """Hooks on the root of a split model; a copy of the model gets its own, which go on by the names of the pieces.

    Args:
        model: the root, to know the pieces by name when it is copied; it is not kept alive.
        pieces: of the schedule; None in a copy, which goes by ``names``.
        names: the pieces by full name.
        told: whether the warning was given.
    """

    __slots__ = ("_model", "_names", "_pieces", "_told")

    def __init__(
        self,
        model: nn.Module | None,
        pieces: Pieces | None,
        names: Mapping[str, Piece] | None = None,
        told: bool = False,
    ) -> None:
        self._model = weakref.ref(model) if model is not None else None
        self._pieces, self._names, self._told = pieces, dict(names or {}), told

    def going_out(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Before ``model.state_dict()``: warn, once for each model."""
        pieces = self._find(model)
        if not pieces or self._told:
            return
        self._told = True
        warnings.warn(
            f"state_dict() of this {type(model).__name__} gives what this rank holds, and that is a part of the "
            f"untouched model only: {described(pieces)}; the untouched model's names and shapes come from {_OUT}, or, "
            "of a built model, from engine.state_dict()",
            stacklevel=3,
        )

    def coming_in(self, model: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Before ``model.load_state_dict(state)``: of whole tensors, say where they go; torch then refuses them."""
        pieces = self._find(model)
        whole = {
            name: piece
            for name, piece in pieces.items()
            if piece.local != piece.whole and tuple(getattr(state.get(prefix + name), "shape", ())) == piece.whole
        }
        if whole:
            messages = rest[-1]  # torch's list of what is wrong, the last argument
            messages.append(
                f"this {type(model).__name__} holds pieces ({described(whole)}), and the state dict is the untouched "
                f"model's: {_IN} gives every rank its own, or, of a built model, engine.load_state_dict(state)"
            )

    def _find(self, model: nn.Module) -> dict[str, Piece]:
        return self._names if self._pieces is None else self._pieces.find(model)

    def _copied(self) -> tuple[None, None, dict[str, Piece], bool]:
        model = self._model() if self._model is not None else None
        return None, None, dict(self._find(model) if model is not None else self._names), self._told

    def __deepcopy__(self, memo: dict[int, Any]) -> PlainStateDicts:
        copied = memo[id(self)] = PlainStateDicts(*self._copied())
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return PlainStateDicts, self._copied()
