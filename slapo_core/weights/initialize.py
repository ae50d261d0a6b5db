"""The model's own initialization, for one tensor at a time, so that any layout starts from the same values.

A plugin that answers ``slapo_initialize`` for a tensor comes before all this.

What the initializers (``initializers.py``) write is found out once (``recording.py``); of what is understood, any piece
can be made by itself, drawn once and without what a later initializer overwrites (``programs.py``). For all else they
are run again on the whole tensor (``rerun.py``). Which of the two it is depends on the reference model alone, not on
the layout.

What a constructor does outside of these methods cannot be repeated: a tensor that only a constructor fills is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from slapo_core.errors import HookError, WeightsError
from slapo_core.spec.layout import Layout
from slapo_core.weights.copies import copy_on_meta
from slapo_core.weights.programs import seed_of
from slapo_core.weights.recording import record
from slapo_core.weights.rerun import Rerun

if TYPE_CHECKING:
    from slapo_core.plugins.manager import HookManager
    from slapo_core.spec.mesh import Mesh

__all__ = ["Initializer", "cannot_initialize"]


class Initializer:
    """Initializes tensors as ``model`` would; the model is only read, and all that is needed of it copied.

    Args:
        model: the reference model, or the scheduled one for what its steps added.
        hooks: of the schedule: a plugin that answers ``slapo_initialize`` comes before the model's own initialization.
        seed: mixed into the seed of every tensor.
        is_untouched: False for a scheduled model. Its tensors may be pieces already, so that what one rank could find
            out of them depends on the layout; all initializers are run again for each.
    """

    def __init__(self, model: nn.Module, hooks: HookManager, *, seed: int = 0, is_untouched: bool = True) -> None:
        self._hooks = hooks
        self._seed = seed
        self._programs = record(model) if is_untouched else {}
        tensors = (*model.named_parameters(), *model.named_buffers())
        others = any(tensor.is_meta and name not in self._programs for name, tensor in tensors)
        self._rerun = Rerun(copy_on_meta(model)) if others else None

    def value(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """The initial value of one tensor, on the CPU; torch's random state stays as it was.

        Args:
            name: the tensor's full name in the model, e.g. ``"encoder.layer.0.output.dense.weight"``.
            shape: its full shape, in elements.

        Returns:
            None if no plugin and no initializer gives all of it.

        Raises:
            WeightsError: an initializer raised.
            HookError: plugins disagree, or give something else than asked for.
        """
        return self.piece(name, Layout(name, shape), None)

    def piece(self, name: str, layout: Layout, mesh: Mesh | None) -> torch.Tensor | None:
        """As :meth:`value`, of which this rank's piece; wherever it can be, nothing else is held in memory.

        Args:
            name: the tensor's full name in the model.
            layout: where the rank's piece lies, and the full shape.
            mesh: None for all of it.
        """
        shape, key, program = tuple(layout.shape), f"{self._seed}:{name}", self._programs.get(name)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            whole = self._ask(name, shape, key, program.dtype if program is not None else self._again.dtype(name))
            if whole is None and program is not None:
                return program.piece(layout, mesh, key)
            if whole is None:
                whole = self._again.value(name, shape, seed_of(key))
        return layout.local(whole, mesh) if whole is not None else None

    @property
    def _again(self) -> Rerun:
        assert self._rerun is not None
        return self._rerun

    def _ask(self, name: str, shape: tuple[int, ...], key: str, dtype: torch.dtype) -> torch.Tensor | None:
        path, _, own_name = name.rpartition(".")
        torch.default_generator.manual_seed(seed_of(key))
        answer = self._hooks.single("slapo_initialize", path=path, name=own_name, shape=shape, dtype=dtype)
        if answer is None:
            return None
        label, value = answer
        fits = isinstance(value, torch.Tensor) and tuple(value.shape) == shape and value.dtype == dtype
        if not fits or value.is_meta:
            got = f"{tuple(value.shape)}, {value.dtype}, {value.device}" if isinstance(value, torch.Tensor) else value
            raise HookError(
                f"hook slapo_initialize of {label} must give a tensor of shape {shape}, {dtype}, with values, for "
                f"'{name}' (got {got})",
                plugin=label,
            )
        return value.detach().to("cpu")


def cannot_initialize(names: list[str]) -> WeightsError:
    """The error for tensors on the meta device that no initializer fills."""
    one = len(names) == 1
    return WeightsError(
        f"{'a tensor' if one else f'{len(names)} tensors'} on the meta device cannot be initialized, because no "
        f"reset_parameters() or _init_weights() fills {'it' if one else 'them'}: {', '.join(names)}",
        hint='pass weights="dir/with/safetensors", or build the model on the CPU instead of the meta device',
    )
