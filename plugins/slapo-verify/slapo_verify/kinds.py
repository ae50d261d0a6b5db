"""The kinds of values that a verification compares, and the phases that produce them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OWN_TYPES = "own types"
"""The phase in the model's own floating-point types, wherever the others run in finer ones."""

Of = Literal["outputs", "parameters", "buffers", "inputs", "draws", "ranks"]


@dataclass(frozen=True)
class Kind:
    """One kind of value.

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
    Kind("output", "training", "outputs", "{name}", "outputs, training mode"),
    Kind("buffer", "training", "buffers", f"buffer {{name}} {_TRAINED}", f"buffers {_TRAINED}"),
    Kind("gradient", "training", "parameters", "gradient of {name}", "gradients of parameters"),
    Kind("dropout", "training", "draws", "dropout of {name}"),
    Kind("evaluation output", "evaluation", "outputs", f"{{name}} {_EVALUATED}", "outputs, evaluation mode"),
    Kind("evaluation dropout", "evaluation", "draws", f"dropout of {{name}} {_EVALUATED}"),
    Kind(
        "evaluation buffer",
        "evaluation",
        "buffers",
        "buffer {name} after a forward in evaluation mode",
        "buffers after evaluation",
    ),
    Kind("batch output", "batches", "outputs", "{name}", "outputs, further batches"),
    Kind(
        "batch gradient",
        "batches",
        "parameters",
        "gradient of {name} for further batches",
        "gradients, further batches",
    ),
    Kind("input gradient", "inputs", "inputs", "gradient of input {name}", "gradients of inputs"),
    Kind("parameter", "updates", "parameters", "parameter {name} {after}", f"parameters {_UPDATED}"),
    Kind("updated output", "updates", "outputs", f"{{name}} {_EVALUATED} {{after}}", f"outputs {_UPDATED}"),
    Kind("updated buffer", "updates", "buffers", "buffer {name} {after}", f"buffers {_UPDATED}"),
    Kind("recomputed dropout", "dropout", "draws", "recomputed dropout of {name}"),
    Kind("diverged dropout", "dropout", "ranks", "shared dropout of {name}"),
    Kind("output with dropout", "dropout", "outputs", "{name} with dropout", "outputs with dropout"),
    Kind("gradient with dropout", "dropout", "parameters", "gradient of {name} with dropout", "gradients with dropout"),
    Kind("own output", OWN_TYPES, "outputs", f"{{name}} {_OWN}", "outputs, own types"),
    Kind("own buffer", OWN_TYPES, "buffers", f"buffer {{name}} {_TRAINED} {_OWN}", "buffers, own types"),
    Kind("own gradient", OWN_TYPES, "parameters", f"gradient of {{name}} {_OWN}", "gradients, own types"),
    Kind(
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
    """Return the phase of a kind, and those that must agree before its difference counts as the first."""
    phase = KINDS[kind].phase
    return ON_ONE_COPY[: ON_ONE_COPY.index(phase) + 1] if phase in ON_ONE_COPY else (EARLY[0], phase)


def label(kind: str, name: str, steps: int) -> str:
    """Format ``"gradient of fc.weight"``, ``"parameter fc.weight after 3 optimizer steps"``."""
    after_steps = f"after {steps} optimizer step{'s' if steps != 1 else ''}"
    if KINDS[kind].of in ("draws", "ranks"):
        name = name or "the model"
    return KINDS[kind].label.format(name=name, after=after_steps)
