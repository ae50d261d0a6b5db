"""Optimisers that hold parameters which a step took out of its model: they would train nothing, without a word.

Steps of a live schedule note which parameters they take out and which they put in; an optimiser is looked at before its
first step, and again only when steps came or went since, or it got another group. Everything is held weakly.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from slapo_core.errors import OptimizerError
from slapo_core.tree.index import full_name
from slapo_core.tree.journal import Entry, ReplaceModule, SetTensor

__all__ = ["note_exchange"]


@dataclass
class _Exchanges:
    """What the live schedules of this process did: about parameters, and gone with them."""

    taken: WeakIdKeyDictionary  # parameter -> (weak reference to its model, its full name)
    put: WeakIdKeyDictionary  # parameter -> whether it has another shape than the one it came for
    looked_at: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]]
    is_watching: bool = False  # from the first exchange on: torch iterates over its hooks when they run, so they stay
    count: int = 0


# As in scheduled_models.py: about models and not about plugins or settings, so nothing leaks from test to test.
_EXCHANGES = _Exchanges(WeakIdKeyDictionary(), WeakIdKeyDictionary(), weakref.WeakKeyDictionary())


def note_exchange(model: nn.Module, entry: Entry, *, undone: bool) -> None:
    """Note which parameters an edit of ``model`` exchanged, when it is made (again) or undone."""
    for name, old, new in _exchanged(entry):
        out, into = (new, old) if undone else (old, new)
        _EXCHANGES.count += 1
        if into is not None:
            _EXCHANGES.taken.pop(into, None)
            _EXCHANGES.put[into] = not undone and old is not None and old.shape != into.shape
        if out is not None:
            _EXCHANGES.put.pop(out, None)
            _EXCHANGES.taken[out] = (weakref.ref(model), name)
            if not _EXCHANGES.is_watching:
                from torch.optim.optimizer import register_optimizer_step_pre_hook

                register_optimizer_step_pre_hook(_before_step)
                _EXCHANGES.is_watching = True


def _exchanged(entry: Entry) -> list[tuple[str, nn.Parameter | None, nn.Parameter | None]]:
    """``(full name, taken out, put in)`` of each parameter."""
    if isinstance(entry, SetTensor):
        return [(full_name(*entry.sites[0]), _parameter(entry.old), _parameter(entry.new))]
    if not isinstance(entry, ReplaceModule):
        return []
    before, after = dict(entry.old.named_parameters()), dict(entry.new.named_parameters())
    kept = {id(p) for p in before.values()} & {id(p) for p in after.values()}
    out = [(full_name(entry.path, name), p, None) for name, p in before.items() if id(p) not in kept]
    return [*out, *((full_name(entry.path, name), None, p) for name, p in after.items() if id(p) not in kept)]


def _parameter(tensor: torch.Tensor | None) -> nn.Parameter | None:
    return tensor if isinstance(tensor, nn.Parameter) else None


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before a step of any optimiser in this process."""
    if torch.compiler.is_compiling() or not _EXCHANGES.taken:
        return
    now = (_EXCHANGES.count, len(optimizer.param_groups))
    if _EXCHANGES.looked_at.get(optimizer) == now:
        return
    _refuse_stale(optimizer)
    _warn_of_pieces(optimizer)
    _EXCHANGES.looked_at[optimizer] = now


def _refuse_stale(optimizer: torch.optim.Optimizer) -> None:
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    taken: dict[int, tuple[nn.Module, dict[str, nn.Parameter]]] = {}
    for parameter in held.values():
        reference, name = _EXCHANGES.taken.get(parameter, (None, ""))
        model = reference() if reference is not None else None
        if model is not None:
            taken.setdefault(id(model), (model, {}))[1][name] = parameter
    for model, found in taken.values():
        present = dict(model.named_parameters())
        kept = {id(p) for p in present.values()}  # a step put it elsewhere in the model
        gone = {name: p for name, p in found.items() if id(p) not in kept}
        missing = {
            name: p for name, p in present.items() if p.requires_grad and id(p) not in held and p in _EXCHANGES.put
        }
        if gone and missing:
            raise _refusal(type(optimizer).__name__, model, gone, missing)


_BY_WHOLE_TENSORS = ("Adafactor", "LBFGS", "Muon")
"""torch's own optimisers that do not go by single elements: of a piece they compute another step than of the whole."""


def _warn_of_pieces(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer).__name__
    if kind not in _BY_WHOLE_TENSORS or not type(optimizer).__module__.startswith("torch.optim"):
        return
    held = [p for group in optimizer.param_groups for p in group["params"] if _EXCHANGES.put.get(p)]
    if held:
        warnings.warn(
            f"{kind} computes its steps from whole tensors, and {len(held)} of its parameters are pieces, such as one "
            f"of shape {tuple(held[0].shape)}: it trains otherwise than it would train the untouched model; optimisers "
            "that go by single elements, such as AdamW or SGD, do not",
            stacklevel=5,
        )


def _refusal(
    kind: str, model: nn.Module, gone: dict[str, nn.Parameter], missing: dict[str, nn.Parameter]
) -> OptimizerError:
    name = next((name for name in gone if name in missing), next(iter(gone)))
    there = f"of shape {tuple(missing[name].shape)} " if name in missing else ""
    return OptimizerError(
        f"this {kind} holds {len(gone)} parameters that are no longer in the {type(model).__name__}, and none of what "
        f"stands there now: '{name}' of shape {tuple(gone[name].shape)} was taken out by a step of its schedule, or "
        f"came back by undo, and what is trained there now {there}is not in the optimiser: it would never change",
        hint=f"make the optimiser after the last step: torch.optim.{kind}(sch.model.parameters(), ...); or pass a "
        f"factory: slapo_core.build(sch, optimizer=lambda params: torch.optim.{kind}(params, ...))",
    )
