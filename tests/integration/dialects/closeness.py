"""When numbers of two trainings in float32 count as equal, and what is said where they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import slapo_core as slapo
from tests.integration.dialects.subjects import LEARNING_RATE

__all__ = ["GRADIENT", "LOSS", "WEIGHT", "Given", "about_gradients", "about_number", "about_weights"]

LOSS, GRADIENT, WEIGHT = 2e-6, 2e-5, 1e-5
"""Tolerances, each about five times what a sum in another order makes of float32, relative to the largest element.

Of a gradient: of that tensor, or a thousandth of that of all gradients where this is more: gradients that are zero but
for rounding have no size of their own. Of a weight: of that tensor, or the learning rate, by which a step moves it.
"""


@dataclass(frozen=True)
class Given:
    """A gradient on this rank.

    Args:
        layout: how the parameter lies in the reference tensor.
        mesh: over which.
        gradient: of this rank's part; None where the runtime has none.
        piece: which elements of it, from and to, where a replica has only some of them.
    """

    layout: slapo.Layout
    mesh: slapo.Mesh
    gradient: torch.Tensor | None
    piece: tuple[int, int] | None = None


def about_number(what: str, one: Any, other: Any, tolerance: float = LOSS) -> Iterator[str]:
    """What is to be said about a loss, or about a norm of gradients: nothing, if they are equal."""
    if not abs(float(one) - float(other)) <= tolerance * abs(float(other)):
        yield f"{what} is {float(one):.8g} instead of {float(other):.8g}"


def about_gradients(step: int, given: Sequence[Given], wanted: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """What is to be said about this rank's gradients of a step, against whole ones."""
    floor = 1e-3 * max(float(one.abs().max()) for one in wanted.values())
    if not given:
        yield f"no gradient of step {step} was seen"
    for one in given:
        what = f"the gradient of '{one.layout.origin}' in step {step}"
        if one.gradient is None:
            yield f"{what} is not given out"
        else:
            whole = wanted[one.layout.origin]
            scale = max(float(whole.abs().max()), floor)
            local = one.layout.local(whole, one.mesh)
            if one.piece is not None:
                local = local.flatten()[slice(*one.piece)]
            yield from _about_tensor(what, one.gradient, local, GRADIENT * scale)


def about_weights(state: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """What is to be said about a state dict: its names, their order, and every tensor."""
    if list(state) != list(wanted):
        yield f"the state dict has other names: {sorted(state.keys() ^ wanted.keys()) or 'another order'}"
        return
    for name, tensor in wanted.items():
        scale = max(float(tensor.abs().max()), LEARNING_RATE)
        yield from _about_tensor(f"'{name}' after training", state[name], tensor, WEIGHT * scale)


def _about_tensor(what: str, one: torch.Tensor, other: torch.Tensor, allowed: float) -> Iterator[str]:
    if one.shape != other.shape or one.dtype != other.dtype:
        yield f"{what} is {one.dtype} {tuple(one.shape)} instead of {other.dtype} {tuple(other.shape)}"
    elif not float((one.double() - other.double()).abs().max()) <= allowed:
        yield f"{what} differs by {float((one - other).abs().max()):.1e}, more than {allowed:.1e}"
