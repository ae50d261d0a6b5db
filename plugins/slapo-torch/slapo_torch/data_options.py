"""The options of data parallelism: replicas by DistributedDataParallel, or shards by ``fully_shard``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slapo_core import BuildError
from slapo_runtime.correspondence.storage import Window
from slapo_torch.fully_shard import is_reshard, marked_units, repeated_blocks, shared_names, tie, units_of
from slapo_torch.precision import OPTIONS as OF_PRECISION, PRESETS, with_islands
from slapo_torch.private import has_gradient_hooks

if TYPE_CHECKING:
    import torch
    from torch import nn

    from slapo_core import Mesh, Schedule
    from slapo_runtime.context import BuildContext
    from slapo_runtime.correspondence.storage import LiveTensor
    from slapo_torch.precision import ModelPrecision

OF_REPLICAS: dict[str, Any] = {"find_unused_parameters": False, "gradient_as_bucket_view": True, "bucket_cap_mb": 25}
"""Options of DistributedDataParallel that have another default here, or that pipelines have, too."""

OF_SHARDS: dict[str, Any] = {"reshard_after_forward": None}

OWN_OPTIONS = ("batch_axes", "data_parallel", *OF_SHARDS, *OF_PRECISION)
"""Options that are not DistributedDataParallel's."""


def data_ranks(mesh: Mesh | None) -> int:
    """Return the number of ranks that see other samples of a batch: ``dp_replicate`` x ``dp``."""
    return mesh.size("dp_replicate") * mesh.size("dp") if mesh is not None else 1


def is_sharded(schedule: Schedule, precision: ModelPrecision, options: Mapping[str, Any]) -> bool:
    """Return whether ``fully_shard`` holds the parameters, perhaps for a single replica, whose types it casts."""
    return options["data_parallel"] == "fsdp" and (data_ranks(schedule.mesh) > 1 or precision.gathers)


def materialize(
    context: BuildContext, *, by_rows: bool = False, dtype: Callable[[LiveTensor], torch.dtype | None] | None = None
) -> None:
    """Give the model its values.

    Args:
        context: from ``build``.
        by_rows: whether of each parameter only this rank's rows along ``dp`` are read.
        dtype: as for ``context.materialize``.
    """
    mesh = context.schedule.mesh

    def window(live: LiveTensor) -> Window:
        assert mesh is not None
        rows, *rest = live.tensor.shape
        length = -(-rows // mesh.size("dp"))  # as fully_shard divides them
        start = min(mesh.rank("dp") * length, rows)
        return Window((min(length, rows - start), *rest), (start, *(0 for _ in rest)))

    with context.together("materializing the model"):
        for _ in context.materialize(windows=window if by_rows else None, dtype=dtype):
            pass


def options_of_replicas() -> frozenset[str]:
    """Return the names of the options of DistributedDataParallel that ``build`` does not set itself."""
    from torch.nn.parallel import DistributedDataParallel

    own = {"module", "device_ids", "output_device", "dim", "process_group", "device_mesh"}
    return frozenset(inspect.signature(DistributedDataParallel).parameters) - own


def data_parallel(schedule: Schedule, config: Mapping[str, Any]) -> str:
    """Return ``"ddp"`` or ``"fsdp"``: the option, else what steps and mesh ask for.

    Raises:
        BuildError: another value, or one that steps or mesh contradict.
    """
    mesh, marked, given = schedule.mesh, marked_units(schedule), config.get("data_parallel")
    replicates = mesh is not None and mesh.size("dp_replicate") > 1
    if given not in (None, "ddp", "fsdp"):
        raise BuildError(f"data_parallel must be 'ddp' or 'fsdp' (got {given!r})", hint='data_parallel="fsdp"')
    if given == "ddp" and (marked or replicates):
        what = "steps mark units of fully_shard" if marked else "the mesh has several ranks along 'dp_replicate'"
        raise BuildError(f"data_parallel='ddp' shards no parameters, and {what}", hint='data_parallel="fsdp"')
    if given is not None:
        return str(given)
    return "fsdp" if marked or replicates else "ddp"


def check_shards(schedule: Schedule, options: Mapping[str, Any]) -> None:
    """Check that ``fully_shard`` trains the parameters.

    Raises:
        BuildError: it does not; or ``reshard_after_forward`` is not one of its values.
    """
    reshard = options["reshard_after_forward"]
    if not is_reshard(reshard):
        raise BuildError(
            f"reshard_after_forward must be a bool, or a number of ranks from 2 (got {reshard!r})",
            hint="reshard_after_forward=True",
        )
    mesh, preset = schedule.mesh, PRESETS.get(options.get("precision", ""))
    if data_ranks(mesh) > 1:
        assert mesh is not None
        _check_mesh(mesh)
    elif preset is None or not preset.is_mixed:
        return
    _check_parameters(schedule, has_types=preset is not None)


def _check_mesh(mesh: Mesh) -> None:
    if mesh.size("dp") == 1:
        raise BuildError(
            f"the mesh {mesh} has several ranks along 'dp_replicate' and one along 'dp', over which parameters are "
            "sharded",
            hint=f'mesh={{"dp": {data_ranks(mesh)}}}',
        )
    dims = list(mesh.sizes)
    if mesh.size("dp_replicate") > 1 and dims.index("dp_replicate") > dims.index("dp"):
        raise BuildError(
            f"the mesh {mesh} has 'dp_replicate' inside of 'dp': ranks that share parameters are neighbors",
            hint=f'mesh={{"dp_replicate": {mesh.size("dp_replicate")}, "dp": {mesh.size("dp")}, ...}}',
        )


def _check_parameters(schedule: Schedule, *, has_types: bool) -> None:
    """Check each parameter; ``has_types`` if a precision casts them to one type in each unit."""
    units = units_of(schedule)
    dtypes: dict[str, dict[str, str]] = {}
    for name, parameter in schedule.model.named_parameters():
        if not parameter.dim() or not parameter.is_contiguous():
            what = "a scalar" if not parameter.dim() else "not contiguous"
            raise BuildError(f"'{name}' is {what}: fully_shard does not shard it", hint='data_parallel="ddp"')
        if has_gradient_hooks(parameter):
            hint = 'data_parallel="ddp", or register them on the parameters of engine.module'
            raise BuildError(f"'{name}' has gradient hooks: fully_shard replaces the parameter", hint=hint)
        if parameter.requires_grad and not has_types:
            unit = max((path for path in units if path and name.startswith(f"{path}.")), key=len, default="")
            others = dtypes.setdefault(unit, {})
            others.setdefault(str(parameter.dtype), name)
            if len(others) > 1:
                shown = ", ".join(f"'{one}' in {dtype.removeprefix('torch.')}" for dtype, one in others.items())
                where = f"unit '{unit}'" if unit else "the root's unit"
                raise BuildError(
                    f"fully_shard trains parameters of one dtype in each unit ({where} has {shown})",
                    hint="model.float(), or fully_shard() on the modules of the other dtype",
                )


def data_steps(schedule: Schedule, options: Mapping[str, Any]) -> Iterator[str]:
    """Describe the shards and the exchange of replicas, a line each."""
    mesh = schedule.mesh
    marked = marked_units(schedule)
    if mesh is None or data_ranks(mesh) == 1:
        preset = PRESETS.get(options["precision"] or "")
        if marked and (preset is None or not preset.is_mixed):
            yield f"fully_shard shards nothing over one rank along 'dp': its marks ({len(marked)} units) have no effect"
        return
    is_cut = mesh.size("pp") > 1
    if options["data_parallel"] == "ddp":
        how = "the mean of gradients, exchanged as each stage ends," if is_cut else "DistributedDataParallel"
        yield f"{how} over mesh_dim 'dp' ({mesh.size('dp')} ranks)"
        return
    over = f"fully_shard over mesh_dim 'dp' ({mesh.size('dp')} ranks)"
    if mesh.size("dp_replicate") > 1:
        over += f", replicated over 'dp_replicate' ({mesh.size('dp_replicate')})"
    if is_cut:
        yield f"{over}: the modules that each stage calls, gathered once and their gradients reduced once in a step"
        return
    units = units_of(schedule, reshard_after_forward=options["reshard_after_forward"])
    units = with_islands(schedule, units, options)
    paths = [path for path in units if path]
    if paths:
        shown = ", ".join(paths[:2]) + (f", ... {paths[-1]}" if len(paths) > 2 else "")
        yield f"{over}: {shown} ({len(paths)} units), and the root's unit"
    else:
        yield f"{over}: one unit of all parameters"
    yield from _left_to_root(schedule)
    yield _collectives(schedule, options)


def _left_to_root(schedule: Schedule) -> Iterator[str]:
    shared = shared_names(schedule.model)
    for path in repeated_blocks(schedule.model) if not marked_units(schedule) else ():
        names = tie(shared, path)
        if names is not None:
            yield f"'{path}' is in the root's unit: its parameter '{names[0]}' is '{names[1]}', too"


@dataclass(frozen=True)
class GatheredUnit:
    """The parameters that one unit of ``fully_shard`` gathers together.

    Args:
        parameters: by name in the model, without the parameters of inner units.
        reshard: ``reshard_after_forward``, as it is in effect.
    """

    parameters: Mapping[str, nn.Parameter]
    reshard: bool | int

    @property
    def is_gathered_again(self) -> bool:
        """Whether the backward gathers them again."""
        return self.reshard is not False


def gathered_units(schedule: Schedule, options: Mapping[str, Any]) -> Iterator[tuple[str, GatheredUnit]]:
    """Yield the units with parameters of their own, by path, inner ones first, the root's last.

    Args:
        schedule: to build.
        options: of the plan.
    """
    units = units_of(schedule, reshard_after_forward=options["reshard_after_forward"])
    units = with_islands(schedule, units, options)
    rest = dict(schedule.model.named_parameters())
    for path in sorted(filter(None, units), key=lambda path: -path.count(".")):
        own = {name: one for name, one in rest.items() if name.startswith(f"{path}.")}
        if own:
            rest = {name: one for name, one in rest.items() if name not in own}
            reshard = units[path].reshard_after_forward
            yield path, GatheredUnit(own, True if reshard is None else reshard)
    if rest:
        reshard = units[""].reshard_after_forward if "" in units else None
        yield "", GatheredUnit(rest, False if reshard is None else reshard)


def _collectives(schedule: Schedule, options: Mapping[str, Any]) -> str:
    """Count the collectives of a micro-batch and of a step."""
    units = [unit for _, unit in gathered_units(schedule, options)]
    gathers = sum(1 + (unit.reshard is True) for unit in units)
    reductions = sum(any(one.requires_grad for one in unit.parameters.values()) for unit in units)
    mesh = schedule.mesh
    both = ", each followed by an all-reduce over 'dp_replicate'" if mesh and mesh.size("dp_replicate") > 1 else ""
    return f"a micro-batch gathers {gathers} times over 'dp'; a step reduces gradients {reductions} times{both}"
