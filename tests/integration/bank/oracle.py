"""Whether a schedule changes any number, found by plain code that shares nothing with ``slapo.verify``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import slapo_core as slapo
from tests.integration.bank.models import batch_of, make_model
from tests.integration.bank.steps import Right, Step, apply_steps

__all__ = ["changes", "observe"]

_CLOSE = 1e-7
_RATE = 1e-3


def observe(right: Right, steps: Sequence[Step], rank: int, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """Outputs, gradients, weights and buffers of a scheduled model in training and evaluation, with dropout off.

    In double precision batches of two, one and four, with gradients and without, and two steps of plain SGD; in the
    model's own type one batch. A model of bfloat16 runs in that only.
    """
    seen: dict[str, Tensor] = {}
    own = options.get("dtype", "float32")
    for dtype in (own,) if own == "bfloat16" else ("float64", own):
        sch = slapo.create_schedule(make_model(right.model, **options), mesh={"tp": right.ranks})
        apply_steps(sch, steps, rank)
        model = _without_dropout(sch.model).to(getattr(torch, dtype))
        with _default(dtype):
            for name, value in _run(model, right, dtype, sizes=(2, 1, 4) if dtype == "float64" else (2,)).items():
                seen[f"{name} in {dtype}"] = value
    return seen


def changes(right: Mapping[str, Tensor], wrong: Mapping[str, Tensor]) -> str | None:
    """The first number that is another one; None if all agree."""
    for name in [*right, *(extra for extra in wrong if extra not in right)]:
        if name not in wrong or name not in right:
            return f"{name} is {'missing' if name in right else 'new'}"
        before, after = right[name].double(), wrong[name].double()
        if before.shape != after.shape:
            return f"{name} has shape {tuple(after.shape)}, not {tuple(before.shape)}"
        close = {"float64": _CLOSE, "float32": 1e-4, "bfloat16": 5e-2}[name.rpartition(" ")[2]]
        scale = float(before.abs().nan_to_num().max()) if before.numel() else 0.0
        largest = max(
            (float(v.abs().max()) for n, v in right.items() if n.startswith("gradient") and v.numel()), default=0.0
        )
        floor = close * 1e-2 * largest if name.startswith("gradient") else 1e-12
        worst = float((before - after).abs().nan_to_num(nan=float("inf")).max()) if before.numel() else 0.0
        if worst > close * scale + floor:
            return f"{name} differs by {worst:.2g} (largest element {scale:.2g})"
    return None


def _run(model: nn.Module, right: Right, dtype: str, *, sizes: Sequence[int]) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    for size in sizes:
        model.zero_grad(set_to_none=True)
        seen.update(_forward(model, right, dtype, size, f"of a batch of {size}"))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                seen[f"gradient {name} of a batch of {size}"] = parameter.grad.clone()
    model.zero_grad(set_to_none=True)
    seen.update(_evaluated(model, right, dtype, "before"))
    for number in range(2 if dtype == "float64" else 0):  # steps make much of roundings
        _forward(model, right, dtype, 2, "")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= _RATE * parameter.grad
        model.zero_grad(set_to_none=True)
        seen.update(_evaluated(model, right, dtype, f"after step {number + 1}"))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        seen[f"value {name}"] = tensor.detach().clone()
    return seen


def _forward(model: nn.Module, right: Right, dtype: str, size: int, called: str) -> dict[str, Tensor]:
    model.train()
    outputs = _tensors(_call(model, batch_of(right.model, right.form, dtype=dtype, size=size)))
    generator = torch.Generator().manual_seed(5)
    total = sum(
        (value * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)).sum()
        for value in outputs.values()
        if value.requires_grad
    )
    if isinstance(total, Tensor):
        total.backward()
    return {f"output {name} {called}": value.detach().clone() for name, value in outputs.items()}


def _evaluated(model: nn.Module, right: Right, dtype: str, called: str) -> dict[str, Tensor]:
    model.eval()
    found = {}
    for form in dict.fromkeys((right.form, "ids")):
        with torch.no_grad():
            outputs = _tensors(_call(model, batch_of(right.model, form, dtype=dtype)))
        found.update({f"evaluated {name} of {form} {called}": value.clone() for name, value in outputs.items()})
    return found


def _call(model: nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def _tensors(output: Any) -> dict[str, Tensor]:
    items = output.items() if isinstance(output, Mapping) else enumerate(output)
    return {str(key): value for key, value in items if isinstance(value, Tensor) and value.is_floating_point()}


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout"):
            if isinstance(module.__dict__.get(name), float):
                setattr(module, name, 0.0)
    return model


@contextlib.contextmanager
def _default(dtype: str) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        yield
    finally:
        torch.set_default_dtype(before)
