"""Every test starts from the same random state, in whatever order and process it is run; long files come first."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from slapo_core.testing import preload_modules

# What ranks would import one by one, in every launch of them: found by what they have that their server had not.
preload_modules(
    "pytest",
    "importlib_metadata",
    "networkx",
    "setuptools",
    "tomllib",
    "typeguard",
    "slapo_core.building.request",
    "slapo_core.graph.traced",
    "slapo_core.native.engine",
    "slapo_core.primitives.merging",
    "slapo_core.testing.checks.two_ranks",
    "slapo_core.verification.dry",
    "slapo_core.weights.checkpoint",
    "slapo_pipeline.partition.hook",
    "slapo_tp.hooks",
    "slapo_tp.shard",
    "slapo_tp.sync",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # by every engine of DeepSpeed's, with much of torch's compiler
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "slapo_deepspeed.pipeline.engine",
    "slapo_deepspeed.zero.engine",
    "tests.cpu_megatron",
    "slapo_megatron.model.assembling",
    "slapo_megatron.pipeline.engine",
    "slapo_megatron.pipeline.making",
    "slapo_megatron.pipeline.running",
    "slapo_megatron.whole.engine",
)


@pytest.fixture(autouse=True)
def same_random_state() -> None:
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


LONGEST = (
    "test_real_models.py",
    "test_wrong_schedules.py",
    "test_docs.py",
    "test_tp_compiled.py",
    "test_fusion_ranks.py",
    "test_fusion_fuse.py",
    "test_deepspeed_state.py",
    "test_resume.py",
    "test_deepspeed_matrix.py",
    "test_megatron_kit.py",
    "test_megatron_state.py",
    "test_megatron_matrix.py",
    "test_verified_pipelines.py",
    "test_pipeline_engine.py",
    "test_bert_deepspeed_example.py",
    "test_gpt_megatron_example.py",
    "test_deepspeed_zero_steps.py",
    "test_deepspeed_kit.py",
    "test_dialect_suite_catches.py",
    "test_launcher.py",
    "test_style.py",
    "test_fusion_compile.py",
    "test_fusion_kit.py",
    "test_kit_pytest.py",
    "test_model_zoo.py",
    "test_installation.py",
    "test_tp_world_sizes.py",
    "test_examples.py",
    "test_verification_failing_ranks.py",
    "test_stubs.py",
    "test_bert_example.py",
    "test_gpt_example.py",
    "test_gpt_megatron_example.py",
    "test_megatron_matrix.py",
    "test_bert_appendix.py",
    "test_template.py",
    "test_live_training.py",
    "test_no_missing_sync_goes_unnoticed.py",
    "test_tp_traced.py",
    "test_pipeline_training.py",
)
"""What takes longest, longest first: at the end, one such file would keep one process busy and the others idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(Path(item.path).name, len(LONGEST)))
