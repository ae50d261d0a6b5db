"""Right schedules: parts of each model in several orders, over two and four ranks, with other steps beside them."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn

from tests.integration.bank.models import MODELS
from tests.integration.bank.places import BLOCKS, NORMS
from tests.integration.bank.splits import parts_of, sequence_parallel
from tests.integration.bank.steps import Right, step

__all__ = ["base", "right_schedules"]

FORMS = ("labels", "ids", "mask")


def base(model: str, kind: str = "whole", **options: Any) -> Right:
    """A right schedule that mistakes are made of.

    Args:
        model: its name.
        kind: ``"whole"`` (all parts), ``"each"`` (the gradient is summed at each column), ``"layers"`` (attentions and
            MLPs only), ``"sequence"`` (sequence parallel).
        options: of the model.
    """
    if kind == "sequence":
        steps = sequence_parallel(model)
    else:
        parts = parts_of(model, around=kind != "each")
        chosen = [name for name in parts if kind != "layers" or name.startswith(("attention", "mlp", "cross"))]
        steps = [each for name in chosen for each in parts[name]]
    if not options.get("dropout"):
        steps = [each for each in steps if each.role != "random"]
    suffix = "".join(f"/{getattr(value, '__name__', f'{name}={value}')}" for name, value in options.items())
    return Right(f"{model}/{kind}{suffix}", model, tuple(steps), options=tuple(options.items()))


@cache
def right_schedules() -> tuple[Right, ...]:
    """Every right schedule, in an order that begins with one of each kind."""
    found = [right for model in MODELS for right in _of(model)]
    assert len({right.name for right in found}) == len(found)
    return tuple(found)


def _of(model: str) -> Iterator[Right]:
    yield from _subsets(model)
    yield from _orders(model)
    yield from _with_other_steps(model)
    yield from _wide(model)
    if model in ("llama", "qwen3"):
        for form, dtype in itertools.product(FORMS, ("float32", "bfloat16")):
            right = base(model, "sequence", dtype=dtype)
            yield _like(right, f"{model}/sequence/{form}/{dtype}", form=form)


def _subsets(model: str) -> Iterator[Right]:
    """Every part by itself, only attentions, only MLPs, only one layer, all; the gradient summed in either place."""
    parts = parts_of(model)
    groups: dict[str, list[str]] = {name: [name] for name in parts}
    groups["attentions"] = [name for name in parts if name.startswith("attention")]
    groups["mlps"] = [name for name in parts if name.startswith("mlp")]
    groups["layers"] = [name for name in parts if name.startswith(("attention", "mlp", "cross"))]
    groups["rest"] = [name for name in parts if name not in groups["layers"]]
    groups["first"] = [name for name in parts if name.endswith((".0", "encoder"))]
    groups["all"] = list(parts)
    forms = itertools.cycle(FORMS)
    for group, names in groups.items():
        if not names:
            continue
        for around in (True, False):
            dropout = 0.0 if around else 0.1
            yield _made(
                model, f"{group}/{'around' if around else 'each'}", names, around=around, form=next(forms),
                options={"dropout": dropout},
            )  # fmt: skip
    for dtype, form in itertools.product(("bfloat16", "float64"), FORMS):
        yield _made(model, f"all/{dtype}/{form}", list(parts), form=form, options={"dtype": dtype})


def _orders(model: str) -> Iterator[Right]:
    """The same steps in other orders: the order of parts means nothing, nor that of pairs within them."""
    names = list(parts_of(model))
    yield _made(model, "all/backwards", names[::-1])
    rotated = names[len(names) // 2 :] + names[: len(names) // 2]
    yield _made(model, "all/rotated", rotated)
    right = _made(model, "all/shards first", names)
    steps = [each for each in right.steps if each.call == "shard"] + [e for e in right.steps if e.call != "shard"]
    yield _like(right, right.name, steps=tuple(steps))
    right = _made(model, "all/rows first", names)
    rows = [each for each in right.steps if each.role in ("row", "forward")]
    yield _like(right, right.name, steps=(*rows, *(each for each in right.steps if each not in rows)))


def _with_other_steps(model: str) -> Iterator[Right]:
    """Checkpoints, equal modules, marks, before and behind the splits."""
    names = list(parts_of(model))
    blocks = [path.format(n=number) for path in BLOCKS[model] for number in range(2)]
    checkpoints = tuple(step(path, "checkpoint") for path in blocks)
    norms = tuple(step(NORMS[model].format(n=number), "replace", equal_module) for number in range(2))
    for called, more in (
        ("checkpoint", checkpoints),
        ("checkpoint one", checkpoints[:1]),
        ("equal norms", norms),
        ("equal norm", norms[-1:]),
        ("equal norms and checkpoints", (*norms, *checkpoints)),
    ):
        for dropout in (0.0, 0.1):
            right = _made(model, f"all/{called} before/{dropout}", names, options={"dropout": dropout})
            yield _like(right, right.name, steps=(*more, *right.steps))
            right = _made(model, f"all/{called} behind/{dropout}", names, options={"dropout": dropout}, form="mask")
            yield _like(right, right.name, steps=(*right.steps, *more))
        only = _made(model, f"{called} only", [])
        yield _like(only, only.name, steps=more)
    marked = _made(model, "all/annotated", names)
    yield _like(
        marked, marked.name, steps=(*marked.steps, step(NORMS[model].format(n=0), "annotate", "weight", "decay", False))
    )
    for frozen in ("norms", "tables"):
        yield _made(
            model,
            f"all/frozen {frozen}",
            names,
            options={"prepare": freeze_norms if frozen == "norms" else freeze_tables},
        )
    yield _made(model, "all/hooked", names, options={"prepare": hook_norms})


def _wide(model: str) -> Iterator[Right]:
    """Four ranks: every head by itself."""
    names = [name for name in parts_of(model) if name.startswith(("attention", "mlp", "cross"))]
    for around in (True, False):
        called = f"layers/{'around' if around else 'each'}/4 ranks"
        yield _like(_made(model, called, names, around=around), f"{model}/{called}", ranks=4)
    if model not in ("bert",):
        yield _like(_made(model, "all/4 ranks", list(parts_of(model))), f"{model}/all/4 ranks", ranks=4)


def _made(
    model: str,
    called: str,
    names: list[str],
    *,
    around: bool = True,
    form: str = "labels",
    options: dict[str, Any] | None = None,
) -> Right:
    parts = parts_of(model, around=around)
    options = options or {}
    steps = [each for name in names for each in parts[name] if each.role != "random" or options.get("dropout")]
    return Right(f"{model}/{called}", model, tuple(steps), options=tuple(options.items()), form=form)


def _like(right: Right, name: str, **changes: Any) -> Right:
    return dataclasses.replace(right, name=name, **changes)


def equal_module(old: nn.Module) -> nn.Module:
    """Another module that computes the same."""
    return copy.deepcopy(old)


def freeze_norms(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() != 1)


def freeze_tables(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.requires_grad_(False)


def hook_norms(model: nn.Module) -> None:
    """The author of the model scales the gradients of some parameters that no step touches."""
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name.lower() or "ln_" in name
        if is_norm and parameter.dim() == 1 and "q_norm" not in name and "k_norm" not in name:
            parameter.register_hook(_doubled)


def _doubled(gradient: Any) -> Any:
    return gradient * 2
