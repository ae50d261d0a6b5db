"""Which initializers a model has for a tensor, in the order in which constructing the model runs them.

``reset_parameters()`` of the tensor's module and of the modules around it, from the inside out, and then
``_init_weights(module)`` of the nearest enclosing module that has such a method, which is the convention of
transformers' ``PreTrainedModel``, for the same modules.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from slapo_core.errors import WeightsError

if TYPE_CHECKING:
    from slapo_core.tree.index import ModuleIndex

__all__ = ["SKIP_MARK", "InitializerCall", "Initializers"]

SKIP_MARK = "_is_hf_initialized"  # on a tensor: transformers' initializers leave it alone
_RESETS = ("reset_parameters", "_reset_parameters")


@dataclass(frozen=True, eq=False)
class InitializerCall:
    """One call that gives tensors their values.

    Args:
        module: the path of the module that it is for.
        label: what to call it in a message, e.g. ``"Linear.reset_parameters() of 'fc1'"``.
        call: runs it.
    """

    module: str
    label: str
    call: Callable[[], object] = field(repr=False)

    def run(self, tensor: str) -> None:
        """Run it for the sake of one tensor.

        Raises:
            WeightsError: it raised.
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

    def __init__(self, index: ModuleIndex) -> None:
        self._modules = index.modules
        self._resets: dict[str, InitializerCall | None] = {}
        self._inits: dict[str, InitializerCall | None] = {}
        self._types: dict[type, bool] = {}

    def of(self, path: str) -> Iterator[InitializerCall]:
        """Those for the tensors of the module at ``path``."""
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
