"""Full schedules of the further families, in float64, against the plain model: odd batches, padding, and stages."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import slapo_core as slapo
from slapo_testing import preload_modules, run_ranks

FAMILIES: dict[str, Any] = importlib.import_module("plugins.slapo-models.tests.families").FAMILIES
NEW = ("qwen3", "gemma2", "mixtral", "vit", "mistral", "gemma3", "qwen3_moe")
preload_modules("slapo_models", *(f"transformers.models.{name}.modeling_{name}" for name in NEW))

adamw = functools.partial(torch.optim.AdamW, lr=1e-3)


class Float64(TorchFunctionMode):
    """Compute in float64 what a model computes in float32 whatever its type: norms, softmax, routers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        single = {torch.float32: torch.float64}
        args = tuple(single.get(each, each) if isinstance(each, torch.dtype) else each for each in args)
        kwargs = {name: single.get(each, each) if name == "dtype" else each for name, each in (kwargs or {}).items()}
        return func(*args, **kwargs)


def entropy(logits: Any, labels: Tensor, *_: Any, **__: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def make(name: str) -> nn.Module:
    """A model that drops nothing, whose loss has the type of its logits."""
    model: Any = FAMILIES[name].make()
    if name != "vit":
        model.loss_function = entropy
    for module in model.modules():
        for attribute in {"p", "attention_dropout"} & vars(module).keys():
            setattr(module, attribute, 0.0)
    return model.double()  # type: ignore[no-any-return]


def batches(name: str, *, even: bool = False) -> list[dict[str, Tensor]]:
    """Of 2, 3 and 1 samples, of 16, 15 and 7 tokens, with padding; ``even``: of equal micro-batches."""
    generator = torch.Generator().manual_seed(1)
    samples = (2, 4, 2) if even else (2, 3, 1)
    if name == "vit":
        images = [torch.randn(size, 3, 16, 16, generator=generator, dtype=torch.float64) for size in samples]
        return [{"pixel_values": each, "labels": torch.arange(len(each)) + 2} for each in images]
    found = []
    for number, tokens in zip(samples, (16, 15, 7), strict=True):
        ids = torch.randint(0, 97, (number, tokens), generator=generator)
        mask = torch.ones_like(ids)
        mask[1:2, tokens if even else -4 :] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def plain(name: str, *, even: bool) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = make(name), []
    optimizer = adamw(model.parameters())
    for batch in batches(name, even=even):
        optimizer.zero_grad()
        with Float64():
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, model.state_dict()


def trained(names: tuple[str, ...], mesh: dict[str, int]) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """Three steps under the full schedule, and the effects of every step seen in the first."""
    found, even = {}, "pp" in mesh
    for name in names:
        sch = slapo.create_schedule(make(name), mesh=mesh, example_inputs=batches(name, even=even)[0])
        FAMILIES[name].apply(sch, stages=mesh.get("pp", 1))
        with Float64(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*was never verified")
            engine = slapo.build(sch, optimizer=adamw, receipts=True)
            losses = [engine.train_step(batch).loss for batch in batches(name, even=even)]
        found[name] = [float(loss) for loss in losses], engine.state_dict()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("names", "mesh"),
    [
        (("gemma2", "mixtral"), {"tp": 2}),
        pytest.param(NEW, {"tp": 4}, marks=pytest.mark.breadth),
        pytest.param(NEW, {"tp": 2}, marks=pytest.mark.breadth),
        pytest.param(NEW, {"pp": 2, "tp": 2}, marks=pytest.mark.breadth),
    ],
    ids=str,
)
def test_three_steps_are_those_of_the_plain_model(names: tuple[str, ...], mesh: dict[str, int]) -> None:
    size = mesh["tp"] * mesh.get("pp", 1)
    ranks = run_ranks(trained, names, mesh, world_size=size)
    for name in names:
        losses, parameters = plain(name, even="pp" in mesh)
        for found in ranks:
            assert found[name][0] == pytest.approx(losses, rel=1e-12), name
            assert found[name][1].keys() == parameters.keys()
            for key, value in parameters.items():
                torch.testing.assert_close(found[name][1][key], value, rtol=1e-11, atol=1e-12, msg=f"{name}: {key}")
