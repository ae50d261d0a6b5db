"""``fuse``: compile a part of a static graph."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core import Edit, Equivalence, Node, PluginError, Primitive, Violation
from slapo_core.spec.graph import by_place

if TYPE_CHECKING:
    from slapo_core.testing import Case

__all__ = ["Fuse", "slapo_cases"]


@dataclass(frozen=True)
class Fuse(Primitive):
    """Take each match out of its graph as one region, and let a compiler make something faster of it.

    Regions that compute the same share what was compiled of them, in whatever layers they are. What was compiled lives
    in this process: a model that is loaded from a file compiles again.

    Args:
        match: what is fused, each as one region: a match or a list of such, or a pattern, as for ``find``, of which
            every match is.
        compiler: ``"inductor"`` (``torch.compile``), ``"aot_eager"`` (the same without its kernels), ``"eager"`` (only
            group), ``"torchscript"``, or whatever else is installed.
        name: of the call in the printed graph; None: ``fused``.
        options: for the compiler; of inductor, ``mode`` and torch's own, e.g. ``{"max_autotune": True}``.

    Raises:
        PreconditionError: nothing matches, no such compiler is installed, or ``name`` is no identifier.
        StaleError: an earlier step changed the place of a match.
        ApplyError: a match cannot be taken out of the graph; or the compiler failed, then or at a call.

    rewrite:
        ``h = x + bias; y = gelu(h)`` -> ``y = fused(x, bias)``

    Source: paper section 3.3.1, ``.fuse(subgraph, compiler)``.
    """

    name = "fusion.fuse"
    matches = ("match",)

    match: Any
    compiler: str = "inductor"
    name_: str | None = dataclasses.field(default=None, kw_only=True)
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.options, Mapping):
            object.__setattr__(self, "options", tuple(sorted(self.options.items())))
        super().__post_init__()

    @property
    def equivalence(self) -> Equivalence:  # type: ignore[override]
        if self.compiler == "eager":
            return Equivalence.EXACT
        if self.compiler == "inductor" and dict(self.options).get("fallback_random") is False:
            return Equivalence.RANDOM
        return Equivalence.REORDERED

    def preconditions(self, node: Node) -> Iterator[Violation]:
        if self.match is None:
            yield Violation("it needs a match, or a pattern", "fuse(lambda x, bias: F.gelu(x + bias))")
        if self.name_ is not None and not self.name_.isidentifier():
            yield Violation(f"name must be a Python identifier (got {self.name_!r})", 'for example name="bias_gelu"')
        try:
            node.plugin("compilers", self.compiler)
        except PluginError as error:
            yield Violation(error.message, error.hint)

    def apply(self, node: Node, edit: Edit) -> None:
        from slapo_fusion.fused import Fusing

        compiler = node.plugin("compilers", self.compiler)
        if compiler.deprecated is not None:
            warnings.warn(f"fuse(compiler='{self.compiler}'): {compiler.deprecated}", DeprecationWarning, stacklevel=2)
        options = tuple(dict(self.options).items())
        for place, matches in by_place(node, self.match):
            graph: Any = place.graph
            where = f"fuse at '{place.path}' ({'; '.join(map(str, matches))})"
            transform = Fusing(compiler, options, where)
            edit.set_graph(place, graph.outlined(place.module, matches, transform, name=self.name_ or "fused"))


def slapo_cases() -> list[Case]:
    """For ``slapo plugins check``."""
    from slapo_core.testing import Case
    from slapo_fusion.cases import COMMON, gelu_of_a_linear, traced

    step = Fuse(gelu_of_a_linear, "aot_eager", name_="linear_gelu")
    rejects = [Fuse(None), Fuse(gelu_of_a_linear, "induktor"), Fuse(gelu_of_a_linear, name_="linear gelu")]
    return [Case(step, path="0", before=[("0", traced)], rejects=rejects, **COMMON)]
