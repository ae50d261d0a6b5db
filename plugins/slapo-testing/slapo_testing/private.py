"""Wrap the private names of torch that this distribution uses; its tests check them against the installed version."""

from __future__ import annotations

from torch.utils._pytree import tree_leaves as tree_leaves, tree_map_only as tree_map_only

TENSOR_TABLES = ("_parameters", "_buffers")
"""Attributes of a module that hold its tensors by name."""

TENSOR_HOOK_TABLES = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
"""Table of a tensor's hooks -> the method that registers one."""
