"""The types that a first training step shows, compared with the promised precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core import BuildError
from slapo_torch.precision import ModelPrecision, dtype_name, is_within
from slapo_torch.private import is_compiled, reduce_dtypes, tree_map_only

if TYPE_CHECKING:
    from slapo_core import Schedule


@dataclass(frozen=True)
class SeenDtypes:
    """The types of one kind of tensors in the first training step.

    Args:
        what: e.g. ``"gradients"``.
        dtypes: the number of tensors by type, e.g. ``{"float32": 12}``.
        is_checked: whether another type than the promised one is an error; else it is only reported.
    """

    what: str
    dtypes: Mapping[str, int]
    is_checked: bool = True

    def __str__(self) -> str:
        shown = ", ".join(f"{dtype} ({count})" for dtype, count in self.dtypes.items()) or "none"
        return f"{self.what:<24}{shown}" + ("" if self.is_checked else "  (reported, not checked)")


@dataclass(frozen=True)
class EnginePrecision:
    """The precision of an engine, and the types that its first training step showed.

    Args:
        precision: the preset, e.g. ``"bf16-mixed"``.
        fp32: paths of the modules that compute in float32.
        seen: a row for each kind of tensors; empty before the first training step.
    """

    precision: str
    fp32: tuple[str, ...] = ()
    seen: tuple[SeenDtypes, ...] = ()

    def __str__(self) -> str:
        lines = [f"precision {self.precision}"] + ([f"  in float32: {', '.join(self.fp32)}"] if self.fp32 else [])
        return "\n".join(lines + [f"  {row}" for row in self.seen or ("not seen before the first training step",)])


STORAGE, WEIGHTS, INPUTS = "parameters", "weights in the forward", "inputs of products"
PRODUCTS, OTHERS = "matrix products", "other outputs"
ISLANDS, REDUCTION, GRADIENTS = "float32 modules", "reduction", "gradients"
MOMENTS, OTHER_STATE, BUFFERS = "moments", "other optimizer state", "buffers"


@dataclass
class _Row:
    """Count what was seen of one kind."""

    is_checked: bool = True
    dtypes: dict[str, int] = field(default_factory=dict)


class FirstStep:
    """Compare the types of a training step with a precision, without a collective.

    Hooks note the types in the forward, and are removed at the end of the step; modules within compiled ones have
    none, because hooks would compile them again.

    Args:
        schedule: of the build.
        precision: what was promised.
    """

    def __init__(self, schedule: Schedule, precision: ModelPrecision) -> None:
        model = schedule.model
        self._model, self._precision = model, precision
        self._compiled = [one.path for one in schedule.records if one.primitive.name in _COMPILES]
        self._buffers = {name: buffer.dtype for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        self._rows: dict[str, _Row] = {}
        self._wrong: list[str] = []
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Start to note the types of a step."""
        self.end()
        self._rows, self._wrong = {}, []
        compiled = self._compiled + [path for path, module in self._model.named_modules() if is_compiled(module)]
        for path, module in self._model.named_modules():
            if is_within(path, compiled) or "" in compiled:
                continue
            is_island, has_matrix = path in self._precision.islands, _has_matrix(module)
            if is_island or (isinstance(module, _PRODUCTS) and not self._precision.uses_autocast):
                self._handles.append(module.register_forward_pre_hook(self._inputs(path), with_kwargs=True))
            if is_island or has_matrix:
                self._handles.append(module.register_forward_pre_hook(self._weights(path)))
            if has_matrix:
                self._handles.append(module.register_forward_hook(self._output(path), prepend=True))

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def in_forward(self) -> None:
        """Check that autocast is on in the context of forward and loss."""
        kind, preset = self._precision.device.type, self._precision.preset
        if self._precision.uses_autocast and preset is not None:
            is_on = torch.is_autocast_enabled(kind)
            seen = torch.get_autocast_dtype(kind) if is_on else preset.storage
            self._see("autocast", f"torch.autocast('{kind}')", seen, preset.compute)

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Check storage, forward, reduction and gradients, before the optimizer's step.

        Raises:
            BuildError: a type is not the promised one.
        """
        from torch.distributed.fsdp import FSDPModule

        self.end()
        names = self._check_storage()
        for path, unit in self._model.named_modules():
            if isinstance(unit, FSDPModule):
                for dtype in reduce_dtypes(unit):
                    self._see(REDUCTION, f"the gradients of unit '{path}'", dtype, self._precision.stored(path))
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            name = names.get(id(parameter))
            if name is not None and parameter.grad is not None:
                self._see(GRADIENTS, f"the gradient of '{name}'", parameter.grad.dtype, self._precision.stored(name))
        self._raise()

    def after_update(self, optimizer: torch.optim.Optimizer) -> EnginePrecision:
        """Check storage, moments and buffers, after the optimizer's step.

        Raises:
            BuildError: a type is not the promised one.
        """
        self._rows.pop(STORAGE, None)
        names = self._check_storage()
        is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter), "")
            for key, value in state.items() if name else ():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point():
                    what = f"'{key}' of '{name}'"
                    if is_torchs:
                        self._see(MOMENTS, what, value.dtype, self._precision.stored(name))
                    else:  # of a factory that may have its reasons
                        self._see(OTHER_STATE, what, value.dtype)
        for name, buffer in self._model.named_buffers():
            if name in self._buffers:
                self._see(BUFFERS, f"buffer '{name}'", buffer.dtype, self._buffers[name])
        self._raise()
        preset = self._precision.preset
        assert preset is not None
        rows = tuple(SeenDtypes(what, dict(row.dtypes), row.is_checked) for what, row in self._rows.items())
        return EnginePrecision(preset.name, self._precision.islands, rows)

    def explain(self, error: Exception) -> None:
        """Raise what was seen in a forward that failed.

        Raises:
            BuildError: a type is not the promised one.
        """
        try:
            self._raise()
        except BuildError as found:
            raise found from error

    # -- notes of a step ------------------------------------------------------------------------------------------

    def _see(self, what: str, name: str, dtype: torch.dtype, promised: torch.dtype | None = None) -> None:
        row, shown = self._rows.setdefault(what, _Row(promised is not None)), dtype_name(dtype)
        row.dtypes[shown] = row.dtypes.get(shown, 0) + 1
        if promised is not None and dtype != promised:
            self._wrong.append(f"{name} is in {shown}, not in {dtype_name(promised)}")

    def _raise(self) -> None:
        if self._wrong:
            preset = self._precision.preset
            assert preset is not None
            more = f"; and {len(self._wrong) - 3} more" if len(self._wrong) > 3 else ""
            raise BuildError(
                f"the first training step does not show precision='{preset.name}': {'; '.join(self._wrong[:3])}{more}",
                hint="leave types to build(): no .to(dtype), no hooks that cast, and no other autocast around steps",
            )

    def _check_storage(self) -> dict[int, str]:
        """Check the types of this rank's parameters; return their names by identity."""
        names: dict[int, str] = {}
        for name, parameter in self._model.named_parameters():
            if parameter.is_floating_point() and parameter.dtype.itemsize > 1 and not parameter.is_meta:
                names[id(parameter)] = name
                self._see(STORAGE, f"'{name}'", parameter.dtype, self._precision.stored(name))
        return names

    def _weights(self, path: str) -> Any:
        def note(module: nn.Module, _: Any) -> None:
            for name, parameter in module.named_parameters(prefix=path, recurse=False):
                if parameter.is_floating_point() and parameter.dtype.itemsize > 1 and not _is_fake(parameter):
                    promised = self._precision.computed if self._precision.gathers else self._precision.stored
                    self._see(WEIGHTS, f"'{name}' in the forward", parameter.dtype, promised(name))

        return note

    def _output(self, path: str) -> Any:
        def note(module: nn.Module, _: Any, output: Any) -> None:
            if type(output) is not torch.Tensor or not output.is_floating_point() or _is_fake(output):
                return
            kind, promised = self._precision.device.type, self._precision.computed(path)
            is_known = isinstance(module, _PRODUCTS) and module.weight.is_floating_point()
            if self._precision.uses_autocast and promised != torch.float32 and not torch.is_autocast_enabled(kind):
                is_known = False  # the model switched it off
            what = ISLANDS if is_within(path, self._precision.islands) else PRODUCTS
            if is_known:
                self._see(what, f"the output of '{path}'", output.dtype, promised)
            else:
                self._see(OTHERS, f"the output of '{path}'", output.dtype)

        return note

    def _inputs(self, path: str) -> Any:
        is_island, promised = is_within(path, self._precision.islands), self._precision.computed(path)
        what = ISLANDS if is_island else INPUTS

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            def see(tensor: torch.Tensor) -> None:
                if tensor.is_floating_point() and not _is_fake(tensor):
                    self._see(what, f"an input of '{path}'", tensor.dtype, promised)

            tree_map_only(torch.Tensor, see, (args, kwargs))
            kind = self._precision.device.type
            if is_island and torch.is_autocast_enabled(kind):
                self._see(ISLANDS, f"autocast in '{path}'", torch.get_autocast_dtype(kind), promised)

        return note


_COMPILES = ("fusion.compile", "fusion.cudagraphify")
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # in the lower type under autocast


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a recording of the model made a tensor."""
    return type(tensor).__name__ == "FakeTensor" or tensor.is_meta
