"""Tests of several distributions together: what the ranks of slapo-deepspeed's and slapo-megatron's tests import."""

from importlib import import_module

for _name in ("deepspeed", "megatron"):
    import_module(f"plugins.slapo-{_name}.tests.conftest")
