"""Arguments of a Trainer that would change a scheduled model, each with the call that does it."""

from __future__ import annotations

from typing import Any

from slapo_core import ArgumentError, Schedule

_REFUSED = {
    "torch_compile": ("compiles the entire model", 'sch["model.layers.*"].compile()'),
    "use_liger_kernel": (
        "replaces modules and the forward of the model",
        'sch.linear_cross_entropy(implementation="liger"), and replace or fuse steps for other kernels',
    ),
    "deepspeed": ("trains by another runtime", 'slapo.build(sch, target="deepspeed", config=...)'),
    "fsdp": ("shards parameters over all ranks", 'create_schedule(model, mesh={"dp": 2}); slapo.fully_shard(sch)'),
    "parallelism_config": ("declares another mesh", 'create_schedule(model, mesh={"dp": 2, "tp": 2})'),
    "save_on_each_node": ("writes on one rank of each node", "an output_dir that all nodes share"),
}


def check_arguments(args: Any, sch: Schedule | None) -> None:
    """Refuse arguments that would change the model beside its schedule.

    Args:
        args: the TrainingArguments.
        sch: the schedule; None if it is made of the model later.

    Raises:
        ArgumentError: with the step, or the call, that does it.
    """
    for name, (what, instead) in _REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise ArgumentError(f"{name}={value!r} {what}", hint=f"leave {name} out; {instead}")
    recomputes = getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", None)
    if recomputes and sch is not None and any(one.primitive.name == "core.checkpoint" for one in sch.records):
        raise ArgumentError(
            "activation_checkpointing=True would recompute what steps of the schedule recompute",
            hint="activation_checkpointing=False",
        )
    if args.n_gpu > 1:
        raise ArgumentError(
            f"this process has {args.n_gpu} GPUs, over which the Trainer would copy the model (DataParallel)",
            hint="torchrun --nproc-per-node 2 your_script.py, or CUDA_VISIBLE_DEVICES=0",
        )
    if getattr(args, "train_sampling_strategy", "random") == "batch_rebalance":
        raise ArgumentError(
            "train_sampling_strategy='batch_rebalance' divides samples over all ranks, not over replicas",
            hint="train_sampling_strategy='group_by_length'",
        )
