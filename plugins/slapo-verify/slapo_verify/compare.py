"""Compare two runs, tensor by tensor, within the tolerance of the steps' promises."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from slapo_core.primitive import Equivalence
from slapo_verify.copies import Counterparts
from slapo_verify.dropout import DropoutComparison, compare_draws
from slapo_verify.kinds import KINDS, ORDER, label
from slapo_verify.phases import Observation, Withheld
from slapo_verify.precision import dtype_name, is_inexact

_REORDERED: dict[torch.dtype, float] = {
    # Sums of n terms associated differently differ by about sqrt(n) roundings, layer upon layer: an estimated
    # tens to hundreds of roundings of the largest element; a wrong term is 1e-3 and more.
    torch.float64: 1e-10,  # 450,000 roundings: room for ill-conditioned layers, and still seven digits stricter
    torch.float32: 2e-5,  # 170 roundings
    torch.float16: 8e-3,  # 8 roundings: fewer, because kernels of these types accumulate in float32
    torch.bfloat16: 4e-2,  # 5 roundings
}
_COARSER = 0.25  # eight-bit types: two digits at most
_EXACT_ROUNDINGS = 16.0
_FLOOR = 1e-2
_OWN_SCALE = ("output", "buffer")  # any kind of them


@dataclass(frozen=True)
class Tolerance:
    """Allow a difference in each tensor: ``rtol * max|reference| + floor``.

    ``rtol`` follows from the coarsest floating-point type in which the reference model computes, and from the
    weakest promise among the steps:

    ============  ==========================  =====================================================
    type          EXACT (16 roundings)        REORDERED and RANDOM (with dropout off)
    ============  ==========================  =====================================================
    float64       3.6e-15                     1e-10
    float32       1.9e-6                      2e-5
    float16       1.6e-2, so 8e-3             8e-3
    bfloat16      1.3e-1, so 4e-2             4e-2
    ============  ==========================  =====================================================

    APPROXIMATE(rtol, atol) adds its own to the REORDERED ones. EXACT is not bitwise, because parallel kernels may
    add in another order from run to run. The floor lets rounding noise of values pass that are zero in exact arithmetic
    (the gradient of an attention's key bias): one percent of ``rtol``, at least 16 roundings, of the model's largest
    gradient (or parameter); for outputs and buffers, whose scales are unrelated, of 1 or the largest of them, whichever
    is smaller.

    Args:
        dtype: the coarsest type seen.
        promise: the weakest promise of the steps.
        rtol: relative to the largest element of the reference tensor.
        atol: absolute, added to the floor.
        floor: relative to the scale of the kind; 0 where the user gave ``atol``.
        of_norm: a tensor whose difference has no more than this part of the reference's norm passes, however large it
            is in single elements; 0: none does.
    """

    dtype: torch.dtype
    promise: Equivalence
    rtol: float
    atol: float
    floor: float
    of_norm: float = 0.0

    @classmethod
    def of(
        cls, dtype: torch.dtype, promises: Iterable[Equivalence], *, rtol: float | None, atol: float | None
    ) -> Tolerance:
        """Derive the tolerance from a type and promises; ``rtol`` and ``atol`` replace it."""
        promise = Equivalence.weakest(promises)
        reordered = _REORDERED.get(dtype, _COARSER)
        exact = min(_EXACT_ROUNDINGS * torch.finfo(dtype).eps, reordered)
        relative = exact if promise.is_exact else reordered + promise.rtol
        return cls(
            dtype=dtype,
            promise=promise,
            rtol=relative if rtol is None else rtol,
            atol=promise.atol if atol is None else atol,
            floor=max(_FLOOR * (exact if promise.is_exact else reordered), exact) if atol is None else 0.0,
        )

    def allowed(self, kind: str, *, largest: float, largest_of_kind: float) -> float:
        """Return the largest absolute difference allowed in one tensor.

        Args:
            kind: of the values, e.g. ``"gradient"``.
            largest: the largest finite absolute value of the reference tensor.
            largest_of_kind: the same over all tensors of that kind.
        """
        scale = min(largest_of_kind, 1.0) if any(part in kind for part in _OWN_SCALE) else largest_of_kind
        return self.rtol * largest + self.floor * scale + self.atol

    def __str__(self) -> str:
        absolute = f" + {self.atol:g}" if self.atol else ""
        floor = f" + {self.floor:.2g} * scale" if self.floor else ""
        return f"{self.rtol:.2g} * max|reference|{floor}{absolute} ({dtype_name(self.dtype)}, {self.promise})"


OF_NORM = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 0.2}
"""Of a gradient's norm: where the input of a ReLU rounds to the other side of zero, single elements jump. Seen on tiny
tensor-parallel models, jumps included: 1e-6, 4e-3 and 0.16."""

_TIMES = 4.0
"""Two runs that each stray as far as the reference model, and twice that for luck."""

_AT_MOST = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.25}
"""Of a tensor's largest element: where rounding goes further, a wrong term could hide in it."""

_OF_THE_KIND = 1e-2
"""A tensor that is much smaller than the others of its kind is rounding noise of theirs: counted as this much."""


def room_for_rounding(
    fine: Observation, own: Observation, types: Mapping[tuple[str, str], torch.dtype]
) -> dict[tuple[str, str], float]:
    """Compute the difference that rounding of the model's own types may add.

    Args:
        fine: the reference model in a finer type: ``"output"``, ``"gradient"``, ...
        own: the same in its own types: ``"own output"``, ...
        types: kind and name of the tensors of ``own`` -> the coarsest type that led to it.

    Returns:
        kind and name -> the difference; infinite where only the own types overflow.
    """
    room: dict[tuple[str, str], float] = {}
    for kind, values in own.values.items():
        finer = fine.of(kind.removeprefix("own "))
        numbers = {name: value for name, value in values.items() if is_inexact(value) and value.numel()}
        sizes = {name: size for name, value in numbers.items() if math.isfinite(size := largest(value))}
        scale = _OF_THE_KIND * max(sizes.values(), default=0.0)
        for name, value in numbers.items():
            before = finer.get(name)
            if not isinstance(before, torch.Tensor) or not is_inexact(before) or before.shape != value.shape:
                continue
            strayed = gap(before, value)
            most = _AT_MOST.get(types[kind, name], 0.25) * max(sizes.get(name, 0.0), scale)
            room[kind, name] = min(_TIMES * strayed, most) if math.isfinite(strayed) else math.inf
    return room


_CHUNK = 1 << 20  # elements that are widened at a time, so that comparing takes no memory to speak of


def gap(before: torch.Tensor, after: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors.

    Equal infinite or NaN elements do not count; unequal ones are an infinite difference.
    """
    wide = torch.complex128 if before.is_complex() else torch.float64
    found = 0.0
    chunks = zip(before.reshape(-1).split(_CHUNK), after.reshape(-1).split(_CHUNK), strict=True)
    for one, other in ((one.to(wide), other.to(wide)) for one, other in chunks):
        apart = largest(one - other) if one.numel() else 0.0
        if not math.isfinite(apart):
            same = (one == other) | (one.isnan() & other.isnan())
            apart = largest(torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=math.inf, posinf=math.inf))
        found = max(found, apart)
    return found


def is_close_in_norm(before: Any, after: Any, share: float) -> bool:
    """Return whether the difference's norm is at most ``share`` of the tensor's."""
    if not share or not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if before.shape != after.shape or not before.is_floating_point():
        return False
    apart = float(torch.linalg.vector_norm(before.double() - after.to(before.device).double()))
    return apart <= share * float(torch.linalg.vector_norm(before.double()))


def largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value of a tensor; NaN if it has one."""
    return float(torch.linalg.vector_norm(tensor.detach(), ord=math.inf)) if tensor.numel() else 0.0


def fingerprint(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the norm and a weighted sum, to tell tensors apart."""
    wide = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1).double()
    weights = torch.arange(wide.numel(), device=wide.device, dtype=torch.float64).cos_()
    return float(torch.linalg.vector_norm(wide)), float(torch.dot(wide, weights)) / math.sqrt(wide.numel() or 1)


@dataclass(frozen=True)
class Difference:
    """Describe a value that differs beyond the tolerance.

    Args:
        kind: of :data:`~slapo_verify.kinds.KINDS`.
        name: the tensor's name in the scheduled model, or of the output leaf.
        problem: in words and numbers.
        largest: the largest absolute difference; infinite where there is none to measure.
        allowed: the largest allowed.
        hint: what usually causes it.
        rule: from which ``allowed`` follows, in words.
        by: indices of the steps to blame, where no trial is needed.
    """

    kind: str
    name: str
    problem: str
    largest: float
    allowed: float
    hint: str | None = None
    rule: str = ""
    by: tuple[int, ...] = ()


def _compared(kind: str, before: Any, after: Any, allowed: float) -> tuple[str, float, str | None]:
    """Compare two tensors: problem ("" for none), difference, and usual cause."""
    if isinstance(before, float) and isinstance(after, float):
        before, after = torch.tensor(before).double(), torch.tensor(after).double()
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        problem, hint = _compared_plainly(kind, before, after)
    elif before.shape != after.shape:
        problem = f"its shape is {tuple(after.shape)}, not {tuple(before.shape)}"
        hint = _shape_hint(before.shape, after.shape)
    elif before.dtype != after.dtype and not (kind.startswith("own ") and _is_finer(after.dtype, before.dtype)):
        problem, hint = f"its type is {dtype_name(after.dtype)}, not {dtype_name(before.dtype)}", None
    elif before.numel() == 0:
        return "", 0.0, None
    elif is_inexact(before):
        return *_compared_numbers(before, after.to(before.device), allowed), None
    else:
        return *_compared_exactly(before, after.to(before.device)), None
    return problem, math.inf if problem else 0.0, hint


def _is_finer(dtype: torch.dtype, other: torch.dtype) -> bool:
    floating = dtype.is_floating_point and other.is_floating_point
    return floating and torch.finfo(dtype).eps <= torch.finfo(other).eps


def _compared_plainly(kind: str, before: Any, after: Any) -> tuple[str, str | None]:
    if not isinstance(before, torch.Tensor) and not isinstance(after, torch.Tensor):
        return "" if before == after else f"it is {after!r}, not {before!r}", None
    if "gradient" not in kind:
        return f"it is a {type(after).__name__}, not a {type(before).__name__}", None
    if after is None:
        return "it has no gradient", "the forward does not use it, or uses it detached"
    return "it has a gradient where the reference model has none", None


def _compared_exactly(before: torch.Tensor, after: torch.Tensor) -> tuple[str, float]:
    other = before != after
    count = int(other.sum())
    if not count:
        return "", 0.0
    where = tuple(int(index) for index in other.nonzero()[0])
    problem = (
        f"{count} of {before.numel()} elements differ; at {_index(where)} it is {after[where].item()}, "
        f"not {before[where].item()}"
    )
    return problem, float((before.double() - after.double()).abs().max())


def _compared_numbers(before: torch.Tensor, after: torch.Tensor, allowed: float) -> tuple[str, float]:
    apart = gap(before, after)
    if apart <= allowed:
        return "", apart
    wide = torch.complex128 if before.is_complex() else torch.float64
    before, after = before.to(wide), after.to(wide)
    same = (before == after) | (before.isnan() & after.isnan())
    apart_each = torch.where(same, 0.0, (before - after).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    where = tuple(int(index) for index in torch.unravel_index(apart_each.argmax(), before.shape))
    got, expected = after[where].item(), before[where].item()
    if math.isinf(apart):
        return f"at {_index(where)} it is {got}, not {expected}", apart
    largest_of_all = float(before.abs().nan_to_num(nan=0.0, posinf=0.0).max())
    problem = (
        f"it differs by up to {apart:.3g} where {allowed:.3g} is allowed: at {_index(where)} it is {got:.9g}, "
        f"not {expected:.9g} (largest element {largest_of_all:.3g})"
    )
    return problem, apart


def _index(where: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, where))}]" if where else "its one element"


def _shape_hint(before: torch.Size, after: torch.Size) -> str | None:
    if len(before) != len(after):
        return None
    smaller = [axis for axis in range(len(before)) if after[axis] != before[axis]]
    if len(smaller) == 1 and after[smaller[0]] and before[smaller[0]] % after[smaller[0]] == 0:
        axis = smaller[0] - len(before)
        return (
            f'a gather along axis {axis} is missing: .sync("fwd_post", "all_gather", axis={axis}) on the module that '
            "gives this output"
        )
    return None


@dataclass(frozen=True)
class Largest:
    """Describe the largest difference of one kind, and its share of the tolerance.

    Args:
        kind: of the values, e.g. ``"gradient"``.
        compared: how many tensors of that kind.
        difference: the largest absolute difference between two elements.
        allowed: the tolerance of that tensor.
        name: of that tensor, e.g. ``"fc.weight"``.
        element: the largest element of the reference model's tensors of that kind.
    """

    kind: str
    compared: int
    difference: float = 0.0
    allowed: float = 0.0
    name: str = ""
    element: float = 0.0

    @property
    def fraction(self) -> float:
        """Return the difference as a share of the tolerance, at most 1 in a report."""
        return self.difference / self.allowed if self.allowed else (math.inf if self.difference else 0.0)


@dataclass
class Comparison:
    """Collect a rank's differences in the order of search; the first decides."""

    differences: list[Difference] = field(default_factory=list)
    largest: dict[str, Largest] = field(default_factory=dict)
    not_compared: list[str] = field(default_factory=list)

    def add(self, later: Comparison) -> None:
        """Merge the comparison of other kinds, in any order."""
        self.differences = sorted([*self.differences, *later.differences], key=lambda found: ORDER.index(found.kind))
        both = self.largest | later.largest
        self.largest = {kind: both[kind] for kind in KINDS if kind in both}
        self.not_compared += later.not_compared


def compare(
    reference: Observation,
    candidate: Observation,
    counterparts: Counterparts,
    tolerance: Tolerance,
    finer: Mapping[tuple[str, str], Tolerance] | None = None,
) -> Comparison:
    """Compare this rank's ``candidate`` with the ``reference``, kind by kind.

    ``finer`` gives, by kind and name in the reference model, tolerances below ``tolerance``.

    Gradients are looked at in the order in which backward makes them, last layer first, so that the first difference
    is the one nearest to its cause.
    """
    result = Comparison()
    for kind in KINDS:
        if kind not in candidate.values or kind not in reference.values:
            continue
        if KINDS[kind].of == "draws":
            result.differences += _drawn(kind, reference, candidate, counterparts, tolerance)
            continue
        expected = reference.of(kind)
        biggest = max((_largest(value) for value in expected.values()), default=0.0)
        got = candidate.of(kind)
        if KINDS[kind].of == "outputs":
            pairs = _output_pairs(kind, expected, got, result)
        elif KINDS[kind].of == "inputs":
            pairs = ((name, name, before, got[name]) for name, before in expected.items())
        else:
            pairs = _tensor_pairs(kind, expected, got, counterparts, result)
        summary = Largest(kind, 0)
        for name, origin, before, after in pairs:
            if before is None and after is None and "gradient" in kind:
                continue
            rule = (finer or {}).get((kind, origin), tolerance)
            allowed = rule.allowed(kind, largest=_largest(before), largest_of_kind=biggest)
            if math.isinf(allowed) and kind.startswith("own "):
                result.not_compared.append(f"{label(kind, name, 0)}: it overflows in the reference model")
                continue
            problem, apart, hint = _compared(kind, before, after, allowed)
            if problem and is_close_in_norm(before, after, rule.of_norm):
                problem, apart = "", 0.0
            seen = Largest(kind, summary.compared + 1, apart, allowed, name, biggest)
            is_larger = seen.fraction > summary.fraction or not summary.name
            summary = seen if is_larger else dataclasses.replace(summary, compared=seen.compared)
            if problem and after is None and counterparts.is_frozen(name):
                hint = f"freeze it before create_schedule: model.get_parameter('{origin}').requires_grad_(False)"
                problem += ": it was frozen after the schedule, and the reference model trains it"
            if problem:
                result.differences.append(Difference(kind, name, problem, apart, allowed, hint, str(rule)))
        result.largest[kind] = summary
    return result


def compare_dropout(
    kind: str, reference: Observation, candidate: Observation, counterparts: Counterparts, promise: Equivalence
) -> DropoutComparison:
    """Compare the dropout of this rank's candidate with the reference model's."""
    expected, got = (seen.of(kind).get("forward", []) for seen in (reference, candidate))
    return compare_draws(
        expected,
        got,
        is_random=promise.is_random,
        is_split=counterparts.is_split_around,
        is_local=counterparts.modules.__contains__,
    )


def _drawn(
    kind: str, reference: Observation, candidate: Observation, counterparts: Counterparts, tolerance: Tolerance
) -> list[Difference]:
    if kind == "recomputed dropout":
        return _recomputed(kind, reference, candidate)
    alike = compare_dropout(kind, reference, candidate, counterparts, tolerance.promise)
    if alike.wrong is None:
        return []
    hint = (
        "drop as often and with the same p as the reference model: F.dropout(x, p, training=self.training); a kernel "
        "with dropout of its own is compared where the model's p is 0"
    )
    rule = "every module drops as often, and with the same probability, as in the reference model"
    return [Difference(kind, alike.path, alike.wrong, math.inf, 0.0, hint, rule)]


def _recomputed(kind: str, reference: Observation, candidate: Observation) -> list[Difference]:
    problem = "backward runs it again with other random numbers than the forward had, so the gradients are wrong"
    hint = "keep the random state: checkpoint(preserve_rng_state=True), which is the default"
    rule = "recomputation drops the same elements as the forward"
    paths = [path for path in candidate.of(kind) if path not in reference.of(kind)]
    return [Difference(kind, path, problem, math.inf, 0.0, hint, rule) for path in paths]


def _output_pairs(
    kind: str, expected: Mapping[str, Any], got: Mapping[str, Any], result: Comparison
) -> Iterator[tuple[str, str, Any, Any]]:
    if list(expected) != list(got):
        missing = [name for name in expected if name not in got]
        added = [name for name in got if name not in expected]
        parts = [f"without {', '.join(missing)}"] if missing else []
        parts += [f"with {', '.join(added)} more"] if added else []
        problem = f"the output is another structure: {' and '.join(parts) or 'its leaves come in another order'}"
        name = (missing or added or ["output"])[0]
        result.differences.append(Difference(kind, name, problem, math.inf, 0.0))
    for name, before in expected.items():
        if name not in got:
            continue
        if isinstance(got[name], Withheld):
            if kind == "output":
                result.not_compared.append(f"{name}: {got[name].why}")
        elif before is None or isinstance(before, (torch.Tensor, bool, int, float, complex, str)):
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
    noun = "buffer" if kind == "buffer" else "parameter"
    names = list(got)
    if KINDS[kind].of == "parameters":
        # Stable: of tied names, which backward completes at the first place, the first one leads.
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
            dict.fromkeys(counterparts.reference_names(name)) if after is None else counterparts.translated(name, after)
        )
        for origin, value in answers.items():
            covered.add(origin)
            yield origin, origin, expected.get(origin), value
        if not answers and kind in ("gradient", "buffer"):
            result.not_compared.append(f"{noun} {name}: it exists only in the scheduled model")
    if kind in ("gradient", "buffer"):
        for name in expected:
            if counterparts.first_name(name) not in covered:
                result.not_compared.append(f"{noun} {name}: the scheduled model does not have it any more")


def _largest(value: Any) -> float:
    if not isinstance(value, torch.Tensor):
        return abs(float(value)) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
    if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    found = largest(value)
    if math.isfinite(found):
        return found
    return largest(value.detach().abs().double().nan_to_num(nan=0.0, posinf=0.0))
