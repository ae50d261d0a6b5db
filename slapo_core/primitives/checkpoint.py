"""``checkpoint``: recompute a module's activations in the backward pass instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slapo_core.errors import ApplyError
from slapo_core.observers import Forward
from slapo_core.primitive import Equivalence, Primitive, Violation
from slapo_core.private import buffers_of, children_of, non_persistent_buffers_of
from slapo_core.tree.edit import Edit
from slapo_core.tree.node import Node


@dataclass(frozen=True)
class Checkpoint(Primitive):
    """Keep only the inputs of the module, or of each match, and recompute the rest for gradients.

    Non-reentrant ``torch.utils.checkpoint``: keyword arguments and nested outputs pass through unchanged, and it works
    with ``torch.autograd.grad``, hooks and ``torch.compile``. Without gradients (evaluation) the forward runs directly.
    Buffers that the forward changes (running statistics) are changed once, by the first run.

    Args:
        match: recomputed, each as one region: a match or a list of matches, or a pattern, as for ``find``, of
            which every match is. None: the module's whole forward.
        preserve_rng_state: whether the recompute uses the RNG state of the first run (dropout). False saves
            keeping the RNG state, and is right only for modules that do not use the RNG: other modules would get the
            gradients of another loss. The step then promises EXACT only if the RNG is unused, which ``verify`` checks.

    Raises:
        PreconditionError: the module is checkpointed already, or has no forward of its own; nothing matches.
        ApplyError: a match cannot be taken out of the graph.
        StaleError: an earlier step changed the place of a match.

    rewrite:
        ``y = module(x)`` keeping every activation inside -> ``y = checkpoint(module, x)`` keeping only ``x``

        ``h = f(x); y = g(h)`` keeping ``x`` and ``h`` -> ``y = checkpoint(region, x)`` keeping only ``x``

    Source: paper section 3.2.1, ``.checkpoint()``, and 3.3.1, ``.checkpoint(subgraph)``; ``torch/utils/checkpoint.py``.
    """

    name = "core.checkpoint"
    selections = ("match",)

    match: Any = None
    preserve_rng_state: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.match, bool):  # checkpoint(False), as it was written before there were matches
            object.__setattr__(self, "preserve_rng_state", self.match)
            object.__setattr__(self, "match", None)
        super().__post_init__()

    @property
    def equivalence(self) -> Equivalence:  # type: ignore[override]
        if self.preserve_rng_state:
            return Equivalence.EXACT
        return Equivalence.EXACT.provided("a module checkpointed without its RNG state does not use the RNG")

    def preconditions(self, node: Node) -> Iterator[Violation]:
        from torch import nn

        if self.match is not None:
            return
        if type(node.module).forward is nn.Module.forward and "forward" not in node.module.__dict__:
            yield Violation(
                f"{type(node.module).__name__} has no forward of its own: it is never called",
                f"checkpoint its children: sch['{node.path}.*'].checkpoint()",
            )
        if checkpoints(node):
            yield Violation("the module is checkpointed already", "remove this second call")

    def apply(self, node: Node, edit: Edit) -> None:
        if self.match is not None:
            transform = CheckpointedRegion(self.preserve_rng_state)
            self.match.outline(node, edit, transform, name="checkpointed")
            return
        edit.wrap_forward(
            node, functools.partial(checkpointed, preserve_rng_state=self.preserve_rng_state, path=node.path)
        )

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if self.match is not None:
            return
        if "forward" not in node.module.__dict__ or not checkpoints(node):
            yield Violation("the module's forward is not wrapped")


def checkpoints(node: Node) -> bool:
    """Whether a step put the whole forward of the module under activation checkpointing."""
    return any(isinstance(wrapper, functools.partial) and wrapper.func is checkpointed for wrapper in node.wrappers)


def checkpointed(forward: Forward, *, preserve_rng_state: bool, path: str) -> Forward:
    """``forward`` under activation checkpointing; both take the module first."""
    import torch
    from torch.utils.checkpoint import checkpoint

    @functools.wraps(forward)
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(module, *args, **kwargs)
        _refuse_caches(path, args, kwargs)
        # Arguments travel as one tuple and one dictionary: keywords of the module cannot clash with checkpoint's own,
        # and checkpoint still sees the tensors, from which it learns whose random state to keep.
        call = _FirstRunCounts(module) if _has_buffers([module]) else _call
        return checkpoint(
            call, forward, module, args, kwargs, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )

    return run


checkpointed.slapo_goes_around = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class CheckpointedRegion:
    """Puts regions under activation checkpointing; equal ones make the same of the same.

    Args:
        preserve_rng_state: as of :class:`Checkpoint`.
    """

    preserve_rng_state: bool

    def __call__(self, region: Callable[..., Any]) -> Callable[..., Any]:
        import torch
        from torch import nn
        from torch.utils.checkpoint import checkpoint

        preserve_rng_state = self.preserve_rng_state

        def forward(_holder: Any, *args: Any) -> Any:
            return region(*args)

        @functools.wraps(region)
        def run(*args: Any) -> Any:
            if not torch.is_grad_enabled():
                return region(*args)
            holder = None
            call: Callable[..., Any] = _call
            if _has_buffers([each for each in args if isinstance(each, nn.Module)]):
                holder = _Holder(args)
                call = _FirstRunCounts(holder)
            return checkpoint(
                call, forward, holder, args, {}, use_reentrant=False, preserve_rng_state=preserve_rng_state
            )

        return run


class _Holder:
    """The modules among the arguments of a region, as one."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        from torch import nn

        self._modules = {id(below): below for each in args if isinstance(each, nn.Module) for below in each.modules()}

    def modules(self) -> Iterator[Any]:
        return iter(self._modules.values())


def _has_buffers(modules: list[Any]) -> bool:
    """Return whether one of the modules, or one below, has a buffer; asked at every call, as modules may change."""
    while modules:
        module = modules.pop()
        table = buffers_of(module)
        if table and any(buffer is not None for buffer in table.values()):
            return True
        modules += [child for child in children_of(module).values() if child is not None]
    return False


def _call(forward: Forward, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(module, *args, **kwargs)


class _FirstRunCounts:
    """Call the forward; the recompute sees the buffers of the first run, and its changes to them are dropped.

    Args:
        module: the state in its state dict (running statistics) is copied now; other buffers are constants.
    """

    def __init__(self, module: Any) -> None:
        self._state = {
            id(buffer): buffer.detach().clone()
            for below in module.modules()
            for name, buffer in buffers_of(below).items()
            if buffer is not None and name not in non_persistent_buffers_of(below)
        }
        self._ran = False

    def __call__(self, forward: Forward, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._ran:
            self._ran = True
            return forward(module, *args, **kwargs)
        tables = [buffers_of(below) for below in module.modules() if buffers_of(below)]
        kept = [dict(table) for table in tables]
        # Other tensors in their place: writing to the originals would invalidate what autograd saved of them.
        copies: dict[int, Any] = {}
        for table in tables:
            for name, buffer in table.items():
                if buffer is not None:
                    seen = self._state.get(id(buffer), buffer)
                    table[name] = copies.setdefault(id(buffer), seen.detach().clone())
        try:
            return forward(module, *args, **kwargs)
        finally:
            for table, before in zip(tables, kept, strict=True):
                table.clear()
                table.update(before)


def _refuse_caches(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A key-value cache is changed by forward, so that a second run would change it again."""
    from torch import Tensor

    for value in (*args, *kwargs.values()):
        if value is None or isinstance(value, Tensor):
            continue
        if hasattr(value, "get_seq_length") and hasattr(value, "update"):
            raise ApplyError(
                f"checkpoint at '{path}': the forward is given a {type(value).__name__}, which running it twice would "
                "fill twice",
                path=path,
                hint="call the model with use_cache=False while training (or set model.config.use_cache = False)",
            )
