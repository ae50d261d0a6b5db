"""Values of integer tensors without memory, computed from the batch: models read masks."""

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


_LARGEST = 2**24  # elements of a tensor whose values are tracked
_VALUE = "_slapo_value"
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_READS = frozenset({LOCAL_SCALAR, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default})


def is_tracked(tensor: torch.Tensor) -> bool:
    """Return whether the values of a tensor are tracked: small integers and booleans."""
    return tensor.dtype in _INTEGERS and tensor.numel() <= _LARGEST


class UnknownValueError(Exception):
    """The model reads a value that only real data can provide."""


class KnownValues:
    """Run operations on fake tensors, and on real values where all arguments are known.

    Args:
        mode: of the fake tensors; None for tensors on the meta device.

    Attributes:
        default: returns the number to use for an unknown value; None refuses to read it.
    """

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        self.mode = mode
        self.default: Callable[[], float | None] = lambda: None
        self._overwritten: dict[int, torch.UntypedStorage] = {}

    def set_value(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Set the value of a tensor without memory; floating-point values are not tracked."""
        if value.dtype in _INTEGERS and not value.is_meta:
            tensor.__dict__[_VALUE] = value

    def copy_value(self, tensor: torch.Tensor, to: torch.Tensor) -> None:
        """Copy the value of ``tensor`` to ``to``."""
        value = self.value_of(tensor)
        if value is not None:
            self.set_value(to, value.detach().clone())

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and return its result.

        Raises:
            UnknownValueError: the operation needs unknown values.
        """
        if func in _READS:
            found = self._computed(func, args, kwargs)
            if found is None:
                return self._read(func, args, kwargs)
            return found[0]
        try:
            result = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._sized_by_values(func, args, kwargs)
        except UnsupportedOperatorException:
            if func.namespace != "c10d" or any("Tensor" in str(one.type) for one in schema_of(func).returns):
                raise
            # Coalesced collectives write into their arguments: a group without peers takes any tensor.
            with unset_fake_temporarily():
                args, kwargs = tree_map_only(torch.Tensor, lambda _: torch.empty(0), (args, kwargs))
                return func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            if result.dtype in _INTEGERS and _has_no_memory(result):
                self._follow(func, args, kwargs, [result])
        elif type(result) in (tuple, list):
            hollow = [leaf for leaf in result if isinstance(leaf, torch.Tensor) and _has_no_memory(leaf)]
            if hollow and len(hollow) == len(result) and all(leaf.dtype in _INTEGERS for leaf in hollow):
                self._follow(func, args, kwargs, hollow)
        return result

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read a value; the mode knows constants."""
        try:
            return func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            number = self.default() if func is LOCAL_SCALAR else None
            if number is None:
                raise UnknownValueError(str(func)) from None
            return number

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[torch.Tensor]) -> None:
        found = None
        if all(result.numel() <= _LARGEST for result in results):
            found = self._computed(func, args, kwargs)
        for position, result in enumerate(results):
            if found is not None:
                result.__dict__[_VALUE] = found[position]
            elif _VALUE in result.__dict__:  # overwritten with unknown values, as are all tensors of its storage
                storage = result.__dict__.pop(_VALUE).untyped_storage()
                self._overwritten[storage_id(storage)] = storage

    def _sized_by_values(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation whose output shape depends on values."""
        found = self._computed(func, args, kwargs)
        if found is not None:
            fakes = [self._fake(value) for value in found]
            return fakes[0] if len(fakes) == 1 else tuple(fakes)
        if func is torch.ops.aten.index.Tensor:
            positions: list[Any] = []
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    known = self.value_of(index)
                    if known is None:
                        raise UnknownValueError(str(func))
                    with unset_fake_temporarily():
                        where = known.nonzero(as_tuple=True)
                    positions.extend(self._fake(each) for each in where)
                else:
                    positions.append(index)
            return func(args[0], positions)
        raise UnknownValueError(str(func))

    def _fake(self, value: torch.Tensor) -> torch.Tensor:
        assert self.mode is not None
        tensor = self.mode.from_tensor(value, static_shapes=True)
        self.set_value(tensor, value)
        return tensor

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a tensor; None where it is not known."""
        if not _has_no_memory(tensor):
            return tensor if tensor.numel() <= _LARGEST else None
        value: torch.Tensor | None = tensor.__dict__.get(_VALUE)
        if value is None:
            return tensor.constant if isinstance(tensor, FakeTensor) else None
        return value if storage_id(value) not in self._overwritten else None

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Run on real values; None if one is unknown, or the operation uses the RNG."""
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
            return None
        leaves, structure = tree_flatten((args, kwargs))
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                value = self.value_of(leaf)
                if value is None:
                    return None
                leaves[position] = value
            elif isinstance(leaf, torch.device):
                leaves[position] = torch.device("cpu")
        with unset_fake_temporarily():
            true_args, true_kwargs = tree_unflatten(leaves, structure)
            return tree_leaves(func(*true_args, **true_kwargs))


class IntegerTracking(TorchDispatchMode):
    """Track integers made on the meta device (a model's buffers) while active."""

    def __init__(self) -> None:
        super().__init__()
        self._values = KnownValues()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._values.run(func, args, kwargs or {})


def _has_no_memory(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


@contextmanager
def hide_fake_tensors() -> Iterator[None]:
    """Make ``is_fake_tensor(x)`` of loaded libraries return False.

    Libraries that call it take another path in tracing than in a training step (explicit masks).
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
