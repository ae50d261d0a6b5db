"""Modules whose calls a rewrite took out of a graph: what happened around those calls must not get lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx, nn

from slapo_core.graph.guards import fingerprint
from slapo_core.graph.leaves import is_changed, is_predefined
from slapo_core.graph.rewriting.placing import CannotPlace
from slapo_core.graph.structure import is_plain
from slapo_core.spec.tracer import Flag

__all__ = ["refuse_changed", "settings_of"]


def refuse_changed(nodes: Sequence[fx.Node], module: nn.Module) -> Iterator[str]:
    """The paths of the modules that ``nodes`` call.

    Raises:
        CannotPlace: one of them, or one below it, has hooks or another forward than its class's.
    """
    for node in nodes:
        if node.op != "call_module":
            continue
        path = str(node.target)
        called = module.get_submodule(path)
        for name, below in called.named_modules():
            if is_changed(below):
                place = f"{path}.{name}" if name else path
                raise CannotPlace(
                    f"'{node}' calls '{place}', which has hooks or a forward of its own, and would be called no more",
                    "rewrite first, change the module then; or match what lies around it",
                )
        yield path


def settings_of(nodes: Sequence[fx.Node], module: nn.Module) -> tuple[Flag, ...]:
    """The plain attributes of modules of torch.nn that ``nodes`` call: what comes in their place was made for these.

    Not the mode: it decides between variants.
    """
    found: list[Flag] = []
    for node in nodes:
        if node.op != "call_module":
            continue
        path = str(node.target)
        called = module.get_submodule(path)
        if is_predefined(called):
            for name, value in vars(called).items():
                if not name.startswith("_") and name != "training" and is_plain(value):
                    found.append(Flag(tuple(path.split(".")), name, fingerprint(value)))
    return tuple(found)
