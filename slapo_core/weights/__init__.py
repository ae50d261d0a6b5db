"""Weights: initialising, loading, and going to and from the untouched model's layout."""

from __future__ import annotations

from slapo_core.weights.reference import Reference, load_reference_state_dict, reference_state_dict
from slapo_core.weights.sources import Source, open_source
from slapo_core.weights.survey import LiveTensor, Survey, TensorSpec, live_tensors, survey

__all__ = [
    "LiveTensor",
    "Reference",
    "Source",
    "Survey",
    "TensorSpec",
    "live_tensors",
    "load_reference_state_dict",
    "open_source",
    "reference_state_dict",
    "survey",
]
