"""Modules that the graph of a traced one calls, and in which nothing can be found therefore."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slapo_core.tree.node import TreeNode


def closed_calls(nodes: Iterable[TreeNode]) -> tuple[str, ...]:
    """Paths of modules with code of their own that the graphs of ``nodes`` call, and ``flatten=True`` would open.

    Not those of torch.nn, nor those of :func:`hooked_calls`: they stay calls.
    """
    return tuple(path for node in nodes for path in _calls(node, hooked=False))


def hooked_calls(nodes: Collection[TreeNode]) -> tuple[str, ...]:
    """Paths of modules with code of their own that stay calls: hooked, or with a forward of the instance.

    Not those that are among ``nodes`` themselves.
    """
    own = {node.path for node in nodes}
    return tuple(path for node in nodes for path in _calls(node, hooked=True) if path not in own)


def how_to_open(closed: tuple[str, ...], hooked: tuple[str, ...] = ()) -> str:
    """Say why modules were not looked into, and what shows what they compute.

    Args:
        closed: of :func:`closed_calls`.
        hooked: of :func:`hooked_calls`.
    """
    said = []
    if closed:
        them = "it is one call" if len(closed) == 1 else "each is one call"
        said.append(f"{_shown(closed)}; {them} in the graph, and trace(flatten=True) shows what it computes")
    if hooked:
        said.append(
            f"{_shown(hooked)}, because of hooks or another forward than the class's; traced by itself, "
            f"sch[{hooked[0]!r}].trace(), its own code is searched"
        )
    return f"not looked into: {'; '.join(said)}"


def _calls(node: TreeNode, *, hooked: bool) -> Iterator[str]:
    """Of modules with code of their own in the graph of ``node``: with what changes their call, or without."""
    from slapo_core.graph.leaves import is_changed, is_predefined

    graph: Any = node.graph
    if graph is None or graph.first is None or (graph.leaves.flatten and not hooked):
        return
    for target in dict.fromkeys(
        str(each.target) for each in graph.first.recorded.graph.nodes if each.op == "call_module"
    ):
        module = node.module.get_submodule(target)
        if not is_predefined(module) and is_changed(module) is hooked:
            yield f"{node.path}.{target}" if node.path else target


def _shown(paths: tuple[str, ...]) -> str:
    return ", ".join(map(repr, paths[:3])) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
