"""Which tensor of the untouched model each tensor of the scheduled one is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from slapo_core.spec.layout import Layout
from slapo_core.spec.mesh import Mesh

__all__ = ["Correspondence", "named_tensors"]

Translate = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor] | None]
"""Makes of a tensor that no layout explains the untouched tensors that it stands for; None if nobody knows."""


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, under every name that they have."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@dataclass(frozen=True)
class Correspondence:
    """Made by :meth:`between`.

    Args:
        layouts: name in the scheduled model -> layout, for what can be compared.
        unexplained: names of the scheduled model that no layout explains -> why.
        mesh: the schedule's mesh.
        translate: asked about the unexplained ones.
        places: name in the scheduled model -> the place of its tensor in the model's order; tied names share the first.
        ties: name in the untouched model -> the first name of its tensor.
    """

    layouts: Mapping[str, Layout]
    unexplained: Mapping[str, str]
    mesh: Mesh | None
    translate: Translate
    places: Mapping[str, int]
    ties: Mapping[str, str]

    @classmethod
    def between(
        cls,
        reference: nn.Module,
        candidate: nn.Module,
        layouts: Mapping[str, Layout],
        mesh: Mesh | None,
        translate: Translate,
    ) -> Correspondence:
        """Match the tensors of two models by layout record, or else by name and shape."""
        shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(reference)}
        first_names: dict[int, str] = {}
        ties = {name: first_names.setdefault(id(tensor), name) for name, tensor in named_tensors(reference)}
        by_object = {id(tensor): layouts[name] for name, tensor in named_tensors(candidate) if name in layouts}
        first: dict[int, int] = {}
        places: dict[str, int] = {}
        matched: dict[str, Layout] = {}
        unexplained: dict[str, str] = {}
        for place, (name, tensor) in enumerate(named_tensors(candidate)):
            places[name] = first.setdefault(id(tensor), place)
            layout = layouts.get(name) or by_object.get(id(tensor)) or Layout(name, shapes.get(name, ()))
            shape = tuple(tensor.shape)
            if layout.origin not in shapes:
                unexplained[name] = "it exists only in the scheduled model"
            elif layout.shape != shapes[layout.origin] or layout.local_shape(mesh) != shape:
                unexplained[name] = (
                    f"its shape is {shape}, where the layout recorded for '{layout.origin}' "
                    f"{shapes[layout.origin]} says {layout.local_shape(mesh)}"
                )
            else:
                matched[name] = layout
        return cls(matched, unexplained, mesh, translate, places, ties)

    def expected(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's piece of the untouched tensor ``full`` that ``name`` corresponds to."""
        return self.layouts[name].local(full, self.mesh)

    def translated(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The untouched tensors that an unexplained one stands for; empty if nobody knows."""
        return self.translate(name, tensor) or {}
