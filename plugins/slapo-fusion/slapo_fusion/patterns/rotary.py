"""``fusion.rotary``: rotary position embedding of queries or keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import slapo_core as slapo

__all__ = ["Rotary"]


class Rotary(slapo.Pattern):
    """Rotary embedding of one tensor: x * cos + rotate_half(x) * sin.

    Halves (LLaMA, GPT-NeoX), where ``rotate_half(x)`` is ``torch.cat((-x2, x1), dim=-1)`` of the two halves of the last
    axis, or neighbors (GPT-J, Cohere, GLM), where it is ``torch.stack((-x2, x1), dim=-1).flatten(-2)`` of every other
    element. Queries and keys are a match each. Where only a part of each head is rotated, ``x`` is that part. The
    middle of a head is read outside of the match, wherever the model computes it.

    Not found: rotations by complex numbers, and those in the other direction (``torch.cat((x2, -x1), dim=-1)``).
    """

    name = "fusion.rotary"

    def forms(self) -> Iterable[Any]:
        def rotated(x: Any, cos: Any, sin: Any, first: Any, second: Any) -> Any:
            any_of = slapo.patterns.any_of
            source = any_of(x, x.to(torch.float32))
            turned = any_of(
                torch.cat((-source[..., second:], source[..., :first]), dim=-1),
                torch.stack((-source[..., 1::2], any_of(source[..., 0::2], source[..., ::2])), dim=-1).flatten(-2),
                torch.stack((-source[:, :, :, 1::2], source[:, :, :, ::2]), dim=-1).flatten(-2),
            )
            return x * cos + any_of(turned, turned.to(torch.float32)) * sin

        yield rotated
