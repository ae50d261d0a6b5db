"""Compare what two runs gave, tensor by tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slapo_core.spec.equivalence import Equivalence
from slapo_core.verification.counterparts import Counterparts
from slapo_core.verification.draws import DrawnAlike, compare_draws
from slapo_core.verification.run import KINDS, Observation
from slapo_core.verification.tolerance import Tolerance
from slapo_core.verification.values import Difference, differ, is_close_in_norm, largest

__all__ = ["Comparison", "Largest", "compare", "drawn_alike", "label"]

_OF_PARAMETERS = ("gradient", "parameter", "batch gradient", "gradient with dropout", "own gradient")
_OF_OUTPUTS = (
    "output",
    "evaluation output",
    "batch output",
    "updated output",
    "output with dropout",
    "own output",
    "own evaluation output",
)
_OF_DRAWS = ("dropout", "evaluation dropout", "recomputed dropout")


@dataclass(frozen=True)
class Largest:
    """The largest difference seen in one kind, and how close it came to what is allowed.

    Args:
        kind: what was compared, e.g. ``"gradient"``.
        compared: how many tensors of that kind.
        difference: the largest absolute difference between two elements.
        allowed: what was allowed for that tensor.
        name: of that tensor, e.g. ``"fc.weight"``.
    """

    kind: str
    compared: int
    difference: float = 0.0
    allowed: float = 0.0
    name: str = ""

    @property
    def fraction(self) -> float:
        """The difference as a share of what is allowed, at most 1 in a report."""
        return self.difference / self.allowed if self.allowed else (math.inf if self.difference else 0.0)


@dataclass
class Comparison:
    """Everything that a rank found: differences in the order of search, the first one to be blamed first."""

    differences: list[Difference] = field(default_factory=list)
    largest: dict[str, Largest] = field(default_factory=dict)
    not_compared: list[str] = field(default_factory=list)

    def add(self, later: Comparison) -> None:
        """Take in what was found of other kinds, in whatever order they come."""
        self.differences = sorted([*self.differences, *later.differences], key=lambda found: KINDS.index(found.kind))
        seen = self.largest | later.largest
        self.largest = {kind: seen[kind] for kind in KINDS if kind in seen}
        self.not_compared += later.not_compared


def label(kind: str, name: str, steps: int) -> str:
    """``"gradient of fc.weight"``, ``"parameter fc.weight after 3 optimiser steps"``."""
    after_steps = f"after {steps} optimiser step{'s' if steps != 1 else ''}"
    return {
        "output": name,
        "buffer": f"buffer {name} after a training step",
        "gradient": f"gradient of {name}",
        "dropout": f"dropout of {name or 'the model'}",
        "evaluation output": f"{name} in evaluation mode",
        "evaluation dropout": f"dropout of {name or 'the model'} in evaluation mode",
        "evaluation buffer": f"buffer {name} after a forward in evaluation mode",
        "batch output": name,
        "batch gradient": f"gradient of {name} for further batches",
        "input gradient": f"gradient of input {name}",
        "parameter": f"parameter {name} {after_steps}",
        "updated output": f"{name} in evaluation mode {after_steps}",
        "updated buffer": f"buffer {name} {after_steps}",
        "recomputed dropout": f"recomputed dropout of {name or 'the model'}",
        "parted dropout": f"shared dropout of {name or 'the model'}",
        "output with dropout": f"{name} with dropout",
        "gradient with dropout": f"gradient of {name} with dropout",
        "own output": f"{name} in the model's own types",
        "own buffer": f"buffer {name} after a training step in the model's own types",
        "own gradient": f"gradient of {name} in the model's own types",
        "own evaluation output": f"{name} in evaluation mode in the model's own types",
    }[kind]


def compare(
    reference: Observation,
    candidate: Observation,
    counterparts: Counterparts,
    tolerance: Tolerance,
    finer: Mapping[tuple[str, str], Tolerance] | None = None,
) -> Comparison:
    """Hold this rank's ``candidate`` against the untouched model's ``reference``; kinds that one lacks are left out.

    ``finer`` holds, by kind and name in the untouched model, what is allowed less than ``tolerance``.

    Gradients are looked at in the order in which backward makes them, last layer first, so that the first difference
    is the one nearest to its cause.
    """
    result = Comparison()
    for kind in KINDS:
        if kind not in candidate.values or kind not in reference.values:
            continue
        if kind in _OF_DRAWS:
            result.differences += _drawn(kind, reference, candidate, counterparts, tolerance)
            continue
        expected = reference.of(kind)
        biggest = max((_largest(value) for value in expected.values()), default=0.0)
        pairs = _pairs(kind, expected, candidate.of(kind), counterparts, result)
        summary = Largest(kind, 0)
        for name, origin, before, after in pairs:
            if before is None and after is None and "gradient" in kind:
                continue
            rule = (finer or {}).get((kind, origin), tolerance)
            allowed = rule.allowed(kind, largest=_largest(before), largest_of_kind=biggest)
            if math.isinf(allowed) and kind.startswith("own "):
                result.not_compared.append(f"{label(kind, name, 0)}: it overflows in the untouched model")
                continue
            difference, apart = differ(kind, name, before, after, allowed)
            if difference is not None and is_close_in_norm(before, after, rule.of_norm):
                difference, apart = None, 0.0
            seen = Largest(kind, summary.compared + 1, apart, allowed, name)
            kept = Largest(kind, seen.compared, summary.difference, summary.allowed, summary.name)
            summary = seen if seen.fraction > kept.fraction or not kept.name else kept
            if difference is not None and after is None and counterparts.is_frozen(name):
                hint = f"freeze it before create_schedule: model.get_parameter('{origin}').requires_grad_(False)"
                problem = f"{difference.problem}: it was frozen after the schedule, and the reference model trains it"
                difference = dataclasses.replace(difference, problem=problem, hint=hint)
            if difference is not None:
                result.differences.append(dataclasses.replace(difference, rule=str(rule)))
        result.largest[kind] = summary
    return result


def drawn_alike(
    kind: str, reference: Observation, candidate: Observation, counterparts: Counterparts, promise: Equivalence
) -> DrawnAlike:
    """Whether this rank's candidate drops the same as the untouched model."""
    expected, got = (seen.of(kind).get("forward", []) for seen in (reference, candidate))
    return compare_draws(
        expected,
        got,
        is_random=promise.is_random,
        is_split=counterparts.is_split_around,
        is_here=counterparts.modules.__contains__,
    )


def _drawn(
    kind: str, reference: Observation, candidate: Observation, counterparts: Counterparts, tolerance: Tolerance
) -> list[Difference]:
    if kind == "recomputed dropout":
        return _recomputed(kind, reference, candidate)
    alike = drawn_alike(kind, reference, candidate, counterparts, tolerance.promise)
    if alike.wrong is None:
        return []
    hint = (
        "drop as often and with the same p as the untouched model: F.dropout(x, p, training=self.training); a kernel "
        "that drops in a way of its own is compared where the model's p is 0"
    )
    rule = "every module drops as often, and with the same probability, as in the untouched model"
    return [Difference(kind, alike.path, alike.wrong, math.inf, 0.0, hint, rule)]


def _recomputed(kind: str, reference: Observation, candidate: Observation) -> list[Difference]:
    problem = "backward runs it again with other random numbers than the forward had, so the gradients are wrong"
    hint = "keep the random state: checkpoint(preserve_rng_state=True), which is the default"
    rule = "what is recomputed drops what it dropped at first"
    paths = [path for path in candidate.of(kind) if path not in reference.of(kind)]
    return [Difference(kind, path, problem, math.inf, 0.0, hint, rule) for path in paths]


def _pairs(
    kind: str,
    expected: Mapping[str, Any],
    got: Mapping[str, Any],
    counterparts: Counterparts,
    result: Comparison,
) -> Iterator[tuple[str, str, Any, Any]]:
    if kind in _OF_OUTPUTS:
        yield from _output_pairs(kind, expected, got, result)
    elif kind == "input gradient":
        for name, before in expected.items():
            yield name, name, before, got[name]
    else:
        yield from _tensor_pairs(kind, expected, got, counterparts, result)


def _output_pairs(
    kind: str, expected: Mapping[str, Any], got: Mapping[str, Any], result: Comparison
) -> Iterator[tuple[str, str, Any, Any]]:
    if list(expected) != list(got):
        missing = [name for name in expected if name not in got]
        added = [name for name in got if name not in expected]
        parts = [f"without {', '.join(missing)}"] if missing else []
        parts += [f"with {', '.join(added)} more"] if added else []
        problem = f"the output is another structure: {' and '.join(parts) or 'its parts come in another order'}"
        name = (missing or added or ["output"])[0]
        result.differences.append(Difference(kind, name, problem, math.inf, 0.0))
    for name, before in expected.items():
        if name not in got:
            continue
        if before is None or isinstance(before, (torch.Tensor, bool, int, float, complex, str)):
            yield name, name, before, got[name]
        elif kind == "output":
            result.not_compared.append(f"{name}: slapo cannot look into a {type(before).__name__}")


def _tensor_pairs(
    kind: str,
    expected: Mapping[str, Any],
    got: Mapping[str, Any],
    counterparts: Counterparts,
    result: Comparison,
) -> Iterator[tuple[str, str, Any, Any]]:
    covered: set[str] = set()
    names = list(got)
    if (
        kind in _OF_PARAMETERS
    ):  # stable: of tied names, which backward completes at the first place, the first one leads
        names.sort(key=lambda name: -counterparts.places.get(name, 0))
    for name in names:
        after = got[name]
        origin = counterparts.explained(name)
        if origin is not None and origin in expected:
            covered.add(origin)
            before = expected[origin]
            yield name, origin, None if before is None else counterparts.expected(name, before), after
            continue
        answers: Mapping[str, Any] = (
            dict.fromkeys(counterparts.stands_for(name)) if after is None else counterparts.translated(name, after)
        )
        for origin, value in answers.items():
            covered.add(origin)
            yield origin, origin, expected.get(origin), value
        if not answers and kind in ("gradient", "buffer"):
            result.not_compared.append(f"{_noun(kind)} {name}: it exists only in the scheduled model")
    if kind in ("gradient", "buffer"):
        for name in expected:
            if counterparts.first_name(name) not in covered:
                result.not_compared.append(f"{_noun(kind)} {name}: the scheduled model does not have it any more")


def _noun(kind: str) -> str:
    return "buffer" if kind == "buffer" else "parameter"


def _largest(value: Any) -> float:
    if not isinstance(value, torch.Tensor):
        return abs(float(value)) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
    if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    found = largest(value)
    if math.isfinite(found):
        return found
    return largest(value.detach().abs().double().nan_to_num(nan=0.0, posinf=0.0))
