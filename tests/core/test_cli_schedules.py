"""Schedules named on the command line: by functions, by files, as saved JSON, at any mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer

from slapo_core.cli import find_schedule
from slapo_core.errors import PreconditionError, SlapoError

SOURCE = """
import torch
from torch import nn
import slapo_core as slapo


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.fc2(self.fc1(x).relu())


class OnlyInMemory(Model):
    def __init__(self):
        super().__init__()
        self.rate = torch.linspace(0, 1, 3)[1].item()


def steps(sch):
    sch["fc1"].shard(["weight", "bias"], axis=0).sync("backward")
    sch["fc2"].shard("weight", axis=1).sync("forward")


def scheduled(mesh=None):
    sch = slapo.create_schedule(Model(), mesh=mesh)
    if mesh:
        steps(sch)
    return sch


def fixed():
    return slapo.create_schedule(Model(), mesh={"tp": 4})


def wrong_steps(sch):
    sch["fc1"].shard("weight", axis=2)


def raises(sch=None):
    return {}["key"]


def number():
    return 7
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "named_module.py").write_text(SOURCE)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "named_file.py").write_text(SOURCE)
    (tmp_path / "json.py").write_text(SOURCE)
    (tmp_path / "broken_file.py").write_text("import nowhere_at_all\n")
    (tmp_path / "not.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("named_module", "named_file"):
        sys.modules.pop(name, None)


def test_all_forms_give_the_same_schedule(here: Path) -> None:
    made = find_schedule("named_module:steps", model="named_module:Model", mesh="tp=2").make()
    (here / "saved.json").write_text(made.to_json())
    others = (
        find_schedule("named_module:scheduled", mesh="tp=2"),
        find_schedule("below/named_file.py:scheduled", mesh="tp=2"),
        find_schedule("below/named_file.py:steps", model="named_module:Model", mesh="tp=2"),
        find_schedule("saved.json", model="named_module:Model"),
        find_schedule("saved.json", model="below/named_file.py:Model"),
    )
    assert made.mesh is not None
    assert made.mesh.sizes == {"tp": 2}
    assert len(made.records) == 4
    for other in others:
        sch = other.make(on_meta=True)
        assert sch.mesh is not None
        assert sch.mesh.sizes == made.mesh.sizes
        assert [(one.path, one.primitive) for one in sch.records] == [(one.path, one.primitive) for one in made.records]
        assert all(parameter.is_meta for parameter in sch.model.parameters())


def test_a_mesh_replaces_that_of_a_saved_schedule_and_a_model_alone_has_no_steps(here: Path) -> None:
    (here / "saved.json").write_text(find_schedule("named_module:scheduled", mesh="tp=2").make().to_json())
    sch = find_schedule("saved.json", model="named_module:Model", mesh="dp=2,tp=4").make()
    assert tuple(sch.model.fc1.weight.shape) == (16, 16)
    assert find_schedule("named_module:Model").make().mesh is None
    plain = find_schedule("named_module:Model", mesh="tp=2").make()
    assert (len(plain.records), str(plain.mesh)) == (0, "{'tp': 2}")


def test_a_model_that_needs_values_is_made_in_memory_and_says_so(here: Path, capsys: pytest.CaptureFixture) -> None:
    sch = find_schedule("named_module:OnlyInMemory").make(on_meta=True)
    assert sch.model.rate == 0.5
    assert sch.model.fc1.weight.device == torch.device("cpu")
    assert "note: the model is made in memory; on the meta device, named_module:OnlyInMemory" in capsys.readouterr().err
    with pytest.raises(PreconditionError):
        find_schedule("named_module:wrong_steps", model="named_module:Model", mesh="tp=2").make(on_meta=True)
    assert capsys.readouterr().err == ""


WRONG: list[tuple[dict[str, str], tuple[str, ...]]] = [
    ({"name": "named_module"}, ("MODULE:FUNCTION", "got 'named_module'")),
    ({"name": "none.json"}, ("JSON file", "got 'none.json'")),
    ({"name": "not.json", "model": "named_module:Model"}, ("not.json", "no list of 'records'")),
    ({"name": "nowhere:steps"}, ("module 'nowhere' not found",)),
    ({"name": "named_module:none"}, ("no function 'none'",)),
    ({"name": "none.py:steps"}, ("no file 'none.py'",)),
    ({"name": "json.py:steps", "model": "named_module:Model"}, ("json.py", "another module", "rename")),
    ({"name": "named_module:steps"}, ("takes sch", "--model")),
    ({"name": "named_module:fixed", "model": "named_module:Model"}, ("must take one argument", "none")),
    ({"name": "named_module:scheduled", "model": "named_module:Model"}, ("must take one argument", "takes mesh")),
    ({"name": "named_module:fixed", "mesh": "tp=2"}, ("{'tp': 4}", "mesh=mesh")),
    ({"name": "named_module:number"}, ("schedule or a model (got int)", "--model")),
    ({"name": "named_module:steps", "model": "named_module:number"}, ("must return a model (got int)",)),
    ({"name": "named_module:scheduled", "mesh": "tp2"}, ("must be sizes", "got 'tp2'")),
]


@pytest.mark.parametrize(("words", "said"), WRONG)
def test_wrong_names_are_usage_errors(here: Path, words: dict[str, str], said: tuple[str, ...]) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        find_schedule(**words).make()
    for word in said:
        assert word in str(caught.value)


def test_errors_of_the_users_code_are_one_line(here: Path) -> None:
    model = "named_module:Model"
    line = SOURCE.splitlines().index('    return {}["key"]') + 1
    for words, *said in (
        ({"name": "broken_file:steps", "model": model}, "import of broken_file", "nowhere_at_all", "broken_file.py:1"),
        ({"name": "named_module:raises"}, f"KeyError: 'key' ({here}/named_module.py:{line})"),
        ({"name": "named_module:raises", "model": model}, "named_module:raises raised KeyError"),
    ):
        with pytest.raises(SlapoError) as caught:
            find_schedule(**words).make()
        assert "\n" not in str(caught.value)
        for word in said:
            assert word in str(caught.value)
