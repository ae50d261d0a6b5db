"""Refuse optimizers of parameters from before a step, and warn about shards."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from slapo_core.errors import OptimizerError, warn_user
from slapo_core.internals import journal, module_index
from slapo_runtime.correspondence.storage import OWN_STORAGE
from slapo_runtime.weights.optimizer import BY_PARAMETER, warn_of_lost_updates


class ExchangedParameters:
    """The parameters that steps of live schedules exchanged, as weak references.

    Attributes:
        taken: removed parameter -> its model (weakly) and full name.
        put: new parameter -> whether its shape differs from the removed one's.
        checked: optimizer -> ``count`` and the number of its groups at its last check.
    """

    _BY_FULL_TENSORS = {**BY_PARAMETER, "torch": (*BY_PARAMETER["torch"], "LBFGS")}

    def __init__(self) -> None:
        self.taken: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.put: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self.count = 0

    def note(self, model: nn.Module, entry: journal.JournalEntry, *, undone: bool) -> None:
        """Note the parameters that an edit of ``model`` or its undo exchanges."""
        for name, old, new in _exchanged(entry):
            out, into = (new, old) if undone else (old, new)
            self._take(model, name, out)
            if into is not None:
                self.taken.pop(into, None)
                self.put[into] = not undone and old is not None and old.shape != into.shape

    def note_distributed(self, model: nn.Module, before: dict[str, nn.Parameter]) -> None:
        """Note the parameters ``before`` fully_shard, by name; the new ones not: ``to()`` swaps none with a weakref."""
        for name, parameter in model.named_parameters():
            if before[name] is not parameter:
                self._take(model, name, before[name])

    def _take(self, model: nn.Module, name: str, out: nn.Parameter | None) -> None:
        if not self.count:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            register_optimizer_step_pre_hook(self.before_step)  # for good: torch iterates over these hooks
        self.count += 1
        if out is not None:
            self.put.pop(out, None)
            self.taken[out] = (weakref.ref(model), name)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Check an optimizer before its first step, and after further schedule steps or groups."""
        if torch.compiler.is_compiling() or not self.taken:
            return
        now = (self.count, len(optimizer.param_groups))
        if self.checked.get(optimizer) == now:
            return
        kind, held = type(optimizer).__name__, [p for group in optimizer.param_groups for p in group["params"]]
        taken: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for parameter in held:
            reference, name = self.taken.get(parameter, (None, ""))
            model = reference() if reference is not None else None
            if model is not None:
                taken.setdefault(model, {})[name] = parameter
        for model, found in taken.items():
            self._refuse_stale(kind, held, model, found)
        by_full = kind in self._BY_FULL_TENSORS.get(type(optimizer).__module__.partition(".")[0], ())
        if by_full and OWN_STORAGE not in vars(optimizer):
            shards = [p for p in held if self.put.get(p)]
            if shards:
                warn_user(
                    f"{kind} computes its steps from full tensors, but {len(shards)} of its parameters are shards, "
                    f"e.g. of shape {tuple(shards[0].shape)}: training differs from the reference model; element-wise "
                    "optimizers (AdamW, SGD) do not have this problem",
                )
        if any(self.put.get(p) for p in held) and optimizer not in self.checked:
            optimizer.register_state_dict_pre_hook(_warn_of_shards)
        warn_of_lost_updates(optimizer, stacklevel=4)
        self.checked[optimizer] = now

    def _refuse_stale(
        self, kind: str, held: list[nn.Parameter], model: nn.Module, taken: dict[str, nn.Parameter]
    ) -> None:
        present, own = dict(model.named_parameters()), {id(p) for p in held}
        live = {id(p) for p in present.values()}
        gone = {name: p for name, p in taken.items() if id(p) not in live}  # a step may have moved it within the model
        trained = {n: p for n, p in present.items() if p.requires_grad and id(p) not in own}
        missing = {n: p for n, p in trained.items() if n in gone or p in self.put}
        if not gone or not missing:
            return
        name = next((name for name in gone if name in missing), next(iter(gone)))
        there = f"of shape {tuple(missing[name].shape)} " if name in missing else ""
        raise OptimizerError(
            f"this {kind} holds {len(gone)} parameters that are no longer in the {type(model).__name__}: '{name}' of "
            f"shape {tuple(gone[name].shape)} was replaced by a step, by undo or by fully_shard, and the new parameter "
            f"{there}is not in the optimizer: it would never change",
            hint="make the optimizer after the last step and fully_shard: "
            f"torch.optim.{kind}(sch.model.parameters(), ...); or pass a "
            f"factory: slapo.build(sch, optimizer=lambda params: torch.optim.{kind}(params, ...))",
        )


def _warn_of_shards(optimizer: torch.optim.Optimizer) -> None:
    """Warn before ``optimizer.state_dict()`` that it gives shards."""
    warn_user(
        f"state_dict() of this {type(optimizer).__name__} gives the state of this rank's shards, which no other rank "
        "or mesh can load; slapo.optimizer_state_dict(sch, optimizer) gives full tensors by the reference model's "
        "names; of a built model, engine.save(directory) saves them",
    )


def _exchanged(entry: journal.JournalEntry) -> list[tuple[str, nn.Parameter | None, nn.Parameter | None]]:
    """Return ``(full name, old, new)`` of each exchanged parameter."""
    if isinstance(entry, journal.SetTensor):
        old, new = (tensor if isinstance(tensor, nn.Parameter) else None for tensor in (entry.old, entry.new))
        return [(module_index.full_name(*entry.sites[0]), old, new)]
    if not isinstance(entry, journal.ReplaceModule):
        return []
    before, after = dict(entry.old.named_parameters()), dict(entry.new.named_parameters())
    kept = {id(p) for p in before.values()} & {id(p) for p in after.values()}
    out = [(module_index.full_name(entry.path, name), p, None) for name, p in before.items() if id(p) not in kept]
    return [
        *out,
        *((module_index.full_name(entry.path, name), None, p) for name, p in after.items() if id(p) not in kept),
    ]


# Weak references to models, without plugins or settings: an entry goes with its model.
EXCHANGED = ExchangedParameters()
