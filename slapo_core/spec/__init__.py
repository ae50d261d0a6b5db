"""The interfaces and values that core, plugins and dialects share.

``primitive`` and ``dialect`` are the classes to derive from; ``node`` and ``edit`` what a primitive is given;
``layout`` and ``mesh`` how tensors are split; ``preconditions`` ready ones; ``hookspecs`` the hooks, ``doctor`` the
answers to one of them; ``kinds`` what a plugin can provide.
"""
