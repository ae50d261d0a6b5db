"""``observe``: run training steps under a watch, and compare them with what schedule and runtime expect."""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slapo_core.errors import ArgumentError, BuildError, SealedError
from slapo_core.internals import buffers_of
from slapo_core.observers import withheld
from slapo_runtime.batches import bound_batch, in_mode
from slapo_runtime.declared_ranks import on_declared_ranks
from slapo_runtime.losses import LossCall
from slapo_runtime.private import tree_leaves, tree_map_only
from slapo_runtime.ranks.consistency import restore, torch_states
from slapo_runtime.ranks.world import World
from slapo_runtime.receipts.engines import built_of
from slapo_runtime.receipts.observation import Kernel, Observation, RankObservation
from slapo_runtime.receipts.receipt import Expectation, expectations, receipt, unexplained
from slapo_runtime.receipts.watch import Watch, dtype_name

if TYPE_CHECKING:
    from slapo_core import Engine, Schedule
    from slapo_core.layout import Mesh
    from slapo_runtime.receipts.memory import MemoryTracker
    from slapo_runtime.schedule_copies import Sent


def observe(
    sch: Schedule | Engine,
    example_inputs: Any = None,
    *,
    steps: int = 1,
    keep: bool = False,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    timeout: float = 600.0,
) -> Observation:
    """Run training steps of a scheduled model or of an engine, and report what each step of the schedule did.

    Reported are the effects that steps and runtime promise and what was seen of them; for each step of the schedule its
    operations, collectives and bytes; types, peak memory and the time of a step. Every rank of the mesh calls it, and
    gets the same answer. Where the mesh is only declared, processes on this machine's CPU repeat the schedule.

    Of a schedule it runs forward and backward passes; gradients, buffers, modes and random number generators are put
    back. Of an engine it runs ``train_step``, and puts its state back by a checkpoint in a temporary directory, which
    all ranks must share. Steps before the observed ones (one, of an engine two), and one after them for the time, are
    not observed. Nothing stays in the model.

    Args:
        sch: the schedule, not sealed, or an engine of :func:`slapo_core.build`.
        example_inputs: one batch: a mapping (keyword arguments), a tuple or list (positional ones), or one argument.
            None takes the example inputs of the schedule.
        steps: the number of observed training steps.
        keep: whether the steps stay done: gradients, buffers and random numbers of a scheduled model; of an engine the
            updates. There is no further step before or after them.
        loss: of a schedule, ``loss(output, batch)``, a scalar tensor. Default: the loss of the output; without one, the
            sum of its differentiable tensors. An engine has its own.
        timeout: seconds for the processes of a declared mesh.

    Returns:
        the observation: print it for a table; ``missing`` lists the effects that were expected and not seen.

    Raises:
        ArgumentError: an argument is invalid, a batch is missing, or the output has nothing to differentiate.
        SealedError: the schedule was built or sealed.
        SerializationError: a step cannot be sent to the processes of a declared mesh.
        LaunchError: the model, the batch or the loss cannot be sent there.
        BuildError: an engine's state cannot be saved.
        ApplyError: a primitive raised where it was asked for its effects; it names the plugin.
        RankFailedError: a process raised, ended, or hung.
    """
    from slapo_core import Schedule

    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"steps must be a positive integer (got {steps!r})", hint="observe(sch, batch, steps=1)")
    if loss is not None and not callable(loss):
        raise ArgumentError(
            f"loss must be a function of output and batch (got {type(loss).__name__})",
            hint="observe(sch, batch, loss=compute_loss)",
        )
    if not isinstance(sch, Schedule):
        return _observe_engine(sch, example_inputs, steps=steps, keep=keep, loss=loss)
    batch = sch.example_inputs if example_inputs is None else example_inputs
    if batch is None:
        raise ArgumentError(
            "observe needs one batch: none was given, and the schedule has no example_inputs",
            hint="observe(sch, {'input_ids': ids}), observe(sch, (x,)), or create_schedule(..., example_inputs=...)",
        )
    if sch.is_sealed:
        raise SealedError(
            "observe cannot tell the steps of a sealed schedule apart: they were dropped",
            hint="observe(engine, batch) with the engine of build(); or observe(sch, batch) before seal()",
        )
    if sch.mesh is not None and sch.mesh.is_abstract:
        arguments = (_on_cpu(batch), {"steps": steps, "loss": loss})
        return on_declared_ranks(_observe_sent, [sch], *arguments, what="observe", timeout=timeout)[0]
    with _rng_put_back(not keep), _ModelState(sch.model).put_back(not keep):
        bound_batch(sch.model, batch, for_loss=loss is not None)
        training = _ModelTraining(sch, loss)
        return _observed(training, Watch(sch, with_memory=True), expectations(sch), batch, steps, keep=keep)


def _observe_sent(
    sent: Sequence[Sent], sizes: Mapping[str, int], batch: Any, options: Mapping[str, Any]
) -> Observation:
    return observe(sent[0].schedule(sizes), batch, **options)


def _observe_engine(engine: Any, batch: Any, *, steps: int, keep: bool, loss: Any) -> Observation:
    built = built_of(engine)
    if built is None:
        raise ArgumentError(
            f"observe takes a schedule, or an engine of build() (got {type(engine).__name__})",
            hint="observe(sch, batch), or observe(slapo.build(sch, ...), batch)",
        )
    if loss is not None:
        raise ArgumentError(
            "an engine computes its own loss (got loss=)", hint="build(sch, ..., loss=loss), and observe(engine, batch)"
        )
    batch = built.schedule.example_inputs if batch is None else batch
    if batch is None:
        raise ArgumentError(
            "observe needs one batch: none was given, and the schedule has no example_inputs",
            hint="observe(engine, batch) with a batch as train_step takes it",
        )
    watch = Watch(built.schedule, places=built.places, with_memory=True)
    training = _EngineTraining(engine, built.schedule)
    with _rng_put_back(not keep), training.put_back(not keep):
        return _observed(training, watch, built.expected, batch, steps, keep=keep)


def _observed(
    training: _ModelTraining | _EngineTraining,
    watch: Watch,
    expected: Sequence[Expectation],
    batch: Any,
    steps: int,
    *,
    keep: bool,
) -> Observation:
    """Run the steps, and merge the ranks: a collective."""
    schedule, seconds = training.schedule, None
    for number in range(0 if keep else training.steps_before):
        training.step(_fresh(batch), is_first=number == 0)
    with _kernels(training.device) as kernels, watch.watching() as record:
        memory = watch.memory
        position = watch.position
        assert memory is not None
        assert position is not None
        handles = training.hold(memory)
        try:
            for number in range(steps):
                own = _fresh(batch)
                record.steps += 1
                position.begin("forward")
                position.forget()
                memory.begin()
                training.hold_state(memory)
                memory.hold((leaf for leaf in tree_leaves(own) if isinstance(leaf, torch.Tensor)), "inputs")
                training.step(own, is_first=keep and number == 0)
        finally:
            for handle in handles:
                handle.remove()
    types = training.types()
    if not keep:
        own = _fresh(batch)
        started = time.perf_counter()
        training.step(own, is_first=False)
        _wait_for(training.device)
        seconds = time.perf_counter() - started
    findings = (
        *receipt(expected, record),
        *unexplained(record, expected, by_runtime=isinstance(training, _EngineTraining)),
    )
    rank = schedule.mesh.global_rank if schedule.mesh is not None else 0
    found = RankObservation(rank, findings, record, memory.peak, types, seconds, tuple(kernels))
    with World(schedule.mesh) as world:
        ranks = tuple(world.gather(found))
    return Observation(steps, {} if schedule.mesh is None else schedule.mesh.sizes, ranks)


class _Training:
    """Training steps of a model.

    Args:
        schedule: of the model.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self._model = schedule, schedule.model
        tensors = (*self._model.parameters(), *self._model.buffers())
        self.device = next((tensor.device for tensor in tensors if not tensor.is_meta), torch.device("cpu"))

    def hold(self, memory: MemoryTracker) -> list[Any]:
        """Count the model's tensors by their kinds, and return the handles of hooks that count its gradients."""
        memory.hold(self._model.parameters(), "parameters")
        memory.hold(self._model.buffers(), "buffers")
        return [
            parameter.register_post_accumulate_grad_hook(lambda each: memory.hold([each.grad], "gradients"))
            for parameter in self._model.parameters()
            if parameter.requires_grad
        ]

    def hold_state(self, memory: MemoryTracker) -> None:
        """Count what a step begins with."""
        memory.hold((parameter.grad for parameter in self._model.parameters()), "gradients")

    def types(self) -> dict[str, tuple[str, ...]]:
        """Return the types of stored tensors, after a step."""
        parameters = list(self._model.parameters())
        return _types_of({"parameters": parameters, "gradients": [each.grad for each in parameters]})


def _types_of(tensors: Mapping[str, Sequence[Any]]) -> dict[str, tuple[str, ...]]:
    found = {
        what: tuple(sorted({dtype_name(each.dtype) for each in several if isinstance(each, torch.Tensor)}))
        for what, several in tensors.items()
    }
    return {what: types for what, types in found.items() if types}


class _ModelTraining(_Training):
    """Forward and backward passes of a scheduled model, without an engine.

    Args:
        schedule: in force.
        loss: as for :func:`observe`.
    """

    steps_before = 1  # which checks the ranks

    def __init__(self, schedule: Schedule, loss: Callable[[Any, Any], torch.Tensor] | None) -> None:
        super().__init__(schedule)
        self._call, self._has_loss = LossCall(schedule.model, loss), loss is not None

    def step(self, batch: Any, *, is_first: bool) -> None:
        """Run forward and backward."""
        if not is_first:
            for parameter in self._model.parameters():
                parameter.grad = None
        with torch.inference_mode(False), torch.enable_grad():
            output = self._call.output(batch, self._model)
            values = [self._call.loss_of(output, batch)] if self._has_loss else _differentiable(output)
            if not any(value.requires_grad for value in values):
                raise ArgumentError(
                    f"the output of {type(self._model).__name__} has nothing to differentiate: no tensor requires a "
                    "gradient",
                    hint="observe(sch, batch, loss=compute_loss); parameters that are trained require a gradient",
                )
            torch.autograd.backward(values, [torch.ones_like(value) for value in values])


def _differentiable(output: Any) -> list[torch.Tensor]:
    """Return the loss of an output, or its tensors that require a gradient."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return [loss]
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and withheld(leaf) is None]
    return [leaf for leaf in leaves if leaf.requires_grad]


class _EngineTraining(_Training):
    """Training steps of an engine.

    Args:
        engine: built.
        schedule: of its model.
    """

    steps_before = 2  # which make the optimizer's state, and the buckets of replicas, of which the second is reported

    def __init__(self, engine: Any, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._engine = engine

    def step(self, batch: Any, *, is_first: bool) -> None:
        """Take a training step."""
        self._engine.train_step(batch)

    def hold_state(self, memory: MemoryTracker) -> None:
        super().hold_state(memory)
        main, state = self._kept()
        memory.hold((*main, *state), "optimizer")

    def types(self) -> dict[str, tuple[str, ...]]:
        main, state = self._kept()
        return {**super().types(), **_types_of({"main weights": main, "optimizer state": state})}

    def _kept(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the optimizer's own parameters, beside the model's, and its state."""
        optimizer = getattr(self._engine, "optimizer", None)
        own = {id(parameter) for parameter in self._model.parameters()}
        groups = getattr(optimizer, "param_groups", None) or ()
        main = [each for group in groups for each in group.get("params", ()) if id(each) not in own]
        state = getattr(optimizer, "state", None)
        values = tree_leaves(list(state.values())) if isinstance(state, Mapping) else []
        return main, [value for value in values if isinstance(value, torch.Tensor)]

    @contextlib.contextmanager
    def put_back(self, is_wanted: bool) -> Iterator[None]:
        """Load the engine's state of before after the block, from a checkpoint: a collective."""
        if not is_wanted:
            yield
            return
        mesh = self.schedule.mesh
        with _shared_directory(mesh) as directory:
            self._engine.save(directory)
            with World(mesh) as world, world.together("reading the saved state"):
                if not any(Path(directory).iterdir()):
                    raise BuildError(
                        f"observe saves the engine's state in '{directory}', which this rank does not share",
                        hint="set TMPDIR to a directory that all ranks share; or observe(engine, batch, keep=True)",
                    )
            buffers = _Buffers(self._model)
            try:
                yield
            finally:
                self._engine.load(directory)
                buffers.put_back()


@contextlib.contextmanager
def _shared_directory(mesh: Mesh | None) -> Iterator[str]:
    """Make a temporary directory on the first rank, and remove it once all have left."""
    with World(mesh) as world:
        is_first = world.index == 0
        directory = world.gather(tempfile.mkdtemp(prefix="slapo-observe-") if is_first else "")[0]
    try:
        yield directory
    finally:
        with World(mesh) as world:
            world.gather(None)
        if is_first:
            shutil.rmtree(directory, ignore_errors=True)


class _Buffers:
    """The buffers of a model and their values.

    Args:
        model: whose buffers are read.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables = [(buffers_of(module), dict(buffers_of(module))) for module in model.modules()]
        buffers = {id(each): each for _, table in self._tables for each in table.values() if each is not None}
        self._values = [(each, each.detach().clone()) for each in buffers.values() if not each.is_meta]

    def put_back(self) -> None:
        """Put them back."""
        with torch.no_grad():
            for buffer, value in self._values:
                if not _is_same(buffer, value):
                    buffer.copy_(value)
        for table, before in self._tables:
            table.clear()
            table.update(before)


def _is_same(buffer: torch.Tensor, value: torch.Tensor) -> bool:
    return buffer.shape == value.shape and bool((buffer == value).all())


class _ModelState:
    """What forward and backward passes change in a model.

    Args:
        model: scheduled.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._gradients = model, [(each, each.grad) for each in model.parameters()]

    @contextlib.contextmanager
    def put_back(self, is_wanted: bool) -> Iterator[None]:
        """Run the block in training mode, without gradients from before; put all back after it."""
        buffers = _Buffers(self._model) if is_wanted else None
        with in_mode(list(self._model.modules()), training=True):
            try:
                if is_wanted:
                    for parameter, _ in self._gradients:
                        parameter.grad = None
                yield
            finally:
                if buffers is not None:
                    buffers.put_back()
                    for parameter, gradient in self._gradients:
                        parameter.grad = gradient


@contextlib.contextmanager
def _rng_put_back(is_wanted: bool) -> Iterator[None]:
    """Restore the states of the generators of torch, Python and NumPy after the block."""
    numpy_random: Any = getattr(sys.modules.get("numpy"), "random", None)
    of_torch, of_python = torch_states(), random.getstate()
    of_numpy = numpy_random.get_state() if numpy_random is not None else None
    try:
        yield
    finally:
        if is_wanted:
            restore(of_torch)
            random.setstate(of_python)
            if of_numpy is not None:
                numpy_random.set_state(of_numpy)


@contextlib.contextmanager
def _kernels(device: torch.device) -> Iterator[list[Kernel]]:
    """List the kernels of CUDA that run in the block, once it has ended; none on a CPU."""
    found: list[Kernel] = []
    if device.type != "cuda":
        yield found
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield found
        _wait_for(device)
    found += [
        Kernel(each.key, each.count, each.self_device_time_total / 1e6)
        for each in profiler.key_averages()
        if each.self_device_time_total > 0
    ]
    found.sort(key=lambda each: -each.seconds)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def _fresh(batch: Any) -> Any:
    """Copy the tensors of a batch, which a model may change."""
    batch = dict(batch) if isinstance(batch, Mapping) else batch  # transformers' BatchEncoding
    return tree_map_only(torch.Tensor, lambda leaf: leaf.detach().clone().requires_grad_(leaf.requires_grad), batch)


def _on_cpu(batch: Any) -> Any:
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    return tree_map_only(torch.Tensor, lambda leaf: leaf.detach().cpu().requires_grad_(leaf.requires_grad), batch)
