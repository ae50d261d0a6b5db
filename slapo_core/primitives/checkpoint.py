"""``checkpoint``: recompute a module's activations in the backward pass instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from slapo_core.observers import Forward
from slapo_core.primitive import Equivalence, Primitive, Violation
from slapo_core.tree.edit import Edit
from slapo_core.tree.node import Node

if TYPE_CHECKING:
    from slapo_core.effects import Effect


@dataclass(frozen=True)
class Checkpoint(Primitive):
    """Keep only the inputs of the module, or of each match, and recompute the rest for gradients.

    Non-reentrant ``torch.utils.checkpoint``: keyword arguments and nested outputs pass through unchanged, and it works
    with ``torch.autograd.grad``, hooks and ``torch.compile``. Without gradients (evaluation) the forward runs directly.
    The recompute sees the buffers, attributes and containers of the first run, and its changes to them are dropped:
    running statistics, counters and lists are changed once. An input that was changed in place since is refused at the
    recompute, by InputError.

    Args:
        match: recomputed, each as one region: a match or a list of matches, or a pattern, as for ``find``, of
            which every match is. None: the module's entire forward.
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
            transform = CheckpointedRegion(self.preserve_rng_state, node.path)
            self.match.outline(node, edit, transform, name="checkpointed")
            return
        edit.wrap_forward(node, Checkpointed(self.preserve_rng_state, node.path))

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if self.match is not None:
            return
        if "forward" not in node.module.__dict__ or not checkpoints(node):
            yield Violation("the module's forward is not wrapped")

    def effects(self, node: Node) -> Iterator[Effect]:
        from slapo_core.effects import Recomputes

        if self.match is None:
            yield Recomputes()
        else:
            yield from (Recomputes(at=effect.at) for effect in self.match.effects(node))


def checkpoints(node: Node) -> bool:
    """Return whether a step put the entire forward of the module under activation checkpointing."""
    return any(isinstance(wrapper, Checkpointed) for wrapper in node.wrappers)


@dataclass(frozen=True)
class Checkpointed:
    """Puts a forward, which takes the module first, under activation checkpointing; equal for equal modules.

    Args:
        preserve_rng_state: as of :class:`Checkpoint`.
        path: of the module, for messages.
    """

    slapo_goes_around: ClassVar[bool] = True
    preserve_rng_state: bool
    path: str = field(compare=False)

    def __call__(self, forward: Forward) -> Forward:
        import torch
        from torch.utils.checkpoint import checkpoint

        from slapo_core.primitives.recomputation import ModuleState, Recomputation

        preserve_rng_state, path = self.preserve_rng_state, self.path
        changing: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
        states: list[tuple[Any, ModuleState]] = []

        @functools.wraps(forward)
        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(module, *args, **kwargs)
            call: Callable[..., Any] = _call
            if not torch.compiler.is_compiling():
                if not states or states[0][0] is not module or not states[0][1].is_current:
                    states[:] = [(module, ModuleState(list(module.modules()), changing))]
                call = Recomputation(path, states[0][1], args, kwargs)
            # Arguments travel as one tuple and one dictionary: keywords of the module cannot clash with checkpoint's
            # own, and checkpoint still sees the tensors, from which it learns whose random state to keep.
            return checkpoint(
                call, forward, module, args, kwargs, use_reentrant=False, preserve_rng_state=preserve_rng_state
            )

        return run


@dataclass(frozen=True)
class CheckpointedRegion:
    """Puts regions under activation checkpointing; equal values give equal regions.

    Args:
        preserve_rng_state: as of :class:`Checkpoint`.
        path: of the module, for messages.
    """

    preserve_rng_state: bool
    path: str = field(compare=False)

    def __call__(self, region: Callable[..., Any]) -> Callable[..., Any]:
        import torch
        from torch import nn
        from torch.utils.checkpoint import checkpoint

        from slapo_core.primitives.recomputation import ModuleState, Recomputation

        preserve_rng_state, path = self.preserve_rng_state, self.path
        changing: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()

        def forward(_module: None, *args: Any) -> Any:
            return region(*args)

        @functools.wraps(region)
        def run(*args: Any) -> Any:
            if not torch.is_grad_enabled():
                return region(*args)
            call: Callable[..., Any] = _call
            if not torch.compiler.is_compiling():
                modules = [below for each in args if isinstance(each, nn.Module) for below in each.modules()]
                state = ModuleState(list(dict.fromkeys(modules)), changing) if modules else None
                call = Recomputation(path, state, args, {}, is_region=True)
            return checkpoint(call, forward, None, args, {}, use_reentrant=False, preserve_rng_state=preserve_rng_state)

        return run


def _call(forward: Forward, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(module, *args, **kwargs)
