"""What slapo-transformers uses of transformers and accelerate is there, with the parameters that it relies on."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import transformers
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import find_batch_size, recursively_apply, slice_tensors
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import rotate_checkpoints, seed_worker, unwrap_peft_model

import slapo_core as slapo
from slapo_transformers import ScheduledTrainerMixin, SlapoTrainer, accelerators

from .training_runs import arguments, model, trainer

CALLED: dict[str, tuple[Callable[..., Any], str]] = {
    "rotate_checkpoints": (rotate_checkpoints, "output_dir save_total_limit best_model_checkpoint use_mtime"),
    "seed_worker": (seed_worker, "rank num_workers"),
    "unwrap_peft_model": (unwrap_peft_model, "model"),
    "LabelSmoother": (LabelSmoother.__call__, "shift_labels"),
    "find_batch_size": (find_batch_size, "data"),
    "slice_tensors": (slice_tensors, "data tensor_slice"),
    "recursively_apply": (recursively_apply, "func data error_on_other_type"),
    "Trainer._save": (transformers.Trainer._save, "output_dir state_dict"),
    "Trainer._get_output_dir": (transformers.Trainer._get_output_dir, "trial"),
    "Accelerator.prepare_model": (accelerate.Accelerator.prepare_model, "evaluation_mode"),
    "Accelerator.gather_for_metrics": (accelerate.Accelerator.gather_for_metrics, "use_gather_object"),
    "Accelerator.register_load_state_pre_hook": (accelerate.Accelerator.register_load_state_pre_hook, "hook"),
}
"""Functions that are called, and their parameters."""
OVERRIDDEN: dict[type, type] = {
    ScheduledTrainerMixin: transformers.Trainer,
    accelerators.ScheduledAccelerator: accelerate.Accelerator,
    accelerators.ScheduledOptimizer: AcceleratedOptimizer,
    accelerators.ScheduledScheduler: AcceleratedScheduler,
}
"""Class -> its base, of which it overrides members."""
OWN = {
    *("_attach", "_wait", "_is_causal", "_parameter_counts", "_samples_of_round", "label_smoother", "gather_function"),
    *("_shared", "_one_of_each_replica", "_first_ranks", "schedule", "steps"),
    *("_run_steps", "_precompute_ref_logps"),  # see test_hosts_trl_steps.py
}
ASKED: dict[str, tuple[type, str, tuple[str, ...]]] = {
    "a checkpoint's parts": (
        transformers.Trainer,
        "_save_checkpoint",
        ("self.save_model(output_dir", "self._save_optimizer_and_scheduler(", "self._save_rng_state("),
    ),
    "the deletion of older checkpoints": (
        transformers.Trainer,
        "_save_checkpoint",
        ("rotate_checkpoints(", "save_total_limit=self.args.save_total_limit"),
    ),
    "weights of all ranks": (transformers.Trainer, "save_model", ("self._save(output_dir",)),
    "weights": (transformers.Trainer, "_save", ("state_dict=state_dict",)),
    "clipping": (transformers.Trainer, "_clip_grad_norm", ("self.accelerator.clip_grad_norm_(",)),
    "norms": (transformers.Trainer, "_get_grad_norm", ("self.accelerator.clip_grad_norm_(",)),
    "the scale of a loss": (
        transformers.Trainer,
        "compute_loss",
        ("self.args.average_tokens_across_devices", "self.accelerator.num_processes", "self.label_smoother("),
    ),
    "causal models by name": (
        transformers.Trainer,
        "compute_loss",
        ("_get_name()", "in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()", "shift_labels=True"),
    ),
    "items": (transformers.Trainer, "_get_num_items_in_batch", ("self.accelerator.gather(",)),
    "tokens": (transformers.Trainer, "_track_num_input_tokens", ("self.accelerator.gather(",)),
    "operations": (transformers.Trainer, "floating_point_ops", ("num_parameters(exclude_embeddings=True)",)),
    "operations of all ranks": (transformers.Trainer, "store_flos", ("distributed_broadcast_scalars(", ".sum()")),
    "evaluation": (transformers.Trainer, "evaluation_loop", ("self.gather_function(", "self.prediction_step(")),
    "losses of evaluations": (transformers.Trainer, "prediction_step", ("self._get_num_items_in_batch(",)),
    "samples of Seq2SeqTrainer": (
        transformers.Seq2SeqTrainer,
        "evaluate",
        ("self.gather_function = self.accelerator.gather",),
    ),
    "generation": (transformers.Seq2SeqTrainer, "prediction_step", ("self.model.generate(",)),
    "data": (transformers.Trainer, "_get_dataloader", ("self.accelerator.prepare(", "seed_worker", "process_index")),
    "a batch of all replicas": (
        transformers.Trainer,
        "set_initial_training_values",
        ("self.get_total_train_batch_size(args)",),
    ),
    "the model and the optimizer": (transformers.Trainer, "_prepare_for_training", ("self.accelerator.prepare(",)),
    "no exchange": (transformers.Trainer, "_run_epoch", ("self.accelerator.no_sync",)),
    "a new model": (transformers.Trainer, "train", ("self.call_model_init(trial)",)),
    "a trial's accelerator": (
        transformers.Trainer,
        "_hp_search_setup",
        ("self.create_accelerator_and_postprocess()",),
    ),
    "resumed weights": (transformers.Trainer, "train", ("self._load_from_checkpoint(resume_from_checkpoint)",)),
    "the best weights": (transformers.Trainer, "_finalize_training", ("self._load_best_model()",)),
    "a resumed optimizer": (
        transformers.Trainer,
        "_prepare_for_training",
        ("self._load_optimizer_and_scheduler(resume_from_checkpoint)",),
    ),
    "an epoch": (
        transformers.Trainer,
        "_inner_training_loop",
        ("self._run_epoch(", "self.control.should_training_stop"),
    ),
    "a saved optimizer": (
        transformers.Trainer,
        "_save_optimizer_and_scheduler",
        ("elif self.args.should_save:", "self.optimizer.state_dict()"),
    ),
    "resumed random numbers": (transformers.Trainer, "_run_epoch", ("self._load_rng_state(resume_from_checkpoint)",)),
    "files of random numbers": (
        transformers.Trainer,
        "_load_rng_state",
        ('f"rng_state_{process_index}.pth"', '"rng_state.pth"'),
    ),
    "data of a replica": (
        accelerate.Accelerator,
        "prepare_data_loader",
        ("num_processes=self.num_processes", "process_index=self.process_index"),
    ),
    "kinds of arguments": (
        accelerate.Accelerator,
        "_prepare_one",
        ("self.prepare_model(", "self.prepare_optimizer(", "self.prepare_scheduler(", "self.prepare_data_loader("),
    ),
    "gradients in fp16": (accelerate.Accelerator, "unscale_gradients", ("self.scaler.unscale_(",)),
    "a saved state": (accelerate.Accelerator, "save_state", ("self.get_state_dict(",)),
    "a loaded state": (accelerate.Accelerator, "load_state", ("self._load_model_state_pre_hook.values()",)),
    "gathered metrics": (
        accelerate.Accelerator,
        "gather_for_metrics",
        ("gather_object(input_data)", "self.gather(input_data)", "self.gradient_state.remainder"),
    ),
    "a prepared optimizer": (
        accelerate.Accelerator,
        "prepare_optimizer",
        ("_is_accelerate_prepared", "self._optimizers.append("),
    ),
    "steps of the learning rate": (
        AcceleratedScheduler,
        "step",
        ("self.split_batches", "AcceleratorState().num_processes", "adjust_scheduler"),
    ),
    "the end of the data": (DataLoaderShard, "__iter__", ("self.end_of_dataloader = True",)),
}
"""What a method of a host must contain."""
READ = {
    "trainer": "_train_batch_size accelerator args.gradient_accumulation_steps args.process_index args.should_save "
    "args.world_size args.n_gpu args.eval_use_gather_object "
    "args.average_tokens_across_devices args.save_total_limit label_smoother gather_function lr_scheduler optimizer "
    "state.best_model_checkpoint state.global_step state.max_steps control.should_training_stop",
    "accelerator": "_models dataloader_config.dispatch_batches dispatch_batches ddp_handler device "
    "gradient_state.end_of_dataloader gradient_state.remainder "
    "gradient_state.sync_gradients scaler state.distributed_type.value state.dynamo_plugin.backend.value "
    "state.num_processes state.process_index",
}
"""Attributes of hosts that are read."""


@pytest.mark.parametrize("seam", CALLED)
def test_a_function_has_its_parameters(seam: str) -> None:
    function, names = CALLED[seam]
    missing = set(names.split()) - set(inspect.signature(function).parameters)
    assert not missing, f"a release has moved {seam}: {missing}"


@pytest.mark.parametrize("own", OVERRIDDEN, ids=lambda own: own.__name__)
def test_an_overridden_member_is_one_of_the_host_with_its_parameters(own: type) -> None:
    base = OVERRIDDEN[own]
    for name, ours in vars(own).items():
        if name.startswith("__") or name in OWN:
            continue
        assert hasattr(base, name), f"a release has moved {base.__name__}.{name}"
        theirs = getattr(base, name)
        if not callable(theirs):
            continue
        required, given = list(inspect.signature(theirs).parameters), inspect.signature(ours).parameters
        takes_more = any(one.kind is one.VAR_KEYWORD for one in given.values())
        assert takes_more or required == list(given), f"a release has changed {base.__name__}.{name}: {required}"


@pytest.mark.parametrize("seam", ASKED)
def test_the_host_asks(seam: str) -> None:
    base, method, texts = ASKED[seam]
    source = inspect.getsource(getattr(base, method))
    for text in texts:
        assert text in source, f"a release has moved a seam: {seam} ({base.__name__}.{method}: {text})"


@pytest.mark.parametrize("host", READ)
def test_the_host_has_its_attributes(host: str, tmp_path: Path) -> None:
    run = trainer(SlapoTrainer, arguments(tmp_path), schedule=slapo.create_schedule(model("llama")))
    for name in READ[host].split():
        try:
            operator.attrgetter(name)(run if host == "trainer" else run.accelerator)
        except AttributeError as error:
            raise AssertionError(f"a release has moved {host}.{name}") from error
