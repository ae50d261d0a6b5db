"""A scheduled model against the reference model on every rank, without slapo-verify: float64, plain torch, no search.

Of slapo it takes only what says which part of a parameter a rank holds: `Layout.local`, and `Layout.full` to gather.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import slapo_core as slapo

__all__ = ["Collectives", "Exactly", "continued", "differences", "dtype_of", "made_exact", "run", "train", "ungathered"]

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_DROPOUT = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.dropout_, torch.alpha_dropout, torch.feature_dropout, torch.native_dropout,
}  # fmt: skip


class Exactly(TorchFunctionMode):
    """Compute without dropout, and in float64 whatever the model asks for.

    Args:
        dtype: of the model; float32 only switches dropout off.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __enter__(self) -> Any:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        torch.set_default_dtype(self._before)
        super().__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DROPOUT:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:  # dropout_p is its fifth argument
            args, kwargs = (*args[:4], *(0.0 for _ in args[4:5]), *args[5:]), {**(kwargs or {})}
            kwargs.pop("dropout_p", None)
        args = tuple(self._wide(each) for each in args)
        kwargs = {key: self._wide(value) for key, value in (kwargs or {}).items()}
        return args[0].to(self._dtype) if func is Tensor.float else func(*args, **kwargs)

    def _wide(self, value: Any) -> Any:
        return self._dtype if value is torch.float32 else value


def dtype_of(model: nn.Module) -> torch.dtype:
    """The floating-point type of a model's first parameter."""
    return next(one.dtype for one in model.parameters() if one.is_floating_point())


def made_exact(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Turn a model to a type, and move every weight: zeros and ones hide mistakes (a bias added on every rank)."""
    model.to(dtype)
    for module in model.modules():
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            module.dropout = 0.0  # inside of one function, where `Exactly` does not see it
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
                parameter.add_(noise.to(parameter.dtype), alpha=0.1)
    return model


def run(model: nn.Module, batch: Any, *, loss: bool = False, training: bool = True) -> dict[str, Tensor | None]:
    """Run a model once, forward and backward.

    Args:
        model: in float64, or float32 where it does not run so.
        batch: keyword arguments, or positional ones.
        loss: whether the objective is ``output["loss"]``; else a sum of all outputs with weights.
        training: mode of the model; in evaluation there is no backward.

    Returns:
        outputs, gradients of parameters (``"gradient of <name>"``) and inputs, and buffers (``"buffer <name>"``).
    """
    model.train(training).zero_grad(set_to_none=True)
    batch = copy.deepcopy(batch)
    inputs = {name: tensor for name, tensor in _tensors(batch) if tensor.is_floating_point()}
    _seed()
    with Exactly(dtype_of(model)):
        for tensor in inputs.values():
            tensor.requires_grad_(training)
        with torch.set_grad_enabled(training):
            output = model(**batch) if isinstance(batch, dict) else model(*batch)
        outputs = {"output['loss']": output["loss"]} if loss else {f"output{n}": t for n, t in _tensors(output)}
        seen: dict[str, Tensor | None] = {name: tensor.detach() for name, tensor in outputs.items()}
        if training:
            objective = [_weighted(tensor) for tensor in outputs.values() if tensor.requires_grad]
            if objective:
                torch.stack(objective).sum().backward()
            seen |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
            seen |= {f"gradient of input{name}": tensor.grad for name, tensor in inputs.items()}
    seen |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return seen


def continued(model: nn.Module, ids: Tensor) -> dict[str, Tensor | None]:
    """Evaluate tokens, and then the last one by itself, from the cache of keys and values that the others left."""
    model.eval()
    _seed()
    with torch.no_grad(), Exactly(dtype_of(model)):
        before = model(input_ids=ids[:, :-1], use_cache=True)
        after = model(input_ids=ids[:, -1:], past_key_values=before["past_key_values"], use_cache=True)
    return {"output['logits']": after["logits"]}


def train(model: nn.Module, batches: list[Any], *, loss: bool) -> dict[str, Tensor | None]:
    """Take a step of AdamW with every batch; the parameters after them, as ``"trained <name>"``."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-4) if trained else None
    for batch in batches:
        run(model, batch, loss=loss)
        if optimizer is not None:
            optimizer.step()
    return {f"trained {name}": parameter.detach() for name, parameter in model.named_parameters()}


def _seed() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)


def _weighted(tensor: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, max(tensor.numel(), 1), dtype=torch.float64).view(tensor.shape)
    return (tensor.abs() if tensor.is_complex() else tensor).double().mul(weights).sum()


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(part, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for key, part in enumerate(value):
            yield from _tensors(part, f"{name}[{key}]")


def differences(
    sch: slapo.Schedule, found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> list[str]:
    """Say what of two results differs: the scheduled model's on this rank, and the reference model's.

    Args:
        sch: its layouts say which part of a gradient, parameter or buffer this rank has to hold.
        found: of the scheduled model.
        expected: of the reference model.
    """
    largest = max((_size(t) for name, t in expected.items() if name.startswith("gradient")), default=0.0)
    said = []
    for name in dict.fromkeys((*expected, *found)):
        kind, _, own = name.rpartition(" ")
        one, other = found.get(name), expected.get(name)
        if one is None or other is None:
            if one is not other:
                said.append(f"{name}: only in the {'reference' if one is None else 'scheduled'} model")
            continue
        if kind in ("gradient of", "trained", "buffer") and not own.startswith("input["):
            other = _layout(sch, own).local(other, sch.mesh)
        if one.shape != other.shape:
            said.append(f"{name}: {tuple(one.shape)} instead of {tuple(other.shape)}")
            continue
        scale = max(_size(other), 1e-3 * largest if kind == "gradient of" else 0.0)
        distance = _size(one.to(other.dtype) - other) if one.numel() and other.dtype != torch.bool else 0.0
        finite = torch.equal(one.isfinite(), other.isfinite())
        if other.dtype == torch.bool and not torch.equal(one, other):
            said.append(f"{name}: other values")
        elif not finite or distance > _tolerance(other) * max(scale, 1e-6):
            said.append(f"{name}: by {distance:.1e} of {scale:.1e}")
    return said


def ungathered(sch: slapo.Schedule, reference: nn.Module) -> list[str]:
    """Say which parameters are not the reference model's: those of each layout gathered, the others' own shards.

    A collective.
    """
    plain = dict(reference.named_parameters())
    said, seen = [], set()
    for name, parameter in sch.model.named_parameters():
        layout, other = _layout(sch, name), plain.pop(name, None)
        kind = replace(layout, origin="")
        is_new = kind not in seen
        seen.add(kind)
        own = layout.full(parameter, sch.mesh) if is_new else parameter
        if other is None or not _near(own, other if is_new else layout.local(other, sch.mesh)):
            said.append(f"{'gathered ' if is_new else ''}{name}: not the reference model's")
    return said + [f"{name}: lost" for name in plain]


def _layout(sch: slapo.Schedule, name: str) -> slapo.Layout:
    path, _, own = name.rpartition(".")
    return (sch[path] if path else sch.root).layout(own)


def _near(one: Tensor, other: Tensor) -> bool:
    one, other = one.detach(), other.detach()
    return one.shape == other.shape and _size(one - other) <= _tolerance(other) * max(_size(other), 1e-6)


def _tolerance(tensor: Tensor) -> float:
    return _TOLERANCE.get(tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype, 0.0)


def _size(tensor: Tensor | None) -> float:
    if tensor is None or not tensor.numel() or tensor.dtype == torch.bool:
        return 0.0
    return float(tensor.detach().abs().nan_to_num(0.0, 0.0).max())


class Collectives(TorchDispatchMode):
    """Count the collectives inside of repeated blocks, forward and backward.

    Sums of gradients of parameters (`sync_gradient`, KV heads that ranks share) are counted by themselves: runtimes
    send them together with others, once a step. They are told by their shapes, and by ``all_to_all``, which only KV
    heads use.

    Args:
        model: the scheduled model.
        paths: of the blocks.

    Attributes:
        forward: collectives by block, over all its calls.
        backward: the same.
        gradients: sums of gradients of parameters by block.
        calls: of a block.
        elsewhere: collectives outside of blocks.
    """

    def __init__(self, model: nn.Module, paths: list[str]) -> None:
        super().__init__()
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.gradients: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.elsewhere = 0
        self._inside: str | None = None
        self._is_backward = False
        self._hooks: list[Any] = []
        self._shapes = {parameter.shape for path in paths for parameter in model.get_submodule(path).parameters()}
        self._hooks.append(model.register_forward_pre_hook(lambda *_: self._turn(False)))
        self._hooks.append(model.register_forward_hook(lambda *_: self._turn(True)))
        for path in paths:
            block = model.get_submodule(path)
            enter, leave = self._hooks_of(path)
            self._hooks.append(block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            self._hooks.append(block.register_forward_hook(leave))

    def _turn(self, is_backward: bool) -> None:
        self._is_backward, self._inside = is_backward, None

    def _hooks_of(self, path: str) -> tuple[Any, Any]:
        def left(gradient: Tensor) -> None:  # of an input: the block's backward is over
            self._inside = None if self._inside == path else self._inside

        def entered(gradient: Tensor) -> None:
            self._inside = path

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._is_backward:
                self.calls[path] += 1
                self._inside = path
                for _, tensor in _tensors([args, kwargs]):
                    if tensor.requires_grad:
                        tensor.register_hook(left)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not self._is_backward:
                self._inside = None
                for _, tensor in _tensors(output):
                    if tensor.requires_grad:
                        tensor.register_hook(entered)

        return enter, leave

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.partition("::")[0] in ("_c10d_functional", "c10d", "_dtensor") and "wait" not in name:
            shapes = {tensor.shape for _, tensor in _tensors(list(args))}
            if self._inside is None:
                self.elsewhere += 1
            elif self._is_backward:
                is_parameter = shapes & self._shapes or "all_to_all" in name
                (self.gradients if is_parameter else self.backward)[self._inside] += 1
            else:
                self.forward[self._inside] += 1
        return func(*args, **(kwargs or {}))

    def per_call(self) -> tuple[int, int, int]:
        """Collectives of the block with the most: forward, backward, and sums of gradients of parameters, a call."""
        most = [
            max((-(-counted[path] // calls) for path, calls in self.calls.items()), default=0)
            for counted in (self.forward, self.backward, self.gradients)
        ]
        return most[0], most[1], most[2]
