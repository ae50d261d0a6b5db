"""Values of integer tensors without memory, where the batch determines them: models read masks."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from slapo_estimate.private import (
    LOCAL_SCALAR,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    UnsupportedOperatorException,
    schema_of,
    storage_id,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    unset_fake_temporarily,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_LARGEST = 2**24  # elements of a tensor whose values are followed
_VALUE = "_slapo_value"
_WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_READS = frozenset({LOCAL_SCALAR, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default})


def is_followed(tensor: torch.Tensor) -> bool:
    """Return whether the values of a tensor are tracked: small integers and booleans."""
    return tensor.dtype in _WHOLE and tensor.numel() <= _LARGEST


class Unknown(Exception):  # noqa: N818 - what a model asks, not a fault
    """A model reads a value that is not known without running it."""


class Values:
    """Runs operations, and also on true values where all integer arguments are known.

    Args:
        mode: of the tensors without memory; None where they are on the meta device.

    Attributes:
        otherwise: returns a number for one that is read and not known, or None to refuse.
    """

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        self.mode = mode
        self.otherwise: Callable[[], float | None] = lambda: None
        self._overwritten: dict[int, torch.UntypedStorage] = {}

    def give(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Give ``tensor``, without memory, its ``value``; floating-point values are not tracked."""
        if value.dtype in _WHOLE and not value.is_meta:
            tensor.__dict__[_VALUE] = value

    def carry(self, tensor: torch.Tensor, to: torch.Tensor) -> None:
        """Give ``to`` the value of ``tensor``."""
        value = self._value(tensor)
        if value is not None:
            self.give(to, value.detach().clone())

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and return its result.

        Raises:
            Unknown: the operation needs values that are not known.
        """
        if func in _READS:
            found = self._computed(func, args, kwargs)
            if found is None:
                return self._asked(func, args, kwargs)
            return found[0]
        try:
            result = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._sized_by_values(func, args, kwargs)
        except UnsupportedOperatorException:
            if func.namespace != "c10d" or any("Tensor" in str(one.type) for one in schema_of(func).returns):
                raise
            # Coalesced collectives, which write into their arguments: a group without peers takes any.
            with unset_fake_temporarily():
                args, kwargs = tree_map_only(torch.Tensor, lambda _: torch.empty(0), (args, kwargs))
                return func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            if result.dtype in _WHOLE and _is_hollow(result):
                self._follow(func, args, kwargs, [result])
        elif type(result) in (tuple, list):
            whole = [leaf for leaf in result if isinstance(leaf, torch.Tensor) and _is_hollow(leaf)]
            if whole and len(whole) == len(result) and all(leaf.dtype in _WHOLE for leaf in whole):
                self._follow(func, args, kwargs, whole)
        return result

    def _asked(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read a value; the mode itself knows constants."""
        try:
            return func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            number = self.otherwise() if func is LOCAL_SCALAR else None
            if number is None:
                raise Unknown(str(func)) from None
            return number

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[torch.Tensor]) -> None:
        found = None
        if all(result.numel() <= _LARGEST for result in results):
            found = self._computed(func, args, kwargs)
        for position, result in enumerate(results):
            if found is not None:
                result.__dict__[_VALUE] = found[position]
            elif _VALUE in result.__dict__:  # written with unknown values; so are tensors that share its storage
                storage = result.__dict__.pop(_VALUE).untyped_storage()
                self._overwritten[storage_id(storage)] = storage

    def _sized_by_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation whose result's shape depends on values, where those are known."""
        found = self._computed(func, args, kwargs)
        if found is not None:
            fakes = [self._fake(value) for value in found]
            return fakes[0] if len(fakes) == 1 else tuple(fakes)
        if func is torch.ops.aten.index.Tensor:
            places: list[Any] = []
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    known = self._value(index)
                    if known is None:
                        raise Unknown(str(func))
                    with unset_fake_temporarily():
                        where = known.nonzero(as_tuple=True)
                    places.extend(self._fake(each) for each in where)
                else:
                    places.append(index)
            return func(args[0], places)
        raise Unknown(str(func))

    def _fake(self, value: torch.Tensor) -> torch.Tensor:
        assert self.mode is not None
        tensor = self.mode.from_tensor(value, static_shapes=True)
        self.give(tensor, value)
        return tensor

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not _is_hollow(tensor):
            return tensor if tensor.numel() <= _LARGEST else None
        value: torch.Tensor | None = tensor.__dict__.get(_VALUE)
        if value is None:
            return tensor.constant if isinstance(tensor, FakeTensor) else None
        return value if storage_id(value) not in self._overwritten else None

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Run on true values; None where one is not known, or the operation uses the RNG."""
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
            return None
        leaves, form = tree_flatten((args, kwargs))
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                value = self._value(leaf)
                if value is None:
                    return None
                leaves[position] = value
            elif isinstance(leaf, torch.device):
                leaves[position] = torch.device("cpu")
        with unset_fake_temporarily():
            true_args, true_kwargs = tree_unflatten(leaves, form)
            return tree_leaves(func(*true_args, **true_kwargs))


class Following(TorchDispatchMode):
    """Tracks integers that are made on the meta device (buffers of a model) while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._values = Values()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._values.run(func, args, kwargs or {})


def _is_hollow(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


@contextmanager
def seen_as_plain() -> Iterator[None]:
    """Make loaded libraries see tensors without memory as plain ones.

    Some ask ``is_fake_tensor(x)``, and take another way for tracing than a training step does (explicit masks).
    """
    asked = {
        name: vars(module)["is_fake_tensor"]
        for name, module in list(sys.modules.items())
        if not name.startswith("torch.") and callable(getattr(module, "__dict__", {}).get("is_fake_tensor"))
    }
    for name in asked:
        vars(sys.modules[name])["is_fake_tensor"] = lambda tensor: False
    try:
        yield
    finally:
        for name, function in asked.items():
            vars(sys.modules[name])["is_fake_tensor"] = function
