"""Step optimizers of full matrices on shards: gather a split parameter on one rank, step it there, and scatter it.

Around ``step()``, the optimizer's groups hold the full parameters that this rank owns in place of its shards: two hooks
of the optimizer exchange them. Its state belongs to the full parameters, and exists on their owners alone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slapo_core.errors import BuildError
from slapo_runtime.correspondence.storage import (
    OWN_STORAGE,
    TorchOptimizer,
    is_distributed,
    sharded_like,
    sharded_over,
    sharding_groups,
    unsharded,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from slapo_core.layout import Mesh
    from slapo_runtime.correspondence.storage import LiveTensor
    from slapo_runtime.weights.state import ModelState


@dataclass
class _Matrix:
    """A split parameter.

    Args:
        live: its shard on this rank.
        mesh: of the schedule.
        dims: the mesh dimensions over which it is split, first those in the schedule's layout.
        groups: their process groups.
        owner: the rank in each group that steps it.
        own: the full parameter, on its owner: with values during a step, and the key of the optimizer's state.
        is_stepped: whether the present step has a gradient of it.
    """

    live: LiveTensor
    mesh: Mesh | None
    dims: tuple[str, ...]
    groups: Sequence[ProcessGroup]
    owner: tuple[int, ...]
    own: torch.nn.Parameter | None = field(init=False, default=None)
    is_stepped: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.owner == tuple(map(dist.get_rank, self.groups)):
            self.own = torch.nn.Parameter(self.empty(0, self.live.tensor.dtype))

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.live.tensor.device)

    def full(self, shard: torch.Tensor) -> torch.Tensor:
        """Gather the full parameter, or its gradient: a collective."""
        return self.live.layout.full(unsharded(shard), self.mesh)

    def broadcast(self, value: torch.Tensor) -> torch.Tensor:
        """Fill in the owner's value on every rank that shares the parameter: a collective."""
        places = tuple(map(dist.get_rank, self.groups))
        for number in reversed(range(len(places))):
            if places[:number] == self.owner[:number]:
                dist.broadcast(value, group=self.groups[number], group_src=self.owner[number])
        return value

    def gather(self) -> None:
        """Give the owner the full parameter and its gradient: a collective."""
        shard = self.live.tensor
        self.is_stepped = shard.grad is not None
        if shard.grad is None:
            return
        value = self.full(shard)
        if self.own is not None:
            self.own.data = value
        del value  # before the gradient: other ranks hold one full tensor at a time
        gradient = self.full(shard.grad)
        if self.own is not None:
            self.own.grad = gradient

    def scatter(self) -> None:
        """Give every rank its shard of the owner's parameter, which is freed: a collective."""
        if not self.is_stepped:
            return
        shape, shard = self.live.layout.shape, self.live.tensor
        value = self.empty(shape, shard.dtype) if self.own is None else self.own.detach().contiguous()
        shard.copy_(sharded_like(shard, self.live.layout.local(self.broadcast(value), self.mesh)))
        if self.own is not None:
            self.own.grad, self.own.data = None, self.empty(0, shard.dtype)


class FullMatrixSteps:
    """Step each split parameter of an optimizer on one rank, by its full matrix.

    Owners are dealt out by size. Parameters that are not split stay with the optimizer as they are.

    Args:
        optimizer: its update of a parameter depends on that full parameter alone, and its ``step`` reads the parameters
            from ``param_groups``.
        state: of the model. Parameters may become shards under ``fully_shard`` until the first step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, state: ModelState) -> None:
        self._optimizer, self._state = optimizer, state
        self._taken: list[tuple[dict[str, Any], list[torch.nn.Parameter]]] = []  # groups with the shards taken out
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_state_dict_pre_hook(_refuse_state_dict)
        optimizer.zero_grad = self._zeroing(optimizer.zero_grad)  # type: ignore[method-assign]
        setattr(optimizer, OWN_STORAGE, self.storage)

    def storage(self) -> FullMatrixStorage:
        """Return the optimizer's state by the model's parameters: a collective."""
        return FullMatrixStorage(self._optimizer, self)

    @functools.cached_property
    def matrices(self) -> dict[int, _Matrix]:
        """The split parameters by identity, in the same order on all ranks that share them."""
        mesh, found = self._state.mesh, dict[int, _Matrix]()
        held = {id(one) for group in self._optimizer.param_groups for one in group["params"]}
        lives = [live for live in self._state.tensors() if live.is_local and id(live.tensor) in held]
        loads: dict[tuple[tuple[str, ...], int], dict[tuple[int, ...], int]] = {}
        for live in sorted(lives, key=lambda live: (-math.prod(live.layout.shape), live.name)):
            sizes = mesh.sizes if mesh is not None else {}
            dims = tuple(dict.fromkeys(dim for dim, _ in live.layout.shards() if sizes.get(dim, 1) > 1))
            over = [mesh.group(dim) for dim in dims if mesh is not None]
            groups = [group for group in over if group is not None]
            groups += [group for group, _ in sharding_groups(live.tensor)]
            dims += sharded_over(live.tensor)
            if groups:
                ranks = itertools.product(*(range(group.size()) for group in groups))
                load = loads.setdefault((dims, len(groups)), dict.fromkeys(ranks, 0))
                owner = min(load, key=load.__getitem__)
                load[owner] += math.prod(live.layout.shape)
                found[id(live.tensor)] = _Matrix(live, mesh, dims, groups, owner)
        return found

    def own(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
        """Return what this rank's optimizer steps for a parameter; None if another rank steps it."""
        matrix = self.matrices.get(id(parameter))
        return parameter if matrix is None else matrix.own

    @contextlib.contextmanager
    def exchanged(self) -> Iterator[None]:
        """Exchange shards by own full parameters in the optimizer's groups."""
        self._exchange()
        try:
            yield
        finally:
            self._give_back()

    def _exchange(self) -> None:
        self._give_back()  # after a step that failed
        for group in self._optimizer.param_groups:
            self._taken.append((group, group["params"]))
            own = [self.own(one) for one in group["params"]]
            group["params"] = [one for one in own if one is not None]

    def _give_back(self) -> None:
        taken, self._taken = self._taken, []
        for place, (group, shards) in enumerate(taken):  # load_state_dict makes other groups
            group["params"] = self._optimizer.param_groups[place]["params"] = shards

    def _zeroing(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        """Reset the gradients of the shards, also after a step that failed."""

        def zero(set_to_none: bool = True) -> None:
            self._give_back()
            zero_grad(set_to_none=set_to_none)

        return zero

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        for matrix in self.matrices.values():
            matrix.gather()
        self._exchange()

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        self._give_back()
        for matrix in self.matrices.values():
            matrix.scatter()


class FullMatrixStorage(TorchOptimizer):
    """The implementation of :class:`OptimizerStorage` for :class:`FullMatrixSteps`: state of full parameters.

    Making one is a collective of the ranks that share parameters.

    Args:
        optimizer: of torch.
        steps: of the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, steps: FullMatrixSteps) -> None:
        with steps.exchanged():
            super().__init__(optimizer)
        self._steps = steps
        self._about: dict[int, dict[str, Any]] = {}  # by the place of the matrix
        for place, matrix in enumerate(steps.matrices.values()):
            if matrix.own is not None:
                own = optimizer.state.get(matrix.own, {})
                self._about[place] = {key: _described(value) for key, value in own.items()}
        for group in dict.fromkeys(group for matrix in steps.matrices.values() for group in matrix.groups):
            parts: list[Any] = [None] * group.size()
            dist.all_gather_object(parts, self._about, group=group)
            self._about = {place: about for part in parts for place, about in part.items()}
        self._place = {key: place for place, key in enumerate(steps.matrices)}

    def owns_full(self, parameter: torch.Tensor) -> bool | None:
        matrix = self._steps.matrices.get(id(parameter))
        return None if matrix is None else matrix.own is not None

    def partitioned(self, parameter: torch.Tensor) -> tuple[str, ...]:
        matrix = self._steps.matrices.get(id(parameter))
        return super().partitioned(parameter) if matrix is None else matrix.dims

    def state(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        if id(parameter) not in self._place:
            return super().state(parameter)
        return self._about[self._place[id(parameter)]]

    def read(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        if id(parameter) not in self._place:
            return super().read(parameter, key)
        matrix, like = self._steps.matrices[id(parameter)], self.state(parameter)[key]
        own = None if matrix.own is None else self._optimizer.state[matrix.own][key]
        value = matrix.empty(like.shape, like.dtype)
        return matrix.broadcast(value if own is None else value.copy_(own))

    def write(self, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        own = self._steps.own(parameter)  # type: ignore[arg-type]
        if own is not None:
            super().write(own, key, value)

    def put(self, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        own = self._steps.own(parameter)  # type: ignore[arg-type]
        if own is not None:
            super().put(own, key, value)

    def loading(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> Callable[[], None]:
        own = {self._steps.own(parameter): state for parameter, state in states.items()}  # type: ignore[arg-type]
        with self._steps.exchanged():
            load = super().loading(groups, {key: state for key, state in own.items() if key is not None})

        def loads() -> None:
            with self._steps.exchanged():
                load()

        return loads


def _described(value: Any) -> Any:
    if is_distributed(value):
        raise BuildError("the optimizer keeps DTensors for a full parameter", hint="use an optimizer of plain tensors")
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value


def _refuse_state_dict(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer).__name__
    raise BuildError(
        f"the state of this {kind} belongs to full parameters, each on one rank, which optimizer.state_dict() cannot "
        "give",
        hint="engine.save(directory) saves it",
    )
