"""Wrap the private names of torch that this distribution uses; its tests check them against the installed version."""

from torch.utils._pytree import tree_leaves as tree_leaves, tree_map_only as tree_map_only
