"""Our stages as DeepSpeed's ``PipelineModule``. It imports DeepSpeed: import it inside of functions only."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import nn

from slapo_deepspeed.private import buffers_of, children_of, non_persistent_buffers_of, parameters_of

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_runtime.stage_runner import Work


AXES = {"pp": "pipe", "dp": "data", "tp": "model"}


def topology_of(mesh: Mesh) -> ProcessTopology:
    """DeepSpeed's axes in the order of the mesh, so that its groups are of the same ranks as ours."""
    sizes = {AXES[mesh_dim]: size for mesh_dim, size in mesh.sizes.items() if mesh_dim in AXES}
    for axis in AXES.values():  # DeepSpeed looks for all of them, and names its files by them
        sizes.setdefault(axis, 1)
    return ProcessTopology(axes=list(sizes), dims=list(sizes.values()))


class _Layer(nn.Module):
    """All stages of this rank, with their modules and tensors at the reference paths.

    Args:
        part: this rank's part of the model.
        unused: parameters that live on this rank and that no stage uses, by name.
        placeholder: trained on a rank without other trained parameters.
    """

    def __init__(self, part: nn.Module, unused: Mapping[str, nn.Parameter], placeholder: nn.Parameter | None) -> None:
        super().__init__()
        for name, child in children_of(part).items():
            self.add_module(name, child)
        for name, parameter in parameters_of(part).items():
            self.register_parameter(name, parameter)
        for name, buffer in buffers_of(part).items():
            self.register_buffer(name, buffer, persistent=name not in non_persistent_buffers_of(part))
        self.unused = nn.ParameterDict({name.replace(".", "/"): one for name, one in unused.items()})
        self.placeholder = placeholder

    work: Work

    def forward(self, given: Any) -> Any:
        *received, number = given if isinstance(given, tuple) else (given,)
        return self.work.forward(tuple(received), int(number))


class StagesModule(PipelineModule):
    """The stages of a schedule, one layer for each rank along ``pipe``.

    Every rank has the whole batch of its replica, so that what stages read of it is not sent: the data iterator of a
    step gives the numbers of the micro-batches only. Modes are those that the engine around it sets.

    Args:
        part: this rank's part of the model.
        unused: parameters that live on this rank and that no stage uses, by name.
        placeholder: trained on a rank without other trained parameters.
        mesh: the schedule's.
        tied: gives the parameters that several ranks along ``pipe`` hold, and the groups over which their gradients are
            summed; called once a step, on every rank, when all passes are over.
    """

    def __init__(
        self,
        part: nn.Module,
        unused: Mapping[str, nn.Parameter],
        placeholder: nn.Parameter | None,
        mesh: Mesh,
        tied: Callable[[], Sequence[tuple[nn.Parameter, Any]]],
    ) -> None:
        own = _Layer(part, unused, placeholder)
        layers = [own if rank == mesh.rank("pp") else nn.Identity() for rank in range(mesh.size("pp"))]
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the contents of the plan
            super().__init__(layers, topology=topology_of(mesh), partition_method="uniform", loss_fn=self._loss)
        self.__dict__["_own"], self.__dict__["_tied"] = own, tied

    def begin(self, work: Work) -> None:
        """A step: what comes is for this."""
        self.__dict__["_work"] = self.__dict__["_own"].work = work
        self.__dict__["_count"] = 0

    def forward(self, forward_input: Any) -> Any:
        work: Work = self.__dict__["_work"]
        received = forward_input if work.chunk.coming is not None else ()
        number = self.__dict__["_count"]  # they come in order on every rank
        self.__dict__["_count"] += 1
        # The number tells DeepSpeed's activation checkpointing which layer to recompute.
        outputs = super().forward((*received, torch.tensor(number)))
        return outputs if isinstance(outputs, tuple) else (outputs,)  # which it makes of a tuple of one

    def _loss(self, outputs: Any, label: torch.Tensor) -> torch.Tensor:
        work: Work = self.__dict__["_work"]
        return work.loss(outputs, self.__dict__["_count"] - 1)

    def train(self, mode: bool = True) -> StagesModule:
        """Set only the own flag: the surrounding engine sets the modules' modes."""
        self.training = mode
        return self

    def get_tied_weights_and_groups(self) -> Any:
        return self.__dict__["_tied"]()
