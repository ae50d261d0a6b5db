"""Precision: the types of parameters, computations, gradients and moments of an engine."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core import BuildError
from slapo_torch.fully_shard import FullyShard, has_forward, repeated_blocks, shared_names, tie
from slapo_torch.private import tree_map_only

if TYPE_CHECKING:
    from slapo_core import Schedule
    from slapo_runtime.correspondence.storage import LiveTensor


@dataclass(frozen=True)
class Precision:
    """A preset of ``build(..., precision=name)``.

    Args:
        name: of the preset.
        storage: the type of parameters, gradients at the optimizer's step, and moments.
        compute: the type of matrix products.
        scales_loss: whether a GradScaler scales the loss.
    """

    name: str
    storage: torch.dtype
    compute: torch.dtype
    scales_loss: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether main weights are stored in a wider type than the forward's."""
        return self.storage != self.compute


PRESETS: Mapping[str, Precision] = {
    preset.name: preset
    for preset in (
        Precision("fp32", torch.float32, torch.float32),
        Precision("bf16-mixed", torch.float32, torch.bfloat16),
        Precision("bf16", torch.bfloat16, torch.bfloat16),
        Precision("fp16-mixed", torch.float32, torch.float16, scales_loss=True),
    )
}

OPTIONS: Mapping[str, Any] = {"precision": None, "fp32": ()}
"""The options of precision, with their defaults."""

ITEMS = "num_items_in_batch"  # a count, which a cast would round


def dtype_name(dtype: torch.dtype) -> str:
    """Format a type as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


# -- the plan -----------------------------------------------------------------------------------------------------


def checked_precision(schedule: Schedule, config: Mapping[str, Any], parallel: str) -> dict[str, Any]:
    """Return the checked options of precision.

    Args:
        schedule: to build.
        config: the user's options.
        parallel: ``"ddp"`` or ``"fsdp"``.

    Raises:
        BuildError: an unknown value, a pattern without a module, or a combination that cannot run.
    """
    name, patterns = config.get("precision"), config.get("fp32", ())
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    if name is not None and name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, 1, 0.5) or ["bf16-mixed"]
        known = ", ".join(map(repr, PRESETS))
        raise BuildError(f"precision must be one of {known} (got {name!r})", hint=f'precision="{near[0]}"')
    if not isinstance(patterns, Sequence) or not all(isinstance(one, str) for one in patterns):
        raise BuildError(f"fp32 must be patterns of module names (got {patterns!r})", hint='fp32=("*norm*", "lm_head")')
    preset = PRESETS[name] if name is not None else None
    if patterns and (preset is None or preset.compute == torch.float32):
        raise BuildError(
            f"fp32 names modules that compute in float32 within a lower precision (got precision={name!r})",
            hint=f'precision="bf16-mixed", fp32={tuple(patterns)!r}',
        )
    if preset is None:
        return dict(OPTIONS)
    islands = islands_of(schedule.model, patterns)
    pp = schedule.mesh.size("pp") if schedule.mesh is not None else 1
    if preset.is_mixed and pp > 1 and parallel != "fsdp":
        raise BuildError(
            f"precision='{name}' with data_parallel='{parallel}' computes under torch.autocast, and a pipeline does "
            "not: the types of P2P messages would differ between ranks",
            hint=f'precision="{name}", data_parallel="fsdp"',
        )
    if parallel == "fsdp" or not preset.is_mixed:
        _refuse_ties(schedule.model, islands, parallel)
    if pp == 1 and parallel == "fsdp":
        _refuse_traced(schedule, islands)
    return {"precision": name, "fp32": tuple(patterns)}


def islands_of(model: nn.Module, patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the paths of the modules that compute in float32: of nested ones the outermost.

    Args:
        model: the scheduled model.
        patterns: of module paths, as of fnmatch; a matched container stands for its modules.

    Raises:
        BuildError: a pattern matches no module.
    """
    modules = dict(model.named_modules())
    found: set[str] = set()
    for pattern in patterns:
        matched = [path for path in modules if path and fnmatchcase(path, pattern)]
        if not matched:
            raise _no_module(model, pattern)
        for path in matched:
            found.update(_called(path, modules[path]))
    return tuple(path for path in modules if path in found and not is_within(path, found - {path}))


def is_within(path: str, outer: Iterable[str]) -> bool:
    """Return whether a module or tensor is one of some modules, or within one."""
    return any(f"{path}.".startswith(f"{other}.") for other in outer)


def _called(path: str, module: nn.Module) -> Iterator[str]:
    """Yield the outermost modules with a forward, from a module on."""
    if has_forward(module):
        yield path
        return
    for name, child in module.named_children():
        yield from _called(f"{path}.{name}", child)


def _no_module(model: nn.Module, pattern: str) -> BuildError:
    paths, above = [path for path, _ in model.named_modules()], pattern.rpartition(".")[0]
    is_parameter = any(fnmatchcase(name, pattern) for name, _ in model.named_parameters())
    names = list(dict.fromkeys(path.rpartition(".")[2] for path in paths if path))
    core = pattern.strip("*").rpartition(".")[2] or pattern
    near = difflib.get_close_matches(core, [name for name in names if not name.isdigit()], 1, 0.4)
    hint = None
    if is_parameter and any(fnmatchcase(path, above) for path in paths if path):
        hint = f'fp32=("{above}",): modules, not parameters'
    elif near:
        hint = f'fp32=("*{near[0]}",)'
    return BuildError(f"fp32={pattern!r} matches no module of {type(model).__name__}", hint=hint)


def _refuse_ties(model: nn.Module, islands: Sequence[str], parallel: str) -> None:
    """Refuse an island that shares a parameter with a module of the other type, or of another unit."""
    shared = shared_names(model)
    for path in islands:
        names = tie(shared, path)
        if names is not None and (parallel == "fsdp" or not is_within(names[1], islands)):
            why = "one unit holds a parameter" if parallel == "fsdp" else "it is stored once, in one type"
            raise BuildError(
                f"'{path}' cannot compute in float32: '{names[0]}' is '{names[1]}', too, and {why}",
                hint=f"leave '{path}' out of fp32, or untie it (tie_word_embeddings=False)",
            )


def _refuse_traced(schedule: Schedule, islands: Sequence[str]) -> None:
    """Refuse a unit of ``fully_shard`` within a traced module, whose graph would record the unit's gathering."""
    traced = [one.path for one in schedule.records if one.primitive.name == "graph.trace"]
    for path in islands:
        outer = next((one for one in traced if one != path and (not one or is_within(path, (one,)))), None)
        if outer is not None:
            raise BuildError(
                f"'{path}' cannot compute in float32 under fully_shard: it would be a unit within the traced module "
                f"'{outer}'",
                hint=f"leave '{path}' out of fp32, trace narrower nodes, or data_parallel=\"ddp\"",
            )


def precision_steps(schedule: Schedule, options: Mapping[str, Any]) -> Iterator[str]:
    """Describe the precision, a line each."""
    preset = PRESETS.get(options["precision"])
    if preset is None:
        return
    storage, compute = dtype_name(preset.storage), dtype_name(preset.compute)
    line = f"precision {preset.name}: parameters, gradients and moments in {storage}"
    if preset.is_mixed and options["data_parallel"] == "ddp":
        line += f"; forward and loss under torch.autocast({compute})"
    elif preset.is_mixed:
        line += f"; fully_shard gathers parameters in {compute}, and reduces gradients in {storage}"
    else:
        line += f", inputs cast to {compute}; buffers keep their types"
    yield line + ("; a GradScaler, whose skipped steps all ranks skip" if preset.scales_loss else "")
    islands = islands_of(schedule.model, options["fp32"])
    if islands:
        shown = ", ".join(islands[:3]) + (f", ... {islands[-1]}" if len(islands) > 3 else "")
        yield f"in float32: {shown} ({len(islands)} modules)"
    yield "the types of the first training step are compared with it"


def with_islands(
    schedule: Schedule, units: Mapping[str, FullyShard], options: Mapping[str, Any]
) -> dict[str, FullyShard]:
    """Return the units of ``fully_shard``, with the float32 modules, which are gathered in their own type."""
    modules, found = dict(schedule.model.named_modules()), dict(units)
    shared = shared_names(schedule.model)
    for path in islands_of(schedule.model, options["fp32"]):
        if path not in found and any(True for _ in modules[path].parameters()) and tie(shared, path) is None:
            found[path] = FullyShard(reshard_after_forward=False)
    return {path: found[path] for path in modules if path in found}


# -- casts in an engine -------------------------------------------------------------------------------------------


class ModelPrecision:
    """The types of a model in an engine: of its parameters, and of what its modules compute.

    Args:
        schedule: of the build.
        options: of the plan.
        device: of the model.

    Attributes:
        preset: of the option ``precision``; None without one.
        islands: paths of the modules that compute in float32.
        uses_autocast: whether passes run under torch.autocast; else inputs are cast at borders.
    """

    def __init__(self, schedule: Schedule, options: Mapping[str, Any], device: torch.device) -> None:
        self.preset = PRESETS.get(options["precision"])
        self._model, self.device = schedule.model, device
        self._elsewhere: list[_Types] | None = None
        self.islands = islands_of(schedule.model, options["fp32"]) if self.preset is not None else ()
        self.uses_autocast = self.is_mixed and options["data_parallel"] == "ddp"

    @property
    def is_mixed(self) -> bool:
        """Whether the forward computes in another type than parameters are stored in."""
        return self.preset is not None and self.preset.is_mixed

    @property
    def gathers(self) -> bool:
        """Whether ``fully_shard`` casts the parameters, also for a single replica."""
        return self.is_mixed and not self.uses_autocast

    def stored(self, name: str) -> torch.dtype:
        """Return the type in which a parameter is stored."""
        assert self.preset is not None
        return torch.float32 if is_within(name, self.islands) else self.preset.storage

    def computed(self, name: str) -> torch.dtype:
        """Return the type in which a module computes, or in which it reads a parameter."""
        assert self.preset is not None
        return torch.float32 if is_within(name, self.islands) else self.preset.compute

    def wanted(self, live: LiveTensor) -> torch.dtype | None:
        """Return the type into which a parameter is read or cast; None for its own."""
        return self.stored(live.name) if self.preset is not None and _is_cast(live.tensor) else None

    def policy(self, path: str) -> Any:
        """Return the policy of ``fully_shard`` for the unit at a path; inputs are cast by :meth:`install`."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        if not self.gathers:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=self.computed(path), reduce_dtype=self.stored(path), cast_forward_inputs=False
        )

    def install(self, borders: Iterable[str] = ("",)) -> None:
        """Cast the inputs of modules, and let float32 modules compute so, by hooks.

        Args:
            borders: paths of modules that take floating-point inputs in the type of the computation: the model, and
                the units of ``fully_shard``, in a pipeline of all ranks.
        """
        if self.preset is None:
            return
        for path in borders if not self.uses_autocast else ():
            if not is_within(path, self.islands):
                module = self._model.get_submodule(path)
                module.register_forward_pre_hook(Cast(self.preset.compute), prepend=True, with_kwargs=True)
        blocks = repeated_blocks(self._model)
        for path in self.islands:
            module = self._model.get_submodule(path)
            is_head = isinstance(module, nn.Linear) and not is_within(path, blocks)
            default = None if self.uses_autocast else self.preset.compute
            island = Float32(self.device.type, torch.float32 if is_head else None, default)
            module.register_forward_pre_hook(island.begin, prepend=True, with_kwargs=True)
            module.register_forward_hook(island.end, always_call=True)

    def prepare(self, inputs: dict[str, Any]) -> Mapping[str, Any]:
        """Cast the arguments of the model's forward, which pipeline stages get directly."""
        return inputs if self.preset is None else cast(inputs, self.preset.compute)  # type: ignore[no-any-return]

    def prepare_stored(self, inputs: dict[str, Any]) -> Mapping[str, Any]:
        """Cast them to the type of the parameters, for a forward without casts."""
        return inputs if self.preset is None else cast(inputs, self.preset.storage)  # type: ignore[no-any-return]

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of forward and loss."""
        if not self.uses_autocast:
            return contextlib.nullcontext()
        assert self.preset is not None
        return torch.autocast(self.device.type, self.preset.compute)

    @contextlib.contextmanager
    def placeholders(self) -> Iterator[None]:
        """Give the placeholders of other pipeline ranks' parameters the types in which those compute."""
        if self._elsewhere is None:
            named = self._model.named_parameters() if self.gathers else ()
            self._elsewhere = self._lower((name, one) for name, one in named if one.is_meta)
        with _exchanged(self._elsewhere):
            yield

    def lowered(self) -> contextlib.AbstractContextManager[None]:
        """Give all parameters the types in which the forward reads them, to cut a model before it is sharded."""
        return _exchanged(self._lower(self._model.named_parameters() if self.gathers else ()))

    def _lower(self, named: Iterable[tuple[str, nn.Parameter]]) -> list[_Types]:
        return [(one, one.data, one.data.to(self.computed(name))) for name, one in named if _is_cast(one)]


_Types = tuple[nn.Parameter, torch.Tensor, torch.Tensor]
"""A parameter, and its data as stored and as computed with."""


@contextlib.contextmanager
def _exchanged(lower: Sequence[_Types]) -> Iterator[None]:
    for parameter, _, data in lower:
        parameter.data = data
    try:
        yield
    finally:
        for parameter, data, _ in lower:
            parameter.data = data


def _is_cast(tensor: torch.Tensor) -> bool:
    """Return whether a precision casts a parameter: floating-point numbers of at least 16 bits."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of arguments, but the count of items."""
    found = tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, value)
    return {**found, ITEMS: value[ITEMS]} if isinstance(value, dict) and ITEMS in value else found


class Cast:
    """Cast the floating-point arguments of a module, as a forward pre-hook."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast(args, self._dtype), cast(kwargs, self._dtype)


class Float32:
    """Let a module compute in float32, by hooks around its forward.

    Args:
        device: the kind whose autocast is off within the module, e.g. ``"cuda"``.
        returns: the type of its floating-point outputs; None: that of its inputs.
        default: the type of its outputs if it has no floating-point input; None leaves them.
    """

    def __init__(self, device: str, returns: torch.dtype | None, default: torch.dtype | None) -> None:
        self._device, self._returns, self._default = device, returns, default
        self._calls: list[tuple[torch.dtype | None, bool]] = []  # the type to return, and whether autocast was on

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        found: list[torch.dtype] = []
        tree_map_only(
            torch.Tensor, lambda one: found.append(one.dtype) if one.is_floating_point() else None, (args, kwargs)
        )
        is_on = torch.is_autocast_enabled(self._device)
        if is_on:
            torch.set_autocast_enabled(self._device, False)
        self._calls.append((self._returns or (found[0] if found else self._default), is_on))
        return cast(args, torch.float32), cast(kwargs, torch.float32)

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._calls:  # another hook failed before
            return output
        returns, was_on = self._calls.pop()
        if was_on:
            torch.set_autocast_enabled(self._device, True)
        return output if returns is None else cast(output, returns)
