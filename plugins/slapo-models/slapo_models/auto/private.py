"""Names of torch that are not public."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves, tree_map_only as tree_map_only


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's memory, which views share."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
