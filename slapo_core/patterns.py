"""The words in which patterns for ``find`` are written: ``from slapo_core import patterns``."""

from __future__ import annotations

from slapo_core.graph.patterns.language import any_constant, any_of, any_op, call_module, capture, optional, where

__all__ = ["any_constant", "any_of", "any_op", "call_module", "capture", "optional", "where"]
