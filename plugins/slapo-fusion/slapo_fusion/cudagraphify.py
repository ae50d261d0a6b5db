"""``cudagraphify``: launch a module's kernels, forward and backward, as one CUDA graph each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slapo_core import Edit, Equivalence, Node, Primitive, Violation
from slapo_core.spec.edit import Forward

if TYPE_CHECKING:
    from slapo_core.testing import Case

__all__ = ["Cudagraphify", "slapo_cases"]


@dataclass(frozen=True)
class Cudagraphify(Primitive):
    """Capture the module's forward and backward into CUDA graphs: for modules whose kernels are shorter than a launch.

    Captured by ``torch.cuda.make_graphed_callables`` at the first training call with each combination of shapes and
    types; the arguments must be tensors. Without gradients, on a CPU tensor, and while ``verify`` watches dropout, the
    forward runs as it is. Where there is no CUDA device when the step is applied, it does nothing, and says so.

    Captured memory is used again at each call: the output of a call holds until the next one, so that a module which is
    called several times before its backward (shared weights, pipeline micro-batches, gradient accumulation over one
    backward) must not be captured. That cannot be seen beforehand, and is refused at the call.

    Of what is written here, only what runs without a GPU is tested: the CUDA path has not been run by the authors.

    Args:
        warmup: runs before the capture, in which libraries choose their kernels; 11 under DistributedDataParallel.
        most_shapes: after that many combinations of shapes, another one is refused.

    Raises:
        PreconditionError: the module is captured already, is hooked below, or has no forward of its own.
        ApplyError: at a call: arguments that are no tensors, too many shapes, a second call before the backward.

    rewrite:
        ``y = forward(module, x)`` -> ``y = graph.replay()`` with ``x`` copied into the graph's input

    Source: ``torch/cuda/graphs.py``.
    """

    name = "fusion.cudagraphify"
    equivalence = Equivalence.REORDERED

    warmup: int = 3
    most_shapes: int = 4

    def preconditions(self, node: Node) -> Iterator[Violation]:
        from torch import nn

        if self.warmup < 1 or self.most_shapes < 1:
            yield Violation("warmup and most_shapes must be at least 1", "cudagraphify(warmup=3, most_shapes=4)")
        if type(node.module).forward is nn.Module.forward and "forward" not in node.module.__dict__:
            yield Violation(
                f"{type(node.module).__name__} has no forward of its own: it is never called",
                f"capture its children: sch['{node.path}.*'].cudagraphify()",
            )
        if any(_is_captured(wrapper) for wrapper in node.wrappers):
            yield Violation("the module is captured already", "remove this second call")
        for below in node.walk():
            if below.path != node.path and (below.module._backward_hooks or below.module._backward_pre_hooks):
                yield Violation(
                    f"'{below.path}' has backward hooks, which a captured graph does not call", "remove them before"
                )

    def apply(self, node: Node, edit: Edit) -> None:
        import torch

        active = torch.cuda.is_available()
        if not active:
            edit.note("there is no CUDA device: the forward runs as it is")
        wrapper = functools.partial(captured, path=node.path, warmup=self.warmup, most_shapes=self.most_shapes)
        edit.wrap_forward(node, wrapper, active=active)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if not any(_is_captured(wrapper) for wrapper in node.wrappers):
            yield Violation("the module's forward is not captured")


def captured(forward: Forward, *, path: str, warmup: int, most_shapes: int) -> Forward:
    """``forward`` as CUDA graphs, captured when they are first needed; both take the module first."""
    from slapo_fusion.cuda_graphs import Captured

    return Captured(forward, path=path, warmup=warmup, most_shapes=most_shapes)


captured.slapo_goes_around = True  # type: ignore[attr-defined]


def _is_captured(wrapper: Callable[..., object]) -> bool:
    return isinstance(wrapper, functools.partial) and wrapper.func is captured


def slapo_cases() -> list[Case]:
    """For ``slapo plugins check``."""
    from slapo_core.testing import Case
    from slapo_fusion.cases import COMMON

    return [Case(Cudagraphify(), path="0", rejects=[Cudagraphify(warmup=0)], **COMMON)]
