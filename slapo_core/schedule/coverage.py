"""Repeated blocks of a model, and which of them a saved schedule has no steps for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn


def count_blocks(model: nn.Module, paths: Iterable[str]) -> dict[str, int]:
    """How many modules each list of blocks holds in which a step was applied, e.g. ``{"encoder.layer": 12}``."""
    steps = tuple(paths)
    return {path: len(blocks) for path, blocks in _lists(model) if any(_is_below(step, path) for step in steps)}


def uncovered(model: nn.Module, paths: Iterable[str], saved: Mapping[str, int]) -> Iterator[str]:
    """A line for each list of blocks of one class of which some have steps and others have none.

    Args:
        model: the reference model.
        paths: of the steps.
        saved: what :func:`count_blocks` gave for the model that the schedule was written for: where the number is the
            same, it was written so.
    """
    steps = tuple(paths)
    for path, blocks in _lists(model):
        if saved.get(path) == len(blocks):
            continue
        for kind in dict.fromkeys(type(block) for block in blocks.values()):
            names = [name for name, block in blocks.items() if type(block) is kind]
            covered = [name for name in names if any(_is_below(step, f"{path}.{name}") for step in steps)]
            if covered and covered != names:
                missing = [name for name in names if name not in covered]
                written = f"; it was saved from a model with {saved[path]} there" if path in saved else ""
                yield (
                    f"of the {len(names)} {kind.__name__} in '{path}', the schedule has steps for {_shown(covered)} "
                    f"and none for {_shown(missing)}{written}"
                )


def _lists(model: nn.Module) -> Iterator[tuple[str, dict[str, nn.Module]]]:
    """The blocks of every list by their own names; one that stands there twice counts once."""
    for path, module in model.named_modules():
        if path and isinstance(module, nn.ModuleList):
            yield path, dict(module.named_children())


def _is_below(step: str, path: str) -> bool:
    return step == path or step.startswith(f"{path}.")


def _shown(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:3])}, ..., {names[-1]} ({len(names)} in all)"
