"""Run initializers of modules on copies without values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slapo_core.errors import WeightsError
from slapo_core.internals import buffers_of, copies, journal, module_index, parameters_of


def copy_on_meta(model: nn.Module) -> nn.Module:
    """Copy a model with all tensors on the meta device."""
    return copy_with(model, lambda tensor: torch.empty_like(tensor.detach(), device="meta"))


def copy_with(model: nn.Module, twin_of: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Copy a model deeply, with ``twin_of(tensor)`` in place of each parameter and buffer.

    Args:
        model: it is only read.
        twin_of: the parameter or buffer -> a plain tensor, which becomes a parameter for a parameter. Python attributes
            of the tensor are copied.
    """
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        twin = twin_of(tensor)
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        twin.__dict__.update(tensor.__dict__)
        memo[id(tensor)] = twin
    return copies.deep_copy(model, memo)


SKIP_MARK = "_is_hf_initialized"  # on a tensor: transformers' initializers skip it
_RESETS = ("reset_parameters", "_reset_parameters")


@dataclass(frozen=True, eq=False)
class InitializerCall:
    """One call that initializes tensors.

    Args:
        module: the path of its module.
        label: its name for messages, e.g. ``"Linear.reset_parameters() of 'fc1'"``.
        call: runs it.
    """

    module: str
    label: str
    call: Callable[[], object] = field(repr=False)

    def run(self, tensor: str) -> None:
        """Run it for one tensor.

        Raises:
            WeightsError: the initializer raised.
        """
        try:
            self.call()
        except Exception as error:
            raise WeightsError(
                f"'{tensor}' cannot be initialized: {self.label} raised {type(error).__name__}: {error}",
                hint='pass weights="dir/with/safetensors", or build the model on the CPU instead of the meta device',
            ) from error


class Initializers:
    """The initializers of a model, each made once.

    Args:
        index: the modules of the model.
    """

    def __init__(self, index: module_index.ModuleIndex) -> None:
        self._modules = index.modules
        self._resets: dict[str, InitializerCall | None] = {}
        self._inits: dict[str, InitializerCall | None] = {}
        self._types: dict[type, bool] = {}

    def of(self, path: str) -> Iterator[InitializerCall]:
        """Yield the initializers for the tensors of the module at ``path``."""
        chain = list(_enclosing(path))
        for made, make in ((self._resets, self._reset), (self._inits, self._init)):
            for place in chain:
                if place not in made:
                    made[place] = make(place)
                found = made[place]
                if found is not None:
                    yield found

    def _reset(self, place: str) -> InitializerCall | None:
        module = self._modules[place]
        for method in _RESETS:
            reset = getattr(module, method, None)
            if callable(reset):
                return InitializerCall(place, f"{type(module).__name__}.{method}() of '{place}'", reset)
        return None

    def _init(self, place: str) -> InitializerCall | None:
        module = self._modules[place]
        for owner_place in _enclosing(place):
            owner: Any = self._modules[owner_place]
            if self._has_init_weights(type(owner)):
                label = f"{type(owner).__name__}._init_weights({type(module).__name__}) of '{owner_place}'"
                return InitializerCall(place, label, functools.partial(owner._init_weights, module))
        return None

    def _has_init_weights(self, kind: type[nn.Module]) -> bool:
        if kind not in self._types:
            method = getattr(kind, "_init_weights", None)
            self._types[kind] = method is not None and callable(method) and _takes_two(method)
        return self._types[kind]


def _enclosing(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _takes_two(method: Callable[..., object]) -> bool:
    try:
        inspect.signature(method).bind(None, None)
    except TypeError:
        return False
    return True


class Rerun:
    """Run a tensor's initializers on a copy of the model.

    All other tensors are on the meta device, where initializing costs nothing.

    Args:
        model: a copy, all of it on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._index = module_index.ModuleIndex(model)
        self._sites = module_index.TensorSites(self._index)
        self._initializers = Initializers(self._index)

    def dtype(self, name: str) -> torch.dtype:
        """Return the element type of a tensor."""
        return self._present(*_split(name)).dtype

    def value(self, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor | None:
        """Return the initialized full tensor; None if no initializer sets all elements.

        A tied tensor is initialized by its first module that can.
        """
        present = self._present(*_split(name))
        for path, own_name in self._sites.of(present):
            found = self._from(path, own_name, name, shape, seed)
            if found is not None:
                return found
        return None

    def _from(self, path: str, own_name: str, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor | None:
        dtype = self._present(path, own_name).dtype
        results = []
        for background in _backgrounds(dtype):
            full = torch.full(shape, background, dtype=dtype)
            placed = self._place(path, own_name, full)
            try:
                torch.default_generator.manual_seed(seed)
                for initializer in self._initializers.of(path):
                    initializer.run(name)
            finally:
                for holder in placed:
                    holder.undo()
            results.append(full)
        if len(results) == 1:
            return None if torch.isnan(results[0]).any() else results[0]
        return results[0] if torch.equal(*results) else None

    def _present(self, path: str, own_name: str) -> torch.Tensor:
        module = self._index.modules[path]
        present: torch.Tensor | None = parameters_of(module).get(own_name)
        if present is None:
            present = buffers_of(module)[own_name]
        assert present is not None
        return present

    def _place(self, path: str, own_name: str, full: torch.Tensor) -> list[journal.Assignment]:
        """Assign ``full`` to every name of the tensor."""
        present = self._present(path, own_name)
        value: torch.Tensor = full
        if isinstance(present, nn.Parameter):
            value = nn.Parameter(full, requires_grad=present.requires_grad)
        value.__dict__.update({key: item for key, item in present.__dict__.items() if key != SKIP_MARK})
        placed = []
        for site_path, site_name in self._sites.of(present):
            placed.append(journal.Assignment(self._index.modules[site_path], site_name))
            placed[-1].set(value)
        return placed


def _split(name: str) -> tuple[str, str]:
    path, _, own_name = name.rpartition(".")
    return path, own_name


def _backgrounds(dtype: torch.dtype) -> tuple[float | int | bool, ...]:
    """Return fill values by which unwritten elements show."""
    if dtype.is_floating_point or dtype.is_complex:
        return (float("nan"),)
    return (False, True)
