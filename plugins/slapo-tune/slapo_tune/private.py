"""Names of torch that are not public and that this plugin needs: what a new version of torch may change is here."""

from torch.utils._pytree import tree_leaves as tree_leaves, tree_map_only as tree_map_only
