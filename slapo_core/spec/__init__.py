"""What a plugin author sees: the protocols and values that core, plugins and dialects share.

``primitive`` and ``dialect`` are the classes to derive from; ``node`` and ``edit`` what a primitive is given;
``layout`` and ``mesh`` how tensors are split; ``conditions`` ready preconditions; ``hookspecs`` the hooks; ``kinds``
what else a plugin can provide.
"""
