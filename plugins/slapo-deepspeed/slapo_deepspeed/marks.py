"""Mark the parameters that count for the gradient norm, and keep the norm before clipping."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from slapo_core.errors import BuildError
from slapo_deepspeed.private import gradient_hooks_of

if TYPE_CHECKING:
    from slapo_core.layout import Mesh
    from slapo_runtime.context import BuildContext
    from slapo_runtime.correspondence.storage import LiveTensor

SHARDED = ("model_parallel", "tensor_model_parallel")
"""DeepSpeed takes either; other code around it one of them."""


@contextlib.contextmanager
def marks_taken_back(context: BuildContext) -> Iterator[None]:
    """Restore attributes and hooks of parameters if the block fails.

    Args:
        context: of the build.
    """
    before = [
        (live.tensor, dict(vars(live.tensor)), dict(gradient_hooks_of(live.tensor)))
        for live in context.state.tensors()
        if live.is_parameter
    ]
    try:
        yield
    except BaseException:
        for tensor, attributes, hooks in before:
            vars(tensor).clear()
            vars(tensor).update(attributes)
            kept = gradient_hooks_of(tensor)
            for key in kept.keys() - hooks.keys():
                del kept[key]
        raise


def mark(context: BuildContext) -> None:
    """Mark the parameters of a build once every tensor is materialized; see :func:`mark_tensors`."""
    mark_tensors(context.state.tensors(), context.schedule.mesh)


def mark_tensors(tensors: Iterable[LiveTensor], mesh: Mesh | None) -> None:
    """Mark the parameters that are sharded over ``tp``, and clear the marks of all others.

    Of a shard that several ranks hold, the first one is marked, so that the norm counts it once.

    In mixed precision without ZeRO, DeepSpeed reads the marks of the gradients instead, so gradients are marked too.

    Raises:
        BuildError: ranks share only parts of their shards of a parameter.
    """
    for live in tensors:
        if not live.is_parameter:
            continue
        if live.layout.parts(mesh):
            raise BuildError(
                f"ranks share only parts of their shards of '{live.name}' ({live.layout}), and DeepSpeed's norm of all "
                "gradients counts a shard in full or not at all",
                hint="a tp size up to the number of KV heads, the torch target, or separate projections",
            )
        is_shard = mesh is not None and mesh.size("tp") > 1 and "tp" in {dim for dim, _ in live.layout.shards()}
        is_shard = is_shard and mesh is not None and live.layout.holders(mesh, "tp")[0] == mesh.rank("tp")
        for name in SHARDED:
            if is_shard or hasattr(live.tensor, name):
                setattr(live.tensor, name, is_shard)
        if is_shard and live.tensor.requires_grad:
            live.tensor.register_post_accumulate_grad_hook(_mark_gradient)


def _mark_gradient(parameter: torch.Tensor) -> None:
    for name in SHARDED:
        if parameter.grad is not None:
            setattr(parameter.grad, name, True)


def count_once(context: BuildContext, copies: Collection[torch.Tensor]) -> None:
    """Mark the parameters that this rank counts, after ``marks.mark`` and after ``PipelineModule`` marked all.

    Args:
        context: of the build; every tensor is materialized.
        copies: this rank's parameters that an earlier rank along ``pp`` has too.
    """
    mesh = context.schedule.mesh
    assert mesh is not None
    is_copy = {id(one) for one in copies}
    for live in context.state.tensors():
        if not live.is_local or not live.is_parameter:
            continue
        if id(live.tensor) in is_copy:
            live.tensor.ds_pipe_replicated = True  # type: ignore[attr-defined]
            for name in SHARDED:
                setattr(live.tensor, name, False)
        elif mesh.rank("pp") and not mesh.rank("tp"):
            setattr(live.tensor, SHARDED[0], True)


def keep_norm(engine: Any) -> None:
    """Keep the gradient norm that DeepSpeed's engine computes for clipping in fp32 without ZeRO.

    Args:
        engine: DeepSpeed's.
    """
    from deepspeed.runtime.utils import clip_grad_norm_

    def clip_fp32_gradients(self: Any) -> None:
        self._global_grad_norm = clip_grad_norm_(
            parameters=[_with_axes(one) for one in self.module.parameters()],
            max_norm=self.gradient_clipping(),
            mpu=self.mpu,
        )

    engine.clip_fp32_gradients = types.MethodType(clip_fp32_gradients, engine)


def norm_of_last_step(engine: Any) -> torch.Tensor | None:
    """Return the gradient norm as a scalar tensor; None where DeepSpeed computed none."""
    norm = engine.get_global_grad_norm()
    if norm is None:
        return None
    return torch.as_tensor(norm, dtype=torch.float32).detach().reshape(()).clone()


def _with_axes(parameter: torch.Tensor) -> Any:
    """Add an axis to scalar parameters, whose gradients DeepSpeed cannot scale."""
    if parameter.dim() or parameter.grad is None:
        return parameter
    marks = {name: value for name, value in vars(parameter).items() if name in SHARDED}
    return types.SimpleNamespace(grad=parameter.grad.view(1), device=parameter.device, **marks)
