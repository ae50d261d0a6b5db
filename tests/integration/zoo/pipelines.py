"""Every model cut into stages, which run one after the other in one process: the reference model, or a reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import slapo_core as slapo
from slapo_core.errors import TraceError
from tests.integration.zoo.checks import NotApplicable, blocks
from tests.integration.zoo.subjects import Subject, call

__all__ = ["PIPELINES", "cut_places", "cut_verifies", "is_causal_lm"]


def cut_verifies(subject: Subject) -> str:
    """Cut after the middle block; a model with an encoder and a decoder also after the middle block of each.

    Returns:
        ``"ok: 2 stages"``, ``"ok: 2 and 3 stages"``, or ``"refused: <reason>"``.

    Raises:
        VerifyError: the stages compute something else.
        NotApplicable: no block is called once, or nothing comes after it.
    """
    model, batch = subject.given()
    counts, refused = [], []
    for paths in cut_places(model, batch):
        model, batch = subject.given()
        schedule = slapo.create_schedule(model)
        for path in paths:
            schedule[path].pipeline_split()
        try:
            slapo.verify(schedule, batch, optimizer_steps=1)
        except TraceError as error:
            refused.append(f"after {' and '.join(paths)}: {error.message}")
        else:
            counts.append(str(len(paths) + 1))
    if refused:
        return f"refused: {'; '.join(refused)}"
    return f"ok: {' and '.join(counts)} stages"


def cut_places(model: nn.Module, batch: Any) -> list[list[str]]:
    """Modules to cut after: the middle one of the blocks that the batch reaches, and one in each of two stacks.

    Raises:
        NotApplicable: fewer than two blocks are called once.
    """
    once = _called_once(model, batch, blocks(model))
    if len(once) < 2:
        raise NotApplicable("fewer than two blocks are called, and called once")
    places = [[once[(len(once) - 1) // 2]]]
    if bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)):
        stacks: dict[str, list[str]] = {}
        for path in once:
            stacks.setdefault(path.rpartition(".")[0], []).append(path)
        middles = [stack[(len(stack) - 1) // 2] for stack in stacks.values() if len(stack) > 1]
        if len(middles) > 1:
            places.append([middles[0], middles[-1]])
    return places


def is_causal_lm(name: str) -> bool:
    """Whether the architecture is one of transformers' models for causal language modeling."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    from tests.integration.zoo.subjects import subject

    return not name.startswith("torch: ") and known.get(name) == subject(name).model


def _called_once(model: nn.Module, batch: Any, paths: list[str]) -> list[str]:
    """In the order of their calls."""
    calls: list[str] = []
    handles = [
        model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: calls.append(path)) for path in paths
    ]
    with torch.no_grad():
        call(model, batch)
    for handle in handles:
        handle.remove()
    return [path for path in calls if calls.count(path) == 1]


PIPELINES = {"pipeline": cut_verifies}
