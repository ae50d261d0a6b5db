"""Clip gradients over all ranks, and sum the gradients of tied parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from slapo_core.errors import BuildError
from slapo_runtime.correspondence.storage import is_distributed, sharding_groups
from slapo_runtime.flat_shards import buckets
from slapo_runtime.ranks.exchange import collect, exchange_device, sum_among

if TYPE_CHECKING:
    from slapo_core.layout import Mesh, ShardRange
    from slapo_runtime.correspondence import Correspondence
    from slapo_runtime.correspondence.storage import LiveTensor


class GradientClipper:
    """Scale gradients down so that their norm over all ranks is at most ``max_norm``.

    Shards of a parameter are counted on every rank of the mesh dimensions that split it, shards of a DTensor over the
    groups of its own DeviceMesh. Replicas are counted once, and so are shards that several ranks hold, and parameters
    tied across pipeline stages.

    Args:
        correspondence: of the scheduled model, with its present parameters.
        max_norm: the largest norm; ``math.inf`` only measures.
        norm_type: p of the p-norm, positive; ``math.inf`` is the largest absolute value.
        error_if_nonfinite: raise, on every rank, instead of scaling by an infinite or NaN norm.
    """

    def __init__(
        self,
        correspondence: Correspondence,
        max_norm: float,
        *,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> None:
        self._mesh: Mesh | None = correspondence.mesh
        self._max_norm, self._norm_type, self._error_if_nonfinite = max_norm, norm_type, error_if_nonfinite
        here = (live.tensor.device for live in correspondence.live() if live.is_local)
        self._device = next(here, torch.device("cpu"))
        self._counted: dict[tuple[str, ...], _Counted] = {(): _Counted([], [])}  # in one order on every rank
        self._again: list[nn.Parameter] = []  # replicas that another rank counts
        self._dtypes: set[torch.dtype] | None = set() if correspondence.placement is not None else None
        for live in correspondence.live():
            if isinstance(live.tensor, nn.Parameter):
                holders = correspondence.holders(live)
                groups = self._groups(*(mesh_dim for mesh_dim, _ in live.layout.shards()), *holders)
                counted = self._counted.setdefault(tuple(groups), _Counted(list(groups.values()), []))
                # Other pipeline ranks do not know which parameters are DTensors: their shards are summed before.
                groups = {group.group_name: (group, device) for group, device in sharding_groups(live.tensor)}
                if groups:
                    counted = counted.sharded.setdefault(tuple(groups), _Counted(list(groups.values()), []))
                if self._dtypes is not None and live.tensor.requires_grad:
                    self._dtypes.add(live.tensor.dtype)
                if live.is_local:
                    holders |= {dim: live.layout.holders(self._mesh, dim) for dim, _ in live.layout.shards()}
                    (counted.parameters if self._is_first(holders) else self._again).append(live.tensor)
                    self._count_parts(counted, live)

    def _count_parts(self, counted: _Counted, live: LiveTensor) -> None:
        parts = live.layout.parts(self._mesh)
        if not parts:
            return
        if is_distributed(live.tensor):
            raise BuildError(
                f"several ranks hold the same parts of the DTensor '{live.name}' ({live.layout}), and the norm would "
                "count these parts more than once",
                hint="leave it out of fully_shard, or shard separate projections of queries, keys and values",
            )
        counted.parts[id(live.tensor)] = [part for part in parts if self._is_first({part.mesh_dim: part.places})]

    def _is_first(self, holders: Mapping[str, tuple[int, ...]]) -> bool:
        return self._mesh is None or all(self._mesh.rank(dim) == ranks[0] for dim, ranks in holders.items())

    def _groups(self, *mesh_dims: str) -> dict[str, tuple[dist.ProcessGroup, torch.device]]:
        """Return the process groups of the schedule's mesh along some dimensions, by name."""
        found: dict[str, tuple[dist.ProcessGroup, torch.device]] = {}
        for mesh_dim in sorted(set(mesh_dims)):
            group = self._mesh.group(mesh_dim) if self._mesh is not None else None
            if group is not None:
                assert self._mesh is not None
                found[group.group_name] = (group, exchange_device(self._mesh))
        return found

    def clip(self) -> torch.Tensor:
        """Clip in place.

        Returns:
            the norm before clipping, a scalar tensor, the same on every rank.

        Raises:
            RuntimeError: the norm is not finite, with ``error_if_nonfinite``.
        """
        found: list[list[torch.Tensor]] = []  # this rank's parts of the gradients
        rest, _ = _Counted([], self._again).gradients()
        norms = [self._norm_of(counted, found) for counted in self._counted.values()]
        device = next((norm.device for norm in norms if norm.device.type != "cpu"), norms[0].device)
        total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), self._norm_type)
        total = total.to(self._dtype(one for local in found for one in local))
        if self._error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the {self._norm_type}-norm of all gradients over all ranks is {total.item()}, so they cannot be "
                "clipped; error_if_nonfinite=False scales them nevertheless"
            )
        held: Any = [SimpleNamespace(grad=one) for local in (*found, rest) for one in local]
        nn.utils.clip_grads_with_norm_(held, self._max_norm, total)
        return total

    @torch.no_grad()
    def _norm_of(self, counted: _Counted, found: list[list[torch.Tensor]]) -> torch.Tensor:
        """Compute the norm of gradients over their process groups: a collective; append them to ``found``."""
        inner = [self._norm_of(one, found) for one in counted.sharded.values()]
        local, gradients = counted.gradients()
        found.append(local)
        if gradients:
            norm = nn.utils.get_total_norm(gradients, self._norm_type)
        else:
            norm = torch.zeros((), device=self._device)  # torch's is on the CPU, and would be copied
        if inner:
            norms = torch.stack([norm.double(), *(one.to(norm.device).double() for one in inner)])
            norm = torch.linalg.vector_norm(norms, self._norm_type)
        if not counted.groups:
            return norm
        # In one type on every rank: a rank without these gradients does not know their type, but takes part.
        home, norm = norm.device, norm.to(torch.float64)
        largest = math.isinf(self._norm_type)
        value = norm if largest else norm.pow(self._norm_type)
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        for group, device in counted.groups:
            value = value.to(device)
            dist.all_reduce(value, operation, group=group)
        return (value if largest else value.pow(1.0 / self._norm_type)).to(home)

    def _dtype(self, gradients: Iterable[torch.Tensor]) -> torch.dtype:
        """Return the widest real type of the gradients, as torch's function."""
        dtype = torch.float32
        for one in {gradient.dtype for gradient in gradients} if self._dtypes is None else self._dtypes:
            dtype = torch.promote_types(dtype, one.to_real())
        return dtype


@dataclass(frozen=True)
class _Counted:
    """Parameters split over the same process groups, given with their devices."""

    groups: list[tuple[dist.ProcessGroup, torch.device]]
    parameters: list[nn.Parameter]
    parts: dict[int, list[ShardRange]] = field(default_factory=dict)
    """The counted parts of parameters that this rank does not count fully."""
    sharded: dict[tuple[str, ...], _Counted] = field(default_factory=dict)
    """The DTensors, by the groups of their own meshes."""

    @torch.no_grad()
    def gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this rank's shards of the gradients as plain tensors, and their counted parts.

        They differ for partial DTensors, which take a collective, and where other ranks count parts.
        """
        there: list[Any] = [parameter for parameter in self.parameters if parameter.grad is not None]
        if not self.parts and all(type(parameter) in (torch.Tensor, nn.Parameter) for parameter in there):
            own = [parameter.grad for parameter in there]
            return own, own
        return [_local(one.grad) for one in there], [gradient for one in there for gradient in self._counted(one)]

    def _counted(self, parameter: nn.Parameter) -> list[torch.Tensor]:
        gradient, parts = _local(_placed(parameter)), self.parts.get(id(parameter))
        return [gradient] if parts is None else [part.of(gradient) for part in parts]


def _local(gradient: Any) -> Any:
    return gradient.to_local() if is_distributed(gradient) else gradient


def _placed(parameter: Any) -> Any:
    """Return a gradient in its parameter's placement: a collective for partial values."""
    gradient = parameter.grad
    if not is_distributed(gradient):
        return gradient
    from torch.distributed.tensor import Replicate

    own = parameter.placements if is_distributed(parameter) else gradient.placements
    wanted = tuple(Replicate() if one.is_partial() else one for one in own)
    return gradient if wanted == gradient.placements else gradient.redistribute(placements=wanted)


_BUCKET = 32 << 20  # bytes of a message; a larger gradient is sent alone, without a copy
_NONE, _DENSE, _SPARSE = 0, 1, 2


class TiedGradients:
    """Sum gradients of tied parameters, or their shards, over their pipeline ranks.

    All ranks have the same sum to the last bit, because each adds in the order of the ranks.

    Args:
        correspondence: of the scheduled model, with all tensors in their places.
    """

    def __init__(self, correspondence: Correspondence) -> None:
        self._mesh: Mesh | None = correspondence.mesh
        self._ties: dict[tuple[int, ...], list[LiveTensor]] = {}
        self._compared: set[tuple[int, ...]] = set()  # ranks that have compared which gradients are sparse
        if correspondence.placement is None or self._mesh is None:
            return
        anywhere = False
        for live in correspondence.live():
            places = correspondence.placement.holders(live)
            if not isinstance(live.tensor, nn.Parameter) or len(places) < 2:
                continue
            anywhere = True
            if live.is_local:
                self._ties.setdefault(places, []).append(live)
        if anywhere and exchange_device(self._mesh).type != "cpu":
            import torch.distributed as dist

            # NCCL connects a group with its first collective, which all of its ranks must join.
            dist.all_reduce(torch.zeros(1, device=exchange_device(self._mesh)), group=self._mesh.group("pp"))

    @torch.no_grad()
    def sum(self, attribute: str = "grad") -> None:
        """Sum the gradients in place: a collective among their ranks.

        A rank without a gradient adds nothing and gets the sum; if no rank has one, there is none afterwards. The host
        waits for the device in the first step, and where a gradient is missing.

        Args:
            attribute: the parameters' attribute with the gradient, which may be missing or None.

        Raises:
            BuildError: a gradient is sparse; in the first step on all of these ranks.
        """
        for places in sorted(self._ties):
            ties = [tie for tie in self._ties[places] if tie.tensor.requires_grad]
            if ties:
                self._sum(ties, places, attribute)

    @torch.no_grad()
    def sum_all(self) -> None:
        """Sum all gradients without comparing ranks, for estimates."""
        for places in sorted(self._ties):
            for tie in self._ties[places]:
                if tie.tensor.requires_grad and tie.tensor.grad is None:
                    tie.tensor.grad = torch.zeros_like(tie.tensor)
            gradients = [_local(tie.tensor.grad) for tie in self._ties[places] if tie.tensor.grad is not None]
            for bucket in buckets(gradients, _BUCKET):
                self._sum_bucket(bucket, places)

    def _sum(self, ties: list[LiveTensor], places: tuple[int, ...], attribute: str) -> None:
        assert self._mesh is not None
        gradients = [getattr(tie.tensor, attribute, None) for tie in ties]
        states = [_state(gradient) for gradient in gradients]
        own = torch.full((len(states),), _DENSE, dtype=torch.uint8, device=exchange_device(self._mesh))
        for number, state in enumerate(states):
            if state != _DENSE:
                own[number] = state
        everywhere = collect(own, self._mesh, "pp", places)
        if places not in self._compared or set(states) != {_DENSE}:
            states = torch.stack(everywhere).amax(0).tolist()
        sparse = [tie.name for tie, state in zip(ties, states, strict=True) if state == _SPARSE]
        if sparse:
            raise BuildError(
                f"the gradients of {', '.join(map(repr, sparse))}, tied across pipeline stages, are sparse: only dense "
                "gradients are summed over stages",
                hint="nn.Embedding(..., sparse=False)",
            )
        self._compared.add(places)
        there = []
        for tie, gradient, state in zip(ties, gradients, states, strict=True):
            if state != _DENSE:
                continue
            if gradient is None:
                gradient = torch.zeros_like(tie.tensor)
                setattr(tie.tensor, attribute, gradient)
            own = _local(gradient)  # shards of all ranks of a tie have one place
            if own.numel():
                there.append(own)
        for bucket in buckets(there, _BUCKET):
            self._sum_bucket(bucket, places)

    def _sum_bucket(self, bucket: list[torch.Tensor], places: tuple[int, ...]) -> None:
        assert self._mesh is not None
        device = exchange_device(self._mesh)
        flat = bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([gradient.reshape(-1) for gradient in bucket])
        total = sum_among(flat.to(device), self._mesh, "pp", places)
        sizes = [gradient.numel() for gradient in bucket]
        for gradient, part in zip(bucket, total.split(sizes), strict=True):
            gradient.copy_(part.view(gradient.shape))


def _state(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return _NONE
    return _DENSE if gradient.layout == torch.strided else _SPARSE
