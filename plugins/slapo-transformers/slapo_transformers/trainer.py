"""transformers' Trainer, and every trainer over it, for scheduled models."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import find_batch_size, recursively_apply, slice_tensors
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import rotate_checkpoints, unwrap_peft_model

import slapo_core as slapo
from slapo_core import ArgumentError, Schedule
from slapo_runtime.state import live_state
from slapo_transformers.accelerators import attach, check_schedule
from slapo_transformers.checkpoints import MANIFEST, newest, rng_directory, rng_file, with_adapter, write_manifest
from slapo_transformers.refusals import check_arguments
from slapo_transformers.trl_forwards import run_steps, scheduled_adapters

_Base: Any = Trainer if TYPE_CHECKING else object


class ScheduledTrainerMixin(_Base):
    """Train a scheduled model by any Trainer: ``class MyTrainer(ScheduledTrainerMixin, SFTTrainer)``.

    Log lines, evaluations and counts are as of one process that accumulates the batches of all replicas.
    ``checkpoint-*/`` holds the reference model; training resumes from it under the same schedule, another one, or none.
    Every rank calls the methods of the trainer, saves included.

    Args:
        args: of the Trainer; ``model`` may be left out.
        schedule: of the model, after its last step and after :func:`slapo_core.fully_shard`; or a function that makes
            it of the model, which ``model`` or ``model_init`` gives.
        kwargs: of the Trainer.

    Raises:
        ArgumentError: not a schedule, the schedule of another model, or an argument of the Trainer that would change
            the model beside its schedule.
        MeshError: an abstract mesh, a mesh of another size than the launch, or pipeline stages.
    """

    label_smoother: Any
    gather_function: Any

    def __init__(self, *args: Any, schedule: Schedule | Callable[[Any], Schedule], **kwargs: Any) -> None:
        self.schedule: Any = None
        self._make: Callable[[Any], Schedule] | None = None
        given = args[0] if args else kwargs.get("model")
        if callable(schedule) and not isinstance(schedule, Schedule | nn.Module):
            self._make = schedule
            self.schedule = None if given is None else schedule(given)
        else:
            check_schedule(schedule, None)
            self.schedule = schedule
            if kwargs.get("model_init") is not None:
                raise ArgumentError(
                    "model_init makes a new model, but schedule= is the schedule of another one",
                    hint="SlapoTrainer(model_init=..., schedule=make), with a function that makes a model's schedule",
                )
            if given is None:
                kwargs["model"] = self.schedule.model
            elif given is not self.schedule.model:
                raise ArgumentError(
                    f"the schedule is one of another {type(self.schedule.model).__name__} than model=",
                    hint="leave model out: SlapoTrainer(schedule=sch, args=...)",
                )
        if kwargs.get("peft_config") is not None:
            raise ArgumentError(
                "peft_config= makes another model, but the steps of the schedule are for the one that is given",
                hint="model = get_peft_model(model, peft_config), before the schedule, and leave peft_config out",
            )
        with scheduled_adapters(None if self.schedule is None else self.schedule.model):
            super().__init__(*args, **kwargs)
        self._run_steps()
        if self.label_smoother is not None and self._is_causal():
            self.label_smoother = functools.partial(self.label_smoother, shift_labels=True)

    def _run_steps(self) -> None:
        """Have the forward that TRL sets on models run their steps."""
        run_steps(self.args, self.model, getattr(self, "ref_model", None))

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        self._run_steps()  # TRL computes log-probabilities before it is made
        return super()._precompute_ref_logps(*args, **kwargs)

    def _is_causal(self) -> bool:
        """Return whether labels are the next tokens; the host asks the name of the class, which fully_shard changes."""
        model = unwrap_peft_model(self.model)
        return type(model).__name__.removeprefix("FSDP") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Make a model and its schedule."""
        assert self._make is not None
        model: nn.Module = super().call_model_init(trial)
        self.schedule = self._make(model)
        self._attach()
        return model

    # -- replicas in place of processes -----------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator as Trainer does, and attach the schedule to it."""
        check_arguments(self.args, self.schedule)
        super().create_accelerator_and_postprocess()
        if self.schedule is not None:
            self._attach()

    def _attach(self) -> None:
        attach(self.accelerator, self.schedule)
        model: nn.Module = self.schedule.model
        if isinstance(model, FSDPModule) and hasattr(model, "generate"):
            register_fsdp_forward_method(model, "generate")
        self._counts: tuple[int, int] | None = None

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of a step of the optimizer over all replicas."""
        samples: int = self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes
        return samples

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, **kwargs)
        seeds = loader.worker_init_fn
        if isinstance(seeds, functools.partial) and "rank" in seeds.keywords:  # the workers of a replica do the same
            loader.worker_init_fn = functools.partial(seeds, rank=self.accelerator.process_index)
        return loader

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Count each sample once: over replicas, Seq2SeqTrainer's gather has twice those that fill the last round."""
        if self.accelerator.num_processes > 1 or self.gather_function != self.accelerator.gather:
            self.gather_function = functools.partial(
                self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
            )
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the batch of a replica as one process does: the loss is that of its own samples and items."""
        rows = find_batch_size(inputs) or 0
        own = self._samples_of_round(rows)
        if own < rows:
            inputs = slice_tensors(inputs, slice(own))
        averages, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            loss, *outputs = super().prediction_step(model, inputs, *args, **kwargs)
        finally:
            self.args.average_tokens_across_devices = averages
        if own < rows:  # as many rows as other replicas have, which the host leaves out
            fill = torch.arange(rows).clamp(max=own - 1)
            outputs = recursively_apply(lambda one: one[fill] if one.ndim else one, outputs)
        return (loss, *outputs)

    def _samples_of_round(self, rows: int) -> int:
        """Return how many rows of a batch are no repetitions of samples, which fill the last round of the replicas."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0 or self.accelerator.num_processes == 1:
            return rows
        left: int = state.remainder - self.accelerator.process_index * rows
        return min(left, rows) if left > 0 else rows  # a replica without samples runs the forward of the others

    def floating_point_ops(self, inputs: Any) -> float:
        """Count the reference model's operations; the host sums them over all ranks."""
        if self._counts is None:
            self._counts = self._parameter_counts()
        own, reference = self._counts
        operations: int = super().floating_point_ops(inputs)
        return operations // max(own, 1) * reference / (self.args.world_size // self.accelerator.num_processes)

    def _parameter_counts(self) -> tuple[int, int]:
        """Return the parameters without embeddings, of this rank as the host counts them, and of all ranks."""
        model, own, reference = self.schedule.model, 0, 0
        tensors = live_state(self.schedule, "SlapoTrainer").tensors()
        sizes = {id(live.tensor): torch.Size(live.layout.shape).numel() for live in tensors}
        embeddings = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Embedding)}
        for name, parameter in model.named_parameters():
            if name not in embeddings:
                own += parameter.numel()
                reference += sizes[id(parameter)]
        return own, reference

    # -- checkpoints ------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; ``resume_from_checkpoint=True`` takes the newest complete checkpoint in ``output_dir``."""
        if resume_from_checkpoint is True:
            found = newest(self.args.output_dir)
            if found is None:
                raise ArgumentError(
                    f"no complete checkpoint in '{self.args.output_dir}': no checkpoint-*/{MANIFEST}",
                    hint="train(resume_from_checkpoint='output/checkpoint-500') names one of another Trainer",
                )
            resume_from_checkpoint = str(found)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:  # resumed after its last step, where the host would run another one
            self.control.should_training_stop = True

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run, limit = self._get_output_dir(trial=trial), self.args.save_total_limit
        directory = Path(run, f"checkpoint-{self.state.global_step}")
        if self.args.should_save:
            (directory / MANIFEST).unlink(missing_ok=True)
        self.args.save_total_limit = None  # older ones are deleted after this one is complete
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self._wait()
        if self.args.should_save:
            write_manifest(directory, self.schedule.mesh)
            rotate_checkpoints(
                output_dir=run,
                save_total_limit=limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _wait(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the reference model; a collective, of which older hosts call ``_save`` on the first rank only."""
        self._weights = slapo.state_dict(self.schedule, rank0_only=True)
        try:
            super().save_model(*args, **kwargs)
        finally:
            del self._weights

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict=self._weights)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self.optimizer.state_dict()
        if self.args.should_save:
            torch.save(optimizer, os.path.join(output_dir, "optimizer.pt"))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the full state on the CPU: the host would load it on every GPU."""
        for part, name in ((self.optimizer, "optimizer.pt"), (self.lr_scheduler, "scheduler.pt")):
            file = None if checkpoint is None else Path(checkpoint, name)
            if file is not None and file.is_file():  # not one of save_only_model=True
                part.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        state: Any = resume_from_checkpoint
        if hasattr(self.schedule.model, "peft_config"):
            state = with_adapter(self.schedule, Path(resume_from_checkpoint))
        slapo.load_state_dict(self.schedule, state)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        rank, directory = self.args.process_index, Path(output_dir)
        if self.args.world_size > 1:
            (directory / f"rng_state_{rank}.pth").replace(directory / rng_file(self.schedule.mesh, rank))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        rank = self.args.process_index
        names = [f"rng_state_{rank}.pth", "rng_state.pth"]
        with rng_directory(Path(checkpoint), self.schedule.mesh, rank, names) as directory:
            super()._load_rng_state(None if directory is None else str(directory))


class SlapoTrainer(ScheduledTrainerMixin, Trainer):
    """transformers' Trainer for a scheduled model; see :class:`ScheduledTrainerMixin`.

    Example:
        ::

            sch = slapo.create_schedule(model, mesh={"dp": 2, "tp": 2})
            ...
            trainer = SlapoTrainer(schedule=sch, args=args, train_dataset=dataset)
            trainer.train()
    """
