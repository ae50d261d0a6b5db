"""Give each rank its own RNG stream in a module: ``fork_rng``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from slapo_core import Edit, Equivalence, Node, Primitive, Violation
from slapo_core.effects import Calls, Effect
from slapo_core.layout import accelerator
from slapo_core.observers import Forward, happened
from slapo_tp.preconditions import needs_mesh
from slapo_tp.private import FakeTensor
from slapo_tp.split_state import mesh_size

_STRIDE = 0x9E3779B97F4A7C15  # odd, so that the ranks' seeds differ in their low 32 bits, all that CPU seeding uses

FORKED = "forked RNG stream"
"""The event of a call."""


@dataclass(frozen=True)
class ForkRng(Primitive):
    """Run the module (dropout) on an RNG stream of each rank's own.

    For modules on shards, between two split layers: there the ranks, which start from the same seed, would drop the
    same elements of different heads or features. Everywhere else the ranks must use equal RNG states: around dropout
    of a full tensor, the ranks' activations, and with them their unsharded parameters, would diverge. ``verify`` finds
    that, and names the module where the call belongs; a missing call it notes.

    The stream is seeded at each call by a number of the generator that all ranks share and by the rank.
    So it needs no state of its own in a checkpoint, and a recompute uses the same stream, be the recompute around this
    step or inside of it.

    Args:
        mesh_dim: the mesh dimension whose ranks get different RNG streams.

    Raises:
        PreconditionError: no mesh, the module has no forward of its own, or has an RNG stream already.

    rewrite: (``g`` the generator that all ranks share, ``g[r]`` one seeded by a number of ``g`` and by the rank)
        ``y = module(x)`` with ``g`` -> ``y = module(x)`` with ``g[r]``; ``g`` moves on by one number

    On a mesh dimension of one rank nothing changes.

    Source: ``CudaRNGStatesTracker.fork`` of ``megatron/core/tensor_parallel/random.py``.
    """

    name = "tp.fork_rng"
    equivalence = Equivalence.RANDOM

    mesh_dim: str = dataclasses.field(default="tp", kw_only=True)

    @needs_mesh
    def preconditions(self, node: Node) -> Iterator[Violation]:
        module = node.module
        if type(module).forward is torch.nn.Module.forward and "forward" not in module.__dict__:
            yield Violation(
                f"{type(module).__name__} has no forward of its own: it is never called",
                f"fork_rng its children: sch['{node.path}.*'].fork_rng()",
            )
        for record in node.records:
            if isinstance(record.primitive, ForkRng) and record.primitive.mesh_dim == self.mesh_dim:
                yield Violation(f"the module has an RNG stream for each rank already, by {record}", "remove this call")

    def apply(self, node: Node, edit: Edit) -> None:
        active = mesh_size(node, self.mesh_dim) > 1
        if not active:
            edit.note(f"mesh_dim '{self.mesh_dim}' has one rank: there is one stream")
        rank = node.mesh.rank(self.mesh_dim) if node.mesh is not None else 0
        edit.wrap_forward(node, functools.partial(with_own_rng, rank=rank, own=type(node.module)), active=active)

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if not node.wrappers:
            yield Violation("the module's forward is not wrapped")

    def effects(self, node: Node) -> Iterator[Effect]:
        if mesh_size(node, self.mesh_dim) > 1:
            yield Calls(FORKED, 1)


def with_own_rng(forward: Forward, *, rank: int, own: type) -> Forward:
    """Wrap a forward to run on this rank's own RNG stream.

    Args:
        forward: of the module.
        rank: along the mesh dimension.
        own: the class of the module, whose own forward a static graph can hold.
    """
    return _Forked(forward, rank, own)


with_own_rng.slapo_goes_around = True  # type: ignore[attr-defined]


class _Forked:
    def __init__(self, forward: Forward, rank: int, own: Any) -> None:
        functools.update_wrapper(self, forward)
        self.forward, self.rank = forward, rank
        is_own = forward is own.forward or getattr(forward, "slapo_own", None) is forward
        self.slapo_is_inlined = is_own or getattr(forward, "slapo_is_inlined", False)

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        states = Fork(self.rank)(torch.randint(2**63 - 1, ()))
        try:
            return self.forward(module, *args, **kwargs)
        finally:
            Restore()(states)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Forked) and (self.forward, self.rank) == (other.forward, other.rank)

    def __hash__(self) -> int:
        return hash((self.forward, self.rank))


@dataclass(frozen=True)
class _Switch:
    """Switch the RNG state of the CPU and the current GPU."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "__name__", type(self).__name__.lower())
        object.__setattr__(self, "__qualname__", type(self).__name__.lower())

    def __call__(self, tensor: Tensor) -> Any:
        if has_torch_function_unary(tensor):  # a mode, which writes it down as one call
            return handle_torch_function(self, (tensor,), tensor)
        if torch.compiler.is_compiling():  # generators are none of a compiler's values
            return torch.compiler.disable(self._switch)(tensor)
        return self._switch(tensor)

    def _switch(self, tensor: Tensor) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Fork(_Switch):
    """Seed the generators by a shared number and this rank; return their states."""

    rank: int

    def _switch(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta or isinstance(tensor, FakeTensor):  # meta tensors use no RNG
            return torch.empty(0, dtype=torch.uint8, device=tensor.device)
        states = [generator.get_state() for generator in _generators()]
        for generator in _generators():
            generator.manual_seed((int(tensor) + (self.rank + 1) * _STRIDE) % 2**64)
        happened("call", FORKED)
        return torch.cat(states)


@dataclass(frozen=True)
class Restore(_Switch):
    """Set the generators to earlier states."""

    def _switch(self, tensor: Tensor) -> None:
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            return
        sizes = [generator.get_state().numel() for generator in _generators()]
        for generator, state in zip(_generators(), tensor.split(sizes), strict=True):
            generator.set_state(state.clone())


def _generators() -> list[Any]:
    device = accelerator()
    if device is None:
        return [torch.default_generator]
    return [torch.default_generator, torch.get_device_module(device).default_generators[device.index]]
