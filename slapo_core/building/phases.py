"""`build`: hand a scheduled model to a runtime."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import ArgumentError, BuildError, OptimizerError, SealedError, SlapoError
from slapo_core.ranks.agreement import check_agreement, check_weights_agreement, together
from slapo_core.schedule.schedule import Schedule
from slapo_core.spec.reserved import CORE_DISTRIBUTION
from slapo_core.weights.materialise import Materialisation, materialise
from slapo_core.weights.sources import open_source
from slapo_core.weights.survey import survey

if TYPE_CHECKING:
    from slapo_core.spec.dialect import Dialect
    from slapo_core.spec.engine import Engine

__all__ = ["build"]


def build(
    sch: Schedule,
    target: str = "torch",
    *,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    weights: str | os.PathLike[str] | Mapping[str, torch.Tensor] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    max_grad_norm: float | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    **config: Any,
) -> Engine:
    """Hand a scheduled model to a runtime, with its values in place; every rank of the mesh calls it.

    Args:
        sch: the schedule. It is sealed when everything went well; after an error it can be used as before.
        target: the dialect, e.g. ``"torch"``.
        optimizer: a factory that is given the list of the engine's parameters, e.g.
            ``lambda params: torch.optim.AdamW(params, lr=1e-4)``. Without one the engine can only evaluate.
        weights: full weights with the untouched model's names: a directory with safetensors files, one such file, or
            a mapping. Without them real tensors are used as they are, and tensors on the meta device are initialised
            by the model's own initialisation, to the same full values under every schedule.
        loss: ``loss(output, batch)``, a scalar tensor; default: the output's ``loss``. With it, what a batch holds
            beyond the arguments of the model's forward is left to the loss.
        max_grad_norm: largest L2 norm of all gradients over all ranks; larger ones are scaled down.
        device: where to put the model, e.g. ``"cuda:0"``; None leaves it where it is.
        seed: another number gives other initial values.
        config: options of the dialect.

    Raises:
        UnknownNameError: no such target is installed.
        BuildError: the target cannot run this schedule; every reason is given.
        WeightsError: weights are missing, unexpected or of another shape, or a tensor cannot be initialised.
        OptimizerError: an optimiser instead of a factory, or one that does not hold the engine's parameters.
        RankMismatchError: ranks disagree about the schedule, the plugins, the versions or the weights.
        SealedError: the schedule was built or sealed before.

    Source: paper section 3.1, ``slapo.build``.
    """
    if not isinstance(sch, Schedule):
        raise ArgumentError(
            f"build takes a schedule (got {type(sch).__name__})", hint="build(slapo_core.create_schedule(model))"
        )
    try:
        engine, done = _build(sch, target, optimizer, weights, loss, max_grad_norm, device, seed, config)
    except BaseException:
        sch.forget_target()
        raise
    _keep(sch, done)
    return engine


def _build(
    sch: Schedule,
    target: str,
    optimizer: Any,
    weights: Any,
    loss: Any,
    max_grad_norm: float | None,
    device: Any,
    seed: int,
    config: Mapping[str, Any],
) -> tuple[Engine, Materialisation]:
    with together(sch.mesh, f"build(target='{target}')"):
        _check_arguments(optimizer, max_grad_norm)
        dialect, label = _dialect(sch, target)
        _check(sch, dialect, label)
        with _named(label, target, "plan"):
            plan = dialect.plan(sch, config)
        source = open_source(weights) if weights is not None else None
    check_agreement(sch, more=_arguments(target, optimizer, weights, max_grad_norm, seed))
    if source is None:
        check_weights_agreement(sch.mesh, survey(sch)[1])
    elif isinstance(weights, Mapping):
        check_weights_agreement(sch.mesh, weights)
    with together(sch.mesh, "giving the model its values"):
        done = materialise(sch, source, device=_device(device), seed=seed)
    try:
        options = {"optimizer": optimizer, "loss": loss, "max_grad_norm": max_grad_norm, "reference": done.reference}
        with _named(label, target, "build"):
            engine = dialect.build(plan, sch, **options)
    except BaseException:
        done.take_back()
        raise
    return engine, done


@contextlib.contextmanager
def _named(label: str, target: str, method: str) -> Iterator[None]:
    """Give what a dialect raises the name of its plugin; errors that say what is wrong stay as they are."""
    try:
        yield
    except SlapoError:
        raise
    except Exception as error:
        if label.startswith(f"{CORE_DISTRIBUTION} "):
            raise  # no stranger's code but the user's own, such as the optimiser's factory
        raise BuildError(
            f"target '{target}' of {label} failed in {method}(): {type(error).__name__}: {error}", plugin=label
        ) from error


def _arguments(
    target: str, optimizer: Any, weights: Any, max_grad_norm: float | None, seed: int
) -> list[tuple[str, str]]:
    """The arguments of ``build`` that every rank must give alike."""
    given = "those of the model" if weights is None else "a mapping" if isinstance(weights, Mapping) else "a path"
    return [
        ("the target of build", target),
        ("the optimizer given to build", "none" if optimizer is None else "a factory"),
        ("the weights given to build", given),
        ("max_grad_norm given to build", repr(max_grad_norm)),
        ("the seed given to build", repr(seed)),
    ]


def _check_arguments(optimizer: Any, max_grad_norm: float | None) -> None:
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        rate = optimizer.param_groups[0].get("lr")
        shown = f", lr={float(rate):g}" if isinstance(rate, (int, float)) else ""
        raise OptimizerError(
            f"optimizer must be a factory (got a {name} made before the schedule was built, which holds the untouched "
            "model's parameters)",
            hint=f"build(sch, optimizer=lambda params: torch.optim.{name}(params{shown}))",
        )
    if optimizer is not None and not callable(optimizer):
        raise OptimizerError(
            f"optimizer must be a factory (got {optimizer!r})",
            hint="build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))",
        )
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise BuildError(f"max_grad_norm must be positive (got {max_grad_norm})", hint="max_grad_norm=1.0, or None")


def _device(device: torch.device | str | None) -> torch.device | None:
    """The device with its index, so that it compares equal to that of a tensor."""
    if device is None:
        return None
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _dialect(sch: Schedule, target: str) -> tuple[Dialect, str]:
    """The dialect, and the plugin that it comes from, e.g. ``"slapo-megatron 0.1.0"``, whose hooks are active now."""
    entry = sch.registry.resolve("dialects", target)
    cls = sch.registry.load(entry)
    with _named(entry.label, target, "__init__"):
        dialect: Dialect = cls()
    sch.hooks.activate(entry.distribution, version=entry.version)
    return dialect, entry.label


def _check(sch: Schedule, dialect: Dialect, label: str) -> None:
    if sch.is_sealed:
        raise SealedError(
            "cannot build: the schedule was built or sealed before, and the originals are gone",
            hint="create a new schedule of a fresh model; sch.to_json() and replay() repeat the steps",
        )
    mesh = sch.mesh
    if mesh is not None and mesh.is_dry:
        raise BuildError(
            f"the mesh {mesh} is only declared: it needs {mesh.world_size} processes, and this is one without "
            "torch.distributed",
            hint=f"call torch.distributed.init_process_group() first and launch with `{mesh.launch_command()}`",
        )
    with _named(label, dialect.name, "check"):
        reasons = [str(violation) for violation in dialect.check(sch) or ()]
    for mesh_dim, size in mesh.sizes.items() if mesh is not None else ():
        if size > 1 and mesh_dim not in dialect.supports:
            can = ", ".join(sorted(dialect.supports)) or "none"
            reasons.append(f"it does not run mesh_dim '{mesh_dim}' (size {size}); it runs {can}")
    if reasons:
        start = f"target '{dialect.name}' cannot run this schedule"
        lines = [f"{start}: {reasons[0]}"] if len(reasons) == 1 else [f"{start}:", *(f"  - {r}" for r in reasons)]
        raise BuildError("\n".join(lines))
    _warn_if_alone(sch)


def _warn_if_alone(sch: Schedule) -> None:
    import torch.distributed as dist

    if sch.mesh is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        world_size = dist.get_world_size()
        warnings.warn(
            f"torch.distributed runs {world_size} processes, but the schedule has no mesh: this rank trains "
            f'on its own; create_schedule(model, mesh={{"dp": {world_size}}}) trains replicas together',
            stacklevel=4,
        )


def _keep(sch: Schedule, done: Materialisation) -> None:
    done.overwritten.clear()
    done.edit.close()
    done.edit.entries.clear()
    sch.seal("build()")
