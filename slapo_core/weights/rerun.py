"""A model's own initializers, run again for one tensor at its full size."""

from __future__ import annotations

import torch
from torch import nn

from slapo_core.tree.assignment import Assignment
from slapo_core.tree.index import ModuleIndex, TensorSites
from slapo_core.weights.initializers import SKIP_MARK, Initializers

__all__ = ["Rerun"]


class Rerun:
    """Runs every initializer of a tensor on a copy of the model in which that tensor alone has memory.

    All others are on the meta device, where initializing costs nothing.

    Args:
        model: a copy, all of it on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._index = ModuleIndex(model)
        self._sites = TensorSites(self._index)
        self._initializers = Initializers(self._index)

    def dtype(self, name: str) -> torch.dtype:
        """The element type of a tensor."""
        return self._present(*_split(name)).dtype

    def value(self, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor | None:
        """The tensor ``name``, of the full ``shape``; None if no initializer gives all of it.

        A tied tensor is initialized as its first place does it, if that can.
        """
        present = self._present(*_split(name))
        for path, own_name in self._sites.of(present):
            found = self._from(path, own_name, name, shape, seed)
            if found is not None:
                return found
        return None

    def _from(self, path: str, own_name: str, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor | None:
        dtype = self._present(path, own_name).dtype
        results = []
        for background in _backgrounds(dtype):
            full = torch.full(shape, background, dtype=dtype)
            placed = self._place(path, own_name, full)
            try:
                torch.default_generator.manual_seed(seed)
                for initializer in self._initializers.of(path):
                    initializer.run(name)
            finally:
                for holder in placed:
                    holder.undo()
            results.append(full)
        if len(results) == 1:
            return None if torch.isnan(results[0]).any() else results[0]
        return results[0] if torch.equal(*results) else None

    def _present(self, path: str, own_name: str) -> torch.Tensor:
        module = self._index.modules[path]
        present: torch.Tensor | None = module._parameters.get(own_name)
        if present is None:
            present = module._buffers[own_name]
        assert present is not None
        return present

    def _place(self, path: str, own_name: str, full: torch.Tensor) -> list[Assignment]:
        """Put ``full`` into every place of the tensor."""
        present = self._present(path, own_name)
        value: torch.Tensor = full
        if isinstance(present, nn.Parameter):
            value = nn.Parameter(full, requires_grad=present.requires_grad)
        value.__dict__.update({key: item for key, item in present.__dict__.items() if key != SKIP_MARK})
        placed = []
        for site_path, site_name in self._sites.of(present):
            placed.append(Assignment(self._index.modules[site_path], site_name))
            placed[-1].set(value)
        return placed


def _split(name: str) -> tuple[str, str]:
    path, _, own_name = name.rpartition(".")
    return path, own_name


def _backgrounds(dtype: torch.dtype) -> tuple[float | int | bool, ...]:
    """What a tensor is filled with before, so that an element that was not written shows."""
    if dtype.is_floating_point or dtype.is_complex:
        return (float("nan"),)
    return (False, True)
