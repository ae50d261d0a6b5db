"""The dialect of target ``"torch"``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from slapo_core.errors import BuildError
from slapo_core.spec.dialect import Dialect, Plan

if TYPE_CHECKING:
    from slapo_core.spec.engine import Engine
    from slapo_core.spec.violation import Violation

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

    def check(self, schedule: Any) -> Iterator[Violation]:
        return iter(())  # what every target needs is checked by build

    def plan(self, schedule: Any, config: Mapping[str, Any]) -> Plan:
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
            if mesh.size("dp") > 1:
                steps.append(f"DistributedDataParallel over mesh_dim 'dp' ({mesh.size('dp')} ranks)")
        return Plan("torch", tuple(steps), {**_DEFAULTS, **config})

    def build(self, plan: Plan, schedule: Any, **options: Any) -> Engine:
        """Make the engine.

        Args:
            plan: from :meth:`plan`.
            schedule: with its values in place.
            options: ``optimizer``, ``loss``, ``max_grad_norm`` and ``reference``, as given by ``build``.

        Raises:
            OptimizerError: the factory's optimiser does not hold the model's parameters.
        """
        from slapo_core.native.engine import TorchEngine
        from slapo_core.native.optimizer import make_optimizer
        from slapo_core.ranks.agreement import together

        model, mesh = schedule.model, schedule.mesh
        with together(mesh, "making the optimiser"):
            optimizer = make_optimizer(schedule, options.get("optimizer"))
        forward = model
        if mesh is not None and mesh.size("dp") > 1 and any(p.requires_grad for p in model.parameters()):
            from torch.nn.parallel import DistributedDataParallel

            forward = DistributedDataParallel(model, process_group=mesh.group("dp"), **plan.config)
        return TorchEngine(
            model,
            forward,
            optimizer,
            reference=options["reference"],
            loss=options.get("loss"),
            max_grad_norm=options.get("max_grad_norm"),
            plan=plan,
        )
