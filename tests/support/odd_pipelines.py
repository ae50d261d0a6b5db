"""A small model of which values of every kind cross the cuts, and its training by hand: for tests of dialects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import slapo_core as slapo

__all__ = ["Net", "Run", "adamw", "batch", "differences"]

MAX_GRAD_NORM = 0.5


class Net(nn.Module):
    """Cut after ``b`` and ``c``: what is made before ``b`` ends is used by later stages, past others.

    Args:
        dropout: of the three layers.
        tied: whether the last layer has the weight of the first one.
    """

    def __init__(self, dropout: float = 0.0, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(11, 4)
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(4, 4) for _ in range(5))
        self.scale = nn.Parameter(torch.tensor(0.5))  # crosses without axes
        self.table = nn.Parameter(torch.randn(6, 4))
        self.drop = nn.Dropout(dropout)
        if tied:
            self.e.weight = self.a.weight

    def forward(self, ids: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        is_masked = ids > 4  # booleans
        soft = (ids.float() * 0.1).unsqueeze(-1)  # a float without a gradient
        turning = torch.polar(soft.squeeze(-1), soft.squeeze(-1))  # complex, without
        h = self.drop(self.a(self.emb(ids) + x))
        mean = h.mean() * self.scale  # without axes
        turned = h.transpose(1, 2).clone()  # not contiguous
        spectrum = torch.fft.rfft(h, dim=-1)  # complex, with a gradient
        small = (h * 3).to(torch.bfloat16)  # of another type, with a gradient
        columns = self.table[:3].t()  # a view of a parameter
        unheeded = h * 2  # with a gradient, which nothing gives back
        h = self.b(h)
        h = h + torch.fft.irfft(spectrum, n=4, dim=-1) + mean
        h = self.drop(self.c(h)) * soft
        h = h.masked_fill(is_masked.unsqueeze(-1), 0.0) + turned.transpose(1, 2) + small.float() @ torch.ones(4, 4)
        turned.mul_(0.5)  # of what was received
        h = self.d(h) + turned.sum() + unheeded.detach()
        h = self.drop(self.e(h + columns.t().sum(0) + mean + turning.real.unsqueeze(-1) + ids.unsqueeze(-1)))
        return ((h - y) ** 2).mean()


def batch(samples: int, seed: int, length: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 11, (samples, length), generator=generator),
        "x": torch.randn(samples, length, 4, generator=generator),
        "y": torch.randn(samples, length, 4, generator=generator),
    }


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.01)


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        mesh: its sizes.
        cuts: after which modules.
        micro_batches: of a step.
        frozen: names of modules and parameters that are not trained.
        config: of DeepSpeed, beside the number of micro-batches and clipping.
        options: of ``build``, beside those, the optimizer and the target.
        target: of ``build``.
        tied: see :class:`Net`.
        before: called with the schedule before it is built.
        forms: samples of a micro-batch and their length, by step; every other form of a batch has stages of its own.
    """

    mesh: Mapping[str, int]
    cuts: Sequence[str] = ("b", "c")
    micro_batches: int = 2
    frozen: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    before: Callable[[slapo.Schedule], None] | None = None
    forms: Sequence[tuple[int, int]] = ((1, 5), (1, 5))
    options: Mapping[str, Any] = field(default_factory=dict)
    target: str = "deepspeed"

    def model(self) -> Net:
        model = Net(tied=self.tied)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(name == one or name.startswith(f"{one}.") for one in self.frozen))
        return model

    def build(self, **options: Any) -> Any:
        sch = slapo.create_schedule(self.model(), mesh=dict(self.mesh), example_inputs=batch(1, 0))
        for path in self.cuts:
            sch[path].pipeline_split()
        if self.before is not None:
            self.before(sch)
        given: dict[str, Any] = {} if "optimizer" in self.config else {"optimizer": adamw}
        if self.target == "deepspeed":
            sizes = {"gradient_accumulation_steps": self.micro_batches, "gradient_clipping": MAX_GRAD_NORM}
            given["config"] = {**sizes, **self.config}
        else:
            given |= {"microbatches": self.micro_batches, "max_grad_norm": MAX_GRAD_NORM}
        return slapo.build(sch, target=self.target, **{**given, **self.options, **options})


def differences(run: Run, tolerance: float = 2e-6) -> list[str]:
    """What this rank's engine does otherwise than the reference model."""
    engine, model = run.build(), run.model()
    optimizer = adamw(model.parameters())
    found = []

    def compare(what: str, one: torch.Tensor, other: torch.Tensor) -> None:
        if not torch.allclose(one.detach().float(), other.detach().float(), rtol=tolerance, atol=tolerance):
            found.append(f"{what}: {one} instead of {other}")

    for step, (samples, length) in enumerate(run.forms):
        given = batch(run.micro_batches * samples, step, length)
        result = engine.train_step(given)
        optimizer.zero_grad()
        compare(f"the loss of step {step}", result.loss, _backward(model, given, run.micro_batches))
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        compare(f"the norm of step {step}", result.grad_norm, norm)
        optimizer.step()
        if (samples, length) in run.forms[:step]:
            continue
        given = batch(run.micro_batches, 50 + step, length)
        evaluated = copy.deepcopy(model).eval()
        compare(f"evaluation {step}", engine.eval_step(given).loss, _backward(evaluated, given, run.micro_batches))
    wanted = dict(model.named_parameters(remove_duplicate=False))
    own = dict(engine.module.named_parameters(remove_duplicate=False))
    assert own
    for name, parameter in own.items():
        compare(name, parameter, wanted[name])
    state = engine.state_dict()
    for name, tensor in model.state_dict().items():
        compare(f"'{name}' of the state", state[name], tensor)
    engine.close()
    return found


def _backward(model: nn.Module, given: Mapping[str, torch.Tensor], count: int) -> torch.Tensor:
    losses = []
    for number in range(count):
        loss = model(**{name: tensor.chunk(count)[number] for name, tensor in given.items()})
        (loss / count).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()
