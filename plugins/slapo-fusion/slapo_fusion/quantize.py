"""``quantize``: train with the rounding of a quantized model, through torchao."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slapo_core import Edit, Effect, Equivalence, Node, Primitive, Violation
from slapo_core.effects import Calls
from slapo_core.internals import parameters_of
from slapo_graph.match import name_of

if TYPE_CHECKING:
    from torch import nn


# torchao gives no gradient to what it clips, e.g. the largest weight of a row: there the entire gradient is missing.
_ROUNDING = {"int8": 1.0, "int4": 1.5}


@dataclass(frozen=True)
class Quantize(Primitive):
    """Round weights, and activations if asked, of every ``nn.Linear`` here or below while training.

    Quantization-aware training by torchao: values are rounded to the integers of the type and scaled back, gradients
    pass through the rounding, and the parameters stay the same: names, dtypes, state dict. torchao's conversion at the
    end (``quantize_(model, QATConfig(base_config, step="convert"))``) finds its own modules.

    Args:
        weight: the type that weights are rounded to.
        activation: the type that inputs are rounded to, asymmetrically for each token; None leaves them.
        group_size: of input features that share a scale; None: one scale for each output feature.
        rtol: how far outputs and gradients may be from the reference model's, relative to their largest element; None:
            1.0 for int8 and 1.5 for int4, because torchao gives no gradient to a weight that it clips, such as the
            largest of a row. ``verify`` applies it to the step.

    Raises:
        PreconditionError: torchao is not installed; no Linear here or below, or one whose forward was changed; a group
            that does not divide the input features.

    rewrite:
        ``y = x @ weight.t() + bias`` -> ``y = rounded(x) @ rounded(weight).t() + bias``

    Source: ``torchao/quantization/qat/linear.py``.
    """

    name = "fusion.quantize"

    weight: Literal["int8", "int4"] = "int8"
    activation: Literal["int8"] | None = dataclasses.field(default=None, kw_only=True)
    group_size: int | None = dataclasses.field(default=None, kw_only=True)
    rtol: float | None = dataclasses.field(default=None, kw_only=True)

    @property
    def equivalence(self) -> Equivalence:  # type: ignore[override]
        return Equivalence.APPROXIMATE(_ROUNDING[self.weight] if self.rtol is None else self.rtol)

    def preconditions(self, node: Node) -> Iterator[Violation]:
        if importlib.util.find_spec("torchao") is None:
            yield Violation("torchao is not installed", "pip install 'slapo-fusion[quantize]'")
            return
        linears = _linears(node)
        if not linears:
            yield Violation("no nn.Linear here or below", "quantize a module that contains one")
        for below in linears:
            yield from self._violations(below)

    def apply(self, node: Node, edit: Edit) -> None:
        for below in _linears(node):
            edit.replace_module(below, self._rounding(below.module))

    def postconditions(self, node: Node) -> Iterator[Violation]:
        left = _linears(node)
        if left:
            yield Violation(f"'{left[0].path}' is not quantized")

    def effects(self, node: Node) -> Iterator[Effect]:
        rounding = [below for below in node.walk() if hasattr(below.module, "weight_fake_quantizer")]
        for below in rounding:
            yield Calls(f"{below.path}.weight_fake_quantizer", at=below.path)
        if not rounding:
            yield Calls("a quantized nn.Linear")

    def _violations(self, node: Node) -> Iterator[Violation]:
        where = name_of(node.path)
        if not node.path:
            yield Violation("the root of the model cannot be replaced", "quantize a Linear inside of a model")
        module: Any = node.module
        if self.group_size is not None and (self.group_size < 1 or module.in_features % self.group_size):
            yield Violation(
                f"{where} has {module.in_features} input features, not divisible into groups of {self.group_size}",
                "choose a group_size that divides them",
            )
        if not node.runs_own_forward:
            yield Violation(f"quantize would drop the changed forward of {where}", "quantize before that step")

    def _rounding(self, module: nn.Module) -> nn.Module:
        import torch
        from torchao.quantization.qat import FakeQuantizedLinear, IntxFakeQuantizeConfig

        types: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("int8", "int4")}
        granularity: dict[str, Any] = (
            {"granularity": "per_channel"} if self.group_size is None else {"group_size": self.group_size}
        )
        weight = IntxFakeQuantizeConfig(types[self.weight], is_symmetric=True, **granularity)
        activation = None
        if self.activation is not None:
            activation = IntxFakeQuantizeConfig(types[self.activation], "per_token", is_symmetric=False)
        new = FakeQuantizedLinear.from_linear(module, activation_config=activation, weight_config=weight)
        parameters_of(new).update(parameters_of(module))  # on the meta device too, where torchao makes its own
        new.slapo_stays_a_call = True  # its forward keeps the scales of the last call
        return new.train(module.training)


def _linears(node: Node) -> list[Node]:
    from torch import nn

    found = [below for below in node.walk() if type(below.module) is nn.Linear]
    return [below for below in found if parameters_of(below.module)["weight"] is not None]  # not merged into another
