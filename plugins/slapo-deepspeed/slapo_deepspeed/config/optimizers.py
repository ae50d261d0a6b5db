"""The optimizer that a configuration names: is it one, and may it be given pieces of parameters?"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from slapo_core import BuildError
from slapo_deepspeed.config.draft import Draft

__all__ = ["check_optimizer", "optimizer_name"]

_OWN = ("adagrad", "adam", "adamw", "lamb", "lion", "muadam", "muadamw", "musgd", "muon")
"""Those that DeepSpeed makes itself, whatever the case of their letters; others are torch.optim's."""

_BY_ELEMENT = frozenset(
    {"adagrad", "adam", "adamw", "lion", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
_FUSED_ONLY = frozenset({"bias_correction", "set_grad_none"})
"""Params that DeepSpeed's own Adam has, and torch's has not."""

_MUP = frozenset({"muadam", "muadamw", "musgd"})


def optimizer_name(config: Mapping[str, Any]) -> str | None:
    """The name as DeepSpeed takes it, e.g. ``"adamw"`` or ``"SGD"``; None without one."""
    section = config.get("optimizer")
    name = section.get("type") if isinstance(section, Mapping) else None
    return (name.lower() if name.lower() in _OWN else name) if isinstance(name, str) else None


def check_optimizer(draft: Draft) -> None:
    """Refuse what DeepSpeed would refuse after the ranks have met, or would run wrongly; fill in its settings.

    Raises:
        BuildError: two optimizers, an unknown one, or one that cannot be given pieces; each with its place.
    """
    config, source, facts = draft.config, draft.source, draft.facts
    if "optimizer" not in config:
        return
    given = draft.get("optimizer.type")
    if facts.has_optimizer:
        raise BuildError(
            f"two optimizers: {source.of('optimizer')} is {given!r}, and build(optimizer=...) is a factory",
            hint='leave out "optimizer" of the configuration, or optimizer= of build',
        )
    name = optimizer_name(config)
    if name is None:
        raise BuildError(
            f"{source.of('optimizer.type')} must name an optimizer (got {given!r})",
            hint='"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}',
        )
    _refuse_unknown(draft, name)
    _refuse_pieces(draft, name)
    _check_params(draft, name)
    if name in ("adam", "adamw") and facts.device == "cpu":
        _fill_adam_of_torch(draft)


def _fill_adam_of_torch(draft: Draft) -> None:
    """Torch's Adam in the place of DeepSpeed's, which would be compiled; what it does stays the same."""
    params = draft.get("optimizer.params") or {}
    offloads = draft.get("zero_optimization.offload_optimizer.device") not in (None, "none")
    if offloads or "torch_adam" in params or _FUSED_ONLY & set(params):
        return
    draft.fill("optimizer.params.torch_adam", True, "DeepSpeed's own Adam would be compiled on a CPU")
    if "weight_decay" not in params:
        draft.fill("optimizer.params.weight_decay", 0.0, "the default of DeepSpeed's own Adam; torch's is 0.01")


def _refuse_unknown(draft: Draft, name: str) -> None:
    import torch

    place = draft.source.of("optimizer.type")
    if name in _MUP:
        raise BuildError(
            f"{place} is {name!r}, which reads what mup has put on the parameters of the reference model; steps make "
            "parameters without it",
            hint="optimizer=lambda params: ... of build",
        )
    if name == "muon":
        raise BuildError(
            f"{place} is 'Muon': DeepSpeed sorts the parameters into groups of its own for it, which this target "
            "cannot save and load",
            hint='"type": "AdamW"',
        )
    if name in _OWN:
        return
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
        known = [*_OWN, *(one for one in dir(torch.optim) if one[:1].isupper() and one != "Optimizer")]
        close = difflib.get_close_matches(name.lower(), [one.lower() for one in known], n=1)
        shown = next((one for one in known if close and one.lower() == close[0]), None)
        raise BuildError(
            f"{place} is {name!r}, which is no optimizer of DeepSpeed 0.19 and none of torch.optim"
            + (f"; did you mean {shown!r}?" if shown else "")
        )
    if kind is torch.optim.LBFGS:
        raise BuildError(f"{place} is 'LBFGS', which runs the model several times a step; DeepSpeed runs it once")


def _refuse_pieces(draft: Draft, name: str) -> None:
    """A parameter's update must not depend on more of it than a rank holds."""
    if name in _BY_ELEMENT:
        return
    place, facts = draft.source.of("optimizer.type"), draft.facts
    if facts.split:
        raise BuildError(
            f"{place} is {name!r}, which does not treat the elements of a parameter one by one, and '{facts.split[0]}' "
            f"is split over mesh_dim 'tp' ({facts.tp} ranks): each would update its piece as if it were the whole",
            hint='"type": "AdamW"',
        )
    stage = draft.get("zero_optimization.stage") or 0
    low = any(draft.get(f"{kind}.enabled") for kind in ("bf16", "bfloat16"))
    if not stage and facts.pp > 1 and low:
        raise BuildError(
            f"{place} is {name!r}, which does not treat the elements of a parameter one by one, and in a pipeline in "
            "bf16 DeepSpeed gives each rank pieces of them, without ZeRO too",
            hint='"type": "AdamW"',
        )
    if stage:
        raise BuildError(
            f"{place} is {name!r}, which does not treat the elements of a parameter one by one, and ZeRO-{stage} "
            "gives each rank pieces of them",
            hint='"type": "AdamW", or "zero_optimization": {"stage": 0}',
        )


def _check_params(draft: Draft, name: str) -> None:
    params: Any = draft.get("optimizer.params")
    if params is None:
        return
    if not isinstance(params, Mapping):
        raise BuildError(f"{draft.source.of('optimizer.params')} must be an object, {{...}} (got {params!r})")
    if "max_grad_norm" in params:
        raise BuildError(
            f"{draft.source.of('optimizer.params.max_grad_norm')}: DeepSpeed clips by 'gradient_clipping'",
            hint=f'"gradient_clipping": {params["max_grad_norm"]}, or max_grad_norm= of build',
        )
