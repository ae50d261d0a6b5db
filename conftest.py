"""Every test starts from the same random state, in whatever order and process it is run; long files come first."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

from slapo_core.testing import preload_modules

pytest_plugins = ["tests.messages"]

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


BREADTH = (
    "test_bert_appendix.py::test_the_appendix_trains",
    "test_bert_deepspeed_example.py::test_deepspeed_trains",
    "test_deepspeed_kit.py::test_with_a_partitioned_optimiser",
    "test_deepspeed_kit.py::test_with_a_pipeline_of_split_stages",
    "test_deepspeed_matrix.py::test_deepspeed_trains_the_scheduled_model_as_torch_trains_the_untouched_one[4]",
    "test_deepspeed_own_checkpoints.py::test_a_universal_checkpoint_is_read_under_another_mesh[a pipeline]",
    "test_deepspeed_pipeline.py::test_every_value_crosses",
    "test_deepspeed_pipeline_types.py::",
    "test_deepspeed_zero_partitioned.py::test_steps_train_as_under_target_torch[fused_and_recomputed]",
    "test_docs.py::test_a_tutorial_prints_what_it_shows[writing-a-dialect.md]",
    "test_fusion_bind.py::test_cpp_source_is_built_and_bound_with_its_backward",
    "test_fusion_compile.py::test_checkpoint_around_and_inside",
    "test_fusion_fuse.py::test_inductor_draws_the_same_dropout",
    "test_fusion_ranks.py::test_a_bert_layer_is_split_compiled_and_fused",
    "test_fusion_ranks.py::test_what_is_decomposed_and_fused_beside_collectives",
    "test_gpt_example.py::test_four_processes_train_as_one_does",
    "test_installation.py::test_the_program_of_slapo_fusion_runs",
    "test_installation.py::test_the_program_of_slapo_pipeline_runs",
    "test_installation.py::test_the_program_of_slapo_tp_runs",
    "test_live_training.py::test_state_dicts_and_exports_are_the_untouched_model_s[4]",
    "test_megatron_kit.py::test_with_a_distributed_optimiser",
    "test_megatron_matrix.py::test_megatron_trains_the_scheduled_model_as_torch_trains_the_untouched_one[2]",
    "test_no_missing_sync_goes_unnoticed.py::",
    "test_pipeline_training.py::test_models_of_every_kind_train_in_stages",
    "test_pipeline_training.py::test_stages_go_together_with_replicas_and_tensor_parallelism",
    "test_staged_checkpoints.py::test_a_checkpoint_goes_from_any_mesh_to_any_other_bit_for_bit",
    "test_storage.py::test_slices_over_replicas_of_a_split_model",
    "test_stubs.py::test_stubs_work_with_an_ordinary_installation_too",
    "test_tp_compiled.py::test_a_split_mlp_and_a_split_bert_layer_compile_into_one_graph",
    "test_tp_traced.py::test_traced_and_split_modules_agree_with_the_untouched_model_in_any_order",
    "test_trace_alive.py::test_a_compiled_model_runs_its_graphs_in_one_piece",
    "test_trial_groups.py::test_groups_are_made_anew_again_and_again",
    "test_undo.py::test_random_sequences_end_bit_identical_after_undoing_all",
    "test_verification_dry.py::test_a_class_of_the_users_script_takes_the_weights_over[right]",
    "test_verification_failing_ranks.py::test_every_rank_of_a_mesh_with_two_dimensions_names_it_too",
    "test_verified_pipelines.py::test_a_model_in_stages_is_the_untouched_model[t5]",
)
"""Long tests that go further over models, sizes and forms than others of the same behaviour: only with
SLAPO_TEST_WHOLE=1, so that the rest stays under a quarter of an hour on two cores."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(Path(item.path).name, len(LONGEST)))
    if os.environ.get("SLAPO_TEST_WHOLE"):
        return
    broad = [item for item in items if any(f"/{name}" in item.nodeid for name in BREADTH)]
    if broad and len(broad) < len(items):  # asked for by itself, such a test runs
        config.hook.pytest_deselected(items=broad)
        left_out = set(broad)
        items[:] = [item for item in items if item not in left_out]
