"""The model's own initialisation, run for one tensor at a time, so that any layout starts from the same values.

A plugin that answers ``slapo_materialize`` for a tensor comes before all this.

It runs on a copy of the model without memory: the tensor that is to be initialised alone gets some, at its full size;
all others are on the meta device, where initialising costs nothing. The initialisers run in the order in which
constructing the model runs them: ``reset_parameters()`` of its module and of the modules around it, from the inside
out, and then ``_init_weights(module)`` of the nearest enclosing module that has such a method, which is the convention
of transformers' ``PreTrainedModel``, for the same modules. The random generator is seeded from the tensor's name.

What a constructor does outside of these methods cannot be repeated: a tensor that only a constructor fills is refused.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import HookError, WeightsError
from slapo_core.tree.assignment import Assignment
from slapo_core.tree.index import ModuleIndex, TensorSites

if TYPE_CHECKING:
    from slapo_core.plugins.manager import HookManager

__all__ = ["Initialiser", "cannot_initialise", "copy_on_meta"]

_RESETS = ("reset_parameters", "_reset_parameters")
_SKIP_MARK = "_is_hf_initialized"  # on a tensor: transformers' initialisers leave it alone


def copy_on_meta(model: nn.Module) -> nn.Module:
    """A deep copy with every parameter and buffer on the meta device, so that it costs no memory."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        twin: torch.Tensor = torch.empty_like(tensor.detach(), device="meta")
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        twin.__dict__.update(tensor.__dict__)
        memo[id(tensor)] = twin
    return copy.deepcopy(model, memo)


class Initialiser:
    """Initialises tensors as ``model`` would; the model is only read.

    Args:
        model: the untouched one, or the scheduled one for what its steps added.
        hooks: of the schedule: a plugin that answers ``slapo_materialize`` comes before the model's own initialisation.
        seed: mixed into the seed of every tensor.
    """

    def __init__(self, model: nn.Module, hooks: HookManager, *, seed: int = 0) -> None:
        self._index = ModuleIndex(copy_on_meta(model))
        self._sites = TensorSites(self._index)
        self._hooks = hooks
        self._seed = seed

    def value(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """The initial value of one tensor, on the CPU; torch's random state stays as it was.

        Args:
            name: the tensor's full name in the model, e.g. ``"encoder.layer.0.output.dense.weight"``.
            shape: its full shape, in elements.

        Returns:
            None if no plugin and no initialiser gives all of it.

        Raises:
            WeightsError: an initialiser raised.
            HookError: plugins disagree, or give something else than asked for.
        """
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            return self._value(name, shape)

    def _value(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        path, _, own_name = name.rpartition(".")
        present = self._present(path, own_name)
        given = self._ask(path, own_name, name, shape, present.dtype)
        if given is not None:
            return given
        sites = self._sites.of(present)
        for site_path, site_name in sites:  # a tied tensor: as its first place does it, if that can
            value = self._from(site_path, site_name, name, shape, present.dtype)
            if value is not None:
                return value
        return None

    def _ask(
        self, path: str, own_name: str, seed_name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        torch.default_generator.manual_seed(_seed_of(seed_name, self._seed))
        answer = self._hooks.single("slapo_materialize", path=path, name=own_name, shape=shape, dtype=dtype)
        if answer is None:
            return None
        label, value = answer
        fits = isinstance(value, torch.Tensor) and tuple(value.shape) == shape and value.dtype == dtype
        if not fits or value.is_meta:
            got = f"{tuple(value.shape)}, {value.dtype}, {value.device}" if isinstance(value, torch.Tensor) else value
            raise HookError(
                f"hook slapo_materialize of {label} must give a tensor of shape {shape}, {dtype}, with values, for "
                f"'{seed_name}' (got {got})",
                plugin=label,
            )
        return value.detach().to("cpu")

    def _from(
        self, path: str, own_name: str, seed_name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        results = []
        for background in _backgrounds(dtype):
            full = torch.full(shape, background, dtype=dtype)
            placed = self._place(path, own_name, full)
            try:
                torch.default_generator.manual_seed(_seed_of(seed_name, self._seed))
                for label, initialiser in self._initialisers(path):
                    _run(initialiser, label, seed_name)
            finally:
                for holder in placed:
                    holder.undo()
            results.append(full)
        if len(results) == 1:
            return None if torch.isnan(results[0]).any() else results[0]
        return results[0] if torch.equal(*results) else None

    def _present(self, path: str, own_name: str) -> torch.Tensor:
        module = self._index.modules[path]
        present: torch.Tensor | None = module._parameters.get(own_name)
        if present is None:
            present = module._buffers[own_name]
        assert present is not None
        return present

    def _place(self, path: str, own_name: str, full: torch.Tensor) -> list[Assignment]:
        """Put ``full`` into every place of the tensor."""
        present = self._present(path, own_name)
        value: torch.Tensor = full
        if isinstance(present, nn.Parameter):
            value = nn.Parameter(full, requires_grad=present.requires_grad)
        value.__dict__.update({key: item for key, item in present.__dict__.items() if key != _SKIP_MARK})
        placed = []
        for site_path, site_name in self._sites.of(present):
            placed.append(Assignment(self._index.modules[site_path], site_name))
            placed[-1].set(value)
        return placed

    def _initialisers(self, path: str) -> Iterator[tuple[str, Callable[[], object]]]:
        chain = list(self._enclosing(path))
        for place, module in chain:
            for method in _RESETS:
                reset = getattr(module, method, None)
                if callable(reset):
                    yield f"{type(module).__name__}.{method}() of '{place}'", reset
                    break
        for position, (_, module) in enumerate(chain):
            for place, owner in chain[position:]:
                if _has_init_weights(owner):
                    label = f"{type(owner).__name__}._init_weights({type(module).__name__}) of '{place}'"
                    yield label, lambda owner=owner, module=module: owner._init_weights(module)  # type: ignore[misc]
                    break

    def _enclosing(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        while True:
            yield path, self._index.modules[path]
            if not path:
                return
            path = path.rpartition(".")[0]


def _has_init_weights(module: nn.Module) -> bool:
    method = getattr(type(module), "_init_weights", None)
    if method is None or not callable(method):
        return False
    try:
        inspect.signature(method).bind(module, module)
    except TypeError:
        return False
    return True


def _run(initialiser: Callable[[], object], label: str, name: str) -> None:
    try:
        initialiser()
    except Exception as error:
        raise WeightsError(
            f"'{name}' cannot be initialised: {label} raised {type(error).__name__}: {error}",
            hint='pass weights="dir/with/safetensors", or build the model on the CPU instead of the meta device',
        ) from error


def _backgrounds(dtype: torch.dtype) -> tuple[float | int | bool, ...]:
    """What a tensor is filled with before, so that an element that was not written shows."""
    if dtype.is_floating_point or dtype.is_complex:
        return (float("nan"),)
    return (False, True)


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def cannot_initialise(names: list[str]) -> WeightsError:
    """The error for tensors on the meta device that no initialiser fills."""
    one = len(names) == 1
    return WeightsError(
        f"{'a tensor' if one else f'{len(names)} tensors'} on the meta device cannot be initialised, because no "
        f"reset_parameters() or _init_weights() fills {'it' if one else 'them'}: {', '.join(names)}",
        hint='pass weights="dir/with/safetensors", or build the model on the CPU instead of the meta device',
    )
