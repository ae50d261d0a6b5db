"""What a replacement gives up stays in the state dict with its reference value; what it adds stays out of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM
from typer.testing import CliRunner

import slapo_core as slapo
from slapo_core.cli.main import make_app
from slapo_core.internals import Internals


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Other(nn.Module):
    """Another function with parameters of the same names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6, 4), 0.5))
        self.bias = nn.Parameter(torch.full((6,), 7.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


def test_dropped_parameter_is_distinct_from_a_new_one_of_its_name() -> None:
    torch.manual_seed(0)
    model = Net()
    untouched = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sch = slapo.create_schedule(model)
    sch["first"].replace(Other(), drop=["bias"])
    assert torch.equal(model.first.bias, torch.full((6,), 7.0))
    assert sch["first"].layout("bias").origin == ""
    with pytest.warns(UserWarning, match=r"first\.bias"):
        state = slapo.build(sch).state_dict()
    assert state.keys() == untouched.keys()
    for name, tensor in untouched.items():
        assert torch.equal(state[name], tensor), name
    Net().load_state_dict(state, strict=True)


def _normalized() -> slapo.Schedule:
    """A BERT whose LayerNorms have nonzero biases, each replaced by an RMSNorm without one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = BertForMaskedLM(BertConfig(vocab_size=31, max_position_embeddings=16, **sizes)).eval()
    nn.init.ones_(model.bert.encoder.layer[0].output.LayerNorm.bias)
    sch = slapo.create_schedule(model)
    sch["bert.encoder.layer.0.output.LayerNorm"].replace(nn.RMSNorm(16), drop=["bias"], rtol=4.0)
    return sch


IDS = torch.arange(3, 15).reshape(2, 6)
LOST = r"#1 replace\(.*\) at 'bert.encoder.layer.0.output.LayerNorm' dropped .*LayerNorm.bias"


def test_saved_weights_of_another_function_are_warned_of(tmp_path: Path) -> None:
    """`from_pretrained` of the files gives other logits than the trained model."""
    sch = _normalized()
    with pytest.warns(UserWarning, match=LOST):
        slapo.save_pretrained(sch, tmp_path / "live")
    trained = sch.model(IDS).logits
    engine = slapo.build(sch)
    with pytest.warns(UserWarning, match=LOST):
        engine.export(tmp_path / "exported")
    engine.save(tmp_path / "steps")
    with pytest.warns(UserWarning, match=LOST):
        CliRunner().invoke(make_app(), ["checkpoint", "export", str(tmp_path / "steps"), str(tmp_path / "of_steps")])
    for name in ("live", "exported", "of_steps"):
        read = BertForMaskedLM.from_pretrained(tmp_path / name).eval()
        assert not torch.allclose(read(IDS).logits, trained), name
        again = slapo.create_schedule(read)
        again["bert.encoder.layer.0.output.LayerNorm"].replace(nn.RMSNorm(16), drop=["bias"], rtol=4.0)
        assert torch.equal(again.model(IDS).logits, trained), name


@pytest.mark.parametrize(("rtol", "warns"), [(1.0, True), (1e-2, False), (None, False)])
def test_replaced_module_of_another_function_is_warned_of_and_a_kernel_is_not(
    rtol: float | None, warns: bool, recwarn: pytest.WarningsRecorder
) -> None:
    sch = slapo.create_schedule(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)))
    sch["1"].replace(nn.ReLU(), rtol=rtol)
    slapo.state_dict(sch)
    assert [str(one.message).count("GELU -> ReLU") for one in recwarn] == [1] * warns


def test_undo_forgets_that_a_parameter_was_dropped() -> None:
    sch = slapo.create_schedule(Net())
    sch["first"].replace(Other(), drop=["bias"])
    sch.undo()
    assert sch["first"].layout("bias").origin == "first.bias"
    assert Internals(sch).tree.layouts == {}


def test_new_tensor_does_not_inherit_the_layout_of_a_dropped_one() -> None:
    sch = slapo.create_schedule(Net(), mesh={"tp": 2})
    sch["first"].shard(["weight", "bias"], axis=0)
    assert sch["first"].layout("bias").is_sharded
    sch["first"].replace(Other(), drop=["weight", "bias"])
    for name in ("weight", "bias"):
        layout = sch["first"].layout(name)
        assert (layout.origin, layout.is_sharded, layout.shape) == (
            "",
            False,
            tuple(sch["first"].parameters[name].shape),
        )
    sch.undo()
    assert sch["first"].layout("bias").is_sharded
