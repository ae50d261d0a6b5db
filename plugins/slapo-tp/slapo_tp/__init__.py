"""Parallelize tensors: ``shard``, ``sync``, ``shard_attribute``, ``sync_gradient``, ``fork_rng``.

Installing this distribution is enough: every schedule then knows ``sch["path"].shard(...)`` and the others. The
classes below are for those who build primitives as values::

    from slapo_tp import Shard

    sch["encoder.fc1"].apply(Shard("weight", axis=0))

``register_layer`` lets them know a class of layers that is not torch's own: see :class:`LayerType`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slapo_tp.attributes import ShardAttribute
    from slapo_tp.fork_rng import ForkRng
    from slapo_tp.layers import Axis, LayerType, register_layer
    from slapo_tp.shard import Shard
    from slapo_tp.sync import Sync
    from slapo_tp.sync_gradient import SyncGradient

__all__ = ["Axis", "ForkRng", "LayerType", "Shard", "ShardAttribute", "Sync", "SyncGradient", "register_layer"]

_HOMES = {
    "Axis": "slapo_tp.layers",
    "ForkRng": "slapo_tp.fork_rng",
    "LayerType": "slapo_tp.layers",
    "Shard": "slapo_tp.shard",
    "ShardAttribute": "slapo_tp.attributes",
    "Sync": "slapo_tp.sync",
    "SyncGradient": "slapo_tp.sync_gradient",
    "register_layer": "slapo_tp.layers",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
