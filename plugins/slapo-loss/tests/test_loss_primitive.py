"""linear_cross_entropy at a head: training, outputs, and refusals."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import slapo_core as slapo
from slapo_core import ArgumentError, PreconditionError
from slapo_loss.withheld import WithheldError, WithheldLogits
from slapo_testing import parametrize_checks
from tests.messages import Messages

from .loss_model import CHUNK, CLASSES, Double, Net, agree, batch, logits_made, scheduled, trained

# -- numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [{}, {"bias": True}, {"tied": True}], ids=["plain", "bias", "tied"])
def test_training_equals_the_plain_model(form: dict[str, bool]) -> None:
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


def test_uncalled_head_warns() -> None:
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


def test_withheld_logits_are_carried_and_raise_when_used() -> None:
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


def test_kept_logits_and_gradients_equal_the_plain_model() -> None:
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
            report = slapo.verify(scheduled(model), given, effects=False)
        return [text for text in report.notes if "linear_cross_entropy" in text]

    (note,) = notes(Penalized(), batch())
    assert "linear_cross_entropy at 'head' had no effect" in note
    assert "__getitem__ took its logits" in note
    (note,) = notes(Net(), {"ids": batch()["ids"]})
    assert "computes no cross entropy of the head's logits" in note
    without = Penalized()
    without.penalty = 0
    assert notes(without, batch()) == []  # though verify leaves out labels, too
    sch = scheduled(Penalized())
    for _ in range(2):  # a warning of a run before takes nothing from the report
        assert any("had no effect" in text for text in slapo.verify(sch, batch(), effects=False).notes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sch.model(**batch())
    with pytest.raises(slapo.VerifyError, match="__getitem__ took the logits"):
        slapo.verify(scheduled(Penalized()), batch())
    slapo.verify(scheduled(Net()), {"ids": batch()["ids"]})  # without labels there is no loss to compute


# -- other steps and tools around it --------------------------------------------------------------------------


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


def test_modules_that_are_not_heads_are_refused(message: Messages) -> None:
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
        assert any("overlap=True has no effect" in text for text in sch.records[-1].edits)


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
