"""The ranks of these tests import Megatron-core once, in the server that they are forked from."""

from slapo_core.testing import preload_modules

preload_modules(
    "tests.cpu_megatron",
    "slapo_megatron.model.assembling",
    "slapo_megatron.pipeline.engine",
    "slapo_megatron.pipeline.making",
    "slapo_megatron.pipeline.running",
    "slapo_megatron.whole.engine",
)
