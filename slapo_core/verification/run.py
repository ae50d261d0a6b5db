"""Run a model under fixed conditions and keep every number that is compared."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slapo_core.verification.dropout import DropoutMode
from slapo_core.verification.inputs import Batch, Inputs
from slapo_core.verification.passes import Caller, Conditions, dense, detached, evaluated, forward_backward, strided
from slapo_core.verification.precision import ChoosesAlike, is_inexact, own_dtype

__all__ = [
    "EARLY",
    "KINDS",
    "ON_ONE_COPY",
    "OWN_TYPES",
    "STAGES",
    "STAGE_OF_KIND",
    "Course",
    "Observation",
    "run_stages",
    "step_size",
]

OWN_TYPES = "own types"
"""The stage in the model's own floating-point types, wherever the others run in finer ones; its kinds are called
``"own ..."``."""

STAGE_OF_KIND = {
    "output": "training",
    "buffer": "training",
    "gradient": "training",
    "dropout": "training",
    "evaluation output": "evaluation",
    "evaluation dropout": "evaluation",
    "evaluation buffer": "evaluation",
    "batch output": "batches",
    "batch gradient": "batches",
    "input gradient": "inputs",
    "parameter": "updates",
    "updated output": "updates",
    "updated buffer": "updates",
    "recomputed dropout": "dropout",
    "parted dropout": "dropout",
    "output with dropout": "dropout",
    "gradient with dropout": "dropout",
    "own output": OWN_TYPES,
    "own buffer": OWN_TYPES,
    "own gradient": OWN_TYPES,
    "own evaluation output": OWN_TYPES,
}
"""What is compared, in the order in which a difference is looked for, and the stage that it comes from."""

KINDS = tuple(STAGE_OF_KIND)

STAGES = tuple(dict.fromkeys(STAGE_OF_KIND.values()))
"""Each on a fresh copy, but for those of :data:`ON_ONE_COPY`."""

EARLY = STAGES[:2]
"""The stages that every model can run."""

ON_ONE_COPY = (*EARLY, "updates")
"""Each goes on with the copy that the one before left: what a call keeps shows in the next ones. The first update
follows the gradients of training."""

MOMENTUM = 0.9


@dataclass
class Observation:
    """Everything seen in a run: kind -> name -> value. None stands for "no gradient"."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def of(self, kind: str) -> dict[str, Any]:
        return self.values.get(kind, {})


class Course:
    """One copy of a model on its way through stages, which change it: nobody else uses it.

    Args:
        model: the copy; submodules that are in evaluation mode within a model in training mode stay so.
        inputs: one batch, copied anew for every forward.
        conditions: the same for both models.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, conditions: Conditions) -> None:
        self.model, self.inputs, self.conditions = model, inputs, conditions
        self.caller = conditions.caller(model)
        self.has_gradients = False
        self._modes = _training_modes(model)
        model.zero_grad(set_to_none=True)

    def run(self, stages: Sequence[str]) -> Observation:
        """What ``stages`` give. Of tensors that are done with then, the observation holds the model's own."""
        seen = Observation()
        for stage in stages:
            self.train()
            _STAGE_FUNCTIONS[stage](self, seen)
        return seen

    def train(self) -> None:
        """Into training mode, as far as the modules were meant to be."""
        for module, trains in self._modes:
            module.training = trains

    def forward_backward(
        self, inputs: Inputs | Batch | None = None, *, dropout: DropoutMode | None = None
    ) -> dict[str, Any]:
        """The output; the gradients are added to the parameters'."""
        return forward_backward(self.caller, inputs or self.inputs, self.conditions, dropout)

    def make_ready(self) -> None:
        """Make what is made before the first forward in this mode, such as the stages of a cut model."""
        self.caller(self.inputs.batch(self.conditions.dtype))

    def evaluate(self) -> None:
        """Into evaluation mode."""
        for module in self.model.modules():
            module.training = False

    def evaluated(self, dropout: DropoutMode | None = None) -> dict[str, Any]:
        """The output in evaluation mode, in which the model is left."""
        self.evaluate()
        return evaluated(self.caller, self.inputs, self.conditions, dropout)


def run_stages(model: nn.Module, inputs: Inputs, conditions: Conditions, stages: Sequence[str]) -> Observation:
    """What ``stages`` of a :class:`Course` give."""
    return Course(model, inputs, conditions).run(stages)


def step_size(model: nn.Module, seen: Observation) -> float:
    """A learning rate whose first step moves the weights by about one percent; 0 if there is nothing to follow."""
    length = _length(grad for grad in seen.of("gradient").values() if grad is not None)
    weights = _length(parameter.detach() for parameter in model.parameters())
    rate = 0.01 * (weights or 1.0) / length if length else 0.0
    return rate if math.isfinite(rate) else 0.0


def _training_modes(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    kept = model.training  # a model that is in evaluation mode as a whole has no training mode of its own to keep
    return [(module, module.training or not kept) for module in model.modules()]


def _length(tensors: Iterable[torch.Tensor]) -> float:
    numbers = (tensor for tensor in tensors if is_inexact(tensor) and tensor.numel())
    return math.sqrt(sum(float(torch.linalg.vector_norm(tensor).double()) ** 2 for tensor in numbers))


def _training(course: Course, seen: Observation) -> None:
    model = course.model
    dropout = DropoutMode(course.caller.paths)
    seen.values["output"] = course.forward_backward(dropout=dropout)
    # After backward: recomputed activations may update buffers a second time.
    seen.values["buffer"] = detached(model.named_buffers(remove_duplicate=False))
    seen.values["gradient"] = _gradients(model)
    seen.values["dropout"] = {"forward": dropout.draws}
    course.has_gradients = True


def _evaluation(course: Course, seen: Observation) -> None:
    model = course.model
    dropout = DropoutMode(course.caller.paths)
    seen.values["evaluation output"] = course.evaluated(dropout)
    seen.values["evaluation buffer"] = detached(model.named_buffers(remove_duplicate=False))
    seen.values["evaluation dropout"] = {"forward": dropout.draws}


def _batches(course: Course, seen: Observation) -> None:
    outputs: dict[str, Any] = {}
    for called, batch in course.conditions.more_batches:
        ran = course.forward_backward(batch)
        outputs.update({f"{name} for {called}": value for name, value in ran.items()})
    seen.values["batch output"] = outputs
    seen.values["batch gradient"] = _gradients(course.model)


def _input_gradients(course: Course, seen: Observation) -> None:
    batch = course.inputs.batch(course.conditions.dtype, watch=True)
    course.forward_backward(batch)
    course.model.zero_grad(set_to_none=True)
    seen.values["input gradient"] = {
        name: None if tensor.grad is None else dense(tensor.grad) for name, tensor in batch.watched.items()
    }


def _updates(course: Course, seen: Observation) -> None:
    model, conditions = course.model, course.conditions
    if not course.has_gradients:
        course.forward_backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=conditions.learning_rate, momentum=MOMENTUM, foreach=False)
    for step in range(conditions.optimizer_steps):
        if step:
            optimizer.zero_grad(set_to_none=True)
            course.forward_backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    course.has_gradients = False
    optimizer.state.clear()
    seen.values["updated output"] = course.evaluated()
    seen.values["updated buffer"] = detached(model.named_buffers(remove_duplicate=False))
    parameters = model.named_parameters(remove_duplicate=False)
    seen.values["parameter"] = {name: parameter.detach() for name, parameter in parameters}


def _with_dropout(course: Course, seen: Observation) -> None:
    dropout = DropoutMode(course.caller.paths, is_on=True)
    seen.values["output with dropout"] = course.forward_backward(dropout=dropout)
    drawn = set(dropout.draws)
    # A region of a graph that backward runs again is called by no module.
    nameless = {dataclasses.replace(draw, path="") for draw in drawn}
    seen.values["recomputed dropout"] = {
        draw.path: draw for draw in dropout.recomputed if draw not in drawn and draw not in nameless
    }
    seen.values["gradient with dropout"] = _gradients(course.model)
    seen.values["drawn with dropout"] = {"forward": dropout.draws}


def _own_types(course: Course, seen: Observation) -> None:
    conditions = dataclasses.replace(course.conditions, dtype=None)
    dtype = own_dtype(course.model, (tensor for _, tensor in course.inputs.tensors()))
    own_course = Course(course.model, course.inputs, conditions)
    own_course.make_ready()
    with ChoosesAlike(conditions.choices, dtype) if conditions.choices else contextlib.nullcontext():
        own = own_course.run(EARLY[:1])
        own_course.caller = Caller(course.model)  # of a cut model the stages of training are enough
        own.values.update(own_course.run(EARLY[1:]).values)
    for kind in ("output", "buffer", "gradient", "evaluation output"):
        seen.values[f"own {kind}"] = own.of(kind)


_STAGE_FUNCTIONS: dict[str, Callable[[Course, Observation], None]] = {
    "training": _training,
    "evaluation": _evaluation,
    "batches": _batches,
    "inputs": _input_gradients,
    "updates": _updates,
    "dropout": _with_dropout,
    OWN_TYPES: _own_types,
}


def _gradients(model: nn.Module) -> dict[str, Any]:
    """Those of all parameters: the tensors themselves, which the next backward does not add to."""
    return {
        name: None if parameter.grad is None else strided(parameter.grad)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
