"""Materialize the model tensor by tensor; with ZeRO-3 partition each before the next.

No rank ever holds more of the model than its partitions and one whole tensor."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from slapo_deepspeed.process_groups import MeshUnit
    from slapo_runtime.context import BuildContext


def is_partitioned(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed partitions the parameters themselves: ZeRO-3."""
    return config.get("zero_optimization", {}).get("stage", 0) == 3


class Partitioning:
    """Takes all tensors of the context, and partitions the parameters where ZeRO-3 wants it.

    Args:
        context: of the build.
        config: DeepSpeed's, filled in.
        unit: the groups of the mesh; ZeRO-3 partitions over that of the replicas.
    """

    def __init__(self, context: BuildContext, config: Mapping[str, Any], unit: MeshUnit) -> None:
        self._context, self._unit = context, unit
        self._config = copy.deepcopy(dict(config))
        self._first: Any = None
        self._undo: list[tuple[nn.Parameter, torch.Tensor, frozenset[str]]] = []

    def run(self) -> None:
        """Give the model its values."""
        real = {id(live.tensor) for live in self._context.state.tensors() if not live.tensor.is_meta}
        partitions = is_partitioned(self._config)
        for live in self._context.materialize():
            if partitions and isinstance(live.tensor, nn.Parameter):
                if id(live.tensor) in real:
                    self._undo.append((live.tensor, live.tensor.data, frozenset(vars(live.tensor))))
                self._partition(live.tensor)

    def take_back(self) -> None:
        """Make parameters that had values before the build whole again; those of a meta model go with the build."""
        for parameter, values, names in self._undo:
            for name in set(vars(parameter)) - names:
                delattr(parameter, name)
            parameter.data = values
        self._undo.clear()

    def keep(self) -> None:
        """Let go of what taking back would need."""
        self._undo.clear()

    def _partition(self, parameter: nn.Parameter) -> None:
        """Cast it as DeepSpeed casts a model, send it from the first replica to the others, keep this rank's part."""
        dtype = _dtype(self._config)
        if dtype is not None:
            parameter.data = parameter.data.to(dtype)
        shape = parameter.shape
        if not shape:  # DeepSpeed sends bytes, which a tensor without axes does not have
            parameter.data = parameter.data.reshape(1)
        if self._first is None:
            self._start(parameter)
            self._first = parameter
        else:
            self._first.convert_to_zero_parameters(param_list=[parameter])
        parameter.ds_shape = shape  # type: ignore[attr-defined]

    def _start(self, parameter: nn.Parameter) -> None:
        """Partition the first one; it knows how to partition others."""
        import deepspeed

        holder = nn.Module()
        holder.first = parameter
        offload = self._config.get("zero_optimization", {}).get("offload_param") or {}
        deepspeed.zero.Init(
            module=holder,
            data_parallel_group=self._unit.get_data_parallel_group(),
            config_dict_or_path=self._config,
            dtype=parameter.dtype,
            remote_device=offload.get("device"),
            pin_memory=bool(offload.get("pin_memory", False)),
            mpu=self._unit,
        )


@contextlib.contextmanager
def with_shapes(model: nn.Module) -> Iterator[None]:
    """Let partitioned parameters have their shapes, without any memory: a factory may ask for them.

    Factories make groups by the number of axes, so that weight decay leaves out biases.
    """
    partitioned = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_shape")]
    empty = [parameter.data for parameter in partitioned]
    for parameter in partitioned:
        parameter.data = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.ds_shape)
    try:
        yield
    finally:
        for parameter, data in zip(partitioned, empty, strict=True):
            parameter.data = data


def _dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype to which DeepSpeed casts parameters, or None."""
    if config.get("fp16", {}).get("enabled"):
        return torch.float16
    if any(config.get(name, {}).get("enabled") for name in ("bf16", "bfloat16")):
        return torch.bfloat16
    return None


_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_SMALL, _LARGE = 256 * 2**10, 32 * 2**20


@contextlib.contextmanager
def returned_at_once() -> Iterator[None]:
    """Let the C library allocate each tensor from the system, and return it when freed.

    Otherwise tensors lie in the heap of the process from the second one of a size on. Each is freed when it has been
    partitioned, small things are put where it lay, and the heap keeps the rest: of a whole model, more than the
    partition. Afterwards the limits are those that large tensors would cause anyway.

    Nothing is done where the C library is another one than glibc, or where the environment sets its limits.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is None or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        yield
        return
    adjust(_MMAP, _SMALL)
    try:
        yield
    finally:
        adjust(_MMAP, _LARGE)
        adjust(_TRIM, 2 * _LARGE)
