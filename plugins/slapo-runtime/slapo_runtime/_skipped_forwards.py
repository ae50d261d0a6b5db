"""Find code that bypasses a module's forward, and the steps around it."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import MeshError, warn_user
from slapo_core.internals import Internals, copies, has_steps
from slapo_runtime.losses import graph_of, is_leaf
from slapo_runtime.private import HOOK_TABLES, is_compiled, tree_leaves

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_core.internals import forwards


_FOR_TRL = "class MyTrainer(slapo_transformers.ScheduledTrainerMixin, SFTTrainer)"


def warn_of_skipped_steps(model: nn.Module, own: Any, *, stacklevel: int) -> None:
    """Warn of a later forward of the root that does not call the steps' forward.

    Args:
        model: the root.
        own: the forward of the steps; None if it was garbage-collected.
        stacklevel: of the user's call.
    """
    if own is not None and (vars(model).get("forward") is own or copies.is_called_through(own, model)):
        return
    warnings.warn(_skipped_steps(model), stacklevel=stacklevel + 1)


def _skipped_steps(model: nn.Module) -> str:
    return (
        f"a forward was set on this {type(model).__name__} after steps at its root, and does not call the forward of "
        "these steps, which do not run\n"
        "  hint: set it before slapo.create_schedule(model), or apply the steps below the root: "
        f"sch['*'].checkpoint(); for TRL's trainers: {_FOR_TRL}"
    )


class OwnForward:
    """Notice in one forward whether a later forward of the root, which holds that of the steps, calls it.

    Args:
        model: the root, about to run.
        own: the forward of the steps; None if it was garbage-collected.
    """

    def __init__(self, model: nn.Module, own: Any) -> None:
        self._model, self._stack, self._ran = model, contextlib.ExitStack(), True
        is_other = own is not None and vars(model).get("forward") is not own
        if is_other and copies.is_called_through(own, model, itself=True):
            self._ran = False
            self._stack.enter_context(own.called_through(self._noticed))

    def _noticed(self, forward: Any) -> Any:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._ran = True
            return forward(*args, **kwargs)

        return run

    def end(self, *, has_run: bool) -> None:
        """Warn if it did not; ``has_run`` unless the forward raised."""
        self._stack.close()
        if has_run and not self._ran:
            warn_user(_skipped_steps(self._model))


def head_of(model: nn.Module) -> nn.Module | None:
    """Return the head of a model of transformers, which the loops of hosts read past its module."""
    with contextlib.suppress(AttributeError, NotImplementedError):
        found: Any = model.get_output_embeddings()  # type: ignore[operator]
        return found if isinstance(found, nn.Module) else None
    return None


class ForwardWatch:
    """Record the modules with hooks of steps, and the head with steps, that run in one training forward.

    Compiled modules, modules inside of a compiled one, and modules inside of one with a replaced forward are left out:
    their calls cannot be counted.

    Args:
        schedule: its model is about to run.
    """

    slapo_only_looks = True  # it changes nothing: stages of a pipeline may do without it

    def __init__(self, schedule: Schedule) -> None:
        self._model = schedule.model
        countable, calls = dict(_countable(self._model)), Internals(schedule).tree.calls
        head = head_of(self._model)
        self._synced = {
            path: one
            for path, one in countable.items()
            if path and (_runs_hooks_of_steps(one, calls) or (one is head and has_steps(one)))
        }
        self._owners: dict[int, list[nn.Module]] = {}
        for module in self._model.modules() if self._synced else ():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append(module)
        tied = {id(owner) for owners in self._owners.values() if len(owners) > 1 for owner in owners}
        self._calls: Counter[int] = Counter()
        self._watched = {id(one): one for path, one in countable.items() if path in self._synced or id(one) in tied}
        self._handles = [one.register_forward_pre_hook(self, prepend=True) for one in self._watched.values()]

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._calls[id(module)] += 1

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def check(self, output: Any) -> None:
        """Refuse an output with contributions of a parameter whose module did not run.

        Args:
            output: of the forward, or the loss.

        Raises:
            MeshError: the module and the parameter are named.
        """
        skipped = {path: module for path, module in self._synced.items() if not self._calls[id(module)]}
        if not skipped:
            return
        inside = {id(module) for one in skipped.values() for module in one.modules()}
        uses = _uses(output)
        for path, module in skipped.items():
            for name, parameter in module.named_parameters():
                others = [one for one in self._owners[id(parameter)] if id(one) not in inside]
                if not all(id(one) in self._watched for one in others):
                    continue
                if uses[id(parameter)] > sum(self._calls[id(one)] for one in others):
                    raise MeshError(
                        f"the forward of '{path}' did not run, but its '{name}' contributes to the output: code that "
                        "reads the parameter skips the steps at the module, and reads a shard where they split it",
                        hint=f"call the module: model.{path}(...); for a loss fused with the head, or another forward "
                        f"that reads the parameter, leave out the steps at '{path}'; for TRL's trainers: {_FOR_TRL}",
                    )


def _countable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose calls can be counted by hooks, by path."""
    hidden: tuple[str, ...] = ()  # below modules whose calls may be compiled, or a graph
    for path, module in model.named_modules():
        if path.startswith(hidden):
            continue
        forward = module.__dict__.get("forward")
        if not path:
            is_wrapped = bool(getattr(forward, "wrappers", None)) or hasattr(forward, "_torchdynamo_orig_callable")
            if is_compiled(module) or is_wrapped:
                return
        elif forward is not None or is_compiled(module):
            hidden = (*hidden, f"{path}.")
        if not is_compiled(module):
            yield path, module


def _runs_hooks_of_steps(module: nn.Module, calls: forwards.CallTable) -> bool:
    functions = [function for _, function in calls.hooks(module)]
    tables = [getattr(module, tables[0]).values() for tables in HOOK_TABLES.values()] if functions else []
    return any(hook in functions for table in tables for hook in table)


def _uses(output: Any) -> Counter[int]:
    """Count how often each leaf of an output's graph is used, by its identity."""
    found: Counter[int] = Counter()
    seen: set[Any] = set()
    for leaf in tree_leaves([output, vars(output) if hasattr(output, "__dict__") else None]):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            for node in graph_of(leaf, seen):
                found.update(id(one.variable) for one, _ in node.next_functions if one is not None and is_leaf(one))
    return found
