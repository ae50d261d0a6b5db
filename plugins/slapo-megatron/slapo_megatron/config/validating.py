"""Megatron's own verdict on its configurations, with our place; nothing is allocated, and no group is needed."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from slapo_core import BuildError
from slapo_megatron.config.draft import Draft
from slapo_megatron.config.slots import CLASSES, megatron_class

if TYPE_CHECKING:
    from slapo_core.spec.mesh import Mesh

__all__ = ["validate"]


def validate(draft: Draft, mesh: Mesh | None) -> None:
    """
    Args:
        draft: filled in.
        mesh: of the schedule.

    Raises:
        BuildError: what Megatron refuses, in its own words.
    """
    from slapo_megatron.model.configuration import transformer_config

    for option in CLASSES:
        if option == "scheduler":  # tried where it is filled in
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                megatron_class(option)(**draft.options[option])
                if option == "model_parallel_config":
                    transformer_config(draft.options, mesh)
        except Exception as error:  # its checks raise assertions, and whatever a wrong value leads to
            raise BuildError(f"Megatron refuses {option}: {_told(error)}") from error


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
