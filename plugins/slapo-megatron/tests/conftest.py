"""The ranks of these tests import Megatron-core once, in the server that they are forked from."""

from slapo_testing import preload_modules

preload_modules(
    "tests.support.cpu_megatron",
    "slapo_megatron.model.assembly",
    "slapo_megatron.pipeline.engine",
    "slapo_megatron.pipeline.chunks",
    "slapo_megatron.pipeline.schedule",
    "slapo_megatron.single_stage",
)
