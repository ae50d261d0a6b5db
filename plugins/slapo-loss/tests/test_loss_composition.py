"""linear_cross_entropy beside other steps, transforms, copies, and calls at the same time."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slapo_core as slapo
from slapo_loss.linear_cross_entropy import _OPEN
from slapo_loss.withheld import WithheldLogits

from .loss_model import CHUNK, CLASSES, Double, Net, agree, batch, logits_made, scheduled, trained

BREADTH = pytest.mark.breadth  # half a minute of torch.compile


def _trace(sch: Any) -> None:
    sch.root.trace()


def _flat(sch: Any) -> None:
    sch.root.trace(flatten=True)


def _checkpoint(path: str) -> Callable[[Any], None]:
    return lambda sch: sch[path].checkpoint()


def _checkpointed_root(sch: Any) -> None:
    sch.root.checkpoint()


AROUND: dict[str, Callable[[Any], None]] = {
    "traced": _trace,
    "flat": _flat,
    "checkpointed root": _checkpointed_root,
    "checkpointed head": _checkpoint("head"),
    "checkpointed block": _checkpoint("blocks.1"),
}


@pytest.mark.parametrize("first", [True, False], ids=["loss first", "loss last"])
@pytest.mark.parametrize("around", AROUND)
def test_step_is_in_effect_within_graphs_and_checkpoints(around: str, first: bool) -> None:
    sch: Any = slapo.create_schedule(Net(bias=True), example_inputs=batch())
    for step in (0, 1):
        if (step == 0) is first:
            sch["head"].linear_cross_entropy(chunk=CHUNK)
        else:
            AROUND[around](sch)
    assert logits_made(sch.model) == 0
    ids = batch()["ids"]
    agree([sch.model.eval()(ids)["logits"]], [Net(bias=True)(ids)["logits"]])
    agree(trained(sch.model), trained(Net(bias=True)))
    sch.undo(to=0)
    assert "forward" not in sch.model.__dict__
    assert "forward" not in sch.model.head.__dict__


def test_a_checkpointed_part_with_head_and_loss_computes_its_loss_again() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Each()
            self.scale = nn.Parameter(torch.ones(24, dtype=torch.float64))

        def forward(self, **given: Any) -> dict[str, Tensor]:
            return {"loss": (self.inner(**given)["loss"] * self.scale).sum()}

    class Each(Net):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            logits = self.head(self.hidden(ids))[:, :-1].flatten(0, 1)
            return {"loss": F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="none")}

    sch: Any = slapo.create_schedule(Outer(), example_inputs=batch())
    sch["inner.head"].linear_cross_entropy(chunk=CHUNK)
    sch["inner"].checkpoint()
    assert logits_made(sch.model) == 0
    agree(trained(sch.model), trained(Outer()))


def test_copies_and_saved_models_run_on_themselves() -> None:
    sch = scheduled(Net())
    expected = trained(Net())
    twin, saved = copy.deepcopy(sch.model), pickle.loads(pickle.dumps(sch.model))
    assert logits_made(twin) == logits_made(saved) == 0
    for model in (twin, saved, sch.model):
        agree(trained(model), expected)


def test_functional_calls_use_the_given_weights() -> None:
    sch, other = scheduled(Net()), Net()
    torch.manual_seed(5)
    given = {name: torch.randn_like(one).requires_grad_() for name, one in other.named_parameters()}
    sch.model.train()
    losses = [torch.func.functional_call(model, given, kwargs=batch())["loss"] for model in (sch.model, other)]
    found, expected = (list(torch.autograd.grad(loss, list(given.values()))) for loss in losses)
    agree([losses[0], *found], [losses[1], *expected])


def test_undo_redo_and_a_saved_schedule_bring_it_back() -> None:
    sch = scheduled(Net())
    with sch.rewound(0) as before:
        assert logits_made(before) > 0
    assert logits_made(sch.model) == 0
    again = slapo.replay(Net(), sch.to_json(), example_inputs=batch())
    assert logits_made(again.model) == 0
    agree(trained(again.model), trained(Net()))


def test_signatures_and_hooks_of_the_model_stay() -> None:
    import inspect

    sch, seen = scheduled(Net()), []
    assert list(inspect.signature(sch.model.forward).parameters) == ["ids", "labels", "num_items_in_batch"]
    sch.model.register_forward_hook(lambda module, args, output: seen.append(type(output["logits"])))
    sch.model.head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    sch.model.train()(**batch())
    assert seen == [(4, 7, CLASSES), WithheldLogits]


@pytest.mark.parametrize("what", ["head", *(pytest.param(each, marks=BREADTH) for each in ("model", "call"))])
def test_compiled_models_train_as_plain_ones(what: str) -> None:
    torch.compiler.reset()
    sch = scheduled(Net())
    model: Any = sch.model
    if what == "model":
        model = torch.compile(model, backend="eager")
    elif what == "call":
        sch.model.compile(backend="aot_eager")
    else:
        sch.model.head.compile(backend="eager")
    ids = batch()["ids"]
    agree([model.eval()(ids)["logits"]], [Net()(ids)["logits"]])
    agree(trained(model), trained(Net()))
    with torch.compiler.set_stance("fail_on_recompile"):
        assert isinstance(model(**batch())["logits"], WithheldLogits)  # it is in effect


def test_autocast_computes_in_the_types_that_it_chooses() -> None:
    for dtype, expected in ((torch.float32, torch.bfloat16), (torch.float64, torch.float64)):
        sch, plain = scheduled(Net().to(dtype)), Net().to(dtype)
        sch.model.train()
        with torch.autocast("cpu", torch.bfloat16):
            output, other = sch.model(**batch()), plain(**batch())
        assert output["logits"].dtype == other["logits"].dtype == expected
        found, wanted = (
            torch.autograd.grad(one["loss"], one["model"].head.weight)
            for one in ({"loss": output["loss"], "model": sch.model}, {"loss": other["loss"], "model": plain})
        )
        agree(
            [output["loss"].double(), *found], [other["loss"].double(), *wanted], 2e-2 if expected != dtype else 1e-12
        )


def test_transforms_of_functions_and_exports_take_the_logits() -> None:
    sch, plain = scheduled(Net()), Net()
    sch.model.train()
    given = {name: one.detach() for name, one in sch.model.named_parameters()}
    found = torch.func.grad(lambda own: torch.func.functional_call(sch.model, own, kwargs=batch())["loss"])(given)
    plain(**batch())["loss"].backward()
    agree([found[name] for name, _ in plain.named_parameters()], [one.grad for one in plain.parameters()])


@BREADTH
def test_a_model_with_it_is_exported() -> None:
    sch, ids = scheduled(Net()), batch()["ids"]
    exported = torch.export.export(sch.model.eval(), (ids,))
    agree([exported.module()(ids)["logits"]], [Net()(ids)["logits"]])


@pytest.mark.parametrize("first", [True, False], ids=["loss first", "loss last"])
def test_wrappers_around_the_head_stay_in_force(first: bool) -> None:
    plain = Net()
    plain.head.register_forward_hook(lambda module, args, output: output * 2)
    sch: Any = slapo.create_schedule(Net(), example_inputs=batch())
    for is_loss in (first, not first):
        if is_loss:
            sch["head"].linear_cross_entropy(chunk=CHUNK)
        else:
            sch["head"].apply(Double())
    assert logits_made(sch.model) == 0
    agree(trained(sch.model), trained(plain))


def test_logits_that_the_model_keeps_elsewhere_are_not_computed_after_its_forward() -> None:
    class Keeps(Net):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
            logits = self.head(self.hidden(ids))
            self.__dict__["last"] = logits
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}  # type: ignore[union-attr]

    sch = scheduled(Keeps())
    sch.model.train()(**batch())
    with pytest.raises(RuntimeError, match="keep_logits=True"):
        sch.model.last.sum()


# -- calls that nest, fail, or run elsewhere ------------------------------------------------------------------


def test_a_forward_that_raises_leaves_nothing_open() -> None:
    sch = scheduled(Net())
    sch.model.train()
    with pytest.raises(ValueError, match="batch_size"):
        sch.model(batch()["ids"], batch()["labels"][:2])  # behind the head
    with pytest.raises(TypeError):
        sch.model(None)  # before it
    assert _OPEN.get() == ()
    agree(trained(sch.model), trained(Net()))
    assert type(sch.model.head(torch.zeros(1, 6, dtype=torch.float64))) is Tensor


def test_teacher_and_student_with_one_path_do_not_mix() -> None:
    class Student(Net):
        teacher: nn.Module | None = None

        def forward(self, ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            logits = self.head(self.hidden(ids))
            assert self.teacher is not None
            taught = self.teacher[0](ids, labels)["loss"]  # type: ignore[operator,index]
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + taught, "logits": logits}

    def pair(teacher: nn.Module) -> nn.Module:
        student = Student()
        student.__dict__["teacher"] = [teacher.train()]
        return student

    expected = trained(pair(Net(bias=True)))
    teachers = scheduled(Net(bias=True)).model, scheduled(Net(bias=True), keep_logits=True).model
    for teacher in teachers:
        student = scheduled(pair(teacher)).model
        agree(trained(student), expected)
        assert isinstance(student(**batch())["logits"], WithheldLogits)
    agree(trained(pair(teachers[0])), expected)


def test_a_copy_of_the_model_within_its_forward_has_a_call_of_its_own() -> None:
    class Twice(Net):
        other: Any = None

        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
            logits = self.head(self.hidden(ids))
            if self.other is None:
                return {"logits": logits}
            inner = self.other[0](ids)["logits"]  # of a forward without a loss: real ones
            return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + inner.square().mean()}

    def pair(model: nn.Module) -> nn.Module:
        other = copy.deepcopy(model)
        model.__dict__["other"] = [other.train()]
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agree(trained(pair(scheduled(Twice()).model)), trained(pair(Twice())))


def test_a_head_that_is_called_twice_gives_both_losses() -> None:
    class Twice(Net):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            hidden = self.hidden(ids)
            pairs = ((self.head(hidden), labels), (self.head(torch.tanh(hidden))[:, 1:], labels[:, 1:]))
            losses = [F.cross_entropy(logits.flatten(0, 1), one.flatten()) for logits, one in pairs]
            return {"loss": losses[0] + 0.3 * losses[1]}

    sch = scheduled(Twice())
    assert logits_made(sch.model) == 0
    agree(trained(sch.model), trained(Twice()))


def test_two_heads_with_a_step_each_end_only_their_own_logits() -> None:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(6, CLASSES).double()

        def forward(self, ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
            hidden = self.hidden(ids)
            logits, others = self.head(hidden), self.second(hidden)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return {"loss": loss + F.cross_entropy(others.flatten(0, 1), ids.flatten()), "a": logits, "b": others}

    sch = scheduled(Two())
    sch["second"].linear_cross_entropy(chunk=CHUNK, keep_logits=True)
    agree(trained(sch.model), trained(Two()))
    output, expected = sch.model(**batch()), trained(Two())
    assert isinstance(output["a"], WithheldLogits)
    assert type(output["b"]) is Tensor
    assert expected


def test_threads_have_calls_of_their_own() -> None:
    models = [copy.deepcopy(scheduled(Net()).model) for _ in range(4)]
    found: list[Any] = [None] * len(models)
    start = threading.Barrier(len(models))

    def run(number: int) -> None:
        start.wait(60)
        found[number] = trained(models[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found:
        agree(one, trained(Net()))


# -- where it cannot be ---------------------------------------------------------------------------------------
