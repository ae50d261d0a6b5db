"""Compute losses of large vocabularies: the step ``linear_cross_entropy``, and ``log_probs``.

Installing this distribution is enough: every schedule then knows ``sch["lm_head"].linear_cross_entropy()``. The names
below are for those who build steps as values, publish an implementation of the loss, or write an RL loop::

    from slapo_loss import log_probs

    values, entropies = log_probs(hidden, sch["lm_head"], labels, temperature=0.7)
"""

from __future__ import annotations

from slapo_loss.head_chunks import Objective, Vocabulary
from slapo_loss.implementations import Implementation, Situation
from slapo_loss.linear_cross_entropy import LinearCrossEntropy
from slapo_loss.token_log_probs import log_probs

__all__ = ["Implementation", "LinearCrossEntropy", "Objective", "Situation", "Vocabulary", "log_probs"]
