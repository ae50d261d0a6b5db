"""Run a model under fixed conditions, phase by phase; keep all compared numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slapo_core.layout import fork_rng
from slapo_core.observers import withheld
from slapo_runtime.float32 import float32_products
from slapo_runtime.ranks.trial_groups import naming_module
from slapo_verify.dropout import DropoutMode
from slapo_verify.inputs import Batch, Batches, Inputs
from slapo_verify.kinds import EARLY, OWN_TYPES
from slapo_verify.precision import Choice, ChoosesAlike, is_inexact, own_dtype, plain
from slapo_verify.private import pytree, run_backward


def output_leaves(output: Any, name: str = "output") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of an output: ``output``, ``output[0]``, ``output.logits``, ``output['mask']``.

    Registered pytrees are entered, and so are other mappings, sequences, dataclasses and nested tensors.
    """
    children = _children(output)
    if children is None:
        yield name, output
        return
    for key, child in children:
        yield from output_leaves(child, name + pytree.keystr((key,)))


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return one level, with pytree's own keys; None for a leaf."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return list(_numbered(value.unbind()))
    if isinstance(value, Mapping):
        attributes = type(value) is not dict  # transformers' ModelOutput and its like
        return [(_attribute(key) if attributes else pytree.MappingKey(key), child) for key, child in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(_attribute(field.name), getattr(value, field.name)) for field in dataclasses.fields(value)]
    if value is None or pytree.tree_is_leaf(value):
        return list(_numbered(value)) if isinstance(value, (list, tuple)) else None
    try:
        level, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda child: child is not value)
    except ValueError:  # registered without keys
        children, _ = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
        return list(_numbered(children))
    return [(path[0], child) for path, child in level]


def _numbered(children: Any) -> Iterator[tuple[Any, Any]]:
    return ((pytree.SequenceKey(position), child) for position, child in enumerate(children))


def _attribute(key: Any) -> Any:
    return pytree.GetAttrKey(key) if isinstance(key, str) and key.isidentifier() else pytree.MappingKey(key)


@contextlib.contextmanager
def fixed_conditions(seed: int, dropout: DropoutMode | None = None) -> Iterator[None]:
    """Run the block reproducibly; restore every random number generator.

    Float32 products are computed in full precision: TF32 and the like differ by more than the tolerance of float32.
    Backward runs in the calling thread, where the mode that switches dropout off holds, so that a forward that
    activation checkpointing recomputes is computed like the first time.

    Args:
        seed: for torch's, Python's and, where it is imported, numpy's global generator.
        dropout: switches dropout and records it; None: off.
    """
    python_state = random.getstate()
    numpy_random: Any = sys.modules.get("numpy.random")
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    try:
        in_one_thread = torch.autograd.set_multithreading_enabled
        with fork_rng(), float32_products(), in_one_thread(False), dropout or DropoutMode():
            torch.clear_autocast_cache()  # under the caller's autocast: weights that an optimizer step has changed
            torch.manual_seed(seed)
            random.seed(seed)
            if numpy_random is not None:
                numpy_random.seed(seed)
            yield
    finally:
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)


_PATTERN = 65_537  # elements of a cotangent, then repeated: a prime, so that no axis of a tensor falls in step with it


class Caller:
    """Call a model, here without stages.

    Args:
        model: a private copy.

    Attributes:
        modules: that may run, with their paths.
        paths: id of a module -> its path; more may come with a call.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: list[tuple[str, nn.Module]] = []
        self.paths: dict[int, str] = {}
        self.add(model)

    def add(self, model: nn.Module) -> None:
        """Add the modules of another copy."""
        self.modules += model.named_modules()
        self.paths.update((id(module), path) for path, module in model.named_modules())

    def __call__(self, batch: Batch) -> Callable[[], Any]:
        """Prepare a batch outside of the fixed conditions; return the model's call."""
        return lambda: self.model(*batch.args, **batch.kwargs)


@dataclass(frozen=True)
class Conditions:
    """Describe the conditions that make two runs comparable.

    Args:
        dtype: the type that floating-point inputs are converted to; None leaves them.
        seed: of every random number generator, set before each forward.
        optimizer_steps: the number of updates.
        learning_rate: of the optimizer steps.
        adapt_output: makes of a rank's output the one that the reference model gives.
        more_batches: further ones, each with what to call it, e.g. ``"a batch of 4"``.
        caller: makes of a model what calls it.
        choices: of the reference model in a finer type, which both models follow in their own.
        withheld: names of outputs that the scheduled model does not give in training: of no model are they
            differentiated there, unless nothing else is.
    """

    dtype: torch.dtype | None
    seed: int
    optimizer_steps: int
    learning_rate: float = 0.0
    adapt_output: Callable[[Any], Any] = lambda output: output
    more_batches: Batches = ()
    caller: Callable[[nn.Module], Caller] = Caller
    choices: tuple[Choice, ...] = ()
    withheld: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Withheld:
    """Stand for an output that a step withholds.

    Args:
        why: in words.
    """

    why: str


def _cotangent(leaf: torch.Tensor, position: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 7919 + position)  # on the CPU: the same on every device
    dtype = torch.complex128 if leaf.is_complex() else torch.float64
    pattern = torch.randn(min(leaf.numel(), _PATTERN), generator=generator, dtype=dtype)
    pattern = pattern.to(device=leaf.device, dtype=leaf.dtype)
    if leaf.numel() > _PATTERN:
        pattern = pattern.repeat(-(-leaf.numel() // _PATTERN))[: leaf.numel()]
    return pattern.view(leaf.shape)


def _detached(items: Any) -> dict[str, Any]:
    """Copy the tensors among named values."""
    return {name: _copied(item) for name, item in items}


def _copied(item: Any) -> Any:
    if (why := withheld(item)) is not None:
        return Withheld(why)
    return _dense(item) if isinstance(item, torch.Tensor) else item


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that is not sparse."""
    return _strided(tensor.detach()).clone()


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; of a sparse or composite one a plain tensor."""
    return plain(tensor.to_dense() if tensor.is_sparse else tensor)


MOMENTUM = 0.9


@dataclass
class Observation:
    """Keep the values of a run: kind -> name -> value; None: no gradient.

    Args:
        values: these.
        notes: of steps on what they did not do in training with the given batch.
    """

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def of(self, kind: str) -> dict[str, Any]:
        return self.values.get(kind, {})


class Runner:
    """Run one private copy of a model through phases, which change it.

    Args:
        model: the copy; submodules that are in evaluation mode within a model in training mode stay so.
        inputs: one batch, copied for every forward.
        conditions: the same for both models.

    Attributes:
        watch: makes of modules with their paths a block in which the training phase runs; None: nothing watches.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, conditions: Conditions) -> None:
        self.model, self.inputs, self.conditions = model, inputs, conditions
        self.caller = conditions.caller(model)
        self.watch: Callable[[Sequence[tuple[str, nn.Module]]], AbstractContextManager[Any]] | None = None
        self._has_gradients, self._notes = False, list[str]()
        kept = model.training  # a model in evaluation mode has no training mode of its own to keep
        self._modes = [(module, module.training or not kept) for module in model.modules()]
        model.zero_grad(set_to_none=True)

    def run(self, phases: Sequence[str]) -> Observation:
        """Run ``phases`` and return their values."""
        seen = Observation(notes=self._notes)
        for phase in phases:
            for module, trains in self._modes:
                module.training = trains
            with naming_module(self.caller.paths):
                seen.values.update(_PHASES[phase](self))
        return seen

    def make_ready(self) -> None:
        """Prepare the first forward in this mode, e.g. the stages."""
        self.caller(self.inputs.batch(self.conditions.dtype))

    def evaluate(self) -> None:
        """Switch to evaluation mode."""
        for module in self.model.modules():
            module.training = False

    # -- phases -----------------------------------------------------------------------------------------------

    def _training(self) -> dict[str, Any]:
        dropout = DropoutMode(self.caller.paths)
        output = self._forward_backward(dropout=dropout, watch=self.watch)
        self._has_gradients, self._notes[:] = True, dropout.slapo_notes
        # After backward: recomputed activations may update buffers a second time.
        found = {"output": output, "buffer": self._buffers(), "gradient": self._gradients()}
        return {**found, "dropout": {"forward": dropout.draws}}

    def _evaluation(self) -> dict[str, Any]:
        dropout = DropoutMode(self.caller.paths)
        found = {"evaluation output": self._evaluated(dropout), "evaluation buffer": self._buffers()}
        return {**found, "evaluation dropout": {"forward": dropout.draws}}

    def _batches(self) -> dict[str, Any]:
        outputs: dict[str, Any] = {}
        for called, batch in self.conditions.more_batches:
            ran = self._forward_backward(batch)
            outputs.update({f"{name} for {called}": value for name, value in ran.items()})
        return {"batch output": outputs, "batch gradient": self._gradients()}

    def _input_gradients(self) -> dict[str, Any]:
        batch = self.inputs.batch(self.conditions.dtype, watch=True)
        self._forward_backward(batch)
        self.model.zero_grad(set_to_none=True)
        gradients = {name: tensor.grad for name, tensor in batch.watched.items()}
        return {"input gradient": {name: None if each is None else _dense(each) for name, each in gradients.items()}}

    def _updates(self) -> dict[str, Any]:
        if not self._has_gradients:
            self._forward_backward()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=self.conditions.learning_rate, momentum=MOMENTUM, foreach=False)
        for step in range(self.conditions.optimizer_steps):
            if step:
                optimizer.zero_grad(set_to_none=True)
                self._forward_backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._has_gradients = False
        optimizer.state.clear()
        found = {"updated output": self._evaluated(), "updated buffer": self._buffers()}
        parameters = self.model.named_parameters(remove_duplicate=False)
        return {**found, "parameter": {name: plain(parameter.detach()) for name, parameter in parameters}}

    def _with_dropout(self) -> dict[str, Any]:
        dropout = DropoutMode(self.caller.paths, is_on=True)
        output = self._forward_backward(dropout=dropout)
        drawn = set(dropout.draws)
        # A region of a graph that backward runs again is called by no module.
        drawn |= {dataclasses.replace(draw, path="") for draw in drawn}
        return {
            "output with dropout": output,
            "recomputed dropout": {draw.path: draw for draw in dropout.recomputed if draw not in drawn},
            "gradient with dropout": self._gradients(),
            "drawn with dropout": {"forward": dropout.draws},
        }

    def _own_types(self) -> dict[str, Any]:
        conditions = dataclasses.replace(self.conditions, dtype=None)
        dtype = own_dtype(self.model, (tensor for _, tensor in self.inputs.tensors()))
        runner = Runner(self.model, self.inputs, conditions)
        runner.make_ready()
        with ChoosesAlike(conditions.choices, dtype) if conditions.choices else contextlib.nullcontext():
            own = runner.run(EARLY[:1])
            runner.caller = Caller(self.model)  # of a cut model the stages of training are enough
            own.values.update(runner.run(EARLY[1:]).values)
        return {f"own {kind}": own.of(kind) for kind in ("output", "buffer", "gradient", "evaluation output")}

    # -- passes -----------------------------------------------------------------------------------------------

    def _evaluated(self, dropout: DropoutMode | None = None) -> dict[str, Any]:
        """Return the output in evaluation mode, in which the model stays."""
        self.evaluate()
        run = self.caller(self.inputs.batch(self.conditions.dtype))
        with fixed_conditions(self.conditions.seed, dropout), torch.no_grad():
            output = self.conditions.adapt_output(run())
        return _detached(output_leaves(output))

    def _forward_backward(
        self,
        inputs: Inputs | Batch | None = None,
        *,
        dropout: DropoutMode | None = None,
        watch: Callable[[Sequence[tuple[str, nn.Module]]], AbstractContextManager[Any]] | None = None,
    ) -> dict[str, Any]:
        """Run forward and backward with fixed random cotangents; return the output.

        The gradients are added to the parameters'.
        """
        seed, inputs, dropout = self.conditions.seed, inputs or self.inputs, dropout or DropoutMode()
        run = self.caller(inputs if isinstance(inputs, Batch) else inputs.batch(self.conditions.dtype))
        watched = contextlib.nullcontext() if watch is None else watch(self.caller.modules)
        with fixed_conditions(seed, dropout), watched:
            output = self.conditions.adapt_output(run())
            dropout.in_backward = True
            leaves = list(output_leaves(output))
            seen = _detached(leaves)
            roots = {
                position: leaf
                for position, (_, leaf) in enumerate(leaves)
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            }
            skipped = self.conditions.withheld
            given = {position: leaf for position, leaf in roots.items() if leaves[position][0] not in skipped}
            roots = given or roots
            if roots:
                cotangents = (_cotangent(leaf, position, seed) for position, leaf in roots.items())
                # torch.autograd.backward is a torch function, within which no torch-function mode is active: recomputed
                # activations would run without the mode that switches dropout off.
                run_backward(tuple(roots.values()), tuple(cotangents))
        return seen

    def _buffers(self) -> dict[str, Any]:
        return _detached(self.model.named_buffers(remove_duplicate=False))

    def _gradients(self) -> dict[str, Any]:
        """Return the gradients of all parameters, detached from later passes."""
        return {
            name: None if parameter.grad is None else _strided(parameter.grad)
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
        }


_PHASES: dict[str, Callable[[Runner], dict[str, Any]]] = {
    "training": Runner._training,
    "evaluation": Runner._evaluation,
    "batches": Runner._batches,
    "inputs": Runner._input_gradients,
    "updates": Runner._updates,
    "dropout": Runner._with_dropout,
    OWN_TYPES: Runner._own_types,
}


def step_size(model: nn.Module, seen: Observation) -> float:
    """Return a learning rate that moves the weights by about one percent."""
    length = _length(grad for grad in seen.of("gradient").values() if grad is not None)
    weights = _length(plain(parameter.detach()) for parameter in model.parameters())
    rate = 0.01 * (weights or 1.0) / length if length else 0.0
    return rate if math.isfinite(rate) else 0.0


def _length(tensors: Iterable[torch.Tensor]) -> float:
    numbers = (tensor for tensor in tensors if is_inexact(tensor) and tensor.numel())
    return math.sqrt(sum(float(torch.linalg.vector_norm(tensor).double()) ** 2 for tensor in numbers))
