"""What ranks of the tests of GPUs do: train a scheduled model by a target, and watch for synchronizations."""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import slapo_core as slapo
from tests.gpu.subjects import moved, small_llama

__all__ = ["CASES", "WATCHED", "batch_of", "engine_schedule", "trained", "watched", "watched_steps"]

ADAM = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.0}
STEPS = 4
CLIP = 1.0


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **ADAM)


def deepspeed(stage: int, dtype: str) -> dict[str, Any]:
    config = {"zero_optimization": {"stage": stage}, **({"bf16": {"enabled": True}} if dtype == "bfloat16" else {})}
    return {"target": "deepspeed", "config": config, "optimizer": adamw}


def megatron(dtype: str, *, distributed: bool) -> dict[str, Any]:
    own = {"lr": ADAM["lr"], "adam_eps": ADAM["eps"], "weight_decay": 0.0, "clip_grad": CLIP}
    types = {"bf16": dtype == "bfloat16", "params_dtype": getattr(torch, dtype)}
    return {
        "target": "megatron",
        "optimizer_config": {**own, **types, "use_distributed_optimizer": distributed},
        "ddp_config": {"use_distributed_optimizer": distributed},
    }


Case = tuple[str, dict[str, Any]]

CASES: dict[str, dict[str, Case]] = {
    "torch": {dtype: (dtype, {"target": "torch", "optimizer": adamw}) for dtype in ("float32", "bfloat16")},
    "deepspeed": {
        **{f"ZeRO-{stage}, float32": ("float32", deepspeed(stage, "float32")) for stage in (0, 1)},
        **{f"ZeRO-{stage}, bfloat16": ("bfloat16", deepspeed(stage, "bfloat16")) for stage in (1, 2, 3)},
    },
    "megatron": {
        "float32": ("float32", megatron("float32", distributed=False)),
        "distributed, float32": ("float32", megatron("float32", distributed=True)),
        "distributed, bfloat16": ("bfloat16", megatron("bfloat16", distributed=True)),
    },
}
"""Ways to train at one rank: by target and name, the type, and what ``build`` is given."""


def prepare(target: str, device: str) -> None:
    """Make a target run in this process."""
    if device == "cpu" and target == "megatron":
        from tests.support.cpu_megatron import install

        install()
    if device == "cpu" and target == "deepspeed":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def batch_of(device: str, step: int = 0) -> dict[str, torch.Tensor]:
    ids = (torch.arange(128).reshape(4, 32) * (5 + step)) % 96
    return moved({"input_ids": ids, "labels": ids.flip(1)}, device)  # type: ignore[no-any-return]


def engine_of(device: str, dtype: str, options: dict[str, Any], **more: Any) -> Any:
    """A LLaMA with kernels and a checkpoint, which recording, patterns and the engine have to agree on."""
    in_target = dtype == "bfloat16" and options["target"] == "torch"  # others cast by themselves, and keep main weights
    sch = engine_schedule(device, torch.bfloat16 if in_target else torch.float32)
    clip = {} if "optimizer_config" in options else {"max_grad_norm": CLIP}
    return slapo.build(sch, **{**options, **clip, **more})


def engine_schedule(device: str, dtype: torch.dtype) -> slapo.Schedule:
    """The full schedule of a LLaMA."""
    import slapo_models

    model = small_llama(device, dtype)
    sch = slapo.create_schedule(model, mesh={"tp": 1}, example_inputs=batch_of(device))
    slapo_models.llama(sch, checkpoint=0.5, compiler="eager")
    return sch


def by_hand(device: str, dtype: str) -> list[float]:
    """Losses of the unscheduled model in PyTorch alone; with main weights in float32 where it computes in bfloat16."""
    model = small_llama(device).to(getattr(torch, dtype))
    main = [nn.Parameter(one.detach().float()) for one in model.parameters()]
    optimizer, losses = adamw(main), []
    for step in range(STEPS):
        model.zero_grad(set_to_none=True)
        loss = model(**batch_of(device, step)).loss
        loss.backward()
        for weight, parameter in zip(main, model.parameters(), strict=True):
            weight.grad = parameter.grad.float()
        nn.utils.clip_grad_norm_(main, CLIP)
        optimizer.step()
        with torch.no_grad():
            for weight, parameter in zip(main, model.parameters(), strict=True):
                parameter.copy_(weight)
        losses.append(float(loss.detach()))
    return losses


def trained(target: str, device: str) -> dict[str, Any]:
    """Losses of every case of a target, and those by hand; the text of an error in the place of those of a case."""
    prepare(target, device)
    found: dict[str, Any] = {f"by hand, {dtype}": by_hand(device, dtype) for dtype in ("float32", "bfloat16")}
    for name, (dtype, options) in CASES[target].items():
        try:
            found[name] = _trained(device, dtype, options)
        except Exception:  # noqa: BLE001
            found[name] = traceback.format_exc()
    return found


def _trained(device: str, dtype: str, options: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(device, dtype, options)
    losses = [float(engine.train_step(batch_of(device, step)).loss) for step in range(STEPS)]
    evaluated = float(engine.eval_step(batch_of(device)).loss)
    with tempfile.TemporaryDirectory() as directory:
        engine.save(Path(directory, "saved"))
        names = sorted(engine.state_dict())
        engine.train_step(batch_of(device))
        engine.load(Path(directory, "saved"))
    again = float(engine.eval_step(batch_of(device)).loss)
    engine.close()
    plain = sorted(small_llama("cpu").state_dict())
    return {"losses": losses, "evaluated": evaluated, "loaded": again, "names": names == plain}


# -- synchronizations -------------------------------------------------------------------------------------------------

_TORCH = str(Path(torch.__file__).parent)


@contextlib.contextmanager
def synchronizations(device: str) -> Iterator[list[traceback.StackSummary]]:
    """The stacks at which the host waited for the GPU, as far as torch tells; none on the CPU."""
    found: list[traceback.StackSummary] = []
    if torch.device(device).type != "cuda":
        yield found
        return

    def shown(message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):  # not: the mode is a prototype
            found.append(traceback.extract_stack()[:-1])  # type: ignore[arg-type]

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = shown
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def described(stack: Any) -> str:
    """The innermost frames of a stack, from the inside."""
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in list(stack)[:-6:-1])


def is_own(stack: Any) -> bool:
    """Whether code of ours asked for it: by itself or by a function of torch."""
    inside = next((frame.filename for frame in reversed(stack) if not frame.filename.startswith(_TORCH)), "")
    return any(part.startswith("slapo_") for part in Path(inside).parts)


WATCHED: dict[str, dict[str, dict[str, Any]]] = {
    "torch": {"float32": {}, "bfloat16": {"accumulate": 2}},
    "deepspeed": {"ZeRO-1, bfloat16": {}},
    "megatron": {"distributed, bfloat16": {}, "float32": {"accumulate": 2}},
}
"""Cases whose steps are watched, and what ``build`` is given besides."""


def watched_steps(target: str, device: str) -> dict[str, dict[str, list[str]]]:
    """Synchronizations of three steps behind two others: of code of ours, and of others."""
    prepare(target, device)
    found = {}
    for name, more in WATCHED[target].items():
        dtype, options = CASES[target][name]
        engine = engine_of(device, dtype, options, **more)
        data = [batch_of(device, step) for step in range(5)]
        for batch in data[:2]:
            engine.train_step(batch)
        with synchronizations(device) as stacks:
            for batch in data[2:]:
                engine.train_step(batch)
        engine.close()
        own = {True: [], False: []}  # type: dict[bool, list[str]]
        for stack in stacks:
            own[is_own(stack)].append(described(stack))
        found[name] = {"own": own[True], "others": own[False]}
    return found


def watched(call: Callable[[], Any], device: str) -> list[str]:
    """Synchronizations of one call, whoever asked for them."""
    with synchronizations(device) as found:
        call()
    return [described(stack) for stack in found]
