"""The lock that everything takes which patches torch, or the objects of a model, while it runs."""

from __future__ import annotations

import threading

__all__ = ["PATCHING"]

PATCHING = threading.RLock()
"""Held while classes of torch, classes of modules or global names are replaced for a run, and until they are back."""
