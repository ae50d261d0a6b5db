"""ZeRO-3: partition a model tensor by tensor; gather full parameters for modules changed by steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.internals import hooks_of
from slapo_deepspeed.private import linear_through

if TYPE_CHECKING:
    from slapo_core import Node
    from slapo_deepspeed.runtime import MeshUnit
    from slapo_runtime.context import BuildContext


def is_partitioned(config: Mapping[str, Any]) -> bool:
    """Return whether DeepSpeed partitions the parameters: ZeRO-3."""
    return config.get("zero_optimization", {}).get("stage", 0) == 3


class Partitioning:
    """Materialize all tensors of the context, and partition the parameters under ZeRO-3.

    Args:
        context: of the build.
        config: DeepSpeed's, filled in.
        unit: the groups of the mesh; ZeRO-3 partitions over the replicas.
    """

    def __init__(self, context: BuildContext, config: Mapping[str, Any], unit: MeshUnit) -> None:
        self._context, self._unit = context, unit
        self._config = copy.deepcopy(dict(config))
        self._first: Any = None

    @contextlib.contextmanager
    def materialized(self) -> Iterator[None]:
        """Give the model its values; on failure, restore the full values that parameters had before the build."""
        real = {id(live.tensor) for live in self._context.state.tensors() if not live.tensor.is_meta}
        undo = []
        try:
            for live in self._context.materialize():
                if isinstance(live.tensor, nn.Parameter) and is_partitioned(self._config):
                    if id(live.tensor) in real:
                        undo.append((live.tensor, live.tensor.data, frozenset(vars(live.tensor))))
                    self._partition(live.tensor)
            yield
        except BaseException:
            for parameter, values, names in undo:
                for name in set(vars(parameter)) - names:
                    delattr(parameter, name)
                parameter.data = values
            raise

    def _partition(self, parameter: nn.Parameter) -> None:
        """Cast a parameter as DeepSpeed does, broadcast it over the replicas, keep this rank's partition."""
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
        """Partition the first parameter, which then has the method to partition others."""
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
    """Give partitioned parameters their full shapes in the block, without memory, for optimizer factories.

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


def gather_below_changed(context: BuildContext, engine: Any) -> None:
    """Let modules with a changed forward gather all parameters below them; without ZeRO-3 do nothing.

    Args:
        context: of the build.
        engine: DeepSpeed's.
    """
    if not engine.zero_optimization_partition_weights():
        return
    import deepspeed

    below = set()
    for node in _outermost(context.schedule.root):
        own = {id(parameter) for parameter in node.module.parameters(recurse=False)}
        for parameter in node.module.parameters():
            if id(parameter) not in own:
                deepspeed.zero.register_external_parameter(node.module, parameter)
        for module in node.module.modules():
            if module is not node.module:
                hooks = hooks_of(module)
                below |= {id(hooks["forward_pre"]), id(hooks["forward"])}
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    for handles in (offload.forward_hooks, offload.backward_hooks):
        for handle in handles:
            if id(handle.hooks_dict_ref()) in below:
                handle.remove()


def _outermost(node: Node) -> Iterator[Node]:
    """Yield the outermost nodes with a graph or a wrapped forward."""
    if node.graph is not None or node.wrappers:
        yield node
        return
    for child in node.children:
        yield from _outermost(child)


@contextlib.contextmanager
def partitioned_linear(config: Mapping[str, Any]) -> Iterator[None]:
    """Use DeepSpeed's linear function for partitioned weights only, in forward and backward.

    Args:
        config: DeepSpeed's, filled in; nothing is done without ZeRO-3, or with ``memory_efficient_linear`` false.
    """
    if not is_partitioned(config) or not config["zero_optimization"].get("memory_efficient_linear", True):
        yield
        return
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    with linear_through(zero3_linear_wrap, where=lambda weight: hasattr(weight, "ds_id")):
        yield
