"""The ranks of these tests import Megatron-core once, in the server that they are forked from."""

from slapo_testing import preload_modules

preload_modules(
    "tests.support.cpu_megatron",
    "slapo_megatron.pipeline",
)
