"""Megatron's own verdict on its configurations, with our place; nothing is allocated, and no group is needed."""

from __future__ import annotations

import warnings

from slapo_core import BuildError
from slapo_megatron.config.draft import Draft
from slapo_megatron.config.slots import CLASSES, megatron_class

__all__ = ["validate"]


def validate(draft: Draft) -> None:
    """
    Raises:
        BuildError: what Megatron refuses, in its own words.
    """
    for option in CLASSES:
        if option == "scheduler":  # tried where it is filled in
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                megatron_class(option)(**draft.options[option])
        except Exception as error:  # its checks raise assertions, and whatever a wrong value leads to
            raise BuildError(f"Megatron refuses {option}: {_told(error)}") from error


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
