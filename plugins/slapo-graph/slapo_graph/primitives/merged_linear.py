"""Merge linear layers: the merged tensors, and their reference tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core import Node
from slapo_core.hookspecs import hookimpl
from slapo_core.internals import forwards, parameters_of
from slapo_core.primitive import Violation

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class MergedFrom:
    """Kept on a merged layer.

    Args:
        sizes: rows of each part, in the reference model.
        origins: by parameter, the reference tensors that it concatenates.
    """

    sizes: tuple[int, ...]
    origins: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class SplitMerged:
    """Split the output of a merged layer, or this rank's shard of it.

    Args:
        sizes: of the parts, in the reference model.
    """

    sizes: tuple[int, ...]
    slapo_draws = False

    def __call__(self, merged: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shards = sum(self.sizes) // merged.shape[-1]
        return merged.split([size // shards for size in self.sizes], dim=-1)


@dataclass(frozen=True)
class Parts:
    """The layers that are merged.

    Args:
        nodes: in the order of their rows.
        names: of their parameters: ``("weight", "bias")`` or ``("weight",)``.
    """

    nodes: tuple[Node, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, node: Node, paths: tuple[str, ...]) -> Parts | Violation:
        """Return the modules at ``paths``, or the reason why they cannot be merged."""
        from torch import nn

        nodes = []
        for path in paths:
            try:
                below = node[path]
            except LookupError:
                return Violation(f"module not found: '{path}' below '{node.path}'", "paths are relative to it")
            kind = type(below.module)
            if kind.forward is not nn.Linear.forward or any(forwards.overrides_of_call(kind)):
                return Violation(f"'{path}' is a {kind.__name__}, not an nn.Linear", "leave it out")
            nodes.append(below)
        names = {tuple(name for name in ("weight", "bias") if name in each.parameters) for each in nodes}
        if len(names) > 1:
            return Violation(
                "some of the layers have a bias, and some do not", "merge only layers that all have a bias, or none"
            )
        (own,) = names
        if "weight" not in own:
            return Violation(
                "the layers have no weights here: merged already, parametrized, or on other ranks",
                "remove this call, or undo the step that moved the weights",
            )
        inputs = {each.parameters["weight"].shape[1] for each in nodes}
        if len(inputs) > 1:
            return Violation(
                f"the layers have different in_features: {sorted(inputs)}",
                "merge only layers with the same in_features",
            )
        return cls(tuple(nodes), own)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(each.parameters["weight"].shape[0] for each in self.nodes)

    @property
    def split(self) -> SplitMerged:
        return SplitMerged(self.sizes)

    def merged(self) -> nn.Linear:
        """Return the new layer."""
        import torch
        from torch import nn

        first = self.nodes[0].parameters["weight"]
        made = nn.Linear(first.shape[1], sum(self.sizes), bias="bias" in self.names, device="meta")
        for name in self.names:
            tensors = [each.parameters[name] for each in self.nodes]
            value = torch.cat([tensor.detach() for tensor in tensors])
            parameter = nn.Parameter(value, requires_grad=tensors[0].requires_grad)
            parameter.__dict__.update(tensors[0].__dict__)
            setattr(made, name, parameter)
        made.train(self.nodes[0].module.training)
        origins = {name: tuple(each.layout(name).origin for each in self.nodes) for name in self.names}
        made.merged_from = MergedFrom(self.sizes, origins)  # type: ignore[assignment]
        return made


@dataclass(frozen=True)
class PartsBack:
    """Give the old layers their parts of the merged tensors, to record another variant.

    Args:
        child: the merged layer, relative to the traced module.
        paths: of the old ones.
        names: of their parameters.
        sizes: rows of each, in the reference model.
    """

    child: str
    paths: tuple[str, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @contextlib.contextmanager
    def __call__(self, module: nn.Module) -> Iterator[None]:
        from torch import nn

        merged = module.get_submodule(self.child)
        slots = [parameters_of(module.get_submodule(path)) for path in self.paths]
        before = [dict(slot) for slot in slots]
        try:
            for name in self.names:
                full = parameters_of(merged)[name]
                assert full is not None
                shards = sum(self.sizes) // full.shape[0]
                values = full.detach().split([size // shards for size in self.sizes])
                for slot, value in zip(slots, values, strict=True):
                    slot[name] = nn.Parameter(value, requires_grad=full.requires_grad)
            yield
        finally:
            for slot, own in zip(slots, before, strict=True):
                slot.update(own)


def tensor_violations(parts: Parts) -> Iterator[Violation]:
    """Refuse tensors that cannot become a part of another one."""
    for name in parts.names:
        tensors = [each.parameters[name] for each in parts.nodes]
        for each in parts.nodes:
            full = f"{each.path}.{name}"
            layout = each.layout(name)
            if layout.placements or layout.padding:
                yield Violation(f"'{full}' is split already ({layout})", "merge first, shard then")
            elif not layout.origin:
                yield Violation(f"'{full}' is not a tensor of the reference model", "merge first")
            if len(each.ties(name)) > 1:
                yield Violation(f"'{full}' is tied: {', '.join(each.ties(name))}", "leave it out")
        for what in ("dtype", "device", "requires_grad"):
            values = list(dict.fromkeys(str(getattr(tensor, what)) for tensor in tensors))
            if len(values) > 1:
                yield Violation(f"'{name}' of the parts differ in {what}: {', '.join(values)}", "make them the same")
        if any(tensor.__dict__ != tensors[0].__dict__ for tensor in tensors):
            yield Violation(f"'{name}' of the parts have different annotations", "annotate the merged one instead")


# -- reference names, and back ------------------------------------------------------------------------------------


def _origins(node: Node, name: str) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
    found: Any = getattr(node.module, "merged_from", None)
    if not isinstance(found, MergedFrom) or name not in found.origins:
        return None
    return found.origins[name], found.sizes


@hookimpl
def slapo_to_reference(node: Node, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Split a merged tensor into its parts."""
    found = _origins(node, name)
    if found is None:
        return None
    return dict(zip(found[0], tensor.split(list(found[1])), strict=True))


@hookimpl
def slapo_from_reference(node: Node, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Concatenate the parts of a merged tensor."""
    import torch

    found = _origins(node, name)
    return None if found is None else torch.cat([tensors[origin] for origin in found[0]])
