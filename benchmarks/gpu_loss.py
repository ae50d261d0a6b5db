"""The loss of a large vocabulary, by each implementation of ``linear_cross_entropy``; a part of gpu.py."""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from report import device_seconds, in_turn, ratio_of
from torch import Tensor, nn

import slapo_core as slapo

if TYPE_CHECKING:
    from gpu import Run

SHAPES = [(16_384, 248_320, 2_048), (8_192, 128_256, 2_048), (8_192, 151_936, 1_024)]
"""Tokens, classes, features."""

IMPLEMENTATIONS = ("chunked", "torch", "liger", "cce")


class Head(nn.Module):
    """The end of a causal language model, as transformers writes it."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.lm_head = nn.Linear(features, classes, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(hidden)
        return {"loss": F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1)), "logits": logits}


def large_vocabulary(run: Run) -> None:
    """Forward and backward of a head and its loss: plain, and with the step by each implementation."""
    rows: list[dict[str, Any]] = []
    for shape in [(64, 512, 32)] if run.small else SHAPES:
        rows += _shape(run, rows, *shape)
        run.keep(rows)


def _shape(run: Run, before: list[dict[str, Any]], tokens: int, classes: int, features: int) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], Tensor]] = {}
    torch.manual_seed(0)
    with run.device:
        weight = torch.randn(classes, features, dtype=torch.bfloat16).mul_(features**-0.5)
        hidden = torch.randn(1, tokens, features, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(0, classes, (1, tokens))
    expected: Tensor | None = None
    for variant in ("plain", *IMPLEMENTATIONS):
        row = found[variant] = {"tokens": tokens, "classes": classes, "features": features, "variant": variant}
        try:
            step = _step(variant, weight, hidden, labels)
            loss = step()
            expected = loss if expected is None else expected
            torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
            row["peak_bytes"] = _peak(run, step)
            steps[variant] = step
        except Exception as error:  # noqa: BLE001 - is a result
            row["failed"] = run.failure(error)
        run.say(row)
        run.keep([*before, *found.values()])
    measures = {way: functools.partial(device_seconds, run.device, step, 2) for way, step in steps.items()}
    rounds = [in_turn(measures, number) for number in range(3 if run.small else 8)]
    for variant in steps:
        own = [each[variant] for each in rounds]
        found[variant]["seconds"] = statistics.median(own)
        if "plain" in steps:
            found[variant]["against_plain"] = ratio_of([each["plain"] for each in rounds], own)
        run.say(found[variant])
    return list(found.values())


def _step(variant: str, weight: Tensor, hidden: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    """A forward and backward; all variants share the weight, and each frees its gradients."""
    with torch.device("meta"):
        model = Head(weight.shape[1], weight.shape[0])
    model.lm_head.weight = nn.Parameter(weight)
    if variant != "plain":
        slapo.create_schedule(model)["lm_head"].linear_cross_entropy(implementation=variant)

    def step() -> Tensor:
        loss: Tensor = model(hidden, labels)["loss"]
        torch.autograd.grad(loss, [hidden, model.lm_head.weight])
        return loss.detach()

    return step


def _peak(run: Run, step: Callable[[], Tensor]) -> int:
    """The most memory of a step, with weight and hidden states; 0 on a CPU."""
    if run.device.type != "cuda":
        step()
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(run.device)
    step()
    return torch.cuda.max_memory_allocated(run.device)
