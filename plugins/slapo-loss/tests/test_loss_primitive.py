"""linear_cross_entropy at a head: training, outputs, other steps around it, and where it is refused."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import slapo_core as slapo
from slapo_core import ArgumentError, PreconditionError
from slapo_loss.linear_cross_entropy import _OPEN
from slapo_loss.withheld import WithheldError, WithheldLogits
from slapo_testing import parametrize_checks
from tests.messages import Messages

from .loss_model import CLASSES, Net, agree, batch, trained

CHUNK = 2
BREADTH = pytest.mark.breadth  # half a minute of torch.compile


class _Logits(TorchDispatchMode):
    """Counts tensors of all tokens by all classes."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in pytree.tree_leaves(result):
            if isinstance(one, Tensor) and one.shape[-1:] == (CLASSES,) and not one.is_meta:
                # More elements than the weight has.
                self.made += one.numel() > 6 * CLASSES
        return result


def logits_made(model: nn.Module, given: dict[str, Any] | None = None) -> int:
    """Return how many tensors of all logits a training step makes."""
    model.train()
    with _Logits() as mode:
        output = model(**(given or batch()))
        (output["loss"] if isinstance(output, dict) else output.loss).backward()
    model.zero_grad()
    return mode.made


def scheduled(model: nn.Module, **options: Any) -> Any:
    sch = slapo.create_schedule(model, example_inputs=batch())
    sch["head"].linear_cross_entropy(**{"chunk": CHUNK, **options})
    return sch


# -- numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [{}, {"bias": True}, {"tied": True}], ids=["plain", "bias", "tied"])
def test_training_is_that_of_the_plain_model(form: dict[str, bool]) -> None:
    sch = scheduled(Net(**form))
    agree(trained(sch.model), trained(Net(**form)))
    assert logits_made(sch.model) == 0 < logits_made(Net(**form))


def test_the_count_of_items_and_accumulation_follow() -> None:
    def given(step: int) -> dict[str, Any]:
        return {**batch(step), "num_items_in_batch": 17}

    agree(trained(scheduled(Net()).model, given), trained(Net(), given))
    results = []
    for sch in (scheduled(Net()), slapo.create_schedule(Net())):
        engine = slapo.build(
            sch,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            accumulate=2,
            loss_weight=lambda one: (one["labels"][:, 1:] != -100).sum(),
        )
        losses = [engine.train_step(batch(step, ignored=5)).loss for step in range(3)]
        results.append([*losses, *engine.state_dict().values()])
    agree(*results)


def test_a_batch_without_labels_to_learn_is_as_in_the_plain_model() -> None:
    nothing = {**batch(), "labels": torch.full((4, 7), -100)}
    outputs = [model(**nothing)["loss"] for model in (scheduled(Net()).model, Net())]
    assert all(one.isnan() for one in outputs)
    given = {**nothing, "num_items_in_batch": 1}
    agree(trained(scheduled(Net()).model, lambda step: given), trained(Net(), lambda step: given))


def test_a_head_of_half_precision_stays_within_its_rounding() -> None:
    found = trained(scheduled(Net().to(torch.bfloat16)).model)
    agree([one.double() for one in found[:3]], trained(Net())[:3], 2e-2)


def test_evaluation_generation_and_training_without_labels_give_logits() -> None:
    sch, plain, ids = scheduled(Net()), Net(), batch()["ids"]
    agree([sch.model.eval()(**batch())["logits"]], [plain(**batch())["logits"]])
    sch.model.train()
    with torch.no_grad():
        agree([sch.model(**batch())["logits"]], [plain(**batch())["logits"]])
    with pytest.warns(UserWarning, match="no effect"):
        logits = sch.model(ids)["logits"]
    assert type(logits) is Tensor
    logits.square().mean().backward()
    plain(ids)["logits"].square().mean().backward()
    agree([one.grad for one in sch.model.parameters()], [one.grad for one in plain.parameters()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        sch.model(ids)
    agree([sch.model.head(plain.hidden(ids))], [plain.head(plain.hidden(ids))])  # outside of the model's forward


class Beside(Net):
    """Multiplies by the weight of its head without calling it."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        logits = self.hidden(ids) @ self.head.weight.t()
        assert labels is not None
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_a_head_that_the_model_does_not_call_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="no effect.*did not run"):
        scheduled(Beside()).model(**batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduled(Net()).model(**batch())
        scheduled(Beside().eval()).model(**batch())


def test_a_weight_that_was_freed_before_the_loss_is_refused() -> None:
    """As ``fully_shard`` frees that of a head of its own after its forward."""

    def free(module: nn.Module, args: Any, output: Any) -> None:
        module.weight.untyped_storage().resize_(0)  # type: ignore[operator, union-attr]

    sch = scheduled(Net())
    sch.model.head.register_forward_hook(free)
    with pytest.raises(ArgumentError, match="freed") as raised:
        sch.model(**batch())
    assert "reshard_after_forward=False" in str(raised.value.hint)


# -- what the output holds ------------------------------------------------------------------------------------


@dataclass
class Output:
    """An output that torch's pytrees do not know."""

    loss: Any
    logits: Any


def test_logits_that_were_not_computed_are_carried_and_say_so_when_they_are_used() -> None:
    output = scheduled(Net()).model.train()(**batch())
    logits = output["logits"]
    assert isinstance(logits, WithheldLogits)
    assert logits.shape == (4, 7, CLASSES)
    assert logits.dtype == torch.float64
    assert logits.untyped_storage is not None
    assert logits.requires_grad is False
    assert logits.grad_fn is None
    assert "WithheldLogits" in repr(output)
    assert "WithheldLogits" in f"{logits}"
    leaves, spec = pytree.tree_flatten(output)
    assert pytree.tree_unflatten(leaves, spec)["logits"] is logits
    assert pytree.tree_map(lambda one: one.detach(), output)["logits"].shape == logits.shape
    assert logits.float().to("cpu").dtype == torch.float32
    assert logits.to(torch.float16).dtype == torch.float16
    for kept in (pickle.loads(pickle.dumps(logits)), copy.deepcopy(logits)):
        assert isinstance(kept, WithheldLogits)
        assert kept.shape == logits.shape
    for use in (
        lambda: logits + 1,
        lambda: logits.argmax(-1),
        lambda: logits[0],
        lambda: logits.tolist(),
        lambda: bool((logits > 0).any()),
        lambda: torch.cat([logits, logits]),
        lambda: F.cross_entropy(logits.flatten(0, 1), batch()["labels"].flatten()),
        lambda: logits.numpy(),
    ):
        with pytest.raises(WithheldError, match="keep_logits=True") as raised:
            use()
        assert "slapo_loss.log_probs" in str(raised.value)
    del output["logits"]


def test_kept_logits_are_those_of_the_plain_model_with_their_gradients() -> None:
    def both(model: nn.Module) -> list[Tensor]:
        model.train()
        output = model(**batch())
        (output["loss"] + output["logits"].square().mean()).backward()
        return [output["logits"], *(one.grad for one in model.parameters() if one.grad is not None)]

    agree(both(scheduled(Net(), keep_logits=True).model), both(Net()))


def test_outputs_of_any_kind_hold_no_deferred_logits() -> None:
    class Kinds(Net):
        def forward(self, ids: Tensor, labels: Tensor | None = None, kind: str = "") -> Any:
            output = super().forward(ids, labels)
            loss, logits = output.get("loss"), output["logits"]
            made: dict[str, Any] = {
                "tuple": (loss, logits),
                "nested": {"a": [loss, (logits, {"b": logits})]},
                "dataclass": Output(loss, logits),
                "alone": logits,
            }
            return made[kind]

    sch, ids = scheduled(Kinds()), batch()["ids"]
    sch.model.train()
    for kind in ("tuple", "nested", "dataclass", "alone"):
        for labels, expected in ((batch()["labels"], WithheldLogits), (None, Tensor)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                output = sch.model(ids, labels, kind=kind)
            parts = [vars(output)["logits"]] if kind == "dataclass" else pytree.tree_leaves(output)
            assert type(parts[-1]) is expected, kind


# -- verify ---------------------------------------------------------------------------------------------------


def test_verify_compares_everything_but_the_logits_of_training_and_says_so() -> None:
    report = slapo.verify(scheduled(Net()), batch())
    (left_out,) = [text for text in report.not_compared if "output['logits']" in text]
    assert "keep_logits=True" in left_out
    compared = {one.kind: one.compared for one in report.largest}
    assert compared["gradient"] == 10
    assert compared["output"] == 1
    assert compared["evaluation output"] == 2
    kept = slapo.verify(scheduled(Net(), keep_logits=True), batch())
    assert not kept.not_compared
    assert {one.kind: one.compared for one in kept.largest}["output"] == 2


def test_verify_finds_a_wrong_loss_where_logits_are_withheld() -> None:
    sch = scheduled(Net())
    sch["head"].apply(Double())
    with pytest.raises(slapo.VerifyError) as raised:
        slapo.verify(sch, batch())
    assert raised.value.tensor == "output['loss']"
    assert raised.value.steps == ("#2 double() at 'head'",)


class Penalized(Net):
    """Adds a number of the logits to its loss, which needs them, or to nothing."""

    penalty = 0.1

    def forward(self, ids: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        logits = self.head(self.hidden(ids))
        penalty = self.penalty * logits[..., 0].sum() if self.penalty else 0.0
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + penalty}


def test_verify_notes_a_step_without_effect_on_the_given_batch_and_no_other() -> None:
    def notes(model: nn.Module, given: dict[str, Tensor]) -> list[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = slapo.verify(scheduled(model), given)
        return [text for text in report.notes if "linear_cross_entropy" in text]

    (note,) = notes(Penalized(), batch())
    assert "linear_cross_entropy at 'head' had no effect" in note
    assert "__getitem__ took its logits" in note
    (note,) = notes(Net(), {"ids": batch()["ids"]})
    assert "computes no cross entropy of what the head gives" in note
    without = Penalized()
    without.penalty = 0
    assert notes(without, batch()) == []  # though verify leaves out labels, too
    sch = scheduled(Penalized())
    for _ in range(2):  # a warning of a run before takes nothing from the report
        assert any("had no effect" in text for text in slapo.verify(sch, batch()).notes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sch.model(**batch())


# -- other steps and tools around it --------------------------------------------------------------------------


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
def test_it_is_in_effect_within_graphs_and_checkpoints(around: str, first: bool) -> None:
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


def _doubled(forward: Any) -> Any:
    return lambda module, input: forward(module, input) * 2


_doubled.slapo_goes_around = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Double(slapo.Primitive):
    """Double what a module gives, which it should not."""

    name = "test.double"
    equivalence = slapo.Equivalence.EXACT

    def apply(self, node: Any, edit: Any) -> None:
        edit.wrap_forward(node, _doubled)


@pytest.mark.parametrize("first", [True, False], ids=["loss first", "loss last"])
def test_what_is_wrapped_around_the_head_stays_in_force(first: bool) -> None:
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


class Scaled(nn.Linear):
    """A layer with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def refused(message: Messages, model: nn.Module, path: str, word: str, **options: Any) -> None:
    sch: Any = slapo.create_schedule(model, mesh=options.pop("mesh", None))
    with pytest.raises(PreconditionError) as raised:
        (sch[path] if path else sch.root).linear_cross_entropy(**options)
    message(raised, word)
    assert raised.value.path == path
    assert all(one.hint for one in raised.value.violations)
    assert len(sch.records) == 0
    assert "forward" not in model.__dict__


def test_what_is_not_a_head_is_refused_by_name(message: Messages) -> None:
    refused(message, Net(), "", "root")
    refused(message, Net(), "embed", "Embedding")
    refused(message, Net(), "head", "chunk", chunk=0)
    refused(message, Net(), "head", "mesh_dim 'cp'", mesh_dim="cp", mesh={"tp": 1})
    wrapped = Net()
    wrapped.head = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, CLASSES)).double()  # type: ignore[assignment]
    refused(message, wrapped, "head", r"Sequential")
    other = Net()
    other.head = Scaled(6, CLASSES).double()
    refused(message, other, "head", "Scaled")
    patched = Net()
    patched.head.forward = functools.partial(F.linear, weight=patched.head.weight)  # type: ignore[method-assign]
    refused(message, patched, "head", "forward")


def test_steps_that_do_not_fit_beside_it_are_refused_in_both_orders(message: Messages) -> None:
    def fresh() -> Any:
        sch: Any = slapo.create_schedule(Net(), mesh={"tp": 1}, example_inputs=batch())
        sch["head"].shard("weight", axis=0)
        return sch

    for arguments in (("fwd_post", "all_gather"), ("forward",)):
        sch = fresh()
        sch["head"].linear_cross_entropy()
        with pytest.raises(PreconditionError) as raised:
            sch["head"].sync(*arguments)
        message(raised, "leave this call out")
        sch["head"].sync("bwd_post", "all_reduce")
        sch = fresh()
        sch["head"].sync(*arguments)
        with pytest.raises(PreconditionError) as raised:
            sch["head"].linear_cross_entropy()
        message(raised, "leave out")
    rows: Any = slapo.create_schedule(Net(), mesh={"tp": 1})
    rows["head"].shard("weight", axis=1)
    with pytest.raises(PreconditionError) as raised:
        rows["head"].linear_cross_entropy()
    message(raised, "along its classes")
    sch = scheduled(Net())
    with pytest.raises(PreconditionError) as raised:
        sch["head"].linear_cross_entropy()
    message(raised, "already")
    with pytest.raises(PreconditionError) as raised:
        sch["head"].replace(nn.Linear(6, CLASSES, bias=False).double())
    message(raised, "replace first")
    before: Any = slapo.create_schedule(Net(), example_inputs=batch())
    before["head"].replace(nn.Linear(6, CLASSES, bias=False).double())
    before["head"].linear_cross_entropy(chunk=CHUNK)
    assert logits_made(before.model) == 0


def test_overlap_fits_at_the_head_in_both_orders_and_has_no_effect_on_its_loss() -> None:
    for is_loss_first in (False, True):
        sch: Any = slapo.create_schedule(Net(), mesh={"tp": 1}, example_inputs=batch())
        sch["head"].shard("weight", axis=0)
        if is_loss_first:
            sch["head"].linear_cross_entropy()
        sch["head"].sync("bwd_post", "all_reduce", overlap=True)
        if not is_loss_first:
            sch["head"].linear_cross_entropy()
        assert any("overlap=True has no effect" in text for text in sch.records[-1].effects)


def test_a_head_split_along_its_features_afterwards_is_refused_by_build() -> None:
    sch: Any = slapo.create_schedule(Net(), mesh={"tp": 1}, example_inputs=batch())
    sch["head"].linear_cross_entropy()
    sch["head"].shard("weight", axis=1)
    with pytest.raises(slapo.BuildError, match="along its classes"):
        slapo.build(sch)


def _cases() -> Any:
    from slapo_loss.cases import slapo_cases

    return slapo_cases()


@pytest.mark.ranks
@parametrize_checks(_cases())
def test_linear_cross_entropy_keeps_the_promises_of_primitives(check: Any) -> None:
    check()
