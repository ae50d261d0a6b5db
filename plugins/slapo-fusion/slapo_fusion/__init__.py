"""Compiled and fused regions for slapo: ``compile``, ``fuse``, ``decompose``, ``bind``, ``cudagraphify``, ``quantize``.

Installing this distribution is enough: every schedule then knows ``sch["path"].compile(...)`` and the others. The
classes below are for those who build primitives as values::

    from slapo_fusion import Compile

    sch["encoder.layer.*"].apply(Compile(backend="aot_eager"))
"""

from __future__ import annotations

from slapo_fusion.bind import Bind
from slapo_fusion.compile import Compile
from slapo_fusion.cudagraphify import Cudagraphify
from slapo_fusion.decompose import Decompose
from slapo_fusion.fuse import Fuse
from slapo_fusion.kernels import build_kernels
from slapo_fusion.quantize import Quantize

__all__ = ["Bind", "Compile", "Cudagraphify", "Decompose", "Fuse", "Quantize", "build_kernels"]
