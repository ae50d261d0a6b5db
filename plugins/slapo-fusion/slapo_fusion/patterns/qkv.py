"""``fusion.qkv``: the three projections of an attention."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn import functional as F

import slapo_core as slapo

__all__ = ["Qkv"]


class Qkv(slapo.Pattern):
    """Three linear layers of one value: query, key and value, in the order in which the model calls them.

    Each with a bias or without. The match has three outputs. ``merge`` makes one projection of them, by their paths:
    ``layer.merge(("self.query", "self.key", "self.value"))``.
    """

    name = "fusion.qkv"

    def forms(self) -> Iterable[Any]:
        def projections(
            x: Any, query: Any, query_bias: Any, key: Any, key_bias: Any, value: Any, value_bias: Any
        ) -> Any:
            any_of = slapo.patterns.any_of
            return (
                any_of(F.linear(x, query, query_bias), F.linear(x, query)),
                any_of(F.linear(x, key, key_bias), F.linear(x, key)),
                any_of(F.linear(x, value, value_bias), F.linear(x, value)),
            )

        yield projections
