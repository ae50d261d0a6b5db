"""Megatron-core as a target of slapo: ``slapo_core.build(sch, target="megatron", optimizer_config={"lr": 1e-4})``.

Installing this distribution is enough. Megatron-core is imported when an engine is built, and not before.
"""
