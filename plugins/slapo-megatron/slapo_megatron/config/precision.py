"""Types of parameters, and the scale of the loss in float16."""

from __future__ import annotations

from typing import Any

from slapo_core import BuildError
from slapo_megatron.config.draft import Draft

__all__ = ["fill_precision"]

_OPTIMIZER, _MODEL = "optimizer_config", "model_parallel_config"
_HALF = {"bf16": "bfloat16", "fp16": "float16"}
_DYNAMIC = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def fill_precision(draft: Draft) -> None:
    """``bf16`` and ``fp16`` are said once and hold everywhere; without a word it is what the model is in.

    Raises:
        BuildError: they contradict each other, or the model; or fp16 has no scale.
    """
    for name in _HALF:
        _fill_half(draft, name)
    if all(draft.get(_OPTIMIZER, name) for name in _HALF):
        raise BuildError(
            "bf16 and fp16 are both True, of optimizer_config, model_parallel_config, or the types of the model's "
            f"parameters ({', '.join(sorted(draft.facts.dtypes))})",
            hint='optimizer_config={"bf16": True}',
        )
    other = draft.facts.dtypes - {"float32", "bfloat16", "float16"}
    if other and draft.may_train:
        raise BuildError(
            f"Megatron's optimizers train float32, bfloat16 and float16, and the model has parameters in "
            f"{', '.join(sorted(other))}",
            hint='model.float() before create_schedule, or target="torch"',
        )
    _fill_types(draft)
    _check_scale(draft)
    if draft.get(_OPTIMIZER, "bf16") and not draft.given("ddp_config", "grad_reduce_in_fp32"):
        draft.fill("ddp_config", "grad_reduce_in_fp32", True, "with bf16, as Megatron-LM has it")


def _fill_half(draft: Draft, name: str) -> None:
    said = {option: draft.options[option][name] for option in (_OPTIMIZER, _MODEL) if draft.given(option, name)}
    if len(set(said.values())) > 1:
        raise BuildError(
            f"{draft.place(_OPTIMIZER, name)} is {said[_OPTIMIZER]}, but {draft.place(_MODEL, name)} is {said[_MODEL]}",
            hint="say it once: they are the same",
        )
    dtype = _HALF[name]
    is_half = dtype in draft.facts.dtypes
    if not said:
        if is_half:
            draft.fill(_OPTIMIZER, name, True, f"the model is in {dtype}")
            draft.fill(_MODEL, name, True, f"the model is in {dtype}")
        return
    option, value = next(iter(said.items()))
    if is_half and not value:
        raise BuildError(
            f"{draft.place(option, name)} is False, but the model has parameters in {dtype}, which Megatron trains by "
            "main parameters in float32",
            hint=f'{_OPTIMIZER}={{"{name}": True}}, or model.float() before create_schedule',
        )
    for missing in {_OPTIMIZER, _MODEL} - set(said):
        draft.fill(missing, name, value, f"{draft.place(option, name)}")


def _fill_types(draft: Draft) -> None:
    import torch

    half = next((dtype for name, dtype in _HALF.items() if draft.get(_OPTIMIZER, name)), None)
    types = draft.facts.dtypes
    dtype = getattr(torch, half or (next(iter(types)) if len(types) == 1 else "float32"))
    why = f"with {next(name for name, one in _HALF.items() if one == half)}" if half else "that of the parameters"
    for option in (_OPTIMIZER, _MODEL):
        _agree(draft, option, "params_dtype", dtype, why)
    if draft.facts.sizes["pp"] > 1:
        _agree(draft, _MODEL, "pipeline_dtype", dtype, "as params_dtype")


def _agree(draft: Draft, option: str, name: str, value: Any, why: str) -> None:
    if not draft.given(option, name):
        draft.fill(option, name, value, why)
    elif draft.options[option][name] != value:
        raise BuildError(
            f"{draft.place(option, name)} is {draft.options[option][name]}, but the parameters are in {value} ({why})",
            hint="leave it out",
        )


def _check_scale(draft: Draft) -> None:
    dynamic = [name for name in _DYNAMIC if draft.given(_OPTIMIZER, name)]
    fixed = draft.options[_OPTIMIZER].get("loss_scale")
    if not draft.get(_OPTIMIZER, "fp16"):
        for name in [*(["loss_scale"] if fixed is not None else []), *dynamic]:
            raise BuildError(
                f"{draft.place(_OPTIMIZER, name)} is {draft.get(_OPTIMIZER, name)}, but only fp16 scales the loss",
                hint=f'leave it out, or {_OPTIMIZER}={{"fp16": True}}',
            )
        return
    if fixed is not None and dynamic:
        raise BuildError(
            f"{draft.place(_OPTIMIZER, 'loss_scale')} is {fixed}, a fixed scale, but {dynamic[0]!r} is given",
            hint="leave one of them out",
        )
    if fixed is None and "initial_loss_scale" not in dynamic and draft.may_train:
        raise BuildError(
            "fp16 needs its scale of the loss: Megatron would begin at 2**32, and leave out step after step until it "
            "is small enough",
            hint=f'{_OPTIMIZER}={{"fp16": True, "initial_loss_scale": 2.0**16, "min_loss_scale": 1.0, '
            '"loss_scale_window": 1000, "hysteresis": 2}, or "loss_scale": 1024.0 for a fixed one',
        )
