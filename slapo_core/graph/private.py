"""Names of torch that graphs need and that are not public: what a new version of torch may change is here."""

from __future__ import annotations

import torch
from torch._C import (
    DisableTorchFunction,
    TensorBase,
    _jit_get_schemas_for_operator as schemas_for_operator,
    _len_torch_function_stack as number_of_function_modes,
    _set_grad_enabled as set_grad_enabled,
)
from torch._compile import _disable_dynamo as disable_dynamo
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
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
    "GROUPED_MM",
    "NN",
    "VF",
    "DataDependentOutputException",
    "DeviceContext",
    "DisableTorchFunction",
    "Dropout",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
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
