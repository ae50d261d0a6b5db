"""Settings of the optimizer, and of DistributedDataParallel, which hang together."""

from __future__ import annotations

import math

from slapo_core import BuildError
from slapo_megatron.config.draft import Draft

__all__ = ["fill_clipping", "fill_optimizer", "fill_replicas"]

_OPTIMIZER, _DDP = "optimizer_config", "ddp_config"
_OF = {
    "adam": ("adam_beta1", "adam_beta2", "adam_eps", "decoupled_weight_decay"),
    "sgd": ("sgd_momentum",),
}
_OWN = ("optimizer", "weight_decay", "apply_wd_to_qk_layernorm", "min_lr", *_OF["adam"], *_OF["sgd"])
"""Settings of the optimizer that Megatron makes."""

_AT_LEAST_0 = ("lr", "min_lr", "weight_decay", "adam_eps", "sgd_momentum", "clip_grad", "min_loss_scale")
_BELOW_1 = ("adam_beta1", "adam_beta2")
_POSITIVE = ("loss_scale", "initial_loss_scale", "loss_scale_window", "hysteresis")


def fill_optimizer(draft: Draft) -> None:
    """Megatron's own optimizer, or what a factory leaves for the options to say.

    Raises:
        BuildError: a value that cannot be meant, or one that would do nothing.
    """
    _check_ranges(draft)
    own = [name for name in _OWN if draft.given(_OPTIMIZER, name)]
    rate = draft.options[_OPTIMIZER].get("lr")
    if draft.facts.has_optimizer:
        for name in [*(["lr"] if rate is not None else []), *own]:
            raise BuildError(
                f"two optimizers: {draft.place(_OPTIMIZER, name)} is {draft.get(_OPTIMIZER, name)!r}, and "
                "build(optimizer=...) is a factory, which says it",
                hint=f"leave {name!r} out, or optimizer= of build",
            )
        return
    if rate is None:
        if own and draft.facts.has_optimizer is False:
            raise BuildError(
                f"{draft.place(_OPTIMIZER, own[0])} is {draft.get(_OPTIMIZER, own[0])!r}, but there is no rate to "
                "train with: the engine only evaluates",
                hint=f'{_OPTIMIZER}={{"lr": 1e-4, ...}}, or optimizer= of build',
            )
        return
    kind = draft.get(_OPTIMIZER, "optimizer")
    if kind not in _OF:
        raise BuildError(
            f"{draft.place(_OPTIMIZER, 'optimizer')} must be 'adam' or 'sgd' (got {kind!r}): others need whole "
            "parameters, or keep state that cannot be read back into the reference layout",
            hint='optimizer=lambda params: ... of build, or "optimizer": "adam"',
        )
    for other, names in _OF.items():
        for name in names:
            if other != kind and draft.given(_OPTIMIZER, name):
                raise BuildError(
                    f"{draft.place(_OPTIMIZER, name)} is {draft.get(_OPTIMIZER, name)}, but the optimizer is {kind!r}",
                    hint=f'leave it out, or "optimizer": "{other}"',
                )
    if draft.get(_OPTIMIZER, "min_lr") is None:
        draft.fill(_OPTIMIZER, "min_lr", 0.0, "without it Megatron's scheduler ends at None")
    if draft.get(_OPTIMIZER, "min_lr") > rate:
        raise BuildError(
            f"{draft.place(_OPTIMIZER, 'min_lr')} is {draft.get(_OPTIMIZER, 'min_lr')}, above 'lr', {rate}",
            hint=f'"min_lr": {rate / 10:g}',
        )


def fill_clipping(draft: Draft) -> None:
    """``clip_grad`` is ``max_grad_norm``; else Megatron's default where an ``optimizer_config`` is given, else nothing.

    Raises:
        BuildError: both are given, and differ.
    """
    asked, given = draft.facts.max_grad_norm, draft.options[_OPTIMIZER].get("clip_grad")
    if given is None and asked is not None:
        draft.fill(_OPTIMIZER, "clip_grad", float(asked), f"max_grad_norm={asked}")
    elif given is None and draft.has_optimizer_config:
        why = 'OptimizerConfig\'s default; "clip_grad": 0.0 does not clip'
        draft.fill(_OPTIMIZER, "clip_grad", draft.get(_OPTIMIZER, "clip_grad"), why)
    elif given is None:
        draft.fill(_OPTIMIZER, "clip_grad", 0.0, "neither optimizer_config nor max_grad_norm: nothing is clipped")
    elif asked is not None and given is not None and float(given) != float(asked):
        raise BuildError(
            f"{draft.place(_OPTIMIZER, 'clip_grad')} is {given}, but build(max_grad_norm={asked})",
            hint="say it once: they are the same number",
        )


def fill_replicas(draft: Draft) -> None:
    """What replicas partition and when they communicate: the same in both configurations.

    Raises:
        BuildError: they contradict each other, or a setting needs another one.
    """
    for name in ("use_distributed_optimizer", "overlap_param_gather"):
        said = {option: draft.options[option][name] for option in (_OPTIMIZER, _DDP) if draft.given(option, name)}
        if len(set(said.values())) > 1:
            raise BuildError(
                f"{draft.place(_OPTIMIZER, name)} is {said[_OPTIMIZER]}, but {draft.place(_DDP, name)} is {said[_DDP]}",
                hint="say it once: they are the same",
            )
        for missing in {_OPTIMIZER, _DDP} - set(said) if said else ():
            given = next(iter(said))
            draft.fill(missing, name, said[given], draft.place(given, name))
    for name, needed in (
        ("overlap_param_gather", "use_distributed_optimizer"),
        ("overlap_param_gather", "overlap_grad_reduce"),
        ("align_param_gather", "overlap_param_gather"),
        ("bucket_size", "overlap_grad_reduce"),
        ("num_buckets", "overlap_grad_reduce"),
    ):
        if draft.get(_DDP, name) and not draft.get(_DDP, needed):
            raise BuildError(
                f"{draft.place(_DDP, name)} is {draft.get(_DDP, name)}, which does nothing without {needed}",
                hint=f'{_DDP}={{"{name}": {draft.get(_DDP, name)}, "{needed}": True}}',
            )
    if draft.get(_DDP, "average_in_collective") and draft.facts.device == "cpu":
        raise BuildError(
            f"{draft.place(_DDP, 'average_in_collective')} is True, but gloo, which CPUs use, has no average",
            hint="leave it out",
        )
    for name in ("bucket_size", "num_buckets"):
        size = draft.get(_DDP, name)
        if size is not None and size < 1:
            raise BuildError(f"{draft.place(_DDP, name)} must be positive (got {size})", hint="leave it out")
    if not draft.may_train:
        for name in ("use_distributed_optimizer", "overlap_param_gather", "overlap_grad_reduce", "align_param_gather"):
            for option in (_OPTIMIZER, _DDP):
                if draft.options[option].get(name):
                    draft.fill(option, name, False, "instead of True: without an optimizer the engine only evaluates")


def _check_ranges(draft: Draft) -> None:
    for name in (*_AT_LEAST_0, *_BELOW_1, *_POSITIVE):
        value = draft.options[_OPTIMIZER].get(name)
        if value is None:
            continue
        low_is_right = value > 0 if name in _POSITIVE else value >= 0
        if not low_is_right or (name in _BELOW_1 and value >= 1) or math.isinf(value):
            wanted = "positive" if name in _POSITIVE else "from 0 to below 1" if name in _BELOW_1 else "0 or more"
            raise BuildError(f"{draft.place(_OPTIMIZER, name)} must be {wanted} (got {value})")
