"""Compiled and fused regions for slapo: ``compile``, ``fuse``, ``decompose``, ``bind``, ``cudagraphify``, ``quantize``.

Installing this distribution is enough: every schedule then knows ``sch["path"].compile(...)`` and the others. The
classes below are for those who build primitives as values::

    from slapo_fusion import Compile

    sch["encoder.layer.*"].apply(Compile(backend="aot_eager"))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slapo_fusion.bind import Bind
    from slapo_fusion.compile import Compile
    from slapo_fusion.cudagraphify import Cudagraphify
    from slapo_fusion.decompose import Decompose
    from slapo_fusion.fuse import Fuse
    from slapo_fusion.kernels import build_kernels
    from slapo_fusion.quantize import Quantize

__all__ = ["Bind", "Compile", "Cudagraphify", "Decompose", "Fuse", "Quantize", "build_kernels"]

_HOMES = {
    "Bind": "slapo_fusion.bind",
    "Compile": "slapo_fusion.compile",
    "Cudagraphify": "slapo_fusion.cudagraphify",
    "Decompose": "slapo_fusion.decompose",
    "Fuse": "slapo_fusion.fuse",
    "Quantize": "slapo_fusion.quantize",
    "build_kernels": "slapo_fusion.kernels",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
