"""``fork_rng``: a module whose random numbers differ from rank to rank."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor

from slapo_core import Edit, Equivalence, Node, Primitive, Violation
from slapo_core.spec.accelerators import accelerator
from slapo_core.spec.edit import Forward
from slapo_core.spec.preconditions import Distributed
from slapo_tp.splits import mesh_size

__all__ = ["ForkRng"]

_STRIDE = 0x9E3779B97F4A7C15  # odd, so that the ranks' seeds differ in their low 32 bits, all that CPU seeding uses


@dataclass(frozen=True)
class ForkRng(Primitive):
    """Let the module draw random numbers (dropout) from a stream that differs from rank to rank.

    For what works on a piece between two split layers: there the ranks, which start from the same seed, would drop the
    same elements of different heads or features. Everywhere else the ranks must go on drawing alike: around a dropout
    of what every rank has whole, the ranks' activations, and with them their whole parameters, would drift apart.
    ``verify`` finds that, and names the module where the call belongs; where one is missing, it notes it.

    The stream is seeded anew at each call, by a number drawn from the generator that all ranks share and by the rank.
    So it needs no state of its own in a checkpoint, and activation recomputation draws the same again, whichever of
    the two is around the other.

    Args:
        mesh_dim: the mesh dimension whose ranks are to draw differently.

    Raises:
        PreconditionError: no mesh, the module has no forward of its own, or it draws so already.

    rewrite: (``g`` the generator that all ranks share, ``g[r]`` one seeded by a number of ``g`` and by the rank)
        ``y = module(x)`` drawing from ``g`` -> ``y = module(x)`` drawing from ``g[r]``; ``g`` moves on by one number

    On a mesh dimension of one rank nothing changes.

    Source: ``CudaRNGStatesTracker.fork`` of ``megatron/core/tensor_parallel/random.py``.
    """

    name = "tp.fork_rng"
    equivalence = Equivalence.RANDOM

    mesh_dim: str = dataclasses.field(default="tp", kw_only=True)

    def preconditions(self, node: Node) -> Iterator[Violation]:
        unplaced = list(Distributed(self.mesh_dim)(node))
        if unplaced:
            yield from unplaced
            return
        module = node.module
        if type(module).forward is torch.nn.Module.forward and "forward" not in module.__dict__:
            yield Violation(
                f"{type(module).__name__} has no forward of its own: it is never called",
                f"fork_rng its children: sch['{node.path}.*'].fork_rng()",
            )
        for record in node.records:
            if isinstance(record.primitive, ForkRng) and record.primitive.mesh_dim == self.mesh_dim:
                yield Violation(f"the module draws differently on each rank already, by {record}", "remove this call")

    def apply(self, node: Node, edit: Edit) -> None:
        active = mesh_size(node, self.mesh_dim) > 1
        if not active:
            edit.note(f"mesh_dim '{self.mesh_dim}' has one rank: there is one stream")
        rank = node.mesh.rank(self.mesh_dim) if node.mesh is not None else 0
        edit.wrap_forward(node, functools.partial(drawing_on_its_own, rank=rank), active=active)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if not node.wrappers:
            yield Violation("the module's forward is not wrapped")


def drawing_on_its_own(forward: Forward, *, rank: int) -> Forward:
    """``forward`` with other random numbers on each rank; both take the module first."""

    @functools.wraps(forward)
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        with _stream_of(rank):
            return forward(module, *args, **kwargs)

    return run


@contextlib.contextmanager
def _stream_of(rank: int) -> Iterator[None]:
    """Torch's generators, of the CPU and of the current GPU, seeded for this rank; behind it they go on as before."""
    shared = torch.randint(2**63 - 1, ())
    if isinstance(shared, FakeTensor) or shared.is_meta:  # without values there is nothing to draw
        yield
        return
    seed = (int(shared) + (rank + 1) * _STRIDE) % 2**64
    generators: list[Any] = [torch.default_generator]
    device = accelerator()
    if device is not None:
        generators.append(torch.get_device_module(device).default_generators[device.index])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
