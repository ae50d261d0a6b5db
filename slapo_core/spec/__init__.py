"""The interfaces and values that core, plugins and dialects share.

``primitive`` and ``dialect`` are the classes to derive from; ``node`` and ``edit`` what a primitive is given;
``layout`` and ``mesh`` how tensors are sharded; ``preconditions`` ready ones; ``hookspecs`` the hooks;
``entry_point_groups`` the groups of a plugin.
"""
