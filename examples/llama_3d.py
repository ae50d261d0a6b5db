"""Train an unmodified LLaMA on eight processes: two replicas of two stages of two tensor-parallel ranks, with kernels,
sequence parallelism and activation checkpointing, by three runtimes; and compare each with one process, unscheduled.

    python examples/llama_3d.py                        # torch, DeepSpeed and Megatron-core, the comparison and the plot
    python examples/llama_3d.py --targets torch        # one of them
    python examples/llama_3d.py --text my.txt          # on your own text
    python examples/llama_3d.py --quick                # a few steps of a tiny model, which is not verified

The script starts ``torchrun`` for the scheduled runs by itself. It ends with status 1 if the loss curves part. It takes
eight GPUs, or the CPU. Megatron wants a GPU for each process: on a CPU, what it asks of CUDA is answered by the shim
that the tests have, ``tests/support/cpu_megatron.py``, enough to see it train, and not to judge its speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from common import next_token_batches as batches
from transformers import LlamaConfig, LlamaForCausalLM

import slapo_core as slapo

RUNS = ("torch", "deepspeed", "megatron")
"""The scheduled runs, each by the target of its name."""

MESH, PROCESSES, MICROBATCHES = {"dp": 2, "pp": 2, "tp": 2}, 8, 2
LEARNING_RATE, EPSILON, CLIP = 5e-4, 1e-6, 1.0


def make_model(options: argparse.Namespace, device: torch.device) -> LlamaForCausalLM:
    """A LLaMA with random weights, the same in every process."""
    torch.manual_seed(0)
    sizes = {"hidden_size": options.width, "intermediate_size": options.width * 11 // 4 // 8 * 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(
        vocab_size=options.vocab_size, num_hidden_layers=options.layers, use_cache=False,
        attn_implementation="eager", **sizes, **heads,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device).train()


def schedule_llama(sch: slapo.Schedule, *, compiler: str = "inductor") -> None:
    """Everything at once; between the layers of a pair, each tensor-parallel rank has its part of the sequence."""
    layers = sch["model.layers.*"]
    for name in ("self_attn.[qkv]_proj", "mlp.gate_proj", "mlp.up_proj"):
        layers[name].shard("weight", axis=0)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        layers[name].shard("weight", axis=1)
    layers.trace(flatten=True).replace(match="fusion.sdpa").replace(match="fusion.rms_norm")
    layers.fuse("fusion.swiglu", compiler=compiler)
    layers["self_attn"].sync("fwd_pre", "all_gather", axis=1, inputs=("hidden_states",))
    layers["mlp"].sync("fwd_pre", "all_gather", axis=1)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        layers[name].sync("fwd_post", "reduce_scatter", axis=1)
    layers["*_layernorm"].sync_gradient("weight")
    sch["model.embed_tokens"].shard("weight", axis=0)
    layers[0].sync("fwd_pre", "reduce_scatter", axis=1, inputs=("hidden_states",))  # where the sequence is cut
    layers[-1].sync("fwd_post", "all_gather", axis=1)
    sch["lm_head"].shard("weight", axis=0).sync("bwd_post", "all_reduce").sync("fwd_post", "all_gather")
    layers[::2].checkpoint()
    sch["model"].pipeline_split(stages=2, balance="flops")


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.0)


def build(sch: slapo.Schedule, target: str, options: argparse.Namespace) -> Any:
    """An engine of the target: one optimizer, clipping, and as many micro-batches everywhere."""
    if target == "torch":
        given: dict[str, Any] = {"max_grad_norm": CLIP, "pipeline_schedule": "1f1b", "microbatches": MICROBATCHES}
        return slapo.build(sch, target="torch", optimizer=make_optimizer, **given)
    if target == "deepspeed":
        config = {
            "train_micro_batch_size_per_gpu": options.batch_size // MESH["dp"] // MICROBATCHES,
            "gradient_accumulation_steps": MICROBATCHES,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        }
        return slapo.build(sch, target="deepspeed", config=config, optimizer=make_optimizer)
    adam = {"optimizer": "adam", "lr": LEARNING_RATE, "adam_eps": EPSILON, "weight_decay": 0.0, "clip_grad": CLIP}
    zero = {"use_distributed_optimizer": True}
    config = {"optimizer_config": {**adam, **zero}, "ddp_config": zero}
    return slapo.build(sch, target="megatron", microbatches=MICROBATCHES, **config)


def states_of(engine: Any, target: str) -> Iterable[Any]:
    """The optimizer's state of each parameter of this rank."""
    if target == "torch":
        return engine.optimizer.state.values()
    if target == "deepspeed":
        return engine.deepspeed.optimizer.state.values()
    parts = engine.megatron.optimizer.chained_optimizers
    return [state for part in parts for state in part.optimizer.state.values()]


def run_plain(options: argparse.Namespace) -> None:
    """The model as its author wrote it, in an ordinary PyTorch loop."""
    model = make_model(options, common.device_of(options, PROCESSES, shared=False))
    common.run_plain(options, model, make_optimizer(model.parameters()), batches, max_grad_norm=CLIP)


def run_scheduled(options: argparse.Namespace, target: str, device: torch.device) -> None:
    """The same model under a schedule; this runs in every process that torchrun starts."""
    torch.set_num_threads(1)
    if target == "megatron" and device.type == "cpu":
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        from tests.support.cpu_megatron import install

        install()
    example = common.on(device, {key: rows[:2] for key, rows in batches(options, seed=3, steps=1)[0].items()})
    sch = slapo.create_schedule(make_model(options, device), mesh=MESH, example_inputs=example)
    schedule_llama(sch, compiler=options.compiler)
    report = "not verified" if options.quick else slapo.verify(sch, example)
    engine = build(sch, target, options)
    if dist.get_rank() == 0:
        print(report, engine.plan, sep="\n\n", flush=True)
    common.run_engine(
        options, target, sch, engine, batches, states=lambda engine: states_of(engine, target), device=device
    )


def compare(options: argparse.Namespace) -> int:
    """Print the runs side by side, plot them, and give the exit status."""
    return common.compare(options, options.targets, "The same LLaMA on one process and on eight")


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_options(parser, "llama_3d", RUNS)
    parser.add_argument("--targets", nargs="+", default=list(RUNS), choices=RUNS, help="default: all")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the hidden states (default: %(default)s)")
    parser.add_argument("--compiler", default="inductor", help="of the fused regions (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="4 steps of a tiny model, nothing compiled or verified")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.length, options.vocab_size, options.layers, options.width = 4, 16, 600, 2, 32
        options.compiler = "eager"
    return options


def main(options: argparse.Namespace) -> int:
    """What the role says; without one, all runs and the comparison."""
    if options.role == "plain":
        run_plain(options)
    elif options.role is not None:
        common.together(lambda device: run_scheduled(options, options.role, device), options, shared=False)
    else:
        done = common.launch(options, __file__, options.targets, PROCESSES, batches, shared=False)
        return done or compare(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(parsed()))
