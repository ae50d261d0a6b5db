"""Steps that conflict with cuts: modules above a cut are no longer called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slapo_core import Node, Primitive, Violation
from slapo_core.errors import place
from slapo_core.internals import Internals, children_of
from slapo_core.observers import only_looks, spans_stages
from slapo_graph.graph import graph_of
from slapo_graph.match import Match
from slapo_pipeline.private import hooks_of, is_compiled

if TYPE_CHECKING:
    from slapo_core.primitive import Record

_AROUND_CALLS = {
    "core.checkpoint": "recomputes its entire forward",
    "fusion.bind": "runs a kernel in place of its forward",
    "fusion.compile": "compiles its entire forward",
    "fusion.cudagraphify": "replays its entire forward",
    "tp.fork_rng": "draws from an RNG stream of its own",
    "tp.sync": "communicates where it is called",
    "tp.sync_gradient": "communicates in its backward",
}
_REPLACES = ("core.replace", "graph.merge")


def root_of(node: Node) -> Node:
    """Return the root of a node's tree."""
    while node.parent is not None:
        node = node.parent
    return node


def unanswered_violations(node: Node) -> Iterator[Violation]:
    """Yield each hook of stages that no active plugin answers.

    Args:
        node: where the model would be cut.
    """
    for hook, entry in (("slapo_partition", "pipeline.partition"), ("slapo_liveness", "pipeline.liveness")):
        if not Internals(node.schedule).hooks.has(hook):
            yield Violation(
                f"no active plugin answers {hook}",
                f"remove slapo-pipeline:{entry} from SLAPO_DISABLE_PLUGINS; or pip install a plugin that answers, and "
                'name it: create_schedule(model, plugins=["acme-slapo"])',
            )


def place_violations(node: Node) -> Iterator[Violation]:
    """Yield why the model cannot be cut after a module: it is the root, or never called.

    Args:
        node: where it would be cut.
    """
    from torch import nn

    if node.parent is None:
        yield Violation("nothing comes after the root", 'sch["encoder.layer.5"].pipeline_split()')
        return
    module = node.module
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
        below = f"{node.path}.{next(iter(children_of(module)), '0')}"
        yield Violation(
            f"{type(module).__name__} has no forward of its own: it is never called",
            f"cut after one of its modules, sch[{below!r}].pipeline_split(), or into balanced stages: "
            f"sch[{node.path!r}].pipeline_split(stages=2)",
        )


def above_violations(node: Node) -> Iterator[Violation]:
    """Yield hooks, wrappers and compilation of modules above a cut: stages do not call these modules.

    Args:
        node: the module after or below which the model would be cut.
    """
    above = node.parent
    while above is not None:
        problem = _call_problem(above)
        if problem is not None:
            where = place(above.path)
            yield Violation(
                f"{where} lies above it and {problem}, and a cut spreads its forward over stages",
                f"do that to modules that lie in one stage: sch[{_sibling_pattern(node.path)!r}]",
            )
        above = above.parent


def _call_problem(node: Node) -> str | None:
    from slapo_graph.flat import is_merely_spanned, is_merely_traced

    steps = [str(record) for record in node.records if record.name not in ("core.annotate", "graph.trace")]
    by = f" ({', '.join(steps)})" if steps else ""
    module: Any = node.module
    if not all(map(spans_stages, node.wrappers)):
        return f"its forward is wrapped{by}"
    if node.hooks:
        return f"has hooks of steps{by}"
    if any(not only_looks(hook) for hooks in hooks_of(module) for hook in hooks.values()):
        return "has hooks"
    if (graph := graph_of(node)) is not None and graph.is_rewritten:
        return f"its graph was rewritten{by}"
    if "forward" in module.__dict__ and not is_merely_traced(module) and not is_merely_spanned(module):
        return "its forward was set on the instance"
    if is_compiled(module):
        return "is compiled"
    if hasattr(module, "_c") and type(module).__module__.startswith("torch.jit"):
        return "is compiled by torch.jit"
    return None


def step_violations(node: Node, primitive: Primitive, cuts: Mapping[str, Record]) -> Iterator[Violation]:
    """Yield why a step must not be applied above a cut.

    Args:
        node: where the step is to be applied.
        primitive: the step.
        cuts: paths of the modules after which the schedule cuts, each with its step.
    """
    selected = [getattr(primitive, name, None) for name in primitive.selections]
    matches = [match for value in selected for match in (value if isinstance(value, list | tuple) else [value])]
    rewritten = dict.fromkeys(match.path for match in matches if isinstance(match, Match))
    for changed in rewritten or {node.path: None}:
        prefix = f"{changed}." if changed else ""
        cut = next((path for path in cuts if path.startswith(prefix) and path != changed), None)
        if cut is None:
            continue
        where = place(changed)
        if rewritten:
            problem = "rewrites its graph"
        elif primitive.name in _REPLACES:
            problem = "replaces it"
        elif primitive.name in _AROUND_CALLS:
            problem = _AROUND_CALLS[primitive.name]
        else:
            continue
        hint = f"apply it to modules that lie in one stage: sch[{_sibling_pattern(cut)!r}]"
        if primitive.name in _REPLACES and not rewritten:
            hint = "apply this step first, then pipeline_split()"
        yield Violation(f"{where} lies above a cut ({cuts[cut]}), which spreads its forward; this step {problem}", hint)


def _sibling_pattern(path: str) -> str:
    """Return the pattern of a path's sibling blocks, e.g. ``"encoder.layer.*"``."""
    return ".".join("*" if name.isdigit() else name for name in path.split("."))
