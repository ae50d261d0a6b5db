"""The dialect of target ``"torch"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from slapo_core import BuildError, Dialect, Plan

if TYPE_CHECKING:
    from slapo_core import Engine
    from slapo_core.spec.request import BuildRequest, ScheduledModel

__all__ = ["TorchDialect"]

_DEFAULTS: dict[str, Any] = {
    "find_unused_parameters": False,
    "gradient_as_bucket_view": True,
    "bucket_cap_mb": 25,
}


class TorchDialect(Dialect):
    """Plain PyTorch: one process, a tensor-parallel group, and replicas through DistributedDataParallel.

    Options, all of them DistributedDataParallel's own: ``find_unused_parameters`` (default False),
    ``gradient_as_bucket_view`` (default True), ``bucket_cap_mb`` (default 25, in MiB).
    """

    name: ClassVar[str] = "torch"
    supports: ClassVar[frozenset[str]] = frozenset({"dp", "tp"})
    accumulates: ClassVar[bool] = True

    def plan(self, schedule: ScheduledModel, config: Mapping[str, Any]) -> Plan:
        unknown = sorted(set(config) - set(_DEFAULTS))
        if unknown:
            raise BuildError(
                f"target 'torch' has no option {', '.join(map(repr, unknown))}; it has {', '.join(_DEFAULTS)}"
            )
        mesh = schedule.mesh
        steps = [f"the scheduled {type(schedule.model).__name__}, {len(schedule.records)} steps applied"]
        if mesh is not None:
            steps += [
                f"collectives over mesh_dim '{mesh_dim}' ({size} ranks), as the steps say"
                for mesh_dim, size in mesh.sizes.items()
                if mesh_dim != "dp" and size > 1
            ]
            if mesh.size("tp") > 1:
                steps.append("one random state for the ranks of mesh_dim 'tp': that of the first of them")
            if mesh.size("dp") > 1:
                steps.append(f"DistributedDataParallel over mesh_dim 'dp' ({mesh.size('dp')} ranks)")
        return Plan("torch", tuple(steps), {**_DEFAULTS, **config})

    def build(self, plan: Plan, request: BuildRequest) -> Engine:
        from slapo_core.native.engine import TorchEngine

        return TorchEngine(plan, request)
