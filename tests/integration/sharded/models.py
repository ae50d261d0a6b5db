"""The models that are sharded over replicas, and their training in one process, in float64."""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tests.integration.pipelines.models import FAMILIES, LENGTH, WORDS

__all__ = ["MAX_GRAD_NORM", "STEPS", "SUBJECTS", "Batch", "Subject", "Trained", "adamw", "train_plain"]

Batch = dict[str, torch.Tensor]
STEPS, SAMPLES, MAX_GRAD_NORM = 3, 16, 0.05
CAUSAL = ("gpt2", "llama")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


@dataclass(frozen=True)
class Subject:
    """A model to train.

    Args:
        family: e.g. ``"bert"``.
        is_tied: whether embeddings and head share their weight.
        is_frozen: whether some parameters are not trained: those of a whole block, and one of another block.
        labels: whether the model computes its loss, of labels, in float32; else the trainer does, in float64.
        is_padded: whether samples have fewer tokens, each another number.
    """

    family: str
    is_tied: bool = False
    is_frozen: bool = False
    labels: bool = False
    is_padded: bool = False

    @property
    def blocks(self) -> tuple[str, ...]:
        """Their paths, in the order in which they run."""
        if self.family == "wide_resnet":
            return ("layer1.0", "layer1.1", "layer2.0", "layer3.0", "layer4.0")
        paths = FAMILIES[self.family].blocks
        return paths[:2] + paths[len(paths) // 2 :][:2] if self.family == "t5" else paths[:4]

    def make(self) -> nn.Module:
        """The model with its first values, the same in every process, in training mode."""
        if self.family == "wide_resnet":
            torch.manual_seed(5)
            model: nn.Module = _tests_of_models().WideResNet((2, 1, 1, 1))
        else:
            deep: Any = FAMILIES[self.family].make()
            config = copy.deepcopy(deep.config)
            config._attn_implementation = "eager"
            config.tie_word_embeddings = self.is_tied
            if self.family == "t5":
                config.num_layers = config.num_decoder_layers = 2
            else:
                config.num_hidden_layers = 4
            torch.manual_seed(5)
            model = type(deep)(config)
        if self.is_frozen:
            model.get_submodule(self.blocks[0]).requires_grad_(False)
            next(model.get_submodule(self.blocks[1]).parameters()).requires_grad_(False)
        return model.double().train()

    def batch(self, step: int) -> Batch:
        """The samples of a step, for all replicas."""
        draw = torch.Generator().manual_seed(10 + step)
        if self.family in ("vit", "wide_resnet"):
            side, name = (16, "pixel_values") if self.family == "vit" else (64, "x")
            pictures = torch.randn(SAMPLES, 3, side, side, generator=draw, dtype=torch.float64)
            return {name: pictures, "targets": torch.randint(0, 5, (SAMPLES,), generator=draw)}
        ids, targets = torch.randint(3, WORDS, (2, SAMPLES, LENGTH), generator=draw)
        batch = {"input_ids": ids, "labels" if self.labels else "targets": targets}
        if self.family == "t5" and not self.labels:
            batch["decoder_input_ids"] = targets.roll(1, 1)
        if self.is_padded:
            batch["attention_mask"] = torch.ones_like(ids)
            for row in range(SAMPLES):
                kept = 2 + (5 * row + step) % (LENGTH - 1)
                targets[row, kept:], batch["attention_mask"][row, kept:] = -100, 0
        return batch

    def loss(self, output: Any, batch: Batch) -> torch.Tensor:
        """The mean over the tokens of a batch."""
        logits = output if isinstance(output, torch.Tensor) else output["logits"]
        targets = batch["targets"]
        if self.family in CAUSAL:
            logits, targets = logits[:, :-1], targets[:, 1:]
        if targets.dim() == 2:
            logits, targets = logits.flatten(0, 1), targets.flatten()
        return nn.functional.cross_entropy(logits, targets)

    def tokens(self, batch: Batch) -> torch.Tensor:
        """How many a batch has, by which its loss is weighted."""
        targets = batch["labels"] if self.labels else batch["targets"]
        return (targets[:, 1:] if self.family in CAUSAL else targets).ne(-100).sum()

    def inputs(self, batch: Batch) -> Batch:
        return {name: tensor for name, tensor in batch.items() if name != "targets"}


SUBJECTS = ("bert", "gpt2", "llama", "t5", "vit", "wide_resnet")


@functools.cache
def _tests_of_models() -> ModuleType:
    """The module of slapo-models' tests that has the tiny WideResNet."""
    path = Path(__file__).parents[3] / "plugins/slapo-models/tests/families.py"
    spec = importlib.util.spec_from_file_location("slapo_models_families", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Trained:
    """What came out of the training in one process.

    Args:
        losses: of each step, the mean over all tokens.
        norms: of each step, of the gradients before clipping.
        evaluated: the loss after each step, of the same samples in evaluation mode.
        states: the state dict after the last step, of each replica: running statistics are its own.
    """

    losses: list[float]
    norms: list[float]
    evaluated: list[float]
    states: list[dict[str, torch.Tensor]]


@functools.cache
def train_plain(subject: Subject, replicas: int, count: int, *, clips: bool) -> Trained:
    """Train a model without slapo: on all samples at once, but where batch norms see those of a micro-batch.

    Args:
        subject: what is trained.
        replicas: that share the samples of a step.
        count: of micro-batches, of each replica.
        clips: whether gradients are clipped.
    """
    model = subject.make()
    optimizer = adamw([one for one in model.parameters() if one.requires_grad])
    buffers = [{name: one.clone() for name, one in model.named_buffers()} for _ in range(replicas)]
    found = Trained([], [], [], [])
    parts = (replicas, count) if subject.family == "wide_resnet" else (1, 1)
    for step in range(STEPS):
        optimizer.zero_grad()
        found.losses.append(sum(_backward(model, subject, step, buffers, parts)))
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM if clips else float("inf"))
        assert norm > 2 * MAX_GRAD_NORM, norm
        found.norms.append(float(norm))
        optimizer.step()
        with torch.no_grad():
            model.eval()
            found.evaluated.append(float(sum(_losses(model, subject, step, buffers, (parts[0], 1)))))
            model.train()
    for own in buffers:
        model.load_state_dict(own, strict=False)
        found.states.append({name: one.clone() for name, one in model.state_dict().items()})
    return found


def _backward(
    model: nn.Module, subject: Subject, step: int, buffers: list[Batch], parts: tuple[int, int]
) -> Iterator[float]:
    for loss in _losses(model, subject, step, buffers, parts):
        loss.backward()
        yield float(loss.detach())


def _losses(
    model: nn.Module, subject: Subject, step: int, buffers: list[Batch], parts: tuple[int, int]
) -> Iterator[torch.Tensor]:
    """The losses of parts of a batch, each with its share of the mean."""
    batch, (replicas, count) = subject.batch(step), parts
    for number in range(replicas * count):
        piece = {name: tensor.chunk(replicas * count)[number] for name, tensor in batch.items()}
        own = buffers[number // count]
        if replicas > 1:
            model.load_state_dict(own, strict=False)
        output = model(**subject.inputs(piece))
        loss = output.loss if subject.labels else subject.loss(output, piece)
        own.update({name: one.clone() for name, one in model.named_buffers()})
        yield loss * subject.tokens(piece) / subject.tokens(batch)
