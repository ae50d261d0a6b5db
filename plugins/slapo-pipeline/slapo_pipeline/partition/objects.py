"""Objects that are neither tensors nor plain: they cannot pass from stage to stage."""

from __future__ import annotations

from typing import Any

from torch import fx

from slapo_core.tracing import Opaque
from slapo_pipeline.partition.places import Uncuttable

__all__ = ["made_object"]


def made_object(value: Any, cut: str, how: str, node: fx.Node) -> Uncuttable:
    """The refusal of a model that makes an object which stages would have to share.

    Args:
        value: the object, or what stands for it.
        cut: path of a cut.
        how: what is done with it, e.g. ``"made before it and used after it"``.
        node: where.
    """
    kind = type(object.__getattribute__(value, "_value") if isinstance(value, Opaque) else value).__name__
    hint = "cut where only tensors pass, or keep it inside of a module that lies in one stage"
    if "Cache" in kind:
        hint = "training needs no cache: pass use_cache=False with the batch, or set model.config.use_cache = False"
    problem = f"the forward makes a {kind}, {how}, and only tensors and plain values can pass between stages"
    return Uncuttable(cut, problem, hint, node.meta.get("location"))
