"""The ranks of these tests import DeepSpeed once, in the server that they are forked from."""

from slapo_testing import preload_modules

preload_modules(
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # by every engine of DeepSpeed's, with much of torch's compiler
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "slapo_deepspeed.pipeline",
    "slapo_deepspeed.engine",
)
