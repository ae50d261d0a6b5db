"""Megatron-core as its users drive it with a model of their own: the yardstick of target ``"megatron"``.

Nothing of slapo is in it. On a machine without a GPU the caller installs ``tests/support/cpu_megatron.py`` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["Groups", "Stage", "train"]


class Groups:
    """Megatron's groups of replicas on all ranks, beside others: they are in its globals only inside of a ``with``."""

    def __init__(self) -> None:
        from megatron.core import parallel_state

        self._globals = vars(parallel_state)
        outside = self._found()
        assert not parallel_state.model_parallel_is_initialized(), "made before the others, or Megatron refuses"
        parallel_state.initialize_model_parallel()
        self._own = self._found()
        self._globals.update(outside)

    def _found(self) -> dict[str, Any]:
        private = (name for name in self._globals if name.startswith("_") and not name.startswith("__"))
        return {name: self._globals[name] for name in private}

    def __enter__(self) -> None:
        self._outside = self._found()
        self._globals.update(self._own)

    def __exit__(self, *_: object) -> None:
        self._globals.update(self._outside)


class Stage(nn.Module):
    """A model, or the layers of one of several stages, with what Megatron's schedules ask of it.

    Args:
        model: called with a micro-batch, or with what the stage before sent.
    """

    share_embeddings_and_output_weights = False

    def __init__(self, model: nn.Module, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.model, self.received = model, None
        self.sent: tuple[int, ...] = ()  # the shape in which the next stage waits for what this one sends
        self.pre_process, self.post_process = first, last

    def set_input_tensor(self, received: Any) -> None:
        self.received = received[0] if isinstance(received, list) else received

    def shared_embedding_or_output_weight(self) -> None:
        return None

    def forward(self, piece: Any) -> Any:
        if self.received is not None:
            given = self.received.view_as(piece)
        else:
            given = piece
        output = self.model(**given) if isinstance(given, Mapping) else self.model(given)
        return output if self.post_process else output.view(self.sent)


def train(
    stage: Stage,
    pieces: Sequence[Any],
    loss_of: Callable[[Any], torch.Tensor],
    *,
    optimizer_config: Mapping[str, Any],
    distributed: bool,
    hidden: int = 1,
    length: int = 1,
    samples: int = 1,
) -> Callable[[], torch.Tensor | None]:
    """A training step; Megatron's groups are there.

    Args:
        stage: this rank's.
        pieces: the micro-batches of every step.
        loss_of: of what the last stage gives.
        optimizer_config: fields of Megatron's ``OptimizerConfig``.
        distributed: whether to train by the distributed optimizer.
        hidden: width of what one stage sends to the next, in elements.
        length: of a sequence.
        samples: of a micro-batch.

    Returns:
        takes a step, and gives the mean loss; None where there is none.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    stages = parallel_state.get_pipeline_model_parallel_world_size()
    bf16 = bool(optimizer_config.get("bf16"))
    config = TransformerConfig(
        num_layers=stages,
        hidden_size=hidden,
        num_attention_heads=1,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    stage.config, stage.model_type = config, ModelType.encoder_or_decoder
    stage.sent = (length, samples, hidden)
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), stage)
    settings = OptimizerConfig(use_distributed_optimizer=distributed, **optimizer_config)
    optimizer = get_megatron_optimizer(settings, [chunk])
    decay = settings.weight_decay
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        lr_decay_style="constant",
        start_wd=decay,
        end_wd=decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    run = get_forward_backward_func()

    def forward_step(iterator: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
        return chunk(next(iterator)), reduced

    def reduced(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = loss_of(output)
        return loss, loss.detach().clone()

    def step() -> torch.Tensor | None:
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(
            forward_step_func=forward_step,
            data_iterator=iter(pieces),
            model=[chunk],
            num_microbatches=len(pieces),
            seq_length=length,
            micro_batch_size=samples,
        )
        optimizer.step()
        scheduler.step(1)
        return torch.stack(losses).mean() if losses else None

    return step
