"""Check that the scheduled model equals the reference model: as a copy, on one and two ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from slapo_core.errors import RankFailedError, VerifyError, place
from slapo_core.internals import hooks_of
from slapo_runtime.launcher import run_ranks
from slapo_testing.bench import Bench, build_inputs, build_model, call, prepare
from slapo_testing.case import Case, make_primitive
from slapo_testing.check import CheckError, NotApplicable
from slapo_testing.device import backend_for, move, resolve_device
from slapo_testing.pickled import Pickled, pack
from slapo_testing.private import tree_leaves

_HINT = "use the module that hooks and wrapped forwards get as an argument; keep no module or parameter in a closure"


def deepcopy_runs_on_itself(case: Case) -> None:
    """A deep copy of the scheduled model computes the same and does not use the original."""
    bench = prepare(case, mesh_size=1)
    bench.apply()
    bench.apply_after()
    original = bench.model.eval()
    twin = copy.deepcopy(original)
    batch = build_inputs(case)
    expected = _tensors(original, batch)
    first = _tensors(twin, batch)
    _require_equal_outputs(
        expected, first, "a deep copy of the scheduled model has another output", "the output of the original"
    )
    with torch.no_grad():
        for tensor in (*original.parameters(), *original.buffers()):
            tensor.add_(1) if tensor.is_floating_point() or tensor.is_complex() else tensor.zero_()
    _require_equal_outputs(
        first,
        _tensors(twin, batch),
        "the output of a deep copy changes with the weights of the original",
        "a copy that uses its own weights",
    )


def _tensors(model: nn.Module, batch: object) -> list[torch.Tensor]:
    with torch.no_grad():
        return [
            leaf.clone() for leaf in tree_leaves(call(model, copy.deepcopy(batch))) if isinstance(leaf, torch.Tensor)
        ]


def _require_equal_outputs(
    expected: list[torch.Tensor], got: list[torch.Tensor], violation: str, required: str
) -> None:
    if len(expected) != len(got):
        raise CheckError(violation, required=required, got=f"{len(got)} tensors instead of {len(expected)}", hint=_HINT)
    for number, (one, other) in enumerate(zip(expected, got, strict=True), start=1):
        if one.shape != other.shape or not torch.equal(one.nan_to_num(), other.nan_to_num()):
            what = f"shape {tuple(other.shape)} instead of {tuple(one.shape)}"
            if one.shape == other.shape:
                what = f"a difference of up to {(one.double() - other.double()).abs().max().item():.3g}"
            raise CheckError(violation, required=required, got=f"tensor {number} of the output: {what}", hint=_HINT)


def mesh_of_one_is_free(case: Case) -> None:
    """With one rank in each mesh dimension the step adds no hook, forward or module."""
    if case.mesh is None:
        raise NotApplicable("the case has no mesh=(...)")
    bench = prepare(case, mesh_size=1)
    before = _costs(bench.model)
    bench.apply()
    added = {place: text for place, text in _costs(bench.model).items() if before.get(place) != text}
    if added:
        raise CheckError(
            "the step costs something on a mesh of one rank",
            required="a record with edit.note(...); no hook, wrapped forward or new module",
            got="; ".join(f"{place}: {text}" for place, text in added.items()),
            hint=f"if node.mesh.size('{case.mesh[-1]}') == 1: edit.note(\"one rank\"); return",
        )


def _costs(model: nn.Module) -> dict[str, str]:
    costs = {}
    for path, module in model.named_modules():
        where = place(path)
        costs[f"module {where}"] = f"{type(module).__qualname__} {id(module)}"
        costs[f"forward of {where}"] = (
            f"{type(module.__dict__.get('forward')).__name__} {id(module.__dict__.get('forward'))}"
        )
        for kind, hooks in hooks_of(module).items():
            costs[f"{kind} hooks of {where}"] = ", ".join(getattr(f, "__qualname__", repr(f)) for f in hooks.values())
    return costs


def forward_and_gradients_on_1_rank(case: Case) -> None:
    """Outputs and gradients keep the declared equivalence, with one rank in each mesh dimension."""
    from slapo_verify import verify

    bench = prepare(case, mesh_size=1)
    bench.apply()
    bench.apply_after()
    try:
        verify(bench.schedule, build_inputs(case))
    except VerifyError as error:
        raise not_equivalent(case, str(error)) from error


def not_equivalent(case: Case, difference: str) -> CheckError:
    """Make the error for a model that differs from the reference model."""
    promise = case.value().equivalence
    return CheckError(
        "the scheduled model differs from the reference model",
        required=f"equivalence {promise}, as the primitive declares",
        got=difference,
        hint="correct apply(), or declare another equivalence, e.g. Equivalence.REORDERED or "
        "Equivalence.APPROXIMATE(rtol=...)",
    )


_TIMEOUT = 120.0  # seconds


def forward_and_gradients_on_2_ranks(case: Case) -> None:
    """Outputs and gradients agree on two ranks, in the last mesh dimension or independently."""
    backend = backend_for(resolve_device(case.device), 2)
    try:
        run_ranks(_verify_on_rank, _pack(case), world_size=2, timeout=_TIMEOUT, backend=backend)
    except RankFailedError as error:
        if isinstance(error.__cause__, VerifyError):
            raise not_equivalent(case, f"on rank {error.first}: {error.__cause__}") from error
        raise CheckError(
            "the step failed on two ranks",
            required="forward and backward passes of the model with this step succeed on two ranks",
            got=str(error),
            hint="the tracebacks of the ranks are above; all ranks must run the same collectives in the same order",
        ) from error


def _verify_on_rank(pickled: Pickled) -> None:
    contents = pickled.unpack()
    model, batch = contents.pop("model"), contents.pop("inputs")
    case = Case(model=lambda: model, inputs=lambda: batch, **contents)
    from slapo_verify import verify

    bench: Bench = prepare(case, mesh_size=2)
    bench.apply()
    bench.apply_after()
    verify(bench.schedule, build_inputs(case))


def _pack(case: Case) -> Pickled:
    contents: dict[str, Any] = {
        "primitive": case.value(),
        "model": build_model(case).cpu(),  # each rank has its own device
        "inputs": move(build_inputs(case), torch.device("cpu")),
        "path": case.path,
        "before": [(path, make_primitive(step)) for path, step in case.before],
        "after": [(path, make_primitive(step)) for path, step in case.after],
        "mesh": case.mesh,
        "device": case.device,
    }
    return pack(contents)
