"""What target "deepspeed" costs against DeepSpeed used by hand: a step under ZeRO, and a step of two stages.

Two ranks each. Without a pipeline the yardstick is ``deepspeed.initialize`` of the same model, and ``forward``,
``backward`` and ``step`` as its documentation writes them; with one, a ``PipelineModule`` of the same layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from by_hand import MICROBATCHES, Step, Way, adamw, main, stack
from step_cost import LAYERS, loss_of

import slapo_core as slapo


def config_of(zero: int, samples: int, micro_batches: int) -> dict[str, Any]:
    """The same for both."""
    return {
        "train_micro_batch_size_per_gpu": samples // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": zero, "reduce_bucket_size": 10**7},  # the default takes 2 GB a rank in each step
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def replicas_by_schedule(x: torch.Tensor, zero: int) -> Step:
    sch = slapo.create_schedule(stack(), mesh={"dp": dist.get_world_size()}, example_inputs=x)
    config = config_of(zero, len(x), 1)
    engine = slapo.build(sch, target="deepspeed", optimizer=adamw, loss=loss_of, config=config)
    return lambda: engine.train_step(x).loss.item()


def replicas_by_hand(x: torch.Tensor, zero: int) -> Step:
    import deepspeed

    model = stack()
    optimizer = adamw(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(zero, len(x), 1))

    def step() -> float:
        loss = loss_of(engine(x))
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def stages_by_schedule(x: torch.Tensor, zero: int) -> Step:
    sch = slapo.create_schedule(stack(), mesh={"pp": 2}, example_inputs=x[: len(x) // MICROBATCHES])
    sch["encoder.layer"].pipeline_split(stages=2)
    config = config_of(zero, len(x), MICROBATCHES)
    engine = slapo.build(sch, target="deepspeed", optimizer=adamw, loss=loss_of, config=config)
    return lambda: engine.train_step(x).loss.item()


def stages_by_hand(x: torch.Tensor, zero: int) -> Step:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule
    from transformers.models.bert.modeling_bert import BertLayer

    whole = stack().encoder
    specs = [LayerSpec(BertLayer, whole.config, layer_idx=number) for number in range(LAYERS)]
    module = PipelineModule(specs, num_stages=2, partition_method="uniform", loss_fn=loss_of)
    for number, layer in enumerate(whole.layer):
        if hasattr(module, str(number)):
            getattr(module, str(number)).load_state_dict(layer.state_dict())
    config = {
        **config_of(zero, len(x), MICROBATCHES),
        "pipeline": {"use_reentrant": False, "pipe_partitioned": False, "grad_partitioned": False},
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=adamw(module.parameters()), config=config)
    pieces = [(piece, piece) for piece in x.chunk(MICROBATCHES)]  # the labels are not used
    return lambda: engine.train_batch(iter(pieces)).item()


WAYS = {
    "ZeRO-1, two replicas / by hand": Way(replicas_by_schedule, replicas_by_hand, {"zero": 1}),
    "ZeRO-2, two replicas / by hand": Way(replicas_by_schedule, replicas_by_hand, {"zero": 2}),
    "ZeRO-1, two stages / PipelineModule by hand": Way(stages_by_schedule, stages_by_hand, {"zero": 1}),
}


if __name__ == "__main__":
    main("deepspeed_cost", __doc__ or "", WAYS, "deepspeed", ("deepspeed",))
