"""A runtime that keeps values elsewhere: masters in float64, and their moments, in slices over the replicas.

With ``forget=True`` the model holds nothing between steps, as under ZeRO-3; else it holds what the forward computes
with, rounded, as under ZeRO-1.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

import slapo_core as slapo
from slapo_core.plugins import Registry, use_registry
from slapo_runtime.correspondence.storage import LiveTensor
from slapo_runtime.engine import StatefulEngine

__all__ = ["Forgetting", "Sliced", "SlicedEngine", "sliced"]


class Slices:
    """This replica's slice of every trained parameter, and of its moments; both storages."""

    def __init__(self, context: Any, forget: bool) -> None:
        self.mesh, self.forget = context.schedule.mesh, forget
        self.replicas = self.mesh.size("dp") if self.mesh is not None else 1
        self.place = self.mesh.rank("dp") if self.mesh is not None else 0
        self.masters: dict[int, nn.Parameter] = {}
        self.parameters: list[nn.Parameter] = []
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.alive = self.most_alive = 0
        for live in context.materialize():
            if isinstance(live.tensor, nn.Parameter) and live.tensor.requires_grad:
                self.shapes[id(live.tensor)] = tuple(live.tensor.shape)
                self.masters[id(live.tensor)] = nn.Parameter(self.slice_of(live.tensor.double()))
                self.parameters.append(live.tensor)
                self.let_go(live.tensor)
        self.inner = torch.optim.AdamW(self.masters.values(), lr=0.01, eps=1e-4)
        self.kind, self.scheduled = "AdamW", ()

    # -- slices -----------------------------------------------------------------------------------------------

    def slice_of(self, value: torch.Tensor) -> torch.Tensor:
        size = -(-value.numel() // self.replicas)
        return nn.functional.pad(value.detach().reshape(-1), (0, size * self.replicas - value.numel())).split(size)[
            self.place
        ]

    def full(self, piece: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        pieces = [torch.empty_like(piece) for _ in range(self.replicas)]
        if self.replicas > 1:
            dist.all_gather(pieces, piece.detach().contiguous(), group=self.mesh.group("dp"))
        else:
            pieces = [piece.detach().clone()]
        value = torch.cat(pieces)[: math.prod(shape)].view(shape)
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        weakref.finalize(value, self.gone)
        return value

    def gone(self) -> None:
        self.alive -= 1

    def let_go(self, parameter: torch.Tensor) -> None:
        if self.forget:
            parameter.data = parameter.data.new_empty(0)

    def renew(self) -> None:
        for parameter in self.parameters:
            parameter.data = self.full(self.masters[id(parameter)], self.shapes[id(parameter)]).to(parameter.dtype)

    # -- of tensors -------------------------------------------------------------------------------------------

    def partitioned(self, one: Any) -> tuple[str, ...]:
        tensor = one.tensor if isinstance(one, LiveTensor) else one
        return ("dp",) if id(tensor) in self.masters and self.replicas > 1 else ()

    def dtype(self, live: LiveTensor) -> torch.dtype:
        return torch.float64 if id(live.tensor) in self.masters else live.tensor.dtype

    def read(self, one: Any, key: str = "") -> torch.Tensor:
        tensor = one.tensor if isinstance(one, LiveTensor) else one
        if id(tensor) not in self.masters:
            return tensor
        master = self.masters[id(tensor)]
        return self.full(self.inner.state[master][key] if key else master, self.shapes[id(tensor)])

    def loading(self, one: Any, value: Any) -> Callable[[], None]:
        if not isinstance(one, LiveTensor):
            return self.loading_states(one, value)
        tensor = one.tensor
        if id(tensor) not in self.masters:
            return lambda: tensor.data.copy_(value)
        piece, kept = self.slice_of(value.double()), None if self.forget else value

        def write() -> None:
            self.masters[id(tensor)].data.copy_(piece)
            if kept is not None:
                tensor.data.copy_(kept)

        return write

    def working(self, live: LiveTensor) -> torch.Tensor | None:
        return live.tensor if id(live.tensor) in self.masters and not self.forget else None

    def is_current(self, live: LiveTensor) -> bool:
        if self.working(live) is None:
            return True
        rounded = self.masters[id(live.tensor)].to(live.tensor.dtype)
        return torch.equal(self.slice_of(live.tensor), rounded)

    # -- of the optimizer -------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        return [{**self.inner.param_groups[0], "params": self.parameters}]

    def state(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        empty = torch.empty(self.shapes[id(parameter)], dtype=torch.float64, device="meta")
        found = self.inner.state.get(self.masters[id(parameter)], {})
        return {key: value if not value.dim() else empty for key, value in found.items()}

    def write(self, parameter: torch.Tensor, key: str, value: torch.Tensor) -> None:
        self.inner.state[self.masters[id(parameter)]][key].copy_(self.slice_of(value))

    def loading_states(self, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any]) -> Callable[[], None]:
        new = {}
        for parameter, state in states.items():
            values = {key: state[key] for key in state}
            new[self.masters[id(parameter)]] = {
                key: self.slice_of(value.double()).clone() if value.dim() else value for key, value in values.items()
            }

        def take() -> None:
            self.inner.state.clear()
            self.inner.state.update(new)
            self.inner.param_groups[0].update(groups[0])

        return take


class SlicedEngine(StatefulEngine):
    def __init__(self, forget: bool, plan: Any, context: Any) -> None:
        self.plan, self.context, self._state = plan, context, context.state
        self.slices = Slices(context, forget)
        self.optimizer, self.module, self.ticks = self.slices.inner, context.schedule.model, 0
        context.state.keep_in(self.slices)

    def train_step(self, batch: Any) -> Any:
        slices = self.slices
        slices.renew()
        loss, output = self.context.compute_loss(batch)
        loss.backward()
        for parameter in slices.parameters:
            if slices.replicas > 1:
                dist.all_reduce(parameter.grad.div_(slices.replicas), group=slices.mesh.group("dp"))
            slices.masters[id(parameter)].grad = slices.slice_of(parameter.grad.double())
            parameter.grad = None
        slices.inner.step()
        slices.renew()
        for parameter in slices.parameters:
            slices.let_go(parameter)
        self.ticks += 1
        self.steps += 1
        return slapo.StepResult(loss.detach(), output)

    def eval_step(self, batch: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None: ...

    def _kept_optimizer(self) -> Any:
        return self.slices

    def _runtime_state(self) -> dict[str, Any]:
        return {"clock": {"ticks": self.ticks}, "counters": {"steps": self.ticks}}

    def _loaded_names(self) -> tuple[str, ...]:
        return ("clock",)

    def _load_runtime_state(self, runtime: Mapping[str, Any]) -> None:
        self.ticks = runtime.get("clock", {}).get("ticks", 0)


class Sliced(slapo.Dialect):
    """The forward's rounded copies stay in the model."""

    name: ClassVar[str] = "sliced"
    supports: ClassVar[frozenset[str]] = frozenset({"dp", "tp"})
    takes_tensors: ClassVar[bool] = True
    forgets: ClassVar[bool] = False

    def plan(self, schedule: Any, config: Mapping[str, Any]) -> slapo.Plan:
        return slapo.Plan(self.name, ("slices over dp",))

    def build(self, plan: slapo.Plan, context: Any) -> Any:
        return SlicedEngine(self.forgets, plan, context)


class Forgetting(Sliced):
    """The model holds nothing between steps."""

    name: ClassVar[str] = "forgetting"
    forgets: ClassVar[bool] = True


@contextlib.contextmanager
def sliced() -> Iterator[None]:
    """With both dialects in the registry of this process."""
    with use_registry(Registry.discover()) as registry:
        registry.register(Sliced, kind="dialects")
        registry.register(Forgetting, kind="dialects")
        yield
