"""What of the untouched model each tensor of a copy of the scheduled one stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from slapo_core.spec.state import LiveTensor
    from slapo_core.weights.correspondence import Correspondence

__all__ = ["Counterparts", "named_tensors"]


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, under every name that they have."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@dataclass(frozen=True)
class Counterparts:
    """A correspondence by name, so that it holds for every copy of the scheduled model.

    Args:
        correspondence: of the schedule; None where no tensor is compared.
        tensors: every name in the scheduled model, aliases and ties included.
        places: name in the scheduled model -> the place of its tensor in the model's order; tied names share the first.
        modules: the paths of all modules of the scheduled model.
    """

    correspondence: Correspondence | None = None
    tensors: Mapping[str, LiveTensor] = field(default_factory=dict)
    places: Mapping[str, int] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()

    @classmethod
    def of(cls, correspondence: Correspondence, model: nn.Module) -> Counterparts:
        """Those of the scheduled ``model`` itself."""
        tensors = correspondence.by_name(model)
        first: dict[int, int] = {}
        places = {name: first.setdefault(id(live.tensor), place) for place, (name, live) in enumerate(tensors.items())}
        paths = frozenset(path for path, _ in model.named_modules(remove_duplicate=False))
        return cls(correspondence, tensors, places, paths)

    def explained(self, name: str) -> str | None:
        """The first name of the untouched tensor that a layout says ``name`` is (a piece of); None if none does."""
        live = self.tensors.get(name)
        return live.stands_for[0] if live is not None and live.stands_for and live.layout.origin else None

    def expected(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's piece of the untouched tensor ``full`` that ``name`` corresponds to."""
        assert self.correspondence is not None
        return self.tensors[name].layout.local(full, self.correspondence.mesh)

    def translated(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The untouched tensors that one without a layout stands for, as a plugin says; empty if it is added."""
        live = self.tensors.get(name)
        if self.correspondence is None or live is None or not live.stands_for:
            return {}
        full = live.layout.full(tensor, self.correspondence.mesh)
        return self.correspondence.translations.to_reference(live, full)

    def stands_for(self, name: str) -> tuple[str, ...]:
        """The reference tensors that a live one maps to, e.g. those that were merged into it."""
        live = self.tensors.get(name)
        return tuple(live.stands_for) if live is not None else ()

    def is_whole(self, name: str) -> bool:
        """Whether every rank has the whole of an untouched tensor under this name."""
        live = self.tensors.get(name)
        return live is not None and self.explained(name) is not None and not live.layout.placements

    def is_frozen(self, name: str) -> bool:
        """Whether a parameter of the scheduled model is not trained."""
        live = self.tensors.get(name)
        return live is not None and isinstance(live.tensor, nn.Parameter) and not live.tensor.requires_grad

    def full_beside_shards(self, path: str) -> list[str]:
        """The parameters of a module of which every rank has the full one, if it has shards of others.

        Empty where the weight is among the shards: of such a layer it is known how its bias is added.
        """
        own = {name: live for name, live in self.tensors.items() if name.rpartition(".")[0] == path}
        sharded = {name.rpartition(".")[2] for name, live in own.items() if live.layout.is_sharded}
        if not sharded or "weight" in sharded:
            return []
        return [name for name, live in own.items() if isinstance(live.tensor, nn.Parameter) and self.is_whole(name)]

    def is_split_around(self, path: str) -> bool:
        """Whether a tensor of a module, or of those beside it, is kept in pieces."""
        around = path.rpartition(".")[0]
        return any(
            live.layout.is_sharded for name, live in self.tensors.items() if not around or name.startswith(f"{around}.")
        )

    def first_name(self, name: str) -> str:
        """The first name of an untouched tensor."""
        return self.correspondence.survey.origins.get(name, name) if self.correspondence is not None else name
