"""Losses of large vocabularies for slapo: ``linear_cross_entropy`` as a step, and ``log_probs``.

Installing this distribution is enough: every schedule then knows ``sch["lm_head"].linear_cross_entropy()``. The names
below are for those who build steps as values, publish an implementation of the loss, or write an RL loop::

    from slapo_loss import log_probs

    values, entropies = log_probs(hidden, sch["lm_head"], labels, temperature=0.7)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slapo_loss.head_chunks import Objective, Vocabulary
    from slapo_loss.implementations import Implementation, Situation
    from slapo_loss.linear_cross_entropy import LinearCrossEntropy
    from slapo_loss.token_log_probs import log_probs

__all__ = ["Implementation", "LinearCrossEntropy", "Objective", "Situation", "Vocabulary", "log_probs"]

_HOMES = {
    "Implementation": "slapo_loss.implementations",
    "LinearCrossEntropy": "slapo_loss.linear_cross_entropy",
    "Objective": "slapo_loss.head_chunks",
    "Situation": "slapo_loss.implementations",
    "Vocabulary": "slapo_loss.head_chunks",
    "log_probs": "slapo_loss.token_log_probs",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
