"""List the kinds of values that a verification compares, and their phases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OWN_TYPES = "own types"
"""The phase in the model's own floating-point types, wherever the others run in finer ones."""

Of = Literal["outputs", "parameters", "buffers", "inputs", "draws", "ranks"]


@dataclass(frozen=True)
class ValueKind:
    """Describe one kind of value.

    Args:
        name: e.g. ``"gradient"``; of the model's own types ``"own gradient"``.
        phase: that it comes from.
        of: the owner of its values, by which they are paired.
        label: of one value, with ``{name}`` and ``{after}``.
        title: of its line in a report; "" for none.
    """

    name: str
    phase: str
    of: Of
    label: str
    title: str = ""


_OWN = "in the model's own types"
_EVALUATED, _FORWARD, _BATCHES = "in evaluation mode", "after a forward in evaluation mode", "further batches"
_OWN_EVALUATED = "outputs, evaluation mode, own types"
_TRAINED, _UPDATED = "after a training step", "after the optimizer steps"

_TABLE = (
    ValueKind("output", "training", "outputs", "{name}", "outputs, training mode"),
    ValueKind("buffer", "training", "buffers", f"buffer {{name}} {_TRAINED}", f"buffers {_TRAINED}"),
    ValueKind("gradient", "training", "parameters", "gradient of {name}", "gradients of parameters"),
    ValueKind("dropout", "training", "draws", "dropout of {name}"),
    ValueKind("evaluation output", "evaluation", "outputs", f"{{name}} {_EVALUATED}", "outputs, evaluation mode"),
    ValueKind("evaluation dropout", "evaluation", "draws", f"dropout of {{name}} {_EVALUATED}"),
    ValueKind(
        "evaluation buffer",
        "evaluation",
        "buffers",
        "buffer {name} after a forward in evaluation mode",
        "buffers after evaluation",
    ),
    ValueKind("batch output", "batches", "outputs", "{name}", "outputs, further batches"),
    ValueKind(
        "batch gradient",
        "batches",
        "parameters",
        "gradient of {name} for further batches",
        "gradients, further batches",
    ),
    ValueKind("input gradient", "inputs", "inputs", "gradient of input {name}", "gradients of inputs"),
    ValueKind("parameter", "updates", "parameters", "parameter {name} {after}", f"parameters {_UPDATED}"),
    ValueKind("updated output", "updates", "outputs", f"{{name}} {_EVALUATED} {{after}}", f"outputs {_UPDATED}"),
    ValueKind("updated buffer", "updates", "buffers", "buffer {name} {after}", f"buffers {_UPDATED}"),
    ValueKind("recomputed dropout", "dropout", "draws", "recomputed dropout of {name}"),
    ValueKind("diverged dropout", "dropout", "ranks", "shared dropout of {name}"),
    ValueKind("output with dropout", "dropout", "outputs", "{name} with dropout", "outputs with dropout"),
    ValueKind(
        "gradient with dropout", "dropout", "parameters", "gradient of {name} with dropout", "gradients with dropout"
    ),
    ValueKind("own output", OWN_TYPES, "outputs", f"{{name}} {_OWN}", "outputs, own types"),
    ValueKind("own buffer", OWN_TYPES, "buffers", f"buffer {{name}} {_TRAINED} {_OWN}", "buffers, own types"),
    ValueKind("own gradient", OWN_TYPES, "parameters", f"gradient of {{name}} {_OWN}", "gradients, own types"),
    ValueKind(
        "own evaluation output",
        OWN_TYPES,
        "outputs",
        f"{{name}} in evaluation mode {_OWN}",
        "outputs, evaluation mode, own types",
    ),
)

KINDS = {kind.name: kind for kind in _TABLE}
"""By name, in the order in which a difference is looked for: later ones are consequences."""

ORDER = list(KINDS)

EARLY = ("training", "evaluation")
"""The phases that every model can run."""

ON_ONE_COPY = (*EARLY, "updates")
"""Each continues with the copy of the one before: state that a call keeps shows in the next ones. The first update
follows the gradients of training. All other phases have a fresh copy each."""


def phases_for(kind: str) -> tuple[str, ...]:
    """Return the phases needed to decide about a kind."""
    phase = KINDS[kind].phase
    return ON_ONE_COPY[: ON_ONE_COPY.index(phase) + 1] if phase in ON_ONE_COPY else (EARLY[0], phase)


def label(kind: str, name: str, steps: int) -> str:
    """Format ``"gradient of fc.weight"``, ``"parameter fc.weight after 3 optimizer steps"``."""
    after_steps = f"after {steps} optimizer step{'s' if steps != 1 else ''}"
    if KINDS[kind].of in ("draws", "ranks"):
        name = name or "the model"
    return KINDS[kind].label.format(name=name, after=after_steps)
