"""List the treatment of each field of Megatron's configurations: the tables of docs/megatron.md.

They are those of Megatron-core 0.16 to 0.19; a field that the installed one does not have is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Field:
    """One field, or argument.

    Args:
        how: ``"passed"`` to Megatron as it is; ``"filled"``: its value comes from the schedule, the arguments of
            ``build`` or other fields where the user gives none; ``"refused"`` with any other value than Megatron's
            default.
        why: the filled-in value, the reason of a refusal, or a note on a field that is passed on.
    """

    how: Literal["passed", "filled", "refused"]
    why: str


def _named(how: Literal["passed", "filled", "refused"], why: str, *names: str) -> dict[str, Field]:
    return dict.fromkeys(names, Field(how, why))


def _passed(why: str, *names: str) -> dict[str, Field]:
    return _named("passed", why, *names)


def _filled(why: str, *names: str) -> dict[str, Field]:
    return _named("filled", why, *names)


def _refused(why: str, *names: str) -> dict[str, Field]:
    return _named("refused", why, *names)


_LAYERS = "it is for Megatron's own layers, and the model has its own; nothing would happen"
_FP8 = "it is for weights of Transformer Engine's layers in FP8 or FP4"
_TIMERS = "timers are Megatron-LM's training script's"
_FSDP = (
    "Megatron's FSDP replaces the parameters, whose layouts would be lost; use_distributed_optimizer partitions the "
    'state of the optimizer, ZeRO-3 of target="deepspeed" the weights too'
)
_PRECISION_AWARE = "of the precision-aware optimizer, whose state cannot be read back into the reference layout"
_OFFLOAD = "its state is split between two optimizers, and cannot be read back into the reference layout"
_EXPERTS = "no step makes experts"
_CONTEXT = "no step cuts sequences over ranks"
_FUNCTIONS = "the engine sets it"
_MUON = "optimizers whose update of an element depends on others would need whole parameters"
_SHARDED_WEIGHTS = "weights are split as the steps say"

OPTIMIZER: dict[str, Field] = {
    **_passed(
        "the rate that a schedule of it begins with; without one, and without a factory, nothing is trained", "lr"
    ),
    **_filled("0: without it Megatron's scheduler ends at None", "min_lr"),
    **_passed("by the rule of Megatron: not for biases and tensors with one axis", "weight_decay"),
    **_passed("decay for `q_layernorm` and `k_layernorm` of the model's names too", "apply_wd_to_qk_layernorm"),
    **_filled("whether the parameters are of that type; main parameters in float32", "bf16", "fp16"),
    **_filled("the type of the parameters", "params_dtype"),
    **_passed('`"adam"` or `"sgd"`; others are refused', "optimizer"),
    **_passed("of fp16, and needed there", "loss_scale"),
    **_passed("of fp16 without `loss_scale`, and needed there: the first dynamic scale", "initial_loss_scale"),
    **_passed("of fp16 without `loss_scale`", "min_loss_scale", "loss_scale_window", "hysteresis"),
    **_passed("of Adam", "adam_beta1", "adam_beta2", "adam_eps", "decoupled_weight_decay"),
    **_passed("of SGD", "sgd_momentum"),
    **_filled("the same as in `ddp_config`", "use_distributed_optimizer", "overlap_param_gather"),
    **_filled(
        "`build(max_grad_norm=...)`; else Megatron's default of 1.0; 0 (no clipping) without any `optimizer_config`",
        "clip_grad",
    ),
    **_refused(
        "the result is not returned; `engine.megatron.optimizer.count_zeros()` after a step", "log_num_zeros_in_grad"
    ),
    **_passed("Megatron writes its configurations there", "config_logger_dir"),
    **_passed("needs parameters marked `is_embedding_or_output_parameter`", "decoupled_lr", "decoupled_min_lr"),
    **_refused(_FP8, "fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag"),
    **_refused(
        "it needs Transformer Engine's Adam, and keeps state that cannot be read back into the reference layout",
        "use_precision_aware_optimizer",
    ),
    **_refused(
        _PRECISION_AWARE,
        "store_param_remainders",
        "main_grads_dtype",
        "main_params_dtype",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
    ),
    **_refused(
        _MUON,
        "muon_momentum",
        "muon_split_qkv",
        "muon_use_nesterov",
        "muon_nesterov",
        "muon_scale_mode",
        "muon_fp32_matmul_prec",
        "muon_num_ns_steps",
        "muon_tp_mode",
        "muon_extra_scale_factor",
        "muon_coefficient_type",
        "muon_scalar_optimizer",
        "adaptive_muon_beta2",
        "adaptive_muon_eps",
        "adaptive_muon_moment2_method",
        "soap_shampoo_beta",
        "soap_precondition_frequency",
        "soap_use_kl_shampoo",
        "use_layer_wise_distributed_optimizer",
    ),
    **_refused("of Lion, which is refused", "lion_beta1", "lion_beta2"),
    **_refused(
        "it makes two optimizers of one, whose state cannot be read back into the reference layout",
        "overlap_param_gather_with_optimizer_step",
    ),
    **_refused(
        _OFFLOAD,
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "use_torch_optimizer_for_cpu_offload",
        "overlap_cpu_optimizer_d2h_h2d",
        "pin_cpu_grads",
        "pin_cpu_params",
    ),
    **_refused("it leaves out steps in silence; clip_grad bounds them", "grad_norm_skip_threshold"),
    **_refused("a captured step would not see loaded values", "optimizer_cuda_graph"),
    **_refused(_TIMERS, "timers", "barrier_with_L1_time"),
}

DDP: dict[str, Field] = {
    **_filled("true with bf16, as Megatron-LM has it", "grad_reduce_in_fp32"),
    **_passed("", "overlap_grad_reduce"),
    **_passed("needs `use_distributed_optimizer` and `overlap_grad_reduce`", "overlap_param_gather"),
    **_passed("needs `overlap_param_gather`", "align_param_gather"),
    **_filled("the same as in `optimizer_config`", "use_distributed_optimizer"),
    **_passed("", "check_for_nan_in_grad", "check_for_large_grads"),
    **_passed("needs `overlap_grad_reduce`; in parameters", "bucket_size"),
    **_passed("needs `overlap_grad_reduce`", "num_buckets"),
    **_passed("", "pad_buckets_for_high_nccl_busbw"),
    **_passed("GPUs only: gloo has no average", "average_in_collective"),
    **_refused(
        "state that is partitioned over some of the replicas cannot be read back into the reference layout",
        "num_distributed_optimizer_instances",
    ),
    **_refused(
        "it changes how every other engine of the process reduces gradients", "reduce_scatter_with_fp32_accumulation"
    ),
    **_refused(
        _FP8, "fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag", "keep_fp8_transpose_cache"
    ),
    **_refused(
        "names would have those of wrappers before them; grad_reduce_in_fp32 accumulates all in float32",
        "param_name_patterns_for_fp32_local_accumulation",
    ),
    **_refused(
        _FSDP,
        "use_megatron_fsdp",
        "use_custom_fsdp",
        "data_parallel_sharding_strategy",
        "outer_dp_sharding_strategy",
        "gradient_reduce_div_fusion",
        "suggested_communication_unit_size",
        "preserve_fp32_weights",
        "fsdp_double_buffer",
        "fsdp_manual_registration",
        "fsdp_db_use_persist_buf_on_alloc_fail",
        "fsdp_all_gather_in_start_param_sync",
        "megatron_fsdp_main_params_dtype",
        "megatron_fsdp_main_grads_dtype",
        "megatron_fsdp_grad_comm_dtype",
        "megatron_fsdp_use_decoupled_grad",
        "megatron_fsdp_cuda_graph_mode",
        "megatron_fsdp_enable_fine_grained_param_gather",
        "megatron_fsdp_max_pool_double_buffer",
    ),
    **_refused("it needs groups with an allocator of NCCL's", "nccl_ub", "disable_symmetric_registration"),
    **_refused(_LAYERS, "delay_wgrad_compute"),
}

MODEL_PARALLEL: dict[str, Field] = {
    **_filled("of the mesh", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    **_filled("`tp` of the mesh", "expert_tensor_parallel_size"),
    **_filled("stages a rank, where there are several", "virtual_pipeline_model_parallel_size"),
    **_passed("needs parameters marked `sequence_parallel`, whose gradients Megatron sums", "sequence_parallel"),
    **_filled("as in `optimizer_config`", "bf16", "fp16", "params_dtype"),
    **_filled("the type of the parameters", "pipeline_dtype"),
    **_filled(
        "false with several stages a rank, and with `overlap_p2p_comm`: Megatron's gradients are wrong otherwise",
        "batch_p2p_comm",
    ),
    **_passed("with several stages a rank", "overlap_p2p_comm"),
    **_passed("needs `overlap_p2p_comm`", "overlap_p2p_comm_warmup_flush"),
    **_passed(
        "with several stages a rank; the number of ranks along `pp` by default", "microbatch_group_size_per_vp_stage"
    ),
    **_passed("frees the sent tensors", "deallocate_pipeline_outputs"),
    **_passed("GPUs only", "batch_p2p_sync"),
    **_refused(_TIMERS, "timers", "barrier_with_L1_time"),
    **_refused(
        _FUNCTIONS,
        "finalize_model_grads_func",
        "grad_scale_func",
        "no_sync_func",
        "grad_sync_func",
        "param_sync_func",
        "moe_grad_scale_func",
        "mtp_grad_scale_func",
        "_cpu_offloading_context",
    ),
    **_refused(
        "packs between stages have one shape for each input signature, which may change in every step",
        "variable_seq_lengths",
    ),
    **_refused("evaluation would run without it; bf16 of `optimizer_config`", "enable_autocast", "autocast_dtype"),
    **_refused("groups have the backend of the mesh", "pipeline_model_parallel_comm_backend"),
    **_refused("it needs a torch that was built for it", "use_ring_exchange_p2p"),
    **_refused(
        "`.checkpoint()` steps decide what is recomputed", "num_microbatches_with_partial_activation_checkpoints"
    ),
    **_refused("torch.use_deterministic_algorithms(True) decides it", "deterministic_mode"),
    **_refused("`build` gives the model its values", "perform_initialization", "use_cpu_initialization"),
    **_refused("it would need Transformer Engine's layers", "use_te_rng_tracker"),
    **_refused(
        _CONTEXT,
        "context_parallel_size",
        "hierarchical_context_parallel_sizes",
        "max_seqlen_per_dp_cp_rank",
        "hybrid_context_parallel",
    ),
    **_refused(
        _EXPERTS,
        "expert_model_parallel_size",
        "moe_extended_tp",
        "overlap_moe_expert_parallel_comm",
        "ep_overlap_early_attn_memory_release",
        "overlap_dispatch_backward_with_experts_wgrad",
        "mtp_standalone",
    ),
    **_refused(
        _SHARDED_WEIGHTS,
        "tensor_parallel_num_weight_shards",
        "gtp_weight_remat_size",
        "expert_tensor_parallel_num_weight_shards",
        "expert_gtp_weight_remat_size",
    ),
    **_refused(
        _LAYERS,
        "gradient_accumulation_fusion",
        "async_tensor_model_parallel_allreduce",
        "tp_comm_overlap",
        "tp_comm_bulk_wgrad",
        "tp_comm_bulk_dgrad",
        "tp_comm_overlap_ag",
        "tp_comm_overlap_rs",
        "tp_comm_overlap_rs_dgrad",
        "tp_comm_split_ag",
        "tp_comm_atomic_ag",
        "tp_comm_split_rs",
        "tp_comm_atomic_rs",
        "tp_comm_overlap_disable_qkv",
        "tp_comm_overlap_disable_fc1",
        "tp_comm_bootstrap_backend",
        "cross_entropy_loss_fusion",
        "cross_entropy_fusion_impl",
        "delay_wgrad_compute",
        "defer_embedding_wgrad_compute",
        "wgrad_deferral_limit",
        "cpu_offloading",
        "cpu_offloading_num_layers",
        "cpu_offloading_activations",
        "cpu_offloading_weights",
        "cpu_offloading_double_buffering",
        "cpu_offloading_retain_pinned_cpu_buffers",
    ),
}

SCHEDULER: dict[str, Field] = {
    **_passed("0 by default; needs `lr_warmup_steps`", "init_lr"),
    **_filled("`lr` of `optimizer_config`", "max_lr"),
    **_filled("`min_lr` of `optimizer_config`", "min_lr"),
    **_passed("training steps (Megatron-LM counts samples)", "lr_warmup_steps"),
    **_passed("training steps; needed where the rate changes", "lr_decay_steps"),
    **_passed("`constant` by default, `linear`, `cosine`, `inverse-square-root` or `WSD`", "lr_decay_style"),
    **_filled("`weight_decay` of `optimizer_config`", "start_wd", "end_wd"),
    **_passed("training steps; needed where the decay changes", "wd_incr_steps"),
    **_passed("`constant` by default, `linear` or `cosine`", "wd_incr_style"),
    **_passed(
        "whose settings hold after loading", "use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler"
    ),
    **_passed("of `WSD`, and needed there", "wsd_decay_steps", "lr_wsd_decay_style"),
}

FIELDS: Mapping[str, Mapping[str, Field]] = {
    "optimizer_config": OPTIMIZER,
    "ddp_config": DDP,
    "model_parallel_config": MODEL_PARALLEL,
    "scheduler": SCHEDULER,
}
"""Option of the dialect -> its fields, under Megatron's names."""
