"""Describe the ranks that hold shards of a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from slapo_core import Mesh, MeshError
from slapo_loss.private import detect_fake_mode, gather_functional


@dataclass(frozen=True)
class Ranks:
    """Describe the ranks that hold a vocabulary.

    Args:
        name: torch's name of the process group; None where the mesh is only declared.
        size: their number.
        rank: this process's place.
        launch: what gives the mesh its processes, for a hint.
    """

    name: str | None
    size: int
    rank: int
    launch: str = field(default="", compare=False)

    @classmethod
    def along(cls, mesh: Mesh, mesh_dim: str) -> Ranks:
        """Return the ranks along ``mesh_dim``."""
        group = None if mesh.is_abstract else mesh.group(mesh_dim)
        name = None if group is None else group.group_name
        return cls(name, mesh.size(mesh_dim), mesh.rank(mesh_dim), mesh.launch_hint())

    def gather(self, tensor: Tensor) -> Tensor:
        """Gather over the ranks: (...) -> (ranks, ...).

        Raises:
            MeshError: the mesh is abstract, and the tensor has values.
        """
        if self.name is not None:
            return gather_functional(tensor, self.size, self.name)
        if not tensor.is_meta and detect_fake_mode(tensor) is None:
            raise MeshError(
                f"linear_cross_entropy ran on an abstract mesh: this process has no process group for the {self.size} "
                "ranks",
                hint=self.launch,
            )
        return torch.stack([tensor] * self.size)
