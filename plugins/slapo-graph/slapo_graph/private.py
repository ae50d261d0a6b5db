"""Names of torch that graphs need and that are not public: what a new version of torch may change is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from torch import fx, nn
from torch._C import (
    DisableTorchFunction,
    TensorBase,
    _is_any_autocast_enabled,
    _jit_get_schemas_for_operator as schemas_for_operator,
    _len_torch_function_stack as number_of_function_modes,
    _set_grad_enabled as set_grad_enabled,
)
from torch._compile import _disable_dynamo as disable_dynamo
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.overrides import (
    _get_current_function_mode_stack as function_modes,
    _pop_mode as pop_function_mode,
    _push_mode as push_function_mode,
)
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "DataDependentOutputException",
    "DeviceContext",
    "DisableTorchFunction",
    "Dropout",
    "DynamicOutputShapeException",
    "FakeTensor",
    "OpOverload",
    "OpOverloadPacket",
    "TensorBase",
    "TorchDispatchMode",
    "disable_current_modes",
    "disable_dynamo",
    "function_modes",
    "number_of_function_modes",
    "pop_function_mode",
    "push_function_mode",
    "pytree",
    "schemas_for_operator",
    "set_grad_enabled",
    "tree_leaves",
    "tree_map_only",
]

NN = torch._C._nn
VF = torch._VF
GROUPED_MM = torch.ops.aten._grouped_mm.default

PARAMETERS, CHILDREN = "_parameters", "_modules"
TENSOR_TABLES = (PARAMETERS, "_buffers")
TABLES = (*TENSOR_TABLES, CHILDREN)
"""Attributes of a module that hold its tensors and children by name."""
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def tables_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return the live tables of parameters, buffers and children."""
    return module._parameters, module._buffers, module._modules


def hooks_of(module: nn.Module) -> tuple[dict[int, Callable[..., Any]], ...]:
    """Return the live hook tables, in the order of ``HOOK_TABLES``."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


HOOKS = itemgetter(*HOOK_TABLES)
FORWARDS = ("forward", "_compiled_call_impl")
"""Attributes that an instance has by itself if something else is called than its class's forward."""


def is_changed(module: nn.Module) -> bool:
    """Return whether a call of ``module`` runs more than its class's forward."""
    return bool(
        "forward" in module.__dict__
        or "_compiled_call_impl" in module.__dict__  # module.compile()
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_any_autocast_enabled() -> bool:
    """Return whether autocast is enabled for any kind of device that there may be."""
    return _is_any_autocast_enabled() or (_HAS_MPS and torch.is_autocast_enabled("mps"))


_HAS_MPS = torch.backends.mps.is_built()  # torch asks about all other kinds


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def compiled_calls_of(module: nn.Module) -> list[Any]:
    """Return the compiled call of a module, if ``module.compile()`` was called."""
    return [module._compiled_call_impl] if "_compiled_call_impl" in module.__dict__ else []


def call_uncompiled(run: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module by ``run``, its ``__call__``, as without ``module.compile()``."""
    own = module.__dict__
    compiled, own["_compiled_call_impl"] = own["_compiled_call_impl"], None
    try:
        return run(module, *args, **kwargs)
    finally:
        own["_compiled_call_impl"] = compiled


class SafeMetaTensors(TorchDispatchMode):
    """Raise on reads of the data pointers of new meta tensors, for which torch gives the address 0."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        if schema is None or not any(each.alias_info for each in schema.returns):  # not of a tensor from outside
            for leaf in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
                if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                    torch._C._set_throw_on_mutable_data_ptr(leaf)
        return out


def write_count(tensor: torch.Tensor) -> int:
    """Return a counter of in-place writes to a tensor or its views."""
    return tensor._version


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a strided tensor's storage, which its views share."""
    return tensor.untyped_storage()._cdata


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view for autograd."""
    return tensor._is_view()


def schema_of(operator: OpOverload) -> Any:
    """Return the schema of an operator overload: ``name``, ``arguments``, ``returns``."""
    return operator._schema


def operator_name(packet: OpOverloadPacket) -> str:
    """Return the qualified name of an operator, e.g. ``"aten::add"``."""
    return packet._qualified_op_name


def is_erased(node: fx.Node) -> bool:
    """Return whether a node was erased from its graph."""
    return node._erased


# Replaced in the entire process while a forward is recorded, or a pattern's function is read: under
# ``slapo_core.observers.PATCHING``, and without effect for other threads where the functions given say so.


@contextmanager
def custom_functions_through(call: Callable[..., Any]) -> Iterator[None]:
    """Route calls of custom autograd functions through ``call(function, run, args, kwargs)``.

    ``function.apply`` looks this method up in its base class, also where it was stored: ``f = Function.apply``.
    """
    base: Any = SingleLevelFunction
    before = vars(base).get("apply")

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = super(base, cls).apply if before is None else before.__get__(None, cls)
        return call(cls, run, args, kwargs)

    base.apply = classmethod(apply)
    try:
        yield
    finally:
        if before is None:
            del base.apply
        else:
            base.apply = before


@contextmanager
def before_saved_tensors_hooks(announce: Callable[[], None]) -> Iterator[None]:
    """Call ``announce()`` before each ``saved_tensors_hooks`` that is entered while the block runs."""
    enter = saved_tensors_hooks.__enter__

    def entered(hooks: saved_tensors_hooks) -> None:
        announce()
        enter(hooks)

    saved_tensors_hooks.__enter__ = entered  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]


@contextmanager
def dropout_default(p: float) -> Iterator[None]:
    """Let dropout functions pass the object ``p``, equal to their default, where it is omitted."""
    functions: tuple[Any, ...] = (
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
    )
    before = [function.__defaults__ for function in functions]
    try:
        for function in functions:
            function.__defaults__ = (p, *function.__defaults__[1:])
        yield
    finally:
        for function, own in zip(functions, before, strict=True):
            function.__defaults__ = own


def methods_put_on(cls: type, methods: Mapping[str, Callable[..., Any]]) -> Callable[[], None] | None:
    """Replace methods of a class; return the function that restores them, None for a class in C."""
    own = {name: vars(cls)[name] for name in methods if name in vars(cls)}
    try:
        for name, method in methods.items():
            setattr(cls, name, method)
    except TypeError:
        return None

    def restore() -> None:
        for name in methods:
            if name in own:
                setattr(cls, name, own[name])
            else:
                delattr(cls, name)

    return restore
