"""A base class of engines, and checks between their training steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slapo_core.errors import BuildError, warn_user
from slapo_core.internals import parameters_of
from slapo_runtime.private import write_counts
from slapo_runtime.ranks.world import World
from slapo_runtime.stages.runner import SignatureFacts, advance
from slapo_runtime.weights.lr_scheduler import NAME, resume, saved

if TYPE_CHECKING:
    import torch

    from slapo_core.layout import Mesh
    from slapo_runtime.context import BuildContext
    from slapo_runtime.correspondence.storage import LiveTensor, OptimizerStorage, TensorStorage
    from slapo_runtime.weights.saving import PendingSave, Stateful
    from slapo_runtime.weights.state import ModelState


class StatefulEngine:
    """State dicts and checkpoints by the context's state, and refusals of steps.

    A subclass sets the attributes, and adds ``module``, the steps and ``close`` of :class:`slapo_core.dialect.Engine`.
    If its runtime keeps values elsewhere, it calls ``context.state.keep_in``, and overrides the methods from
    :meth:`_kept_optimizer` on.

    Attributes:
        optimizer: None where the engine only evaluates, or is closed.
        lr_scheduler: the user's scheduler of the learning rate, which steps after each step of the optimizer; None
            without one.
        steps: the number of training steps, of the checkpoint that was loaded too; ``train_step`` and manual loops
            increment it.
        _state: ``context.state``.
    """

    optimizer: Any
    lr_scheduler: Any = None
    steps: int = 0
    _state: ModelState
    _reason: str | None = None  # why it is closed

    def state_dict(self, *, rank0_only: bool = False, include_added: bool = False) -> dict[str, torch.Tensor]:
        """Return the reference model's state dict; with ``include_added``, also the tensors that steps added."""
        return self._state.state_dict(rank0_only=rank0_only, include_added=include_added)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state.load_state_dict(state)

    def check_replicas(self, *, repair: bool = False) -> None:
        self._state.check_replicas(optimizer=self._kept_optimizer(), repair=repair)

    def save(
        self, directory: str | os.PathLike[str], *, keep: int | None = None, asynchronous: bool = False
    ) -> PendingSave | None:
        """Write a checkpoint into ``directory/step-<steps>``: a collective; every rank writes its own shards.

        It is complete, or never loaded. Replicas are compared first, as by :meth:`check_replicas`. The state of
        torch's generators in each replica and of attached objects is saved too.

        Args:
            directory: of the checkpoints of all steps, on a file system that all ranks share; made if it does not
                exist.
            keep: the number of complete checkpoints to keep, e.g. 3; None keeps all.
            asynchronous: return once the values are copied into shared memory; a worker process of each rank writes
                them. The next ``save`` and ``load`` wait for it.

        Returns:
            with ``asynchronous``, an object with ``done`` and ``wait()``, a collective that raises errors of writing;
            else None.

        Raises:
            ArgumentError: the directory is ``""``, or ``keep`` is not positive.
            ReplicaError: replicas differ between ranks; the checkpoint is complete, with the first rank's values.
            BuildError: the optimizer holds a value that a checkpoint cannot store, or writing failed, on every rank;
                earlier checkpoints are intact.
        """
        state = self._state
        state.saving.steps = self.steps
        optimizer, runtime = self._kept_optimizer(), self._runtime_state()
        return state.save(directory, optimizer=optimizer, runtime=runtime, keep=keep, asynchronous=asynchronous)

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Load a checkpoint of this or any other schedule, target and number of ranks: a collective.

        Args:
            directory: as given to ``save``, for its newest complete checkpoint; or one step's directory.

        Raises:
            WeightsError: it holds no complete checkpoint, or one of another model; nothing was changed.
            BuildError: it has no optimizer state, or one that does not fit; nothing was changed.
        """
        state = self._state
        self._load_runtime_state(state.load(directory, optimizer=self._kept_optimizer(), uses=self._loaded_names()))
        self.steps = state.saving.steps

    def attach(self, name: str, stateful: Stateful) -> None:
        """Save and resume an object with the engine, e.g. a sampler.

        Args:
            name: in the checkpoints.
            stateful: with ``state_dict()`` of JSON values, the same on every rank, and ``load_state_dict(state)``.

        Raises:
            ArgumentError: the name is taken, or the object lacks these methods.
        """
        self._state.saving.attach(name, stateful)

    def export(
        self,
        directory: str | os.PathLike[str],
        *,
        max_shard_size: int | str = "5GB",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write the weights as safetensors files with the reference model's names: a collective.

        ``from_pretrained(directory)`` of transformers and ``build(sch, weights=directory)`` read them. Every rank
        assembles and writes some of the tensors, one at a time; tied tensors are written under each name. The files
        come into their places when all are complete, the index last; other files in the directory stay.

        Args:
            directory: made if it does not exist; on a file system that all ranks share.
            max_shard_size: the largest file, in bytes, or as in ``"5GB"``; a larger tensor has its own file.
            dtype: of floating-point tensors; None: the reference model's.

        Raises:
            ArgumentError: an invalid size or type.
            ReplicaError: replicas of a tensor differ; nothing was written.
            BuildError: writing failed, on every rank; former files stay.
        """
        self._state.export(directory, max_shard_size=max_shard_size, dtype=dtype)

    # -- for a runtime that keeps values elsewhere ------------------------------------------------------------

    def _kept_optimizer(self) -> torch.optim.Optimizer | OptimizerStorage | None:
        """Return the optimizer, or its storage."""
        optimizer: torch.optim.Optimizer | OptimizerStorage | None = self.optimizer
        return optimizer

    def _runtime_state(self) -> Mapping[str, Any]:
        """Return the runtime's further state for checkpoints, as JSON, by name."""
        return saved(self.lr_scheduler)

    def _loaded_names(self) -> Collection[str]:
        """Return the names of :meth:`_runtime_state` that this engine loads; others get a warning."""
        return (NAME,) if self.lr_scheduler is not None else ()

    def _load_runtime_state(self, runtime: Mapping[str, Any]) -> None:
        """Load a saved :meth:`_runtime_state`, after weights and optimizer; ``{}`` if none was saved."""
        resume(self.lr_scheduler, runtime)

    # -- the end ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _closing(self, at: Callable[[], str]) -> Iterator[None]:
        """Close the engine if a step fails midway: the ranks have diverged.

        Other ranks may then wait for this one until the job's launcher ends them or their group times out.

        Args:
            at: gives this rank's present work, e.g. ``"stage 1 in the forward of micro-batch 0"``.
        """
        try:
            yield
        except BaseException as error:
            error.add_note(f"a step of the pipeline failed here: {at()}")
            self._reason = f"a step failed: {type(error).__name__}: {error}"
            self.close()  # type: ignore[attr-defined]
            raise

    # -- refusals -----------------------------------------------------------------------------------------------

    @staticmethod
    def _refuse_without_gradients() -> None:
        """Refuse a training step where torch computes no gradients."""
        import torch

        if not torch.is_grad_enabled():
            raise BuildError(
                "train_step() was called without gradients: inside of torch.no_grad() or torch.inference_mode()",
                hint="call it outside of that block, or engine.eval_step(batch) inside",
            )

    @staticmethod
    def _without_optimizer() -> BuildError:
        return BuildError(
            "this engine cannot train: it was built without an optimizer",
            hint="build(sch, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))",
        )

    @staticmethod
    def _closed(reason: str = "") -> BuildError:
        return BuildError(
            f"the engine is closed{reason and ', because '}{reason}",
            hint="schedule and build a fresh model, with weights=engine.state_dict()",
        )


class PipelineSteps:
    """Track the position of a pipeline's step, exchange its loss, and refuse autocast.

    A subclass, also of :class:`StatefulEngine`, sets ``_mesh``, passes :meth:`_stand` to the runner of the stages, and
    runs its steps inside of :meth:`StatefulEngine._closing`.

    Attributes:
        _mesh: of the schedule.
    """

    _mesh: Mesh
    _at = "nothing"  # of a step, for the message of an error

    def _stand(self, what: str) -> None:
        """Note this rank's present work."""
        self._at = what

    def _exchange_loss(
        self, facts: SignatureFacts, own: Sequence[torch.Tensor], *, drew: bool, device: torch.device
    ) -> torch.Tensor:
        """Return the mean loss on every rank of the replica: a collective over ``pp``.

        All ranks advance the default generator if the stages use the RNG. That and the loss's dtype are read from the
        first message of each input signature; later ones stay on the device, and the host does not wait for them.

        Args:
            facts: about the input signature of the micro-batches.
            own: the losses, on the rank of the last stage; empty on others.
            drew: whether a stage of this rank used the RNG.
            device: of the process group.

        Raises:
            BuildError: the RNG was used, but not in the first step with this input signature.
        """
        import torch
        import torch.distributed as dist

        self._stand("exchanging the loss")
        if drew and facts.uses_rng is False:
            raise BuildError(
                "a stage used the RNG, but none did in the first step with these inputs and modes: the RNG states of "
                "pipeline ranks would diverge",
                hint="set dropout probabilities before the first step; or engine.save(directory), build a fresh engine "
                "and engine.load(directory)",
            )
        message = torch.zeros(3, dtype=torch.float64, device=device)
        message[2] = drew
        if own:
            mean = torch.stack(list(own)).mean()
            message[0], message[1] = mean, _LOSS_TYPES.index(str(mean.dtype))
        dist.all_reduce(message, group=self._mesh.group("pp"))
        if facts.uses_rng is None or facts.loss_dtype is None:
            _, kind, has_drawn = message.tolist()
            facts.loss_dtype = getattr(torch, _LOSS_TYPES[int(kind)].removeprefix("torch."))
            facts.uses_rng = has_drawn > 0
        if facts.uses_rng:
            advance()
        return message[0].to(facts.loss_dtype)

    def _refuse_autocast(self, device: torch.device, target: str, hint: str) -> None:
        """Refuse a step under autocast, which ignores the placeholders of other ranks' stages.

        Raises:
            BuildError: it is called under torch.autocast.
        """
        import torch

        if torch.is_autocast_enabled(device.type):
            raise BuildError(
                f"a step of a pipeline of target '{target}' was called under torch.autocast: the dtypes of P2P "
                "messages would differ between ranks",
                hint=hint,
            )


_LOSS_TYPES = ("torch.float32", "torch.float64", "torch.bfloat16", "torch.float16")


REBUILD = "engine.save(directory); build a fresh engine of the changed model, and engine.load(directory)"


class StepInvariants:
    """Check that parameters were not replaced, frozen or modified since the last step.

    Every rank checks its own, because all ranks run the same program. Where replicas hold shards of parameters, ranks
    that see a write exchange their findings, because the change may be in one shard only. The exchange has a timeout,
    for a write on one rank alone.

    Args:
        context: of the build.
        tensors: the storage, for comparing parameters with their main copies.
        runtime: its name, for messages.
        partitioned: whether it partitions parameters over ``dp``.
    """

    def __init__(
        self, context: BuildContext, tensors: TensorStorage, runtime: str, *, partitioned: bool = False
    ) -> None:
        self._storage, self._runtime = tensors, runtime
        self._replicas = World(context.schedule.mesh, over="dp") if partitioned else None
        self._parameters = [live for live in context.state.tensors() if live.is_parameter and live.is_local]
        self._tensors = [live.tensor for live in self._parameters]
        self._trained = [tensor.requires_grad for tensor in self._tensors]
        trained = {id(live.tensor): live for live in self._parameters}
        self._places = [
            (trained[id(parameter)], parameters_of(module), name)
            for module in context.schedule.model.modules()
            for name, parameter in parameters_of(module).items()
            if id(parameter) in trained
        ]
        self.note()

    def note(self) -> None:
        """Record the parameters' versions, after the build and after each step."""
        self._stamps = self.stamps()

    def check(self) -> list[LiveTensor]:
        """Check the parameters, before a step.

        Returns:
            the modified parameters that match their main copies.

        Raises:
            BuildError: a parameter was replaced, frozen, unfrozen, or modified; or modified on some replicas only.
        """
        for live, table, name in self._places:
            if table.get(name) is not live.tensor:
                raise BuildError(
                    f"'{live.name}' was replaced after build(): {self._runtime} still optimizes the old parameter",
                    hint=REBUILD,
                )
        if [tensor.requires_grad for tensor in self._tensors] != self._trained:
            for live, trained in zip(self._parameters, self._trained, strict=True):
                if live.tensor.requires_grad is not trained and (not trained or self.steps_frozen(live)):
                    raise self._other_trained(live, trained)
        written, stamps = [], self.stamps()
        if stamps != self._stamps:
            rows = zip(self._parameters, self._stamps, stamps, strict=True)
            written = [live for live, before, now in rows if now != before]
        names = [live.name for live in written if not self._storage.is_current(live)]
        if written and self._replicas is not None:
            if not self._replicas.all_come(_SECONDS):
                raise BuildError(
                    f"'{written[0].name}' was modified in place since the last step, but not on every replica: other "
                    f"ranks did not report a change within {_SECONDS:g} s",
                    hint="write the same values on every rank, not inside of `if rank == 0:`",
                )
            names = [name for theirs in self._replicas.gather_once(names) for name in theirs]
        if names:
            raise BuildError(
                f"'{names[0]}' no longer matches its main copy: it was modified in place since the last step, and the "
                f"next step of {self._runtime} would overwrite it",
                hint="state = engine.state_dict(), change it there, and engine.load_state_dict(state)",
            )
        return written

    # -- what differs from runtime to runtime -------------------------------------------------------------------

    def stamps(self) -> list[Any]:
        """Return one value for each parameter, which changes with every in-place write."""
        return write_counts(self._tensors)

    def steps_frozen(self, live: LiveTensor) -> bool:
        """Return whether the runtime still steps a frozen parameter."""
        return self._storage.working(live) is not None

    def _other_trained(self, live: LiveTensor, trained: bool) -> BuildError:
        if trained:
            return BuildError(
                f"'{live.name}' was frozen after build(): {self._runtime} would still step it, with zero gradients",
                hint=REBUILD,
            )
        return BuildError(
            f"'{live.name}' was unfrozen after build(): {self._runtime} has no optimizer state for it and would not "
            "step it",
            hint=REBUILD,
        )


_SECONDS = 300.0  # the timeout for ranks that reach a step later

_SHOWN = 5
_STEPS = 3


class UnusedParameters:
    """Warn of the first training step with parameters without a gradient.

    It ends after three steps without one: later steps do not pay for it.

    Args:
        context: of the build.
        runtime: its name, for the warning, e.g. ``"DeepSpeed"``.
        steps_with_zeros: whether it steps such parameters, with zero gradients; else there is no warning.
    """

    def __init__(self, context: BuildContext, runtime: str, *, steps_with_zeros: bool = True) -> None:
        self._runtime = runtime
        self._names: dict[int, str] = {}
        self._seen: set[int] = set()
        self._handles: list[Any] = []
        self._steps = 0
        if not steps_with_zeros:
            return
        for live in context.state.tensors():
            if live.is_parameter and live.is_local and live.tensor.requires_grad:
                self._names[id(live.tensor)] = live.reference_name
                self._handles.append(live.tensor.register_post_accumulate_grad_hook(self.seen))

    def seen(self, parameter: torch.Tensor) -> None:
        """Note a parameter with a gradient."""
        self._seen.add(id(parameter))

    def step_begins(self) -> None:
        """Forget the gradients of a failed step."""
        self._seen.clear()

    def step_is_over(self) -> None:
        """Warn if this step is the first with unused parameters."""
        self._steps += 1
        if not self._names.keys() <= self._seen:
            names = [name for key, name in self._names.items() if key not in self._seen]
            self.stop()
            which = "the first training step" if self._steps == 1 else f"training step {self._steps}"
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            warn_user(
                f"{which} gave {', '.join(map(repr, names[:_SHOWN]))}{more} no gradient: {self._runtime} steps unused "
                "parameters with zero gradients, so weight decay and momentum change them, unlike in torch; set "
                "requires_grad=False on unused parameters before build",
            )
        elif self._steps == _STEPS:
            self.stop()
        self._seen.clear()

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._names.clear()
