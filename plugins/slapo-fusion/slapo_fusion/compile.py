"""``compile``: compile the forward of one module, and of every other of its class once for all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slapo_core import Edit, Effect, Equivalence, Node, Primitive, Violation, effects
from slapo_fusion.compilers import Backend, Compiled, backend_problem
from slapo_fusion.forwards import is_wrapped_by, missing_forward


@dataclass(frozen=True)
class Compile(Primitive):
    """Compile the module's forward with ``torch.compile`` when it is first called.

    Only this region is compiled: its hooks and the code around it run as they are. Modules of one class with an
    unchanged forward share compiled code, so that 24 equal layers are compiled once. Sizes that change become symbolic.
    Random numbers come from torch's generators, so that dropout drops what it would drop uncompiled.

    Compiled code lives in this process; a model loaded from a file compiles again. ``verify`` runs the compiled code;
    only code with graph breaks and dropout runs uncompiled while ``verify`` disables dropout. As always with
    ``torch.compile``, most backends refuse gradients of gradients.

    Args:
        mode: of inductor: ``"reduce-overhead"``, ``"max-autotune"`` or ``"max-autotune-no-cudagraphs"``. Gradients and
            losses are copied out of the memory of its CUDA graphs, so that micro-batches may be accumulated.
        fullgraph: whether Python that cannot be compiled is an error; otherwise it runs as Python between compiled
            pieces.
        dynamic: True makes all sizes symbolic, False compiles again for each size; None makes changing sizes symbolic.
        backend: a name that torch knows, or a function of a graph and example inputs.
        options: of the backend, e.g. ``{"max_autotune": True}``.

    Raises:
        PreconditionError: the module has no forward of its own or is compiled already; no such backend, mode or option.
        ApplyError: at the first call, if the compiler fails; it names the node.

    rewrite:
        ``y = forward(module, x)`` -> ``y = torch.compile(forward)(module, x)``

    Source: ``torch/_dynamo/eval_frame.py``; "regional compilation" of PyTorch's recipes.
    """

    name = "fusion.compile"
    named_functions = ("backend",)

    mode: str | None = None
    fullgraph: bool = dataclasses.field(default=False, kw_only=True)
    dynamic: bool | None = dataclasses.field(default=None, kw_only=True)
    backend: str | Callable[..., Any] = dataclasses.field(default="inductor", kw_only=True)
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.options, Mapping):
            object.__setattr__(self, "options", tuple(sorted(self.options.items())))
        super().__post_init__()

    @property
    def equivalence(self) -> Equivalence:  # type: ignore[override]
        return Equivalence.RANDOM if self._backend.is_random else Equivalence.REORDERED

    def preconditions(self, node: Node) -> Iterator[Violation]:
        yield from missing_forward(node, "compile", "compile")
        if is_wrapped_by(node, Compiled):
            yield Violation("the module is compiled already", "remove this second call")
        problem = backend_problem(self._backend)
        if problem is not None:
            yield Violation(*problem)

    def apply(self, node: Node, edit: Edit) -> None:
        edit.wrap_forward(
            node,
            functools.partial(
                Compiled,
                backend=self._backend,
                where=f"{self} at '{node.path}'",
                fullgraph=self.fullgraph,
                dynamic=self.dynamic,
            ),
        )

    def postconditions(self, node: Node) -> Iterator[Violation]:
        if not is_wrapped_by(node, Compiled):
            yield Violation("the module's forward is not compiled")

    def effects(self, node: Node) -> Iterator[Effect]:
        yield effects.Compiled(graph_breaks=0 if self.fullgraph else None)

    @property
    def _backend(self) -> Backend:
        return Backend(self.backend, self.mode, tuple(dict(self.options).items()))
