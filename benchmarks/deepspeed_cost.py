"""What target "deepspeed" costs against DeepSpeed used by hand: a step under ZeRO, and a step of two stages.

Two ranks each. Without a pipeline the yardstick is ``deepspeed.initialize`` of the same model, and ``forward``,
``backward`` and ``step`` as its documentation writes them; with one, a ``PipelineModule`` of the same layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from report import interleaved, ratio_of_medians, save
from step_cost import HIDDEN, LAYERS, LENGTH, Stack, loss_of

import slapo_core as slapo
from slapo_core.testing import preload_modules, run_ranks

ALLOWED = 1.05  # where the 95 % interval of the ratio of the medians must end
BATCH, MICROBATCHES = 8, 4

Step = Callable[[], float]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def config_of(zero: int, samples: int, micro_batches: int) -> dict[str, Any]:
    """The same for both."""
    return {
        "train_micro_batch_size_per_gpu": samples // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def replicas_by_schedule(zero: int, x: torch.Tensor) -> Step:
    sch = slapo.create_schedule(stack(), mesh={"dp": dist.get_world_size()}, example_inputs=x)
    config = config_of(zero, len(x), 1)
    engine = slapo.build(sch, target="deepspeed", optimizer=adamw, loss=loss_of, config=config)
    return lambda: engine.train_step(x).loss.item()


def replicas_by_hand(zero: int, x: torch.Tensor) -> Step:
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


def stages_by_schedule(zero: int, x: torch.Tensor) -> Step:
    sch = slapo.create_schedule(stack(), mesh={"pp": 2}, example_inputs=x[: len(x) // MICROBATCHES])
    sch["encoder.layer"].pipeline_split(stages=2)
    config = config_of(zero, len(x), MICROBATCHES)
    engine = slapo.build(sch, target="deepspeed", optimizer=adamw, loss=loss_of, config=config)
    return lambda: engine.train_step(x).loss.item()


def stages_by_hand(zero: int, x: torch.Tensor) -> Step:
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


WAYS: dict[str, tuple[Callable[[int, torch.Tensor], Step], Callable[[int, torch.Tensor], Step], int]] = {
    "ZeRO-1, two replicas / by hand": (replicas_by_schedule, replicas_by_hand, 1),
    "ZeRO-2, two replicas / by hand": (replicas_by_schedule, replicas_by_hand, 2),
    "ZeRO-1, two stages / PipelineModule by hand": (stages_by_schedule, stages_by_hand, 1),
}


def compare_steps(question: str, pairs: int, clock: str) -> tuple[list[float], list[float]]:
    """On each of two ranks: both steps in turn, after they were found to give the same losses."""
    torch.set_num_threads(1)
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    ours, theirs, zero = WAYS[question]
    by_schedule, by_hand = ours(zero, x), theirs(zero, x)
    for _ in range(3):
        expected, loss = by_hand(), by_schedule()
        assert abs(loss - expected) < 1e-5 * abs(expected), (loss, expected)
    return interleaved(by_schedule, by_hand, pairs=pairs, clock=getattr(time, clock))


def main() -> None:
    """Ask everything, print it and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, help="interleaved pairs of steps (default: %(default)s)")
    parser.add_argument("--only", choices=list(WAYS), action="append", help="only this question; nothing is kept")
    parser.add_argument("--cpu-time", action="store_true", help="of rank 0, for a busy machine; nothing is kept")
    options = parser.parse_args()
    clock = "process_time" if options.cpu_time else "perf_counter"
    preload_modules("deepspeed")
    rows = []
    for question in options.only or WAYS:
        ours, theirs = run_ranks(compare_steps, question, options.pairs, clock, world_size=2, timeout=3600)[0]
        row = {
            "question": question,
            **ratio_of_medians(ours, theirs),
            "by_hand": statistics.median(theirs),
            "allowed": ALLOWED,
        }
        rows.append(row)
        low, high = row["interval_95"]
        print(
            f"{question:<46} {row['ratio']:.3f} (95 %: {low:.3f} to {high:.3f}, by hand "
            f"{1000 * row['by_hand']:.0f} ms)   allowed {ALLOWED}",
            flush=True,
        )
    if not options.only and not options.cpu_time:
        save("deepspeed_cost", rows, deepspeed=version("deepspeed"))


if __name__ == "__main__":
    main()
