"""What must hold for every model, in one process."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import slapo_core as slapo
from slapo_core.errors import VerifyError, WeightsError
from slapo_testing import ModelSnapshot, assert_bit_identical
from tests.integration.zoo.subjects import Subject, call

__all__ = ["CHECKS", "NotApplicable", "blocks", "run_checks"]


_FILLS_A_CACHE = "which the recompute would fill again"  # checkpoint's refusal; some models always hand one over


class NotApplicable(Exception):  # noqa: N818
    """Why a check says nothing about a model."""


def run_checks(subject: Subject, checks: Mapping[str, Callable[[Subject], str | None]] | None = None) -> dict[str, str]:
    """What every check says of one model: ``"ok"``, ``"refused: ..."``, ``"none: ..."`` or ``"FAILED: ..."``.

    Args:
        subject: the model.
        checks: column -> what raises where the promise is broken, and may return the result; None for all of
            :data:`CHECKS`.

    Raises:
        CannotMake: there is no tiny instance of the model, or it does not run.
    """
    subject.check_that_it_runs()
    results = {}
    for name, check in (CHECKS if checks is None else checks).items():
        try:
            results[name] = check(subject) or "ok"
        except NotApplicable as reason:
            results[name] = f"none: {reason}"
        except WeightsError as error:
            results[name] = f"refused: {error}"
        except VerifyError as error:
            word = "refused" if _FILLS_A_CACHE in str(error) else "FAILED"
            results[name] = f"{word}: {error}"
        except Exception as error:  # noqa: BLE001
            results[name] = f"FAILED: {type(error).__name__}: {error}"
    return results


def blocks(model: nn.Module) -> list[str]:
    """The outermost repeated blocks: modules that stand in a list and are called themselves; else the children."""
    found: list[str] = []
    seen: set[int] = set()

    def visit(module: nn.Module, path: str) -> None:
        children = [(name, child) for name, child in module.named_children() if id(child) not in seen]
        seen.update(id(child) for _, child in children)
        in_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1
        for name, child in children:
            below = f"{path}.{name}" if path else name
            like_the_first = in_list and type(child) is type(module[0]) and any(True for _ in child.children())
            if in_list and _called(child) and (like_the_first or not isinstance(module, nn.Sequential)):
                found.append(below)
            else:
                visit(child, below)

    visit(model, "")
    if found:
        return found
    return [name for name, child in model.named_children() if _called(child)]


def _called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward and any(True for _ in module.parameters())


def checkpointed(sch: slapo.Schedule) -> slapo.Schedule:
    """Checkpoint every block."""
    paths = blocks(sch.model)
    if not paths:
        raise NotApplicable("no module in it is called with parameters of its own")
    for path in paths:
        sch[path].checkpoint()
    return sch


def addresses(subject: Subject) -> None:
    """Every path of the model is a path of the schedule, which can be printed and explained."""
    model, _ = subject.given()
    sch = slapo.create_schedule(model)
    for path, module in model.named_modules(remove_duplicate=False):
        assert sch[path].module is module is model.get_submodule(path), path
    assert type(model).__name__ in str(sch)
    if blocks(model):
        checkpointed(sch)
        assert sch.explain().count("core.checkpoint") >= 1
        assert "checkpoint" in str(sch)
    for path, module in model.named_modules(remove_duplicate=False):
        assert sch[path].module is module is model.get_submodule(path), path


def checkpoint_verifies(subject: Subject) -> None:
    """With every block checkpointed, outputs, gradients, buffers and an optimizer step are the reference model's."""
    model, batch = subject.given()
    report = slapo.verify(checkpointed(slapo.create_schedule(model)), batch, optimizer_steps=1)
    assert str(report)


def deep_copies(subject: Subject) -> None:
    """A deep copy of the scheduled model runs by itself, with the original's outputs and its own parameters."""
    model, batch = subject.given()
    checkpointed(slapo.create_schedule(model))
    twin = copy.deepcopy(model)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in twin.parameters()}
    wanted = outputs(model, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # the twin must not look at them
    same(outputs(twin, batch), wanted)


def keeps_names(subject: Subject) -> None:
    """The scheduled model's state dict has the reference model's keys, in their order."""
    model, _ = subject.given()
    keys = list(model.state_dict())
    sch = checkpointed(slapo.create_schedule(model))
    assert list(model.state_dict()) == keys
    replay = slapo.replay(subject.make(), sch.to_json())
    assert [str(record) for record in replay.records] == [str(record) for record in sch.records]


def undoes(subject: Subject) -> None:
    """After verify and undo(to=0) everything that one can see of the model is as before."""
    model, batch = subject.given()
    before = ModelSnapshot(model)
    sch = slapo.create_schedule(model)
    path = a_linear(model)
    if path is not None:
        sch[path].replace(fresh_linear(model, path))
    for path in blocks(model):
        sch[path].checkpoint()
    if not sch.records:
        raise NotApplicable("nothing to apply: no block, no nn.Linear")
    assert before.differences(model)
    slapo.verify(sch, batch, optimizer_steps=0)
    sch.undo(to=0)
    assert_bit_identical(before, model)


def replaces(subject: Subject) -> None:
    """A fresh nn.Linear in the place of one computes what the old one did, with the old one's parameters."""
    model, batch = subject.given()
    path = a_linear(model)
    if path is None:
        raise NotApplicable("it has no plain nn.Linear")
    wanted = outputs(copy.deepcopy(model), batch)
    old = dict(model.get_submodule(path).named_parameters())
    new = fresh_linear(model, path)
    sch = slapo.create_schedule(model)
    sch[path].replace(new)
    assert model.get_submodule(path) is new
    assert all(new.get_parameter(name) is parameter for name, parameter in old.items())
    same(outputs(model, batch), wanted)


def builds_from_meta(subject: Subject) -> None:
    """Made on the meta device, the model is initialized by build, and its state dict is the plain model's.

    The plain model that loads it gives the same outputs, so that buffers that no state dict holds are right too.
    """
    try:
        with torch.device("meta"):
            model = subject.make()
    except Exception as error:
        raise NotApplicable(f"it cannot be made on the meta device: {type(error).__name__}") from error
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise NotApplicable("its constructor does not use the default device")
    sch = slapo.create_schedule(model)
    for path in blocks(model):
        sch[path].checkpoint()
    engine = slapo.build(sch)
    plain, batch = subject.given()
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    state = engine.state_dict()
    assert list(state) == list(plain.state_dict())
    usual = [tensor.isfinite().all() for tensor in outputs(plain, batch)]
    plain.load_state_dict(state, strict=True)
    wanted, got = outputs(plain, batch), outputs(engine.module, batch)
    same(got, wanted)
    for tensor, finite in zip(got, usual, strict=True):
        assert tensor.isfinite().all() or not finite, "an output is not finite"


def reloads(subject: Subject) -> None:
    """The state dict of the engine goes into a fresh plain model, and back into another engine."""
    model, batch = subject.given()
    sch = checkpointed(slapo.create_schedule(model))
    engine = slapo.build(sch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    state = engine.state_dict()
    plain = subject.make()
    plain.load_state_dict(state, strict=True)
    wanted = outputs(engine.module, batch)
    same(outputs(plain, batch), wanted)
    other = slapo.build(checkpointed(slapo.create_schedule(subject.make())), weights=state)
    same(outputs(other.module, batch), wanted)


CHECKS: Mapping[str, Callable[[Subject], str | None]] = {
    "addresses": addresses,
    "checkpoint": checkpoint_verifies,
    "deep copy": deep_copies,
    "names, replay": keeps_names,
    "undo": undoes,
    "replace": replaces,
    "meta build": builds_from_meta,
    "state dict": reloads,
}
"""Column of the table -> the check; each raises where the promise is broken."""


def a_linear(model: nn.Module) -> str | None:
    """The last plain nn.Linear inside of a block, else anywhere, that stands in one place only."""
    places: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Linear and not hasattr(module, "parametrizations"):
            places.setdefault(id(module), []).append(path)
    single = [paths[0] for paths in places.values() if len(paths) == 1 and paths[0]]
    inside = tuple(f"{path}." for path in blocks(model))
    preferred = [path for path in single if path.startswith(inside)] if inside else []
    return (preferred or single or [None])[-1]


def fresh_linear(model: nn.Module, path: str) -> nn.Linear:
    """An nn.Linear of the same shape, with other values."""
    old: Any = model.get_submodule(path)
    return nn.Linear(old.in_features, old.out_features, bias=old.bias is not None, dtype=old.weight.dtype)


def outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """The floating-point tensors of the output in evaluation mode, in order."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    torch.manual_seed(5)
    try:
        with torch.no_grad():
            return list(_tensors(call(model, copy.deepcopy(batch))))
    finally:
        for module, mode in training.items():
            module.training = mode


def same(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert wanted, "the model has no floating-point output"
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
